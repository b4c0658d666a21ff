"""Triton's kernels of groups: one launch for all points of a bucket, from a table of their addresses.

Each kernel computes, and rounds, like the plain functions of a method, element by element.
"""

from __future__ import annotations

import triton
import triton.language as tl

from grace.kernels.triton.launcher import magnitudes_of
from grace.kernels.triton.parts import (
    codes_of,
    drawn,
    floats,
    load_codes,
    natural_fields,
    natural_scale,
    norm_of,
    not_zero,
    put_codes,
    scales_at,
    scales_of,
    store_floats,
    values_of,
    words,
)
from grace.kernels.triton.points import (
    ALIKE,
    CODES,
    FLAG,
    NEW,
    OLD,
    SCALES,
    START,
    STREAMS,
    X,
    codes_of_all,
    column,
    fast,
    keep,
    keys_of,
    load_value,
    message_of,
    put_mean,
    tile_of,
)
from grace.kernels.triton.rotations import load_rotated, put_rotated, row_places


# -- states ------------------------------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=ALIKE)
def group_finite(tiles, table, many, senders, count, flags, TILE: tl.constexpr):
    """Clear the flag of a point with a scale that is not finite."""
    point, _, begin, left = tile_of(tiles)
    at = tl.arange(0, TILE)
    worst = tl.zeros((TILE,), tl.int32)
    for worker in range(count):
        scales = floats(message_of(table, many, senders, point, count, worker) + column(table, many, point, SCALES))
        worst = tl.maximum(worst, magnitudes_of(tl.load(scales + begin + at, mask=at < left, other=0.0)))
    if tl.max(worst, 0) >= 0x7F800000:
        tl.store(flags + column(table, many, point, FLAG), 0)


@triton.jit(do_not_specialize=ALIKE)
def group_restore(tiles, table, many, flags, TILE: tl.constexpr):
    """Undo `keep` for points whose flag is 0: copy their old residuals to the new ones."""
    point, _, begin, left = tile_of(tiles)
    if tl.load(flags + column(table, many, point, FLAG)) == 0:
        old, new, x = column(table, many, point, OLD), column(table, many, point, NEW), column(table, many, point, X)
        at = tl.arange(0, TILE)
        source = floats(tl.where(old == new, x, old)) + begin
        tl.store(floats(new) + begin + at, tl.load(source + at, mask=at < left), mask=at < left)


# -- blocks that share a scale -----------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=ALIKE)
def group_partials(
    tiles, table, many, out, partials,
    METHOD: tl.constexpr, TILE: tl.constexpr, LEVELS: tl.constexpr, RANDOM: tl.constexpr, ADD: tl.constexpr,
    SQUARES: tl.constexpr,
):  # fmt: skip
    """Write a tile's statistic to ``partials``, float64[tiles]; for blocks that are too large for one program.

    efsignsgd: the sum of magnitudes. natural: the largest exponent field. Others: the bits of the largest magnitude;
    if SQUARES, the sum of squares relative to the largest magnitude, which is stored in place of the block's scale.
    """
    point, block, begin, left = tile_of(tiles)
    at = tl.arange(0, TILE)
    value, _ = load_value(table, many, point, begin, at, at < left, ADD, False)
    if METHOD == "efsignsgd":
        found = tl.sum(tl.abs(value).to(tl.float64), 0)
    elif SQUARES:
        largest = tl.load(floats(out + column(table, many, point, SCALES)) + block)
        share = tl.div_rn(value, not_zero(tl.zeros_like(value) + largest))
        found = tl.sum((share * share).to(tl.float64), 0)
    elif METHOD == "natural":
        key0, key1 = keys_of(table, many, point)
        draws = words(column(table, many, point, START) + begin, at, key0, key1)
        found = tl.max(natural_fields(value, draws, RANDOM), 0).to(tl.float64)
    else:
        found = tl.max(magnitudes_of(value), 0).to(tl.float64)
    tl.store(partials + tl.program_id(0), found)


@triton.jit(do_not_specialize=ALIKE)
def group_scales(
    blocks, partials, table, many, out,
    METHOD: tl.constexpr, TILE: tl.constexpr, LEVELS: tl.constexpr, SQUARES: tl.constexpr,
):  # fmt: skip
    """Write a block's scale. ``blocks``: rows of point, block number, first tile, number of tiles, and size."""
    row = blocks + tl.program_id(0).to(tl.int64) * 5
    first, tiles = tl.load(row + 2), tl.load(row + 3)
    at = tl.arange(0, TILE)
    found = tl.zeros((TILE,), tl.float64)
    for begin in range(0, tiles, TILE):
        part = tl.load(partials + first + begin + at, mask=at < tiles - begin, other=0.0)
        found = found + part if METHOD == "efsignsgd" or SQUARES else tl.maximum(found, part)
    place = scales_at(METHOD, out + column(table, many, tl.load(row), SCALES)) + tl.load(row + 1)
    if METHOD == "efsignsgd":
        scale = tl.div_rn(tl.sum(found, 0).to(tl.float32), tl.load(row + 4).to(tl.float32))
    elif SQUARES:
        scale = norm_of(tl.load(place), tl.sum(found, 0))
    elif METHOD == "natural":
        scale = natural_scale(tl.max(found, 0).to(tl.int32), LEVELS)
    else:
        scale = tl.max(found, 0).to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(place, scale)


