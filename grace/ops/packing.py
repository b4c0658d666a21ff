"""Packing of small integer codes: b bits for a b-bit code, a byte for five trits. Written over a backend.

Eight codes of b bits fill b bytes, in little-endian order: code j of such a group begins at bit j * b. Unused bits at
the end are zero.
"""

from __future__ import annotations

from typing import Any

from grace.core import Array
from grace.ops.validate import fitting

WORDS = {2: "int16", 4: "int32"}
"""Integer dtypes by their number of bytes."""


def packed_size(bits: int, n: int) -> int:
    """Bytes for ``n`` codes of ``bits`` bits."""
    return -(-n * bits // 8) if 8 % bits == 0 else -(-n // 8) * bits


def pack(xp: Any, bits: int, codes: Array) -> Array:
    """Pack the lower bits of integer codes, [n] -> uint8[`packed_size`(bits, n)]; bits = 1 .. 8.

    Codes are in 0 .. 2**bits - 1 in any integer dtype, or signed int8.
    """
    n = xp.shape(codes)[0]
    if xp.dtype(codes) == "int8":  # two's complement
        codes = xp.bitcast(codes, "uint8")
        codes = codes if bits == 8 else xp.bitwise_and(codes, (1 << bits) - 1)
    if bits == 8:
        return xp.cast(codes, "uint8")
    if bits == 1:
        return xp.bits.pack(codes != 0)
    if 8 % bits == 0:  # bytes hold whole codes: collect the codes of each word in its first byte
        each = 8 // bits
        words = xp.bitcast(xp.pad(xp.cast(codes, "uint8"), packed_size(bits, n) * each), WORDS[each])
        packed = words
        for i in range(1, each):
            packed = xp.bitwise_or(packed, xp.shift_right(words, i * (8 - bits)))
        return xp.cast(xp.bitwise_and(packed, 0xFF), "uint8")
    codes = xp.pad(xp.cast(codes, "int64"), -(-n // 8) * 8)
    word = codes[0::8]
    for i in range(1, 8):
        word = xp.bitwise_or(word, xp.shift_left(codes[i::8], i * bits))
    columns = [xp.reshape(xp.bitwise_and(xp.shift_right(word, 8 * i), 0xFF), (-1, 1)) for i in range(bits)]
    return xp.cast(xp.reshape(xp.concat(columns, 1), (-1,)), "uint8")


def unpack(xp: Any, bits: int, packed: Array, n: int) -> Array:
    """The inverse of `pack`: uint8[`packed_size`(bits, n)] -> uint8[n]; ValueError for another dtype or length."""
    packed = fitting(xp, packed, "uint8", packed_size(bits, n), "codes")
    if bits == 8:
        return packed
    if bits == 1:
        return xp.cast(xp.bits.unpack(packed, n), "uint8")
    mask = (1 << bits) - 1
    if 8 % bits == 0:
        each = 8 // bits
        words = xp.cast(packed, WORDS[each])
        spread = words
        for i in range(1, each):
            spread = xp.bitwise_or(spread, xp.shift_left(words, i * (8 - bits)))
        return xp.bitcast(xp.bitwise_and(spread, sum(mask << 8 * i for i in range(each))), "uint8")[:n]
    rows = xp.cast(xp.reshape(packed, (-1, bits)), "int64")
    words = rows[:, 0]
    for i in range(1, bits):
        words = xp.bitwise_or(words, xp.shift_left(rows[:, i], 8 * i))
    columns = [
        xp.reshape(xp.cast(xp.bitwise_and(xp.shift_right(words, i * bits), mask), "uint8"), (-1, 1)) for i in range(8)
    ]
    return xp.reshape(xp.concat(columns, 1), (-1,))[:n]


def packed_trits(n: int) -> int:
    """Bytes for ``n`` codes of three values: five per byte."""
    return -(-n // 5)


def pack_trits(xp: Any, trits: Array) -> Array:
    """Pack int32[n] of -1, 0 and 1 in uint8[`packed_trits`(n)], 0 .. 242: the sum of (trit + 1) * 3**j, j = 0 .. 4.

    The last five are padded with zeros; five zeros become the byte 121.
    """
    rows = xp.reshape(xp.pad(trits, packed_trits(xp.shape(trits)[0]) * 5), (-1, 5))
    return xp.cast(sum((rows[:, i] * 3**i for i in range(1, 5)), rows[:, 0] + 121), "uint8")


def unpack_trits(xp: Any, packed: Array, n: int) -> Array:
    """The inverse of `pack_trits`: [`packed_trits`(n)] -> int32[n]."""
    bytes_ = xp.cast(packed, "int32")
    columns = [xp.reshape(bytes_ // 3**i % 3 - 1, (-1, 1)) for i in range(5)]
    return xp.reshape(xp.concat(columns, 1), (-1,))[:n]
