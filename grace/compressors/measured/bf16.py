"""The upper half of a float32."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from grace.core import Array, Compressor, Context, MaybeProgram, Payload, State, Traits
from grace.core.registry import register
from grace.ops.validate import fitting


@register("bf16", "bfloat16")
@dataclass(frozen=True)
class BF16(Compressor):
    """Keep sign, exponent and 7 bits of mantissa, rounded to nearest or stochastically.

    Payload: uint8[2n], the upper two bytes of each float32, little-endian. Bytes are sent since Horovod has no
    bfloat16, so payloads are gathered (or exchanged in two stages), not summed on the wire.
    ``rounding``: "nearest" (halves to even) or "stochastic" (unbiased).
    """

    rounding: str = "nearest"

    def __post_init__(self) -> None:
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"rounding={self.rounding!r}: choose 'nearest' or 'stochastic'")

    @cached_property
    def traits(self) -> Traits:
        return Traits(family="quantisation", block_size=1, unbiased=self.rounding == "stochastic", memory="none")

    def variance(self, n: int) -> float | None:
        return 2.0**-16 if self.traits.unbiased else None

    def contraction(self, n: int) -> float | None:
        return 1 - 2.0**-16 if self.rounding == "nearest" else None

    def compress(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        xp = ctx.xp
        bits = xp.bitcast(x, "int32")
        magnitude = xp.bitwise_and(bits, 0x7FFFFFFF)
        if self.rounding == "nearest":
            step = 0x7FFF + xp.bitwise_and(xp.shift_right(magnitude, 16), 1)
        else:
            step = xp.bitwise_and(ctx.rng("round").bits(ctx.size), 0xFFFF)
            # The largest finite value must not be rounded up to infinity.
            step = xp.where(magnitude >= 0x7F7F0000, xp.zeros(ctx.size, "int32"), step)
        rounded = xp.where(
            xp.isfinite(x), magnitude + step, xp.bitwise_or(magnitude, xp.cast(x != x, "int32") * 0x400000)
        )
        sign = xp.bitwise_and(xp.shift_right(bits, 16), 0x8000)
        upper = xp.bitwise_or(xp.shift_right(rounded, 16), sign)
        pairs = [xp.bitwise_and(upper, 0xFF), xp.bitwise_and(xp.shift_right(upper, 8), 0xFF)]
        columns = [xp.reshape(xp.cast(byte, "uint8"), (-1, 1)) for byte in pairs]
        return (xp.reshape(xp.concat(columns, 1), (-1,)),), state

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        xp = ctx.xp
        pairs = xp.reshape(fitting(xp, payload[0], "uint8", 2 * ctx.size, "bytes"), (-1, 2))
        return xp.bitcast(xp.reshape(xp.concat([xp.zeros((ctx.size, 2), "uint8"), pairs], 1), (-1,)), "float32")
