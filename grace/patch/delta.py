"""What differs between two arrays of words: places, steps and new values, by the native kernels or by NumPy.

Words are unsigned integers. Chunks of 65536 words each have a count; a place is a word's offset in its chunk, uint16. A
step is new - base modulo the word's range. Both ways give the same arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grace.kernels import library

Array = Any
CHUNK = 1 << 16
SPAN = 1 << 19
"""Bytes of each array that are compared and hashed while a core's cache holds them."""


@dataclass
class Delta:
    """The changes of ``size`` words. ``counts``: int32[chunks]. ``places``: uint16[k]. ``steps``: [k]. ``fresh``: the
    new words, [k], or None if unknown."""

    size: int
    counts: Array
    places: Array
    steps: Array
    fresh: Array | None

    def positions(self) -> Array:
        """int64[k]: the positions of the changed words, ascending."""
        starts = np.repeat(np.arange(len(self.counts), dtype=np.int64) * CHUNK, self.counts)
        return starts + self.places

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        arrays = (self.counts, self.places, self.steps, self.fresh)
        return sum(each.nbytes for each in arrays if each is not None)


def chunks_of(n: int) -> int:
    """Number of chunks of n words."""
    return -(-n // CHUNK)


def compare(new: Array, base: Array, seen: Callable[[Array], None] | None = None, paired: bool = False) -> Delta:
    """Compare arrays of words, [n] each. ``seen`` gets the bytes of ``new``, part by part. ``paired``: both words of an
    element count as changed if one is (complex128)."""
    n, size, kernels = new.size, new.itemsize, library()
    counts = np.zeros(chunks_of(n), np.int32)
    # Room for all words: what is not written takes no memory.
    room = np.empty(n, np.uint16), np.empty(n, new.dtype), np.empty(n, new.dtype)
    done, span = 0, SPAN // size
    for begin in range(0, n, span):
        one, two = new[begin : begin + span], base[begin : begin + span]
        here, free = counts[begin // CHUNK :], [each[done:] for each in room]
        if kernels is None or paired:
            done += _compared(one, two, here, free, paired)
        else:
            done += kernels.patch_diff(*(each.ctypes.data for each in (one, two, here, *free)), one.size, size)
        if seen is not None:
            seen(one.view(np.uint8))
    for each in room:
        each.resize(done, refcheck=False)  # gives the rest back, without a copy
    places, fresh, steps = room
    return Delta(n, counts, places, steps, fresh)


def _compared(new: Array, base: Array, counts: Array, free: Sequence[Array], paired: bool) -> int:
    differs = new != base
    if paired:
        differs = differs.reshape(-1, 2).any(1).repeat(2)
    where = np.flatnonzero(differs)
    many = np.bincount(where // CHUNK, minlength=chunks_of(new.size))
    counts[: many.size] = many
    for array, found in zip(free, (where % CHUNK, new[where], new[where] - base[where]), strict=True):
        array[: where.size] = found
    return where.size


def patched(base: Array, delta: Delta, seen: Callable[[Array], None] | None = None) -> Array:
    """Returns the new words at the changed positions, [k]; ``seen`` gets the bytes of the whole result, part by part.

    Nothing is changed.
    """
    size, span, kernels = base.itemsize, SPAN // base.itemsize, library()
    fresh = np.empty(delta.steps.size, base.dtype)
    scratch = np.empty(min(base.size, span), base.dtype)
    done = 0
    for begin in range(0, base.size, span):
        here = scratch[: min(span, base.size - begin)]
        here[...] = base[begin : begin + span]
        counts = delta.counts[begin // CHUNK : (begin + here.size + CHUNK - 1) // CHUNK]
        k = int(counts.sum())
        places, steps, out = (each[done : done + k] for each in (delta.places, delta.steps, fresh))
        if kernels is None:
            where = _where(counts, places)
            out[...] = here[where] + steps
            here[where] = out
        else:
            kernels.patch_step(*(each.ctypes.data for each in (here, counts, places, steps, out)), len(counts), size)
        done += k
        if seen is not None:
            seen(here.view(np.uint8))
    return fresh


def scatter(target: Array, delta: Delta, fresh: Array) -> None:
    """Write ``fresh``, [k], to the changed positions of ``target``."""
    kernels = library()
    if kernels is None:
        target[delta.positions()] = fresh
        return
    arrays = (target, delta.counts, delta.places, fresh)
    kernels.patch_write(*(each.ctypes.data for each in arrays), len(delta.counts), target.itemsize)


def _where(counts: Array, places: Array) -> Array:
    return np.repeat(np.arange(len(counts), dtype=np.int64) * CHUNK, counts) + places


# -- positions ---------------------------------------------------------------------------------------------------------
def coded_size(counts: Array) -> Array:
    """int64[chunks + 1]: where the code of each chunk begins, and the total number of bytes."""
    lower = lower_of(counts)
    full = counts.astype(np.int64)
    sizes = np.where(full > 0, (full * lower + 7) // 8 + (full + (CHUNK >> lower) + 7) // 8, 0)
    return np.concatenate([[0], np.cumsum(sizes)])


def lower_of(counts: Array) -> Array:
    """int64[chunks]: the number of lower bits of each place, floor(log2(65536 / count))."""
    exponent = np.frexp(CHUNK / np.maximum(counts, 1).astype(np.float64))[1]
    return np.maximum(exponent.astype(np.int64) - 1, 0)


def write_places(counts: Array, places: Array) -> Array:
    """uint8[b]: the Elias-Fano code of each chunk's places, which ascend. Lower bits first, then the upper ones.

    A chunk with c places has l = floor(log2(65536 / c)) lower bits each, packed from bit 0 of a byte on; then bit
    (place >> l) + j is set for place number j. Both parts begin at whole bytes.
    """
    starts = coded_size(counts)
    out = np.zeros(int(starts[-1]), np.uint8)
    kernels = library()
    if kernels is not None:
        kernels.patch_places(*(each.ctypes.data for each in (counts, places, out)), len(counts))
        return out
    done = 0
    for chunk in np.flatnonzero(counts).tolist():
        c, lower = int(counts[chunk]), int(lower_of(counts[chunk : chunk + 1])[0])
        here = places[done : done + c].astype(np.int64)
        done += c
        bits = (here[:, None] >> np.arange(lower)) & 1
        low = np.packbits(bits.astype(np.uint8).reshape(-1), bitorder="little")
        marks = np.zeros(c + (CHUNK >> lower), np.uint8)
        marks[(here >> lower) + np.arange(c)] = 1
        out[starts[chunk] : starts[chunk + 1]] = np.concatenate([low, np.packbits(marks, bitorder="little")])
    return out


def read_places(counts: Array, sent: Array, n: int) -> tuple[Array, int]:
    """The inverse of `write_places`: uint16[k], and the number of bytes that were read.

    Raises ValueError for what `write_places` cannot have written for n words.
    """
    if len(counts) != chunks_of(n) or (counts < 0).any() or (counts > CHUNK).any():
        raise ValueError("counts do not fit the tensor")
    starts = coded_size(counts)
    if int(starts[-1]) > sent.size:
        raise ValueError(f"{sent.size} bytes where {int(starts[-1])} of positions were written")
    places = np.empty(int(counts.sum(dtype=np.int64)), np.uint16)
    kernels = library()
    if kernels is not None:
        if not kernels.patch_unplaces(*(each.ctypes.data for each in (counts, sent, places)), len(counts), n):
            raise ValueError("positions do not ascend within their chunks")
        return places, int(starts[-1])
    done = 0
    for chunk in np.flatnonzero(counts).tolist():
        c, lower = int(counts[chunk]), int(lower_of(counts[chunk : chunk + 1])[0])
        code = sent[starts[chunk] : starts[chunk + 1]]
        low = (c * lower + 7) // 8
        marks = np.flatnonzero(np.unpackbits(code[low:], bitorder="little"))
        if marks.size != c:
            raise ValueError("positions do not ascend within their chunks")
        bits = np.unpackbits(code[:low], count=c * lower, bitorder="little").reshape(c, lower)
        here = ((marks - np.arange(c)) << lower) | (bits.astype(np.int64) << np.arange(lower)).sum(1)
        if (np.diff(here) <= 0).any() or here[-1] >= min(CHUNK, n - chunk * CHUNK):
            raise ValueError("positions do not ascend within their chunks")
        places[done : done + c] = here
        done += c
    return places, int(starts[-1])


# -- steps -------------------------------------------------------------------------------------------------------------
LARGE = 15
"""The code of four bits that stands for larger ones."""


def write_steps(steps: Array) -> tuple[Array, Array]:
    """Zigzag codes, so that small steps of either sign are small: 2 step, or -2 step - 1.

    Returns uint8[(k + 1) / 2], four bits each, the first code in the lower ones; and the words of the codes of `LARGE`
    and more, for which the four bits are `LARGE`. A byte for two codes lets zstd spend less than a bit on a code.
    """
    kernels = library()
    if kernels is not None:
        out, large = np.empty((steps.size + 1) // 2, np.uint8), np.empty_like(steps)
        many = kernels.patch_nibbles(*(each.ctypes.data for each in (steps, out, large)), steps.size, steps.itemsize)
        return out, large[:many]
    sign = (steps.view(f"i{steps.itemsize}") >> (steps.itemsize * 8 - 1)).view(steps.dtype)
    codes = (steps << np.array(1, steps.dtype)) ^ sign
    small = np.minimum(codes, LARGE).astype(np.uint8)
    small = np.append(small, np.zeros(steps.size % 2, np.uint8))
    return small[::2] | (small[1::2] << np.uint8(4)), codes[codes >= LARGE]


def read_steps(sent: Array, large: Array, k: int) -> Array:
    """The inverse of `write_steps`: [k]. Raises ValueError for another number of large codes."""
    steps, kernels = np.empty(k, large.dtype), library()
    if kernels is not None:
        addresses = (each.ctypes.data for each in (sent, large, steps))
        if not kernels.patch_unnibbles(*addresses, k, large.size, steps.itemsize):
            raise ValueError(f"steps do not fit {large.size} large ones")
        return steps
    codes = np.stack([sent & np.uint8(15), sent >> np.uint8(4)], 1).reshape(-1)[:k].astype(large.dtype)
    where = np.flatnonzero(codes == LARGE)
    if where.size != large.size:
        raise ValueError(f"steps do not fit {large.size} large ones")
    codes[where] = large
    one = np.array(1, codes.dtype)
    return (codes >> one) ^ (np.array(0, codes.dtype) - (codes & one))
