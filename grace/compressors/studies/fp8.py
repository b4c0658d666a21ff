"""8-bit floats."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from grace.compressors.blockwise import Rounded
from grace.core import Array, Context, MaybeProgram, Payload, State, Traits
from grace.core.registry import register
from grace.ops import blocks
from grace.ops.validate import fitting


class Format(NamedTuple):
    """The layout of an 8-bit float."""

    mantissa: int
    """Number of mantissa bits."""
    bias: int
    """Bias of the exponent."""
    top: int
    """The code of the largest finite value."""

    def value(self, code: int) -> float:
        """The value of a code; the few non-finite codes are never used."""
        exponent, mantissa = divmod(code & 127, 1 << self.mantissa)
        implicit = 1 << self.mantissa if exponent else 0
        return (-1.0 if code > 127 else 1.0) * (mantissa + implicit) * 2.0 ** (self.first + max(exponent, 1) - 1)

    @property
    def first(self) -> int:
        """Exponent (base 2) of the spacing of subnormal numbers, which is also that of the smallest normal numbers."""
        return 1 - self.bias - self.mantissa

    @property
    def largest(self) -> float:
        return self.value(self.top)


FORMATS = {"e4m3": Format(3, 7, 0x7E), "e5m2": Format(2, 15, 0x7B)}


@register("fp8", "float8")
@dataclass(frozen=True)
class FP8(Rounded):
    """Scale each block so that its largest magnitude becomes the largest 8-bit float, and round to 8-bit floats.

    Payload: uint8[n], the floats' bits; scales float32[m].
    ``format``: "e4m3" (4 bits of exponent, 3 of mantissa, up to 448) or "e5m2" (up to 57344: coarser, wider range).
    ``rounding``: "nearest" (halves to even) or "stochastic" (unbiased, without a residual).
    ``block_size``: elements that share a scale, a multiple of 8; 0: the whole tensor.
    Micikevicius et al., "FP8 Formats for Deep Learning", 2022, arXiv:2209.05433, section 3. The paper's scales are per
    tensor; its infinities and NaN are not used: a non-finite block has a non-finite scale.
    """

    format: str = "e4m3"
    block_size: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format not in FORMATS:
            raise ValueError(f"format={self.format!r}: choose one of {', '.join(map(repr, FORMATS))}")

    @cached_property
    def traits(self) -> Traits:
        return replace(super().traits, nonfinite_in_payload=True)

    def _error(self, n: int) -> float:
        # Normal numbers are spaced by at most 2**-mantissa of their own size, subnormal ones by a fixed share of the
        # block's largest element. The error is at most half of the spacing, the variance a quarter of its square.
        chosen = FORMATS[self.format]
        smallest = 2.0**chosen.first / chosen.largest
        return (4.0**-chosen.mantissa + min(n, self.traits.block_size or n) * smallest**2) / 4

    def variance(self, n: int) -> float | None:
        return self._error(n) if self.traits.unbiased else None

    def contraction(self, n: int) -> float | None:
        return None if self.traits.unbiased else 1 - self._error(n)

    def compress(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        xp, n, chosen = ctx.xp, ctx.size, FORMATS[self.format]
        rows = blocks.rows(xp, x, self.traits.block_size)
        # Multiply by the reciprocal, as graphs do for a division by a constant.
        scale = xp.max(xp.abs(rows), 1) * (1.0 / chosen.largest)
        magnitude = xp.abs(blocks.flat(xp, rows / blocks.divisor(xp, scale), n))
        # Number of doublings from the smallest spacing of neighbours to the spacing at this magnitude.
        doublings = xp.maximum(xp.shift_right(xp.bitcast(magnitude, "int32"), 23) - (128 - chosen.bias), 0)
        steps = magnitude / xp.bitcast(xp.shift_left(doublings + (127 + chosen.first), 23), "float32")
        steps = xp.round(steps) if self.rounding == "nearest" else ctx.rng("round").rounded(steps, n)
        # Codes number the magnitudes in ascending order, so a carry into the exponent needs no special case.
        code = xp.minimum(xp.cast(steps, "int32") + xp.shift_left(doublings, chosen.mantissa), chosen.top)
        return (xp.cast(code + xp.cast(x < 0, "int32") * 128, "uint8"), scale), state

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        xp, chosen = ctx.xp, FORMATS[self.format]
        table = xp.asarray([chosen.value(code) for code in range(256)], "float32")
        codes = fitting(xp, payload[0], "uint8", ctx.size, "codes")
        return blocks.scaled(xp, xp.take(table, xp.cast(codes, "int32")), payload[1], self.traits.block_size)
