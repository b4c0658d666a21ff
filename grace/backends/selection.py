"""Selections from NumPy arrays, in cache-sized chunks."""

from __future__ import annotations

from typing import Any

import numpy as np

from grace.backends.base import PIECE
from grace.core.rng import MASK32

Array = Any
FEW_RANKS = 8
"""Minimum number of ranks for which sorting is as fast as partitioning."""


def excess(x: Array, bound: float) -> tuple[float, float, float]:
    """Number, sum and sum of squares of the excesses of |x| over a bound, computed in cache-sized chunks."""
    number, total, squares = 0, 0.0, 0.0
    over, mask = np.empty(min(len(x), PIECE), np.float32), np.empty(min(len(x), PIECE), bool)
    with np.errstate(all="ignore"):
        for start in range(0, len(x), PIECE):
            part = x[start : start + PIECE]
            size, positive = over[: len(part)], mask[: len(part)]
            np.abs(part, out=size)
            np.subtract(size, bound, out=size)
            np.greater(size, 0, out=positive)
            number += int(np.count_nonzero(positive))
            np.maximum(size, 0, out=size)
            total += float(np.sum(size))
            square = float(np.dot(size, size))
            if not 1e-20 < square < 1e30:  # at or beyond the ends of float32's range
                wide = size.astype(np.float64)
                square = float(np.dot(wide, wide))
            squares += square
    return float(number), total, squares


def beyond(x: Array, bound: float) -> Array:
    """Return int32[K], positions where |x| exceeds a bound or is NaN; in cache-sized chunks."""
    magnitude, mask = np.empty(min(len(x), PIECE), np.float32), np.empty(min(len(x), PIECE), bool)
    found = [np.zeros(0, np.int32)]
    for start in range(0, len(x), PIECE):
        part = x[start : start + PIECE]
        size, below = magnitude[: len(part)], mask[: len(part)]
        np.abs(part, out=size)
        np.less_equal(size, bound, out=below)
        places = np.flatnonzero(np.logical_not(below, out=below)).astype(np.int32)
        places += start
        found.append(places)
    return np.concatenate(found)


def ranked(x: Array, ranks: Array) -> Array:
    """`Backend.ranked`: a few ranks need no full sort."""
    return (np.partition(x, ranks) if len(ranks) < FEW_RANKS else np.sort(x))[ranks]


def searchsorted(bounds: Array, x: Array) -> Array:
    """`Backend.searchsorted`. For few bounds, searches cache-sized chunks without unpredictable branches."""
    many = len(bounds)
    if not 0 < many < 2**12 or len(x) < 2**10 or bounds.dtype.kind != "f":
        return np.searchsorted(bounds, x).astype(np.int32)
    places, step = np.zeros(len(x), np.int32), 1 << (many.bit_length() - 1)
    padded = np.full(2 * step, np.inf, bounds.dtype)  # no number exceeds the padding
    padded[:many] = bounds
    for start in range(0, len(x), PIECE):
        part, place = x[start : start + PIECE], places[start : start + PIECE]
        bound, above = np.empty(len(part), bounds.dtype), np.empty(len(part), bool)
        for each in [step >> shift for shift in range(step.bit_length())]:
            np.take(padded[each - 1 :], place, out=bound, mode="clip")
            np.greater(part, bound, out=above)
            place += np.multiply(above, each, dtype=np.int32)
        nan = np.flatnonzero(np.not_equal(part, part, out=above))
        place[nan] = np.searchsorted(bounds, part[nan])
    return places


def smallest(words: Array, k: int) -> Array:
    """Return int32[k], ascending positions of the k smallest of distinct int32 numbers, taken as unsigned."""
    n, words = len(words), words.view(np.uint32)
    if k >= n or k == 0:
        return np.arange(min(k, n), dtype=np.int32)
    # With high probability, slightly more than k numbers lie below this bound; the exact selection is made among them.
    bound = np.uint32(min((k + 6 * k**0.5 + 16) / n, 1.0) * MASK32)
    places = np.concatenate(
        [np.flatnonzero(words[start : start + PIECE] <= bound) + start for start in range(0, n, PIECE)]
    ).astype(np.int32)
    if len(places) < k:
        places = np.arange(n, dtype=np.int32)
    values = words[places]
    return places[values <= np.partition(values, k - 1)[k - 1]]


def largest_in_rows(x: Array, k: int) -> Array:
    """Return int32[m, k], ascending positions of each row's k largest |x|; NaN as in `largest_magnitudes`."""
    m, n = x.shape
    found = np.empty((m, min(k, n)), np.int32)
    if k >= n or k == 0:
        found[:] = np.arange(min(k, n), dtype=np.int32)
        return found
    height = max(1, PIECE // n)  # rows that fit a cache
    for start in range(0, m, height):
        size = np.abs(x[start : start + height])
        size[np.isnan(size)] = np.inf
        least = np.partition(size, n - k, 1)[:, n - k : n - k + 1]
        chosen = size >= least
        rows = np.flatnonzero(np.count_nonzero(chosen, 1) > k)  # too many ties at the smallest value
        for row in rows:
            ties = np.flatnonzero(size[row] == least[row])
            chosen[row, ties[k - np.count_nonzero(size[row] > least[row]) :]] = False
        found[start : start + height] = np.nonzero(chosen)[1].reshape(-1, k)
    return found


def largest_magnitudes(x: Array, k: int) -> Array:
    """Return int32[k], ascending positions of the k largest |x|. 0 < k < len(x). NaN counts as infinity.

    Of equal magnitudes, the first are taken. A bound from a sample leaves few candidates, from which the exact
    selection is made without allocating an array of x's size. A wrong bound is discarded, so the result is exact for
    any sample.
    """
    n = len(x)
    sample = np.abs(x[:: n // 65536 | 1])  # an odd stride: one that divides the row length would sample few columns
    sample[np.isnan(sample)] = np.inf
    want = k / n * len(sample)
    rank = min(len(sample), int(want + 4 * want**0.5) + 1)
    bound = np.partition(sample, len(sample) - rank)[len(sample) - rank]
    magnitude, below = np.empty(min(n, PIECE), np.float32), np.empty(min(n, PIECE), bool)
    found, total = [], 0
    for start in range(0, n, PIECE):
        part = x[start : start + PIECE]
        size, mask = magnitude[: len(part)], below[: len(part)]
        np.abs(part, out=size)
        np.less(size, bound, out=mask)  # "not less" keeps NaN as a candidate
        places = np.flatnonzero(np.logical_not(mask, out=mask))
        places += start
        found.append(places)
        total += len(places)
        if total > n // 4:
            break
    if not k <= total <= n // 4:
        values, candidates = np.abs(x), None
    else:
        candidates = np.concatenate(found)
        values = np.abs(x[candidates])
    values[np.isnan(values)] = np.inf
    least = np.partition(values, len(values) - k)[len(values) - k]
    above = np.flatnonzero(values > least)
    ties = np.flatnonzero(values == least)[: k - len(above)]
    chosen = np.sort(np.concatenate([above, ties]))
    return (chosen if candidates is None else candidates[chosen]).astype(np.int32)
