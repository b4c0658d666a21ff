"""Packed bits: eight in each byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Array = Any


class Bits:
    """A backend's conversions between arrays and packed bits."""

    def __init__(self, xp: Any):
        self._xp = xp

    def pack(self, mask: Array) -> Array:
        """bool[n] -> uint8[ceil(n/8)]; element j is bit j % 8 of byte j // 8, padded with 0."""
        xp, n = self._xp, self._xp.shape(mask)[0]
        octets = xp.bitcast(xp.pad(xp.cast(mask, "uint8"), -(-n // 8) * 8), "int64")
        # One multiplication moves byte i of the word to bit 56 + i: the sum of 2**(56 - 7i).
        gathered = xp.shift_right(octets * 0x0102040810204080, 56)
        return xp.cast(xp.bitwise_and(gathered, 0xFF), "uint8")

    def unpack(self, packed: Array, n: int) -> Array:
        """uint8[ceil(n/8)] -> bool[n]."""
        xp = self._xp
        spread = xp.cast(packed, "int64") * 0x0101010101010101
        return xp.bitcast(xp.bitwise_and(spread, -0x7FBFDFEFF7FBFDFF), "uint8")[:n] != 0

    def pack_signs(self, x: Array) -> Array:
        """float32[n] -> uint8[ceil(n/8)]: `pack` of x >= 0, which is false for NaN."""
        return self.pack(x >= 0)

    def unpack_signs(self, packed: Array, n: int) -> Array:
        """uint8[ceil(n/8)] -> float32[n]: 1 for a set bit, else -1."""
        return self._xp.cast(self.unpack(packed, n), "float32") * 2.0 - 1.0

    def map_bytes(self, values: Callable[[Array, int], Array], packed: Array, m: int) -> Array:
        """``values(packed, m)``: float32[m * k] from uint8[m], k numbers per byte, each byte independently.

        If a table is faster, a toolkit may compute the values of all 256 bytes once and look them up.
        """
        return values(packed, m)
