"""Natural compression: powers of two."""

from __future__ import annotations

from dataclasses import dataclass

from grace.core import Array, Compressor, Context, Payload, State, Steps
from grace.registry import register

GRACE_TOP = 127 + 18  # exponent field of 2**18, which code 127 stands for in GRACE's first release


@register("natural")
@dataclass(frozen=True)
class Natural(Compressor):
    """Round each magnitude to a neighbouring power of two, at random so that the expectation is x.

    Payload: codes uint8[n], sign in the top bit, then 7 bits for the exponent, 0 for zero; top int32[1], the exponent
    field of float32 that code 127 stands for.
    ``stochastic``: round at random; False: to the nearer power, which is biased but contracts.
    ``window``: "auto" sets code 127 to the largest power that occurs; magnitudes reach 126 powers below it. "grace" is
    the window of GRACE's first release, 2**-108 .. 2**18: larger magnitudes are cut, smaller ones become zero.
    Horvath et al., "Natural Compression for Distributed Deep Learning", 2019, arXiv:1905.10988, section 2.
    """

    stochastic: bool = True
    window: str = "auto"
    family = "quantisation"

    def __post_init__(self) -> None:
        if self.window not in ("auto", "grace"):
            raise ValueError(f"window={self.window!r}: choose 'auto' or 'grace'")

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        return self.stochastic and self.window == "auto"

    @property
    def memory(self) -> str:  # type: ignore[override]
        return "none" if self.stochastic else "residual"

    def variance(self, n: int) -> float | None:
        return 1 / 8 if self.unbiased else None

    def contraction(self, n: int) -> float | None:
        return 8 / 9 if not self.stochastic and self.window == "auto" else None

    def compress(self, x: Array, state: State, ctx: Context) -> Steps[tuple[Payload, State]]:
        xp, n = ctx.xp, ctx.size
        if n == 0:
            return (xp.zeros(0, "uint8"), xp.zeros(1, "int32")), state
        bits = xp.bitwise_and(xp.bitcast(x, "int32"), 0x7FFFFFFF)
        mantissa = xp.bitwise_and(bits, 0x7FFFFF)
        if self.stochastic:  # up with a chance of mantissa / 2**23, exactly
            up = mantissa > xp.bitwise_and(xp.shift_right(ctx.rng("round").bits(n), 9), 0x7FFFFF)
        else:
            up = mantissa >= 0x400000
        zero = xp.zeros(n, "int32")
        field = xp.minimum(xp.shift_right(bits, 23) + xp.cast(up, "int32"), 254)
        field = xp.where(bits >= 0x800000, field, zero)  # subnormal numbers become zero
        top = xp.reshape(xp.max(field), (1,)) if self.window == "auto" else xp.full(1, GRACE_TOP, "int32")
        code = xp.where(field > 0, xp.minimum(xp.maximum(field - top + 127, 0), 127), zero)
        code = xp.bitwise_or(code, xp.cast(x < 0, "int32") * 128)
        # No power of two has field 255: it says that an element was not finite.
        return (xp.cast(code, "uint8"), xp.where(xp.finite(x), top, xp.full(1, 255, "int32"))), state

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        xp, top = ctx.xp, payload[1]
        codes = xp.cast(payload[0], "int32")
        magnitude = xp.bitwise_and(codes, 127)
        value = xp.bitcast(xp.shift_left(xp.maximum(magnitude + top - 127, 0), 23), "float32")
        value = xp.where(magnitude > 0, value, 0.0)
        return xp.where(top < 255, xp.where(codes >= 128, -value, value), float("nan"))
