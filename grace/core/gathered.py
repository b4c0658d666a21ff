"""Payloads gathered from all workers: views into the received messages, made on access.

A round receives hundreds of small arrays from each worker, and making views of them takes longer than a kernel's work
on them. A kernel needs only addresses: dtypes, shapes and offsets are the same for all workers, and this worker knows
them from the message that it sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from math import prod
from typing import Any, overload

from grace.core import Array, Payload
from grace.core.dtypes import ITEMSIZE

Shape = tuple[Any, ...]
Layout = tuple[tuple[str, Shape], ...]
"""dtype and shape of each array in a message, in order."""


@lru_cache(256)
def offsets(layout: Layout) -> tuple[int, ...]:
    """Byte offset of each array in a message, and of the message's end."""
    return tuple(accumulate((nbytes(*form) for form in layout), initial=0))


def nbytes(dtype: str, shape: Shape) -> Any:
    """Bytes of an array."""
    return prod(shape) * ITEMSIZE[dtype]


class GatheredBuffers:
    """A byte buffer from each worker, all of one layout. ``cut`` splits a buffer into the layout's arrays."""

    def __init__(self, xp: Any, buffers: Sequence[Array], layout: Layout, cut: Callable[[Array, Layout], Payload]):
        self._xp, self._buffers, self._cut = xp, [xp.buffers.contiguous(buffer) for buffer in buffers], cut
        self.layout, self.size = layout, len(buffers)
        self._arrays: dict[int, Payload] = {}

    def arrays(self, worker: int) -> Payload:
        """All arrays of one worker."""
        if worker not in self._arrays:
            self._arrays[worker] = self._cut(self._buffers[worker], self.layout)
        return self._arrays[worker]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Byte offset of each array in a message, and of the message's end."""
        return offsets(self.layout)

    @cached_property
    def bases(self) -> list[int]:
        """Address of each worker's message; on hosts only."""
        return [self._xp.buffers.address(buffer) for buffer in self._buffers]


class GatheredPayloads(Sequence[Payload]):
    """The payload of each worker, in rank order: the slice ``part`` of the arrays in each message."""

    def __init__(self, messages: GatheredBuffers, part: slice):
        self._messages, self._part = messages, part

    def __len__(self) -> int:
        return self._messages.size

    @overload
    def __getitem__(self, worker: int) -> Payload: ...

    @overload
    def __getitem__(self, worker: slice) -> list[Payload]: ...

    def __getitem__(self, worker: int | slice) -> Payload | list[Payload]:
        workers = range(len(self))[worker]
        if isinstance(workers, range):
            return [self[each] for each in workers]
        return self._messages.arrays(workers)[self._part]

    @property
    def layout(self) -> Layout:
        """dtype and shape of the arrays of each worker's payload."""
        return self._messages.layout[self._part]

    @property
    def nbytes(self) -> int:
        """Bytes of one worker's payload."""
        ends = self._messages.offsets
        return ends[self._part.stop] - ends[self._part.start]

    def addresses(self) -> list[list[int]]:
        """Memory addresses, by array and then by worker, possibly unaligned; valid as long as this object lives."""
        bases = self._messages.bases
        return [[base + offset for base in bases] for offset in self._messages.offsets[self._part]]
