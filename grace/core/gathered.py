"""What came from all workers: payloads that lie in messages, taken apart when somebody looks at them.

A round brings hundreds of small arrays from each worker. Views of them cost more than what a kernel does with them, and
a kernel wants no views: dtypes, shapes and places are the same for all workers and known from what this one sent.
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
"""dtype and shape of the arrays that lie one after the other in a message."""


@lru_cache(256)
def offsets(layout: Layout) -> tuple[int, ...]:
    """Where each array of a message begins, in bytes; and where the last one ends."""
    return tuple(accumulate((nbytes(*form) for form in layout), initial=0))


def nbytes(dtype: str, shape: Shape) -> Any:
    """How many bytes an array has."""
    return prod(shape) * ITEMSIZE[dtype]


class GatheredBuffers:
    """A buffer of bytes from each worker, all of one layout. ``cut`` takes one apart: into the layout's arrays."""

    def __init__(self, xp: Any, buffers: Sequence[Array], layout: Layout, cut: Callable[[Array, Layout], Payload]):
        self._xp, self._buffers, self._cut = xp, [xp.contiguous(buffer) for buffer in buffers], cut
        self.layout, self.size = layout, len(buffers)
        self._arrays: dict[int, Payload] = {}

    def arrays(self, worker: int) -> Payload:
        """All arrays of one worker."""
        if worker not in self._arrays:
            self._arrays[worker] = self._cut(self._buffers[worker], self.layout)
        return self._arrays[worker]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each array of a message begins, in bytes; and where the last one ends."""
        return offsets(self.layout)

    @cached_property
    def bases(self) -> list[int]:
        """Where each worker's message begins in memory; on hosts."""
        return [self._xp.address(buffer) for buffer in self._buffers]


class GatheredPayloads(Sequence[Payload]):
    """The payload of each worker, in rank order: ``part`` of the arrays in their messages."""

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
        """For each array of a payload where it lies in memory, aligned or not, by worker; as long as this object."""
        bases = self._messages.bases
        return [[base + offset for base in bases] for offset in self._messages.offsets[self._part]]
