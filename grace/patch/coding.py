"""The encodings of a tensor's changes. "xor" and "overwrite" are those of the shared format, "steps" is GRACE's own.

"xor": zstd of new XOR base over all bytes. "overwrite": zstd of the number of changed bytes, uint32, their positions,
uint32 each, and their new values. "steps": a head of five numbers, int64 each (words, bytes per word, and the lengths
of the three parts that follow); zstd of each chunk's count, int32; the Elias-Fano code of the places; zstd of the byte
planes of the zigzag steps (grace.patch.delta). All numbers are little-endian.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from grace.patch.delta import CHUNK, Delta, chunks_of, compare, planes, read_places, steps_of, write_places
from grace.patch.files import bits, pack, unpack

Array = Any
ENCODINGS = ("steps", "xor", "overwrite")
HEAD = 5 * 8


def encode(delta: Delta, encoding: str) -> bytes:
    """The changes of a tensor as bytes."""
    return ENCODERS[encoding](delta)


def _steps(delta: Delta) -> bytes:
    parts = (
        pack(delta.counts.astype("<i4", copy=False)),
        write_places(delta.counts, delta.places).tobytes(),
        pack(planes(delta.steps)),
    )
    head = np.array([delta.size, delta.steps.itemsize, *map(len, parts)], "<i8")
    return b"".join((head.tobytes(), *parts))


def _mixed(delta: Delta) -> Array:
    # The changed words: new XOR base.
    assert delta.fresh is not None
    return delta.fresh ^ (delta.fresh - delta.steps)


def _xor(delta: Delta) -> bytes:
    dense = np.zeros(delta.size, delta.steps.dtype)
    dense[delta.positions()] = _mixed(delta)
    return pack(dense)


def _overwrite(delta: Delta) -> bytes:
    assert delta.fresh is not None
    width = delta.steps.itemsize
    if delta.size * width > 1 << 32:
        raise ValueError("positions of 32 bits end at 4 GiB: use the encoding xor or steps")
    differs = bits(_mixed(delta)) != 0
    positions = (delta.positions()[:, None] * width + np.arange(width)).reshape(-1)[differs]
    values = bits(delta.fresh)[differs]
    return pack(b"".join((len(values).to_bytes(4, "little"), positions.astype("<u4").tobytes(), values.tobytes())))


ENCODERS: dict[str, Callable[[Delta], bytes]] = {"steps": _steps, "xor": _xor, "overwrite": _overwrite}


def decode(data: memoryview, encoding: str, base: Array, paired: bool = False) -> Delta:
    """The inverse of `encode`, for the words that it was made from. Raises ValueError for damaged bytes."""
    if encoding == "steps":
        found = read_steps(data)
        if (found.size, found.steps.itemsize) != (base.size, base.itemsize):
            raise ValueError(
                f"it is of {found.size} words of {found.steps.itemsize} bytes, not {base.size} of {base.itemsize}"
            )
        return found
    new = base.copy()
    if encoding == "xor":
        sent = unpack(data, base.nbytes)
        if len(sent) != base.nbytes:
            raise ValueError(f"it is of {len(sent)} bytes, not {base.nbytes}")
        new ^= bits(sent).view(base.dtype)
    else:
        sent = unpack(data, 4 + 5 * base.nbytes)
        count = int.from_bytes(sent[:4], "little")
        if len(sent) != 4 + 5 * count:
            raise ValueError(f"{len(sent)} bytes cannot hold {count} positions and values")
        positions = np.frombuffer(sent, "<u4", count, 4)
        if count and int(positions.max()) >= base.nbytes:
            raise ValueError(f"position {int(positions.max())} lies beyond the {base.nbytes} bytes of the tensor")
        new.view(np.uint8)[positions] = np.frombuffer(sent, np.uint8, count, 4 + 4 * count)
    return compare(new, base, paired=paired)


def read_steps(data: memoryview) -> Delta:
    """The changes that "steps" holds, without the new values, for which it takes the base."""
    if len(data) < HEAD:
        raise ValueError("it is cut off")
    size, width, *lengths = map(int, np.frombuffer(data, "<i8", 5))
    if size < 0 or width not in (1, 2, 4, 8) or min(lengths) < 0 or HEAD + sum(lengths) != len(data):
        raise ValueError("its head does not fit its length")
    ends = np.cumsum([HEAD, *lengths]).tolist()
    packed, places, steps = (data[begin:end] for begin, end in pairwise(ends))
    chunks = chunks_of(size)
    counted = unpack(packed, 4 * chunks)
    if len(counted) != 4 * chunks:
        raise ValueError(f"{len(counted)} bytes of counts for {chunks} chunks")
    counts = np.frombuffer(counted, "<i4").astype(np.int32)
    if size % CHUNK and counts[-1] > size % CHUNK:
        raise ValueError("counts do not fit the tensor")
    found = read_places(counts, bits(places), size)
    sent = unpack(steps, found.size * width)
    if len(sent) != found.size * width:
        raise ValueError(f"{len(sent)} bytes of steps for {found.size} places")
    return Delta(size, counts, found, steps_of(bits(sent), width), None)
