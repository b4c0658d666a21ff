"""Natural dithering: powers of two below a norm."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from grace.compressors.blockwise import Blockwise
from grace.core import Array, Context, MaybeProgram, Payload, State, Traits
from grace.core.registry import register
from grace.ops import blocks
from grace.ops.packing import pack, unpack


def _bits(s: int) -> int:
    return 1 + s.bit_length()


def _values(s: int) -> list[float]:
    # The values of the codes of s levels, the sign in the top bit.
    levels = [0.0, *(2.0 ** (level - s) for level in range(1, s + 1))]
    levels += [float("nan")] * ((1 << (_bits(s) - 1)) - len(levels))  # unused codes
    return [*levels, *(-level for level in levels)]


@register("natural_dithering")
@dataclass(frozen=True)
class NaturalDithering(Blockwise):
    """Round magnitudes, relative to the block's largest, at random to 0, 2**(1-s), ..., 1/2 or 1: unbiased.

    Payload: codes uint8[ceil(b * n / 8)], b = 1 + bits of s, the level's number and the sign in the top bit; scales
    float32[m].
    ``s``: number of non-zero levels, 1 .. 127; 1, 3, 7 and so on leave no code unused.
    ``block_size``: elements that share a scale, a multiple of 8; 0: the whole tensor.
    Horvath et al., "Natural Compression for Distributed Deep Learning", 2019, arXiv:1905.10988, on natural dithering,
    where the norm may be chosen; this is the infinity norm.
    """

    s: int = 7
    block_size: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.s <= 127:
            raise ValueError(f"s={self.s!r} must lie in 1 .. 127 (codes of at most 8 bits)")

    @cached_property
    def traits(self) -> Traits:
        return Traits(family="quantisation", block_size=self.block_size or None, unbiased=True, memory="none")

    @property
    def bits(self) -> int:
        """Bits of one code, its sign included."""
        return _bits(self.s)

    def variance(self, n: int) -> float | None:
        # Between powers of two the variance is at most x²/8. Below the lowest power it is that of equal steps (see
        # `blockint`), which includes the exact largest element. In the worst case all elements are of one kind.
        n = max(1, min(n, self.traits.block_size or n))
        return max(1 / 8, ((1 + (n - 1) * 4.0 ** (1 - self.s)) ** 0.5 - 1) / 2)

    def compress(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        xp, n = ctx.xp, ctx.size
        rows = xp.abs(blocks.rows(xp, x, self.traits.block_size))
        scale = xp.max(rows, 1)
        share = blocks.flat(xp, rows / blocks.divisor(xp, scale), n)
        bits = xp.bitcast(share, "int32")
        # The level below, by the exponent, or 0; and the exact distance from it to the next.
        level = xp.maximum(xp.shift_right(bits, 23) + (self.s - 127), 0)
        mantissa = xp.cast(xp.bitwise_and(bits, 0x7FFFFF), "float32") * 2.0**-23
        fraction = xp.where(level > 0, mantissa, share * 2.0 ** (self.s - 1))
        up = xp.cast(ctx.rng("round").uniform(n) < fraction, "int32")
        level = xp.minimum(level + up, self.s)
        codes = level + xp.cast(x < 0, "int32") * (1 << (self.bits - 1))
        return (pack(xp, self.bits, codes), scale), state

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        xp, n = ctx.xp, ctx.size
        table = xp.asarray(_values(self.s), "float32")
        codes = xp.cast(unpack(xp, self.bits, payload[0], n), "int32")
        return blocks.scaled(xp, xp.take(table, codes), payload[1], self.traits.block_size)
