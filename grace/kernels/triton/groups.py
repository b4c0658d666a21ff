"""Triton's kernels of groups: one launch for all points of a bucket, from a table of their addresses.

Each computes what the kernels of one tensor do, element by element.
"""

from __future__ import annotations

import triton
import triton.language as tl

from grace.kernels.triton.launcher import magnitudes_of
from grace.kernels.triton.parts import (
    largest_magnitude,
    load_ints,
    load_signs,
    mean_magnitude,
    places,
    put_ints,
    put_signs,
    received,
)
from grace.kernels.triton.rotations import load_rotated, put_rotated, row_places, words

# Columns of a table of points, int64[COLUMNS, points], which the addresses of received messages follow.
N, START, FLAG = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
X, OLD, NEW = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
KEY0, KEY1 = tl.constexpr(6), tl.constexpr(7)
CODES, SCALES, STREAMS = tl.constexpr(8), tl.constexpr(9), tl.constexpr(10)
COLUMNS = tl.constexpr(11)
ALIKE = ("many", "count", "out", "table0", "table1", "stream")
"""Arguments whose values must not select another compiled kernel."""


# -- kernel helpers ----------------------------------------------------------------------------------------------------
@triton.jit
def _tile(tiles):
    # Returns a program's point, the number of its first block, the place of its first element, and how many there are.
    row = tiles + tl.program_id(0).to(tl.int64) * 4
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3).to(tl.int32)


@triton.jit
def _of(table, many, point, COLUMN: tl.constexpr):
    return tl.load(table + COLUMN * many + point)


@triton.jit
def _floats(address):
    return address.to(tl.pointer_type(tl.float32), bitcast=False)


@triton.jit
def _octets(address):
    return address.to(tl.pointer_type(tl.uint8), bitcast=False)


@triton.jit
def _load(table, many, point, begin, at, here, ADD: tl.constexpr):
    # Returns x + residual and the residual; if not ADD, x twice.
    value = tl.load(_floats(_of(table, many, point, X)) + begin + at, mask=here, other=0.0)
    residual = value
    if ADD:
        residual = tl.load(_floats(_of(table, many, point, OLD)) + begin + at, mask=here, other=0.0)
        value += residual
    return value, residual


@triton.jit
def _keep(table, many, point, begin, at, here, rest, residual):
    # Stores the new residual; if it replaces the old one, x receives the old one.
    old, new = _of(table, many, point, OLD), _of(table, many, point, NEW)
    tl.store(_floats(new) + begin + at, rest, mask=here)
    if old == new:
        tl.store(_floats(_of(table, many, point, X)) + begin + at, residual, mask=here)


@triton.jit
def _message(table, many, senders, point, count, worker):
    # Returns the address of the message of a point's worker.
    return tl.load(table + COLUMNS * many + tl.load(senders + point * count + worker))


@triton.jit
def _put(table, many, point, begin, at, left, total, count):
    # Stores the mean of the payloads of ``count`` workers.
    if count > 1:
        total = tl.div_rn(total, tl.zeros_like(total) + count.to(tl.float32))
    tl.store(_floats(_of(table, many, point, X)) + begin + at, total, mask=at < left)


# -- states ------------------------------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=ALIKE)
def group_finite(tiles, table, many, senders, count, flags, TILE: tl.constexpr):
    """Clear the flag of a point with a scale that is not finite."""
    point, _, begin, left = _tile(tiles)
    at = tl.arange(0, TILE)
    worst = tl.zeros((TILE,), tl.int32)
    for worker in range(count):
        scales = _floats(_message(table, many, senders, point, count, worker) + _of(table, many, point, SCALES))
        worst = tl.maximum(worst, magnitudes_of(tl.load(scales + begin + at, mask=at < left, other=0.0)))
    if tl.max(worst, 0) >= 0x7F800000:
        tl.store(flags + _of(table, many, point, FLAG), 0)


@triton.jit(do_not_specialize=ALIKE)
def group_restore(tiles, table, many, flags, TILE: tl.constexpr):
    """Undo `_keep` where a point's flag is 0: its new residual becomes the old one."""
    point, _, begin, left = _tile(tiles)
    if tl.load(flags + _of(table, many, point, FLAG)) == 0:
        old, new, x = _of(table, many, point, OLD), _of(table, many, point, NEW), _of(table, many, point, X)
        at = tl.arange(0, TILE)
        source = _floats(tl.where(old == new, x, old)) + begin
        tl.store(_floats(new) + begin + at, tl.load(source + at, mask=at < left), mask=at < left)


