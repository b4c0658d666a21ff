"""Triton's kernels of groups that send some elements: those of largest magnitude, or at random positions.

An element's key is its magnitude, or its inverted random word: the smallest word has the largest key. The k-th largest
key is found digit by digit. Each launch counts, per chunk of a tensor, the elements whose keys begin with the digits
found so far, by their next digit. From these counts, the last launch computes how many elements earlier chunks send.
"""

from __future__ import annotations

import triton
import triton.language as tl

from grace.kernels.triton.launcher import magnitudes_of
from grace.kernels.triton.parts import floats, integers, words
from grace.kernels.triton.points import (
    ALIKE,
    CODES,
    COUNT,
    SCALES,
    START,
    X,
    column,
    keep,
    keys_of,
    load_value,
    message_of,
    put_mean,
    tile_of,
)

BINS = 2048
"""Number of counters per chunk and launch; the digits of a key have 11, 11 and 10 bits."""
SHIFTS = (21, 10, 0)
CHUNK, CHUNKS = 2**15, 128
"""Number of elements per chunk, unless a tensor would have more chunks than this."""
_BINS = tl.constexpr(BINS)


@triton.jit
def _chunk(chunks):
    # Returns a program's point, the point's first chunk and number of chunks, and the chunk's begin and size.
    row = chunks + tl.program_id(0).to(tl.int64) * 5
    return tl.load(row), tl.load(row + 1), tl.load(row + 2).to(tl.int32), tl.load(row + 3), tl.load(row + 4)


@triton.jit
def _key(table, many, point, begin, at, value, RANDOM: tl.constexpr):
    # Returns keys, uint32; NaN counts as infinity.
    if RANDOM:
        key0, key1 = keys_of(table, many, point)
        key = ~words(column(table, many, point, START) + begin, at, key0, key1).to(tl.uint32, bitcast=True)
    else:
        key = tl.minimum(magnitudes_of(value), 0x7F800000).to(tl.uint32, bitcast=True)
    return key


@triton.jit
def _digit(total, rank):
    # Returns the digit of the element of this rank, and its rank among elements with this digit. Ranks begin at 1.
    above = tl.sum(total, 0) - tl.cumsum(total, 0)
    digit = tl.sum((above >= rank).to(tl.int32), 0)
    return digit, rank - tl.sum(tl.where(tl.arange(0, _BINS) == digit, above, 0), 0)


