"""Fewer bits for smaller magnitudes: INCEPTIONN."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

from grace.core import Array, Compressor, Context, MaybeProgram, Payload, State, Traits
from grace.core.registry import register
from grace.ops.packing import pack, unpack
from grace.ops.validate import matching


@register("inceptionn")
@dataclass(frozen=True)
class Inceptionn(Compressor):
    """Send 32, 16, 8 or 0 bits of each element, depending on its exponent; all but the 32-bit ones are truncated.

    Payload: tags uint8[ceil(n/4)], 3 .. 0 for 32 .. 0 bits; float32[n3], the elements with tag 3, of magnitude 1 and
    more; uint8[2 * n2], those with tag 2 as sign and 15 bits, little-endian; uint8[n1], those with tag 1 as sign and 7
    bits.
    ``error_bound``: an upper bound of the error, rounded up to a power of two, 2**-14 .. 2**-1; smaller elements
    become zero. It is absolute: scale gradients to about 1. GRACE's first release used 2e-10, which is read as 2**-10.
    Li et al., "A Network-Centric Hardware/Algorithm Co-Design to Accelerate Distributed Training of Deep Neural
    Networks", MICRO 2018, doi:10.1109/MICRO.2018.00023, on lossy compression. As we understand the paper, its 8-bit
    numbers are fractions of 1 and exceed the error bound; here they are fractions of the power at which 16-bit numbers
    begin.
    """

    error_bound: float = 2**-10

    traits = Traits(family="quantisation", variable_length=True, memory="none")

    def __post_init__(self) -> None:
        if self.error_bound == 2e-10:
            warnings.warn("error_bound=2e-10 is read as 2**-10, which GRACE's first release took it for", stacklevel=3)
        elif not 2**-14 <= self.error_bound <= 2**-1:
            raise ValueError(
                f"error_bound={self.error_bound!r} must lie in 2**-14 .. 2**-1, which 15 and 7 bits can keep"
            )

    @property
    def powers(self) -> tuple[int, int]:
        """Exponents of the smallest magnitudes sent with 8 and with 16 bits."""
        lowest = -10 if self.error_bound == 2e-10 else math.ceil(math.log2(self.error_bound))
        return lowest, lowest + math.ceil(-lowest / 2)

    def compress(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        xp = ctx.xp
        lowest, middle = self.powers
        magnitude = xp.abs(x)
        exponent = xp.shift_right(xp.bitcast(magnitude, "int32"), 23) - 127  # 128 for non-finite elements
        tags = sum((xp.cast(exponent >= power, "int32") for power in (lowest, middle)), xp.cast(exponent >= 0, "int32"))
        three, two, one = (xp.nonzero(tags == tag) for tag in (3, 2, 1))
        sign = xp.cast(x < 0, "int32")
        wide = xp.cast(xp.take(magnitude, two) * 2.0**15, "int32") + xp.take(sign, two) * 2**15
        pairs = [xp.reshape(xp.cast(byte, "uint8"), (-1, 1)) for byte in (xp.bitwise_and(wide, 255), wide // 256)]
        narrow = xp.cast(xp.take(magnitude, one) * 2.0 ** (7 - middle), "int32") + xp.take(sign, one) * 128
        parts = (xp.take(x, three), xp.reshape(xp.concat(pairs, 1), (-1,)), xp.cast(narrow, "uint8"))
        return (pack(xp, 2, tags), *parts), state

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        xp, n = ctx.xp, ctx.size
        tags = unpack(xp, 2, payload[0], n)
        three, two, one = (xp.nonzero(tags == tag) for tag in (3, 2, 1))
        pairs = xp.cast(
            xp.reshape(matching(xp, payload[2], "uint8", two, "bytes of 16 bits", times=2), (-1, 2)), "int32"
        )
        narrow = xp.cast(matching(xp, payload[3], "uint8", one, "bytes of 8 bits"), "int32")
        found = xp.scatter(xp.zeros(n), three, matching(xp, payload[1], "float32", three, "magnitudes from 1"))
        found = xp.scatter(found, two, _signed(xp, pairs[:, 0] + pairs[:, 1] * 256, 2**15, 2.0**-15))
        return xp.scatter(found, one, _signed(xp, narrow, 128, 2.0 ** (self.powers[1] - 7)))


def _signed(xp: Any, codes: Array, top: int, unit: float) -> Array:
    # The sign is the bit of value ``top``.
    magnitude = xp.cast(xp.bitwise_and(codes, top - 1), "float32") * unit
    return xp.where(codes >= top, -magnitude, magnitude)
