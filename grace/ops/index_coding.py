"""Codings of ascending positions on the wire, in fewer bits than int32 if there are many. Written over a backend.

"int32": 32 bits per position. "bitmap": one bit for each of the n elements, which is smaller for more than n / 32
positions. "elias_fano": for a known number k of positions, about 2 + log2(n / k) bits each: the lower bits verbatim,
the differences of the upper bits in unary.
Elias, "Efficient storage and retrieval by content and address of static files", JACM 1974; Fano, 1971.
"""

from __future__ import annotations

from typing import Any

from grace.core import Array
from grace.ops.packing import pack, packed_size, unpack
from grace.ops.validate import fitting

CODINGS = ("int32", "bitmap", "elias_fano")


def choose(coding: str, n: int, k: int) -> str:
    """The name of the coding; for "auto", that of the smallest one."""
    return min(CODINGS, key=lambda each: nbytes(each, n, k)) if coding == "auto" else coding


def nbytes(coding: str, n: int, k: int) -> int:
    """Number of bytes that encode k positions in 0 .. n-1."""
    if coding == "int32":
        return 4 * k
    if coding == "bitmap":
        return packed_size(1, n)
    lower, upper = widths(n, k)
    return sum(packed_size(bits, k) for bits in lower) + packed_size(1, upper)


def arrays(coding: str, n: int, k: int) -> int:
    """Number of arrays that `write` returns."""
    return len(widths(n, k)[0]) + 1 if coding == "elias_fano" else 1


def write(xp: Any, coding: str, positions: Array, n: int, k: int | None = None) -> tuple[Array, ...]:
    """Encode positions, int32[k], ascending and distinct in 0 .. n-1, as wire arrays. Only "elias_fano" needs k."""
    if coding == "int32":
        return (positions,)
    if coding == "bitmap":
        return (xp.bits.pack(xp.scatter(xp.zeros(n, "uint8"), positions, 1) != 0),)
    assert k is not None
    lower, upper = widths(n, k)
    planes, shift = [], 0
    for bits in lower:
        planes.append(pack(xp, bits, xp.bitwise_and(xp.shift_right(positions, shift), 2**bits - 1)))
        shift += bits
    marks = xp.scatter(xp.zeros(upper, "uint8"), xp.shift_right(positions, shift) + xp.arange(k), 1)
    return (*planes, xp.bits.pack(marks != 0))


def read(xp: Any, coding: str, sent: tuple[Array, ...], n: int, k: int | None = None) -> Array:
    """The inverse of `write`: int32[k]. ValueError for arrays of wrong lengths; the caller must check the positions."""
    if coding == "int32":
        return sent[0]
    if coding == "bitmap":
        return _set(xp, sent[0], n, k)
    assert k is not None
    lower, upper = widths(n, k)
    positions = xp.shift_left(_set(xp, sent[-1], upper, k) - xp.arange(k), sum(lower))
    shift = 0
    for bits, plane in zip(lower, sent, strict=False):
        positions = xp.bitwise_or(positions, xp.shift_left(xp.cast(unpack(xp, bits, plane, k), "int32"), shift))
        shift += bits
    return positions


def _set(xp: Any, packed: Array, n: int, k: int | None) -> Array:
    # Returns int32[k], the positions of the bits that are set, among n packed bits.
    bits = xp.bits.unpack(fitting(xp, packed, "uint8", packed_size(1, n), "bits of positions"), n)
    found = xp.nonzero(bits, k)
    return found if k is None else xp.reshape(fitting(xp, found, "int32", k, "positions"), (k,))


def widths(n: int, k: int) -> tuple[list[int], int]:
    """For "elias_fano": the bits per position in each array of lower bits, 8 at most; the bits of the unary code."""
    lower = max(0, (n // k).bit_length() - 1) if k else 0
    upper = k + (max(n - 1, 0) >> lower)
    return [8] * (lower // 8) + [lower % 8] * (lower % 8 > 0), upper if k else 0


def narrow(xp: Any, places: Array, width: int) -> tuple[Array, ...]:
    """Encode places, int32[k] in 0 .. width-1 in any order: the lower bytes, and the bits above them packed.

    width <= 2**16. If it is at most 256, there is only the first array.
    """
    above = max(0, (width - 1).bit_length() - 8)
    low = xp.cast(xp.bitwise_and(places, 255), "uint8")
    return (low, pack(xp, above, xp.shift_right(places, 8))) if above else (low,)


def widen(xp: Any, sent: tuple[Array, ...], width: int, k: int) -> Array:
    """The inverse of `narrow`: int32[k]. ValueError for wrong lengths, and for places that are not below ``width``."""
    above = max(0, (width - 1).bit_length() - 8)
    places = xp.cast(fitting(xp, sent[0], "uint8", k, "places"), "int32")
    if above:
        places = xp.bitwise_or(places, xp.shift_left(xp.cast(unpack(xp, above, sent[1], k), "int32"), 8))
    if width == 1 << (8 + above):  # any bits are valid
        return places
    return xp.sound(places, lambda: xp.all(places < width), f"its places are not below {width}")
