"""The encodings of a tensor's changes. "xor" and "overwrite" are those of the shared format, "steps" is GRACE's own.

"xor": zstd of new XOR base over all bytes. "overwrite": zstd of the number of changed bytes, uint32, their positions,
uint32 each, and their new values. "steps": the number of words, the bytes of a word, and each chunk's count, in 7 bits
per byte from the lowest on, the top bit set if more follow (LEB128); the Elias-Fano code of the places; zstd of the
zigzag steps (`grace.patch.delta`). All numbers are little-endian.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from grace.patch.delta import Delta, chunks_of, compare, read_places, read_steps, write_places, write_steps
from grace.patch.files import bits, pack, unpack

Array = Any
ENCODINGS = ("steps", "xor", "overwrite")


def encode(delta: Delta, encoding: str) -> bytes:
    """The changes of a tensor as bytes."""
    return ENCODERS[encoding](delta)


def _steps(delta: Delta) -> bytes:
    small, large = write_steps(delta.steps)
    # The bytes of large codes in planes: their upper ones are alike.
    planes = large.view(np.uint8).reshape(-1, large.itemsize).T
    head = _numbers([delta.size, large.itemsize, *delta.counts.tolist()])
    places = write_places(delta.counts, delta.places)
    return head + places.tobytes() + pack(small.tobytes() + planes.tobytes())


def _numbers(values: Iterable[int]) -> bytes:
    found = bytearray()
    for value in values:
        while value > 127:
            found.append(value & 127 | 128)
            value >>= 7
        found.append(value)
    return bytes(found)


def _number(data: memoryview, at: int) -> tuple[int, int]:
    # Returns a number, and where the next one begins. IndexError if it is cut off.
    value = shift = 0
    while data[at] > 127:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if shift > 56:
            raise ValueError("a number of its head is too large")
    return value | data[at] << shift, at + 1


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
        found = read(data)
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


def read(data: memoryview) -> Delta:
    """The changes that "steps" holds, without the new values, for which it takes the base."""
    try:
        size, at = _number(data, 0)
        width, at = _number(data, at)
        if width not in (1, 2, 4, 8) or chunks_of(size) > len(data):
            raise ValueError("its head does not fit its length")
        counts = np.empty(chunks_of(size), np.int32)
        for chunk in range(counts.size):
            counts[chunk], at = _number(data, at)
    except (IndexError, OverflowError) as error:
        raise ValueError("its head is cut off, or too large") from error
    found, end = read_places(counts, bits(data)[at:], size)
    k = found.size
    sent = unpack(data[at + end :], (k + 1) // 2 + k * width)
    large = np.frombuffer(sent, np.uint8)[(k + 1) // 2 :]
    if len(sent) < (k + 1) // 2 or large.size % width:
        raise ValueError(f"{len(sent)} bytes of steps for {k} places")
    words = np.ascontiguousarray(large.reshape(width, -1).T).reshape(-1).view(f"u{width}")
    return Delta(size, counts, found, read_steps(bits(sent)[: (k + 1) // 2], words, k), None)
