"""Kashin representations: more coefficients than elements, all of about one size."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from grace.compressors.blockwise import Blockwise
from grace.core import Array, Context, MaybeProgram, Payload, State, Traits
from grace.core.registry import register
from grace.ops import blocks
from grace.ops.hadamard import hadamard, signs, width_of
from grace.ops.packing import pack, unpack
from grace.ops.validate import fitting


@register("kashin")
@dataclass(frozen=True)
class Kashin(Blockwise):
    """Write each block as a sum of more vectors than it has elements, and round their coefficients stochastically.

    The vectors are the columns of U: n random rows of a d x d Hadamard matrix, with random signs, divided by sqrt(d).
    U is equal on all workers. Clipping finds coefficients a with U a = x, none of which is large, so that few bits
    suffice. The error E|x - x̂|² is n / d times the sum of the rounded coefficients' variances.
    Payload: codes uint8[bits * d * m / 8]; scales float32[m], the largest coefficient of each block.
    ``bits``: 1 .. 8; coefficients are rounded to one of 2**bits levels between minus the largest and the largest.
    ``block_size``: n, a multiple of 8; for smaller tensors n is the next power of two, at least 8.
    ``redundancy``: 1 .. 64; d is the smallest power of two that is at least this times n.
    ``iterations``: number of passes of the clipping, of which the last one clips nothing. 1: the random rotation alone.
    ``delta``: positive; the first pass clips at the norm of x over sqrt(delta * d).
    ``eta``: the factor by which each pass lowers the threshold, in (0, 1).
    Departures from the paper: rows have random signs, and a block whose largest coefficient is smaller before the
    clipping is sent without it, so that the variance is bounded for every x.
    Safaryan, Shulgin and Richtarik, "Uncertainty Principle for Communication Compression in Distributed and Federated
    Learning and the Search for an Optimal Compressor", 2020, arXiv:2002.08958; the algorithm is that of Lyubarskii and
    Vershynin, "Uncertainty Principles and Vector Quantization", 2010.
    """

    bits: int = 4
    block_size: int = 512
    redundancy: float = 2.0
    iterations: int = 6
    eta: float = 0.7
    delta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.block_size:
            raise ValueError("block_size=0: a frame needs a size; use a multiple of 8, such as 512")
        if not 1 <= self.bits <= 8:
            raise ValueError(f"bits={self.bits!r} must lie in 1 .. 8")
        if not 1 <= self.redundancy <= 64:
            raise ValueError(f"redundancy={self.redundancy!r} must lie in 1 .. 64")
        if not 1 <= self.iterations <= 100:
            raise ValueError(f"iterations={self.iterations!r} must lie in 1 .. 100")
        if not 0 < self.eta < 1:
            raise ValueError(f"eta={self.eta!r} must lie in (0, 1)")
        if not self.delta > 0:
            raise ValueError(f"delta={self.delta!r} must be positive")

    @cached_property
    def traits(self) -> Traits:
        return Traits(
            family="quantisation",
            block_size=self.block_size,
            unbiased=True,
            nonfinite_in_payload=True,
            memory="none",
        )

    def variance(self, n: int) -> float | None:
        # Each rotated coefficient is a sum of elements with random signs. By Hoeffding's inequality the largest of d
        # exceeds t |x| / sqrt(d) with a probability of at most 2 d exp(-t² / 2), so the expectation of its square is
        # at most (2 ln(2 d) + 2) |x|² / d. The square never exceeds n |x|² / d.
        n = min(self.block_size, max(8, 1 << max(n - 1, 0).bit_length()))
        d, top = self.coefficients(n), self.top
        square = min(float(n), 2 * math.log(2 * d) + 2)
        # With two levels the variance is the sum of m² - a², with m the largest coefficient; with more levels it is at
        # most the square of half a step per coefficient. |a| is at least |x|.
        return n / d * (square - 1 if top == 1 else square / top**2)

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    def coefficients(self, n: int) -> int:
        """d for blocks of n elements."""
        return 1 << (math.ceil(self.redundancy * n) - 1).bit_length()

    def compress(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        xp, n = ctx.xp, width_of(ctx, self.block_size)
        rows, d = blocks.rows(xp, x, n), self.coefficients(n)
        largest = xp.max(xp.abs(rows), 1)  # relative to this, squares stay in float32's range
        positions = self._positions(ctx)
        rows = self._placed(xp, rows / blocks.divisor(xp, largest) * self._signs(ctx), positions, d)
        mask = xp.reshape(xp.scatter(xp.zeros(d), positions, 1.0), (1, -1))
        a = self.represent(xp, rows, mask)
        scale = xp.max(xp.abs(a), 1)
        steps = xp.reshape((a / blocks.divisor(xp, scale) + 1.0) * (self.top / 2), (-1,))
        wide = replace(ctx, offset=ctx.offset // n * d)  # a chunk's position among the codes
        codes = xp.minimum(wide.rng("round").rounded(steps, xp.shape(rows)[0] * d), float(self.top))
        return (pack(xp, self.bits, xp.cast(codes, "int32")), scale * largest), state

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        xp, n = ctx.xp, width_of(ctx, self.block_size)
        m, d = blocks.block_count(ctx.size, n), self.coefficients(n)
        scale = fitting(xp, payload[1], "float32", m, "scales")
        codes = xp.cast(unpack(xp, self.bits, payload[0], m * d), "float32")
        rows = hadamard(xp, xp.reshape(codes * (2 / self.top) - 1.0, (m, d))) / d**0.5
        rows = xp.transpose(xp.take(xp.transpose(rows), self._positions(ctx)))
        return blocks.flat(xp, rows * self._signs(ctx) * xp.reshape(scale, (-1, 1)), ctx.size)

    def represent(self, xp: Any, rows: Array, mask: Array) -> Array:
        """[m, d] -> [m, d]: the coefficients a of x. The rows have x where ``mask``, [1, d], is 1, and 0 elsewhere."""
        d = xp.shape(rows)[1]
        root = d**0.5
        limit = xp.sqrt(xp.sum(rows * rows, 1, keepdims=True)) / (self.delta * d) ** 0.5
        plain = rotated = hadamard(xp, rows) / root
        found = xp.zeros((1, 1), xp.dtype(rows))
        for _ in range(self.iterations - 1):
            clipped = xp.maximum(xp.minimum(rotated, limit), -limit)
            found = found + clipped
            rows = rows - hadamard(xp, clipped) / root * mask
            rotated = hadamard(xp, rows) / root
            limit = limit * self.eta
        found = found + rotated
        better = xp.max(xp.abs(found), 1, keepdims=True) < xp.max(xp.abs(plain), 1, keepdims=True)
        return xp.where(better, found, plain)

    def _placed(self, xp: Any, rows: Array, positions: Array, d: int) -> Array:
        # [m, n] -> [m, d]: the columns at their positions, zeros elsewhere.
        m, n = xp.shape(rows)
        source = xp.scatter(xp.full(d, n, "int32"), positions, xp.arange(n))
        return xp.transpose(xp.take(xp.concat([xp.transpose(rows), xp.zeros((1, m))]), source))

    def _positions(self, ctx: Context) -> Array:
        # Returns int32[n]: the rows of the Hadamard matrix, the same for all blocks.
        n = width_of(ctx, self.block_size)
        return replace(ctx, offset=0).shared_rng("rows").sample(self.coefficients(n), n)

    def _signs(self, ctx: Context) -> Array:
        xp, n = ctx.xp, width_of(ctx, self.block_size)
        m = blocks.block_count(ctx.size, n)
        return signs(xp, ctx.shared_rng("signs").bits(m * n), xp.zeros(m, "uint8"), n)
