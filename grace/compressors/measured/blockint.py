"""Integers with a scale per block."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from grace.compressors.blockwise import Rounded
from grace.core import Array, Context, MaybeProgram, Payload, State, Traits
from grace.core.registry import register
from grace.ops import blocks
from grace.ops.packing import pack, unpack
from grace.ops.validate import fitting


@register("blockint")
@dataclass(frozen=True)
class BlockInt(Rounded):
    """Round each element, relative to the largest magnitude of its block, to a low-bit integer.

    Payload: codes uint8[ceil(bits * n / 8)], two's complement, -L .. L with L = 2**(bits - 1) - 1; scales float32[m]. A
    code stands for code * (scale / L). A block whose scale is the largest float32 decodes to infinity. TensorFlow
    decodes blocks with a scale below 1.5e-36 to zero, since it flushes numbers below 1.2e-38 to zero.
    ``bits``: 8, 4 or 2 (which is -1, 0 and 1).
    ``rounding``: "nearest" (halves to even) or "stochastic" (unbiased, without a residual).
    ``block_size``: elements that share a scale, a multiple of 8; 0: the whole tensor.
    Markov, Ramezanikebrya and Alistarh, "CGX", Middleware 2022, arXiv:2111.08617, on quantisation. There the integers
    span minimum to maximum, so that zero may lie between two; here they are symmetric about zero, which stays zero.
    """

    bits: int = 4
    block_size: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in (2, 4, 8):
            raise ValueError(f"bits={self.bits!r}: choose 2, 4 or 8")

    @cached_property
    def traits(self) -> Traits:
        return replace(super().traits, nonfinite_in_payload=True)

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << (self.bits - 1)) - 1

    def variance(self, n: int) -> float | None:
        # The largest element is exact up to float rounding. In the worst case all others lie in the step next to zero,
        # at the fraction L / (sqrt(L² + n - 1) + L) of it, which gives this bound; it is below (n - 1) / (4 L²).
        n = max(1, min(n, self.traits.block_size or n))
        return ((1 + (n - 1) / self.top**2) ** 0.5 - 1) / 2 if self.traits.unbiased else None

    def contraction(self, n: int) -> float | None:
        # No element's error exceeds the element or half a step, and the largest is exact up to float rounding.
        n = max(1, min(n, self.traits.block_size or n))
        return None if self.traits.unbiased else max(1 / n, 1 - (n - 1) / (4 * self.top**2))

    def compress(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        xp, n = ctx.xp, ctx.size
        rows = blocks.rows(xp, x, self.traits.block_size)
        scale = xp.max_abs(rows)
        relative = rows / blocks.divisor(xp, scale)
        steps = blocks.flat(xp, xp.inplace.multiply(relative, float(self.top)), n)
        return (pack(xp, self.bits, xp.cast(self._codes(steps, ctx), "int8")), scale), state

    def _codes(self, steps: Array, ctx: Context) -> Array:
        xp = ctx.xp
        if self.traits.unbiased:
            return xp.inplace.floor(xp.inplace.add(steps, ctx.rng("round").noise(ctx.size)))
        return xp.round(steps)

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        xp, n = ctx.xp, ctx.size
        codes = xp.bitcast(unpack(xp, self.bits, payload[0], n), "int8")
        if self.bits < 8:  # codes of the upper half are negative
            half = 1 << (self.bits - 1)
            codes = xp.bitwise_xor(codes, half) - half
        scale = fitting(xp, payload[1], "float32", blocks.block_count(n, self.traits.block_size), "scales")
        return blocks.scaled(xp, xp.cast(codes, "float32"), scale / float(self.top), self.traits.block_size)