# -- blocks too large for one program: statistics first ----------------------------------------------------------------
@triton.jit(do_not_specialize=ALIKE)
def group_partials(tiles, table, many, partials, TILE: tl.constexpr, SUM: tl.constexpr, ADD: tl.constexpr):
    """Write a tile's sum of magnitudes, or its largest magnitude as an integer, to ``partials``, float64[tiles]."""
    point, _, begin, left = _tile(tiles)
    at = tl.arange(0, TILE)
    value, _ = _load(table, many, point, begin, at, at < left, ADD)
    if SUM:
        found = tl.sum(tl.abs(value).to(tl.float64), 0)
    else:
        found = tl.max(magnitudes_of(value), 0).to(tl.float64)
    tl.store(partials + tl.program_id(0), found)


@triton.jit(do_not_specialize=ALIKE)
def group_scales(blocks, partials, table, many, out, TILE: tl.constexpr, SUM: tl.constexpr):
    """Write the scale of a block: ``blocks`` has its point, number, first tile, number of tiles and of elements."""
    row = blocks + tl.program_id(0).to(tl.int64) * 5
    first, tiles = tl.load(row + 2), tl.load(row + 3)
    at = tl.arange(0, TILE)
    found = tl.zeros((TILE,), tl.float64)
    for begin in range(0, tiles, TILE):
        part = tl.load(partials + first + begin + at, mask=at < tiles - begin, other=0.0)
        found = found + part if SUM else tl.maximum(found, part)
    if SUM:
        scale = tl.div_rn(tl.sum(found, 0).to(tl.float32), tl.load(row + 4).to(tl.float32))
    else:
        scale = tl.max(found, 0).to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(_floats(out + _of(table, many, tl.load(row), SCALES)) + tl.load(row + 1), scale)


