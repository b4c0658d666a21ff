"""Random rotations of blocks: random signs, then a Walsh-Hadamard transform. Written over a backend.

A rotation spreads large elements of a block over all its elements, which are then approximately normally distributed.
"""

from __future__ import annotations

from typing import Any

from grace.core import Array, Context
from grace.ops.blocks import LARGEST

STREAMS = 32  # number of different rotations: one per bit of a random word


def check_width(key: str, width: int) -> None:
    """Raise ValueError unless a block size is a power of two, and at least 8 (whole bytes of bits)."""
    if not 8 <= width <= LARGEST or width & (width - 1):
        raise ValueError(f"{key}={width!r} must be a power of two, 8 .. {LARGEST}")


def width_of(ctx: Context, block: int) -> int:
    """Elements per block on the wire: ``block``, or for a smaller tensor the next power of two, at least 8."""
    # A chunk that begins inside a tensor belongs to a tensor of several blocks.
    return min(block, max(8, 1 << (ctx.size - 1).bit_length())) if ctx.offset == 0 and ctx.size else block


def hadamard(xp: Any, rows: Array) -> Array:
    """[m, d] -> [m, d]: the Walsh-Hadamard transform of each row; applied twice, it gives d times the row.

    d is a power of two.
    """
    m, d = xp.shape(rows)
    if m == 0:
        return rows
    half = 1
    # Pairwise sums in a fixed order, not a matrix product: every toolkit gets the same bits.
    while half < d:
        pairs = xp.reshape(rows, (-1, 2, half))
        a, b = pairs[:, :1], pairs[:, 1:]
        rows = xp.concat([a + b, a - b], 1)
        half *= 2
    return xp.reshape(rows, (m, d))


def signs(xp: Any, words: Array, streams: Array, d: int) -> Array:
    """Return float32[m, d] of -1 and 1, by bit ``31 - streams[i]`` in row i of the random words int32[m * d].

    ``streams``: [m], each row's number in 0 .. `STREAMS` - 1. The words are equal on all workers, but workers with
    different streams rotate independently.
    """
    table = xp.reshape(words, (-1, d))
    negative = xp.shift_left(table, xp.reshape(xp.cast(streams, "int32"), (-1, 1))) < 0
    return 1.0 - 2.0 * xp.cast(negative, "float32")
