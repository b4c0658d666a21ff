"""Codes that can be summed without decoding: THC."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

from grace.compressors.blockwise import Blockwise
from grace.core import Array, Combine, Context, Payload, Program, State, Traits
from grace.core.collectives import Reduce
from grace.core.registry import register
from grace.ops import blocks
from grace.ops.hadamard import check_width, hadamard, signs, width_of
from grace.ops.validate import fitting

CUT = NormalDist().inv_cdf(1 - 1 / 64)  # 1 in 32 standard normal numbers exceeds it in magnitude


@register("thc")
@dataclass(frozen=True)
class THC(Blockwise):
    """Rotate each block at random, alike on all workers, round stochastically to equal steps, and sum on the wire.

    Two rounds: each block's norms float32[m] are gathered, and the largest is used; then the codes are summed, in one
    byte each if N * (2**bits - 1) <= 255, in two if this is below 32,768, else in four. A block has d elements on the
    wire, padded with zeros.
    Payload: sums uint8[d * m] or int32[d * m]; norms float32[m]; this worker's own codes, which are not sent again.
    ``bits``: 2 .. 8; there are 2**bits - 1 steps, from -2.15 to 2.15 standard deviations; larger values are clipped.
    ``block_size``: d, a power of two; for tensors of fewer elements d is the next power of two, at least 8.
    Li et al., "THC", NSDI 2024, arXiv:2302.08545, with its uniform table: the paper also fits tables to the
    normal distribution, and looks codes up in the switch or server, so that only ``bits`` travel.
    """

    bits: int = 4
    block_size: int = 4096

    def __post_init__(self) -> None:
        check_width("block_size", self.block_size)
        if not 2 <= self.bits <= 8:
            raise ValueError(f"bits={self.bits!r} must lie in 2 .. 8")

    @cached_property
    def traits(self) -> Traits:
        return Traits(
            family="quantisation", combine=Combine.AGREED, block_size=self.block_size or None, nonfinite_in_payload=True
        )

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    def compress(self, x: Array, state: State, ctx: Context) -> Program[tuple[Payload, State]]:
        rows = blocks.rows(ctx.xp, x, width_of(ctx, self.block_size))
        norm = yield from blocks.largest_of_all(ctx.xp, blocks.norms(ctx.xp, rows))
        own = self.codes(x, norm, ctx)
        total = yield from self.total(own, ctx)
        return (total, norm, own), state

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        return self._values(payload[0], payload[1], ctx.world_size, ctx)

    def residual(self, x: Array, payload: Payload, ctx: Context) -> Array:
        return x - self._values(payload[2], payload[1], 1, ctx)

    def codes(self, x: Array, norm: Array, ctx: Context) -> Array:
        """This worker's codes, given the largest norms over all workers."""
        xp, d, dtype, factor = ctx.xp, width_of(ctx, self.block_size), self.dtype(ctx), self.top / (2 * CUT)
        # On the worker with the largest norm these have variance 1, on other workers less.
        normal = hadamard(xp, blocks.rows(xp, x, d) / blocks.divisor(xp, norm) * self._signs(norm, ctx))
        steps = (xp.maximum(xp.minimum(normal, CUT), -CUT) + CUT) * factor
        steps = ctx.rng("round").rounded(xp.reshape(steps, (-1,)), xp.shape(norm)[0] * d)
        return xp.cast(xp.minimum(steps, float(self.top)), dtype)

    def total(self, own: Array, ctx: Context) -> Program[Array]:
        """The sum of all workers' codes, in the dtype of ``own``."""
        xp, d = ctx.xp, width_of(ctx, self.block_size)
        if self.dtype(ctx) == "uint8" or self.top * ctx.world_size >= 1 << 15:
            (total,) = yield Reduce((own,), "sum")
            return total
        # Two codes share an integer: neither half's sum reaches its 16th bit.
        low, high = xp.split(own, [blocks.block_count(ctx.size, d) * d // 2] * 2)
        (words,) = yield Reduce((xp.bitwise_or(low, xp.shift_left(high, 16)),), "sum")
        return xp.concat([xp.bitwise_and(words, (1 << 16) - 1), xp.shift_right(words, 16)])

    def dtype(self, ctx: Context) -> str:
        """The dtype of codes and of their sums."""
        return "uint8" if self.top * ctx.world_size <= 255 else "int32"

    def step(self, workers: int) -> float:
        """The spacing of the mean's values for this many workers' codes."""
        return 2 * CUT / (self.top * workers)

    def _signs(self, norm: Array, ctx: Context) -> Array:
        d, m = width_of(ctx, self.block_size), ctx.xp.shape(norm)[0]
        return signs(ctx.xp, ctx.shared_rng("rotation").bits(m * d), ctx.xp.zeros(m, "uint8"), d)

    def checked(self, total: Array, norm: Array, ctx: Context) -> tuple[Array, Array]:
        """Return sums and norms; ValueError for wrong dtypes or lengths."""
        xp, d = ctx.xp, width_of(ctx, self.block_size)
        m = blocks.block_count(ctx.size, d)
        norm = fitting(xp, norm, "float32", m, "norms")
        return fitting(xp, total, self.dtype(ctx), m * d, "sums"), norm

    def _values(self, total: Array, norm: Array, workers: int, ctx: Context) -> Array:
        xp, d = ctx.xp, width_of(ctx, self.block_size)
        total, norm = self.checked(total, norm, ctx)
        normal = xp.cast(total, "float32") * self.step(workers) - CUT
        rows = hadamard(xp, xp.reshape(normal, (-1, d))) * self._signs(norm, ctx)
        # H·H = d·I: divide by d. The norm is that of d numbers of variance 1.
        return blocks.flat(xp, rows / float(d) * xp.reshape(norm, (-1, 1)), ctx.size)