# -- signs -------------------------------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=ALIKE)
def efsignsgd_group(
    tiles, table, many, out, BLOCK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """`efsignsgd_encode` of ROWS blocks to the message at ``out``; unless WHOLE, of a part of one with its scale."""
    point, block, begin, left = _tile(tiles)
    column, at = places(ROWS, BLOCK, WIDTH, 8)
    here = (column < BLOCK) & (at < left)
    value, residual = _load(table, many, point, begin, at, here, ADD)
    row = tl.arange(0, ROWS)[:, None, None]
    scales = _floats(out + _of(table, many, point, SCALES)) + block
    if WHOLE:
        scale = mean_magnitude(value, tl.maximum(tl.minimum(left - row * BLOCK, BLOCK), 1))
        tl.store(scales + row, scale, mask=row * BLOCK < left)
    else:
        scale = tl.load(scales + row)
    rest = put_signs(value, scale, _octets(out + _of(table, many, point, CODES)) + begin // 8, at, here)
    if ADD:
        _keep(table, many, point, begin, at, here, rest, residual)


@triton.jit(do_not_specialize=ALIKE)
def efsignsgd_group_mean(tiles, table, many, senders, count, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """`efsignsgd_mean` of a tile."""
    point, _, begin, left = _tile(tiles)
    byte, at, place = received(begin, BLOCK, TILE, 8)
    codes, scales = _of(table, many, point, CODES), _of(table, many, point, SCALES)
    base = _message(table, many, senders, point, count, 0)
    total = load_signs(_octets(base + codes), _floats(base + scales), begin, left, byte, place)
    for worker in range(1, count):
        base = _message(table, many, senders, point, count, worker)
        total += load_signs(_octets(base + codes), _floats(base + scales), begin, left, byte, place)
    _put(table, many, point, begin, at, left, total, count)


# -- integers ----------------------------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=ALIKE)
def blockint_group(
    tiles, table, many, out, table0, table1, BLOCK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    BITS: tl.constexpr, RANDOM: tl.constexpr, ADD: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """`efsignsgd_group`, for integers."""
    point, block, begin, left = _tile(tiles)
    column, at = places(ROWS, BLOCK, WIDTH, 8 // BITS)
    here = (column < BLOCK) & (at < left)
    value, residual = _load(table, many, point, begin, at, here, ADD)
    row = tl.arange(0, ROWS)[:, None, None]
    scales = _floats(out + _of(table, many, point, SCALES)) + block
    if WHOLE:
        scale = largest_magnitude(value)
        tl.store(scales + row, scale, mask=row * BLOCK < left)
    else:
        scale = tl.load(scales + row)
    key0, key1 = _of(table, many, point, KEY0).to(tl.int32), _of(table, many, point, KEY1).to(tl.int32)
    start = _of(table, many, point, START) + begin
    codes = _octets(out + _of(table, many, point, CODES)) + begin // (8 // BITS)
    rest = put_ints(value, scale, codes, at, here, start, table0, table1, key0, key1, BITS, RANDOM)
    if ADD:
        _keep(table, many, point, begin, at, here, rest, residual)


@triton.jit(do_not_specialize=ALIKE)
def blockint_group_mean(
    tiles, table, many, senders, count, BLOCK: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr
):
    """`blockint_mean` of a tile."""
    point, _, begin, left = _tile(tiles)
    byte, at, place = received(begin, BLOCK, TILE, 8 // BITS)
    codes, scales = _of(table, many, point, CODES), _of(table, many, point, SCALES)
    base = _message(table, many, senders, point, count, 0)
    total = load_ints(_octets(base + codes), _floats(base + scales), begin, left, byte, place, BITS)
    for worker in range(1, count):
        base = _message(table, many, senders, point, count, worker)
        total += load_ints(_octets(base + codes), _floats(base + scales), begin, left, byte, place, BITS)
    _put(table, many, point, begin, at, left, total, count)


# -- rotations ---------------------------------------------------------------------------------------------------------
@triton.jit
def _words_of(table, many, point, begin, at):
    # Returns the random words of a tile's elements.
    key0, key1 = _of(table, many, point, KEY0).to(tl.int32), _of(table, many, point, KEY1).to(tl.int32)
    return words(_of(table, many, point, START) + begin, at, key0, key1)


@triton.jit(do_not_specialize=ALIKE)
def eden_group(
    tiles, table, many, out, levels, middles, root, divisor, stream,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr, BITS: tl.constexpr,
    BIASED: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """`eden_encode` of ROWS blocks to the message at ``out``."""
    point, block, begin, left = _tile(tiles)
    row, at = row_places(ROWS, WIDTH)
    value, residual = _load(table, many, point, begin, at, at < left, ADD)
    rest = put_rotated(
        value, _words_of(table, many, point, begin, at),
        _octets(out + _of(table, many, point, CODES)) + begin // 8 * BITS,
        _floats(out + _of(table, many, point, SCALES)) + block,
        _octets(out + _of(table, many, point, STREAMS)) + block,
        row, left, levels, middles, root, divisor, stream, ROWS, WIDTH, STAGES, BITS, BIASED, ADD,
    )  # fmt: skip
    if ADD:
        _keep(table, many, point, begin, at, at < left, rest, residual)


@triton.jit
def _rotated_of(
    table, many, point, base, random, block, begin, row, left, levels, root,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    # Returns what the payload in a message stands for.
    return load_rotated(
        random,
        _octets(base + _of(table, many, point, CODES)) + begin // 8 * BITS,
        _floats(base + _of(table, many, point, SCALES)) + block,
        _octets(base + _of(table, many, point, STREAMS)) + block,
        row, left, levels, root, ROWS, WIDTH, STAGES, BITS,
    )  # fmt: skip


@triton.jit(do_not_specialize=ALIKE)
def eden_group_mean(
    tiles, table, many, senders, count, levels, root,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """`eden_mean` of ROWS blocks."""
    point, block, begin, left = _tile(tiles)
    row, at = row_places(ROWS, WIDTH)
    random = _words_of(table, many, point, begin, at)
    base = _message(table, many, senders, point, count, 0)
    total = _rotated_of(
        table, many, point, base, random, block, begin, row, left, levels, root, ROWS, WIDTH, STAGES, BITS
    )
    for worker in range(1, count):
        base = _message(table, many, senders, point, count, worker)
        total += _rotated_of(
            table, many, point, base, random, block, begin, row, left, levels, root, ROWS, WIDTH, STAGES, BITS
        )
    _put(table, many, point, begin, at, left, total, count)