@triton.jit(do_not_specialize=ALIKE)
def group_encode(
    tiles, table, many, out, table0, table1,
    METHOD: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
    LEVELS: tl.constexpr, EACH: tl.constexpr, RANDOM: tl.constexpr, ADD: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Encode ROWS blocks, padded to WIDTH elements, to the message at ``out``.

    If not WHOLE, encode a part of one block, whose scale is in the message. METHOD: see `grace.kernels.triton.parts`.
    """
    point, block, begin, left = tile_of(tiles)
    codes = out + column(table, many, point, CODES) + begin // 8 * BITS
    scales = scales_at(METHOD, out + column(table, many, point, SCALES)) + block
    full = (left == ROWS * BLOCK) & (BLOCK == WIDTH)
    if full & fast(table, many, point, begin, codes, EACH * BITS // 8, ADD):
        _encode(
            point, begin, left, table, many, codes, scales, table0, table1,
            METHOD, BLOCK, ROWS, WIDTH, BITS, LEVELS, EACH, RANDOM, ADD, WHOLE, True,
        )  # fmt: skip
    else:
        _encode(
            point, begin, left, table, many, codes, scales, table0, table1,
            METHOD, BLOCK, ROWS, WIDTH, BITS, LEVELS, EACH, RANDOM, ADD, WHOLE, False,
        )  # fmt: skip


@triton.jit
def _encode(
    point, begin, left, table, many, codes, scales, table0, table1,
    METHOD: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
    LEVELS: tl.constexpr, EACH: tl.constexpr, RANDOM: tl.constexpr, ADD: tl.constexpr, WHOLE: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    row, first = tl.arange(0, ROWS)[:, None, None], tl.arange(0, WIDTH // EACH)[None, :, None] * EACH
    inside = first + tl.arange(0, EACH)[None, None, :]
    at = row * BLOCK + inside
    here = (inside < BLOCK) & (at < left)
    value, residual = load_value(table, many, point, begin, at, here, ADD, FAST)
    key0, key1 = keys_of(table, many, point)
    draws = drawn(METHOD, column(table, many, point, START) + begin, at, table0, table1, key0, key1)
    if WHOLE:
        count = tl.maximum(tl.minimum(left - row * BLOCK, BLOCK), 1)
        scale = scales_of(METHOD, value, draws, count, LEVELS, RANDOM)
        tl.store(scales + row, scale, mask=row * BLOCK < left)
    else:
        scale = tl.load(scales + row)
    code = codes_of(METHOD, value, scale, draws, BITS, LEVELS, RANDOM)
    if ADD:
        rest = value - values_of(METHOD, code, scale, BITS, LEVELS)
        keep(table, many, point, begin, at, here, rest, residual, FAST)
    if not FAST:
        code = tl.where(here, code, 0)
    room = tl.where(first < BLOCK, left - row * BLOCK - first, 0)
    put_codes(codes, code, row * (BLOCK // EACH) + first // EACH, room, BITS, EACH, FAST)


@triton.jit(do_not_specialize=ALIKE)
def group_mean(
    tiles, table, many, senders, count,
    METHOD: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr, LEVELS: tl.constexpr,
    EACH: tl.constexpr,
):  # fmt: skip
    """Write the mean of the decoded payloads of a tile; for signsgd, the majority."""
    point, _, begin, left = tile_of(tiles)
    SIZE: tl.constexpr = EACH * BITS // 8
    offset = column(table, many, point, CODES) + begin // 8 * BITS
    found = codes_of_all(table, many, senders, point, count, offset) if SIZE == 4 or SIZE == 2 else offset
    if (left == TILE) & fast(table, many, point, begin, found, SIZE, False):
        _mean(point, begin, left, table, many, senders, count, METHOD, BLOCK, TILE, BITS, LEVELS, EACH, True)
    else:
        _mean(point, begin, left, table, many, senders, count, METHOD, BLOCK, TILE, BITS, LEVELS, EACH, False)


@triton.jit
def _mean(
    point, begin, left, table, many, senders, count,
    METHOD: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr, LEVELS: tl.constexpr,
    EACH: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    word = tl.arange(0, TILE // EACH)[None, :, None]
    at = word * EACH + tl.arange(0, EACH)[None, None, :]
    base = message_of(table, many, senders, point, count, 0)
    total = _decoded(base, table, many, point, begin, left, word, METHOD, BLOCK, BITS, LEVELS, EACH, FAST)
    for worker in range(1, count):
        base = message_of(table, many, senders, point, count, worker)
        total += _decoded(base, table, many, point, begin, left, word, METHOD, BLOCK, BITS, LEVELS, EACH, FAST)
    if METHOD == "signsgd":
        total = tl.where(total >= 0, 1.0, -1.0) + (total - total)  # NaN if a worker's block is not finite
        store_floats(column(table, many, point, X) + begin * 4, at, at < left, total, FAST)
    else:
        put_mean(table, many, point, begin, at, left, total, count, FAST)


@triton.jit
def _decoded(
    base, table, many, point, begin, left, word,
    METHOD: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, LEVELS: tl.constexpr, EACH: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    # Returns the decoded values of a payload in a message.
    room = left - word * EACH
    code = load_codes(base + column(table, many, point, CODES) + begin // 8 * BITS, word, room, BITS, EACH, FAST)
    place = word * 0
    if BLOCK:
        place = begin // BLOCK + ((begin % BLOCK).to(tl.int32) + word * EACH) // BLOCK
    scale = tl.load(scales_at(METHOD, base + column(table, many, point, SCALES)) + place, mask=room > 0, other=0)
    return values_of(METHOD, code, scale, BITS, LEVELS)


# -- rotations ---------------------------------------------------------------------------------------------------------
@triton.jit
def _words_of(table, many, point, begin, at):
    # Returns the random words of a tile's elements.
    key0, key1 = keys_of(table, many, point)
    return words(column(table, many, point, START) + begin, at, key0, key1)


@triton.jit(do_not_specialize=ALIKE)
def eden_group(
    tiles, table, many, out, levels, middles, root, divisor, stream,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr, BITS: tl.constexpr, EACH: tl.constexpr,
    BIASED: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """`grace.compressors.eden.Eden.compress` of ROWS blocks to the message at ``out``. ``root``: sqrt(WIDTH)."""
    point, block, begin, left = tile_of(tiles)
    codes = out + column(table, many, point, CODES) + begin // 8 * BITS
    if (left == ROWS * WIDTH) & fast(table, many, point, begin, codes, EACH * BITS // 8, ADD):
        _rotate(
            point, block, begin, left, table, many, out, codes, levels, middles, root, divisor, stream,
            ROWS, WIDTH, STAGES, BITS, EACH, BIASED, ADD, True,
        )  # fmt: skip
    else:
        _rotate(
            point, block, begin, left, table, many, out, codes, levels, middles, root, divisor, stream,
            ROWS, WIDTH, STAGES, BITS, EACH, BIASED, ADD, False,
        )  # fmt: skip


@triton.jit
def _rotate(
    point, block, begin, left, table, many, out, codes, levels, middles, root, divisor, stream,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr, BITS: tl.constexpr, EACH: tl.constexpr,
    BIASED: tl.constexpr, ADD: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    row, at = row_places(ROWS, WIDTH)
    value, residual = load_value(table, many, point, begin, at, at < left, ADD, FAST)
    rest = put_rotated(
        value, _words_of(table, many, point, begin, at), codes,
        out + column(table, many, point, SCALES) + block * 4, out + column(table, many, point, STREAMS) + block,
        row, left, levels, middles, root, divisor, stream,
        ROWS, WIDTH, STAGES, BITS, EACH, BIASED, ADD, FAST,
    )  # fmt: skip
    if ADD:
        keep(table, many, point, begin, at, at < left, rest, residual, FAST)


@triton.jit(do_not_specialize=ALIKE)
def eden_group_mean(
    tiles, table, many, senders, count, levels, root,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr, BITS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Write the mean of the decoded payloads of ROWS blocks."""
    point, block, begin, left = tile_of(tiles)
    offset = column(table, many, point, CODES) + begin // 8 * BITS
    found = codes_of_all(table, many, senders, point, count, offset)
    if (left == ROWS * WIDTH) & fast(table, many, point, begin, found, EACH * BITS // 8, False):
        _rotate_back(
            point, block, begin, left, table, many, senders, count, levels, root, ROWS, WIDTH, STAGES, BITS, EACH, True
        )
    else:
        _rotate_back(
            point, block, begin, left, table, many, senders, count, levels, root, ROWS, WIDTH, STAGES, BITS, EACH, False
        )


@triton.jit
def _rotate_back(
    point, block, begin, left, table, many, senders, count, levels, root,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr, BITS: tl.constexpr, EACH: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    row, at = row_places(ROWS, WIDTH)
    random = _words_of(table, many, point, begin, at)
    codes = column(table, many, point, CODES) + begin // 8 * BITS
    scales, streams = column(table, many, point, SCALES) + block * 4, column(table, many, point, STREAMS) + block
    base = message_of(table, many, senders, point, count, 0)
    total = load_rotated(
        random, base + codes, base + scales, base + streams, row, left, levels, root,
        ROWS, WIDTH, STAGES, BITS, EACH, FAST,
    )  # fmt: skip
    for worker in range(1, count):
        base = message_of(table, many, senders, point, count, worker)
        total += load_rotated(
            random, base + codes, base + scales, base + streams, row, left, levels, root,
            ROWS, WIDTH, STAGES, BITS, EACH, FAST,
        )  # fmt: skip
    put_mean(table, many, point, begin, at, left, total, count, FAST)