@triton.jit(do_not_specialize=ALIKE)
def group_digits(
    chunks, table, many, before, counts, found, marks,
    SHIFT: tl.constexpr, TILE: tl.constexpr, RANDOM: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Count a chunk's elements by the digit of their keys at bit SHIFT, in ``counts``, int32[chunks, BINS], all zeros.

    ``before``: the counts of the previous digit. ``found``: int64[points, 4], receives the digits so far and the rank
    among elements with these digits, in columns 0 and 1 by the second launch, and 2 and 3 by the third. ``marks``:
    int32[2, chunks], receives how many elements exceed the digits so far, and whether any is not finite.
    """
    point, first, many_chunks, begin, size = _chunk(chunks)
    chunk, last = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    here_counts, bins, at = counts + chunk * _BINS, tl.arange(0, _BINS), tl.arange(0, TILE)
    prefix, rank = tl.zeros((), tl.int64), column(table, many, point, COUNT)
    if SHIFT < 21:
        total = tl.zeros((_BINS,), tl.int32)
        for other in range(many_chunks):
            total += tl.load(before + (first + other) * _BINS + bins)
        if SHIFT == 0:
            prefix, rank = tl.load(found + 4 * point), tl.load(found + 4 * point + 1)
        digit, rank = _digit(total, rank)
        prefix = prefix * _BINS + digit
        place = found + 4 * point + (2 if SHIFT == 0 else 0)
        tl.store(place, prefix)
        tl.store(place + 1, rank)
    exceeding, infinite = tl.zeros((TILE,), tl.int32), tl.zeros((TILE,), tl.int32)
    for start in range(0, size, TILE):
        here = at < size - start
        value, _ = load_value(table, many, point, begin + start, at, here, ADD, False)
        key = _key(table, many, point, begin + start, at, value, RANDOM)
        if SHIFT == 21:
            step, counted = key >> 21, here & (key != 0)  # zeros need no count: 0 is the default digit
            infinite |= (here & (magnitudes_of(value) >= 0x7F800000)).to(tl.int32)
        elif SHIFT == 10:
            step, counted = (key >> 10) & 2047, here & (key != 0) & (key >> 21 == prefix)
        else:
            step, counted = key & 1023, here & (key >> 10 == prefix)
            exceeding += (here & (key >> 10 > prefix)).to(tl.int32)
        tl.atomic_add(here_counts + step.to(tl.int32), 1, mask=counted, sem="relaxed")
    if SHIFT == 21:
        tl.store(marks + last + chunk, tl.max(infinite, 0))
    elif SHIFT == 0:
        tl.store(marks + chunk, tl.sum(exceeding, 0))


@triton.jit(do_not_specialize=ALIKE)
def group_take(
    chunks, table, many, out, counts, found, marks, positions,
    TILE: tl.constexpr, RANDOM: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Write a chunk's chosen elements and positions to the message at ``out``, and the new residual.

    If RANDOM, positions go to the address ``positions``, and all values are NaN if any of the tensor is not finite.
    """
    point, first, many_chunks, begin, size = _chunk(chunks)
    chunk, last, at, bins = tl.program_id(0), tl.num_programs(0), tl.arange(0, TILE), tl.arange(0, _BINS)
    total, mine = tl.zeros((_BINS,), tl.int32), tl.zeros((_BINS,), tl.int32)
    place, infinite = tl.zeros((), tl.int64), tl.zeros((), tl.int32)
    for other in range(many_chunks):
        row = tl.load(counts + (first + other) * _BINS + bins)
        total += row
        if first + other < chunk:
            mine += row
            place += tl.load(marks + first + other)
        infinite |= tl.load(marks + last + first + other)
    digit, room = _digit(total, tl.load(found + 4 * point + 3))
    bound = (tl.load(found + 4 * point + 2) * 1024 + digit).to(tl.uint32)
    equal = tl.sum(tl.where(bins == digit, mine, 0), 0).to(tl.int64)
    place += tl.sum(tl.where(bins > digit, mine, 0), 0) + tl.minimum(equal, room)
    values = floats(out + column(table, many, point, SCALES))
    where = integers((positions if RANDOM else out) + column(table, many, point, CODES), 4)
    for start in range(0, size, TILE):
        here = at < size - start
        value, residual = load_value(table, many, point, begin + start, at, here, ADD, False)
        key = _key(table, many, point, begin + start, at, value, RANDOM)
        tie = (here & (key == bound)).to(tl.int32)
        chosen = here & ((key > bound) | ((tie != 0) & (equal + tl.cumsum(tie, 0) <= room)))
        to = place + tl.cumsum(chosen.to(tl.int32), 0) - 1
        sent = value
        if RANDOM:
            sent = tl.where(infinite != 0, float("nan"), value)
        tl.store(values + to, sent, mask=chosen)
        tl.store(where + to, (begin + start + at).to(tl.int32), mask=chosen)
        if ADD:
            keep(table, many, point, begin + start, at, here, tl.where(chosen, 0.0, value), residual, False)
        place += tl.sum(chosen.to(tl.int32), 0)
        equal += tl.sum(tie, 0)


@triton.jit(do_not_specialize=ALIKE)
def group_scatter(tiles, table, many, senders, count, positions, TILE: tl.constexpr, SOME: tl.constexpr):
    """Write a tile of the mean of payloads with values and ascending positions.

    ``positions``: the address of all workers' positions, or 0 if they are in the messages.
    """
    point, _, begin, left = tile_of(tiles)
    k, out, at = column(table, many, point, COUNT), floats(column(table, many, point, X)) + begin, tl.arange(0, TILE)
    tl.store(out + at, tl.zeros((TILE,), tl.float32), mask=at < left)
    for worker in range(count):
        base = message_of(table, many, senders, point, count, worker)
        values = floats(base + column(table, many, point, SCALES))
        where = integers(tl.where(positions != 0, positions, base) + column(table, many, point, CODES), 4)
        low, high = tl.zeros((), tl.int64), k
        while low < high:  # searches for the first position in this tile
            middle = (low + high) // 2
            below = tl.load(where + middle) < begin
            low, high = tl.where(below, middle + 1, low), tl.where(below, high, middle)
        tl.debug_barrier()  # other threads may have written to the same elements of out
        more = low < k
        while more:
            place = low + tl.arange(0, SOME)
            to = tl.load(where + place, mask=place < k, other=2147483647) - begin
            here = (to >= 0) & (to < left)
            value = tl.load(values + place, mask=here, other=0.0)
            tl.store(out + to, tl.load(out + to, mask=here, other=0.0) + value, mask=here)
            low += SOME
            more = (low < k) & (tl.max(to, 0) < left)
    if count > 1:
        tl.debug_barrier()
        total = tl.load(out + at, mask=at < left, other=0.0)
        put_mean(table, many, point, begin, at, left, total, count, False)
