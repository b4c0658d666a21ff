"""The table of a group's points (tensors, or shards of tensors), and how Triton's kernels access their vectors."""

from __future__ import annotations

import triton
import triton.language as tl

from grace.kernels.triton.parts import load_floats, store_floats

# Columns of a table of points, int64[COLUMNS, points]. The addresses of received messages follow the table.
N, START, FLAG = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
X, OLD, NEW = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
KEY0, KEY1 = tl.constexpr(6), tl.constexpr(7)
CODES, SCALES, STREAMS = tl.constexpr(8), tl.constexpr(9), tl.constexpr(10)
COUNT = tl.constexpr(11)
COLUMNS = tl.constexpr(12)
ALIKE = ("many", "count", "out", "table0", "table1", "stream", "positions")
"""Arguments for whose values Triton must not compile special kernels."""


@triton.jit
def tile_of(tiles):
    """Return a program's point, its first block, the offset of its first element, and its number of elements."""
    row = tiles + tl.program_id(0).to(tl.int64) * 4
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3).to(tl.int32)


@triton.jit
def column(table, many, point, COLUMN: tl.constexpr):
    """Return a point's entry in a column of the table."""
    return tl.load(table + COLUMN * many + point)


@triton.jit
def fast(table, many, point, begin, code_bytes, SIZE: tl.constexpr, ADD: tl.constexpr):
    """Whether wide accesses to a tile are aligned: to its vectors, and to codes whose words have SIZE bytes."""
    vectors = column(table, many, point, X)
    if ADD:
        vectors |= column(table, many, point, OLD) | column(table, many, point, NEW)
    found = (vectors | begin * 4) & 15
    if SIZE == 4 or SIZE == 2:
        found |= code_bytes & (SIZE - 1)
    return found == 0


@triton.jit
def load_value(table, many, point, begin, at, here, ADD: tl.constexpr, FAST: tl.constexpr):
    """Return x + residual and the residual; if not ADD, x twice."""
    value = load_floats(column(table, many, point, X) + begin * 4, at, here, FAST)
    residual = value
    if ADD:
        residual = load_floats(column(table, many, point, OLD) + begin * 4, at, here, FAST)
        value += residual
    return value, residual


@triton.jit
def keep(table, many, point, begin, at, here, rest, residual, FAST: tl.constexpr):
    """Store the new residual; if it replaces the old one, x receives the old one."""
    old, new = column(table, many, point, OLD), column(table, many, point, NEW)
    store_floats(new + begin * 4, at, here, rest, FAST)
    if old == new:
        store_floats(column(table, many, point, X) + begin * 4, at, here, residual, FAST)


@triton.jit
def keys_of(table, many, point):
    """The two keys of a point's random stream."""
    return column(table, many, point, KEY0).to(tl.int32), column(table, many, point, KEY1).to(tl.int32)


@triton.jit
def message_of(table, many, senders, point, count, worker):
    """Return the address of the message from a point's sender number ``worker``."""
    return tl.load(table + COLUMNS * many + tl.load(senders + point * count + worker))


@triton.jit
def codes_of_all(table, many, senders, point, count, offset):
    """Return the bitwise or of the addresses of a point's codes, over all workers; `fast` checks its alignment."""
    found = offset * 0
    for worker in range(count):
        found |= message_of(table, many, senders, point, count, worker) + offset
    return found


@triton.jit
def put_mean(table, many, point, begin, at, left, total, count, FAST: tl.constexpr):
    """Store the mean of the payloads of ``count`` workers."""
    if count > 1:
        total = tl.div_rn(total, tl.zeros_like(total) + count.to(tl.float32))
    store_floats(column(table, many, point, X) + begin * 4, at, at < left, total, FAST)
