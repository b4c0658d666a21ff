"""The memory of PyTorch tensors: a pool on the host."""

from __future__ import annotations

import ctypes
import math
import sys
import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from grace.backends.buffers import Buffers

Array = Any
DTYPES = {
    "bool": torch.bool,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
CPU = torch.device("cpu")
"""Passed wherever a tensor is created, since torch.set_default_device must not move host tensors."""


def _octets(size: int) -> Any:
    return np.empty(size, np.uint8)


class Pool:
    """Host memory that is reused as soon as no reference to it remains.

    The C library returns large arrays to the system immediately, and fresh pages cost several times as much time as the
    work done on them. An array's reference count tells whether it is free, so there is no explicit release.
    """

    SMALL = 2**17  # bytes: smaller arrays are cached by the C library

    def __init__(self, made: Callable[[int], Any] = _octets) -> None:
        self._made = made
        self._lock = threading.Lock()
        self._arrays: list[Any] = []
        self._used: set[int] = set()  # arrays used since the last check for waste

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Array:
        size = math.prod(shape) * dtype.itemsize
        if size < self.SMALL:
            return torch.empty(shape, dtype=dtype, device=CPU)
        with self._lock:
            whole = torch.from_numpy(self._find(size)[:size])  # slicing is faster in NumPy
        return whole.view(dtype).view(shape)

    def _find(self, size: int) -> Any:
        # Arrays are sorted by size, so that only a few need to be checked when a step requests hundreds.
        start = bisect_left(self._arrays, size, key=_size)
        for place in range(start, bisect_left(self._arrays, 2 * size + 1, start, key=_size)):
            if _references(self._arrays, place) <= FREE:
                self._used.add(id(self._arrays[place]))
                return self._arrays[place]
        places = [place for place in range(len(self._arrays)) if _references(self._arrays, place) <= FREE]
        free = [self._arrays[place] for place in places]
        wasted = sum(array.size for array in free)
        if wasted > sum(array.size for array in self._arrays) // 2:
            # More bytes are idle than in use: drop the free arrays that were not used since the last such drop. Keep
            # the others, since requests may alternate between large and small sizes.
            gone = {id(array) for array in free} - self._used
            self._arrays = [array for array in self._arrays if id(array) not in gone]
            self._used.clear()
        array = self._made(size)
        self._used.add(id(array))
        insort(self._arrays, array, key=_size)
        return array


def _size(array: Any) -> int:
    return int(array.size)


def _references(arrays: list[Any], place: int) -> int:
    return sys.getrefcount(arrays[place])


FREE = _references([np.empty(1)], 0)
"""Reference count of an array held only by a list; it depends on the interpreter."""
POOL = Pool()


def span(arrays: Sequence[Array]) -> Array | None:
    """The bytes of arrays that lie side by side in one storage, uint8[n]; None if they do not, or have no elements."""
    filled = [array for array in arrays if array.numel()]  # empty arrays have no address
    if not filled:
        return None
    first, storage = filled[0], filled[0].untyped_storage()
    begin = end = first.data_ptr()
    for array in filled:
        if array.data_ptr() != end or not array.is_contiguous():
            return None
        end += array.nbytes
    start = storage.data_ptr()
    if end > start + storage.nbytes():  # adjacent by chance, from different storages
        return None
    return torch.empty(0, dtype=torch.uint8, device=first.device).set_(storage, begin - start, (end - begin,))


class TorchBuffers(Buffers):
    """PyTorch tensors as memory: on the host from a pool."""

    def empty(self, shape: Any, dtype: str = "float32") -> Array:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        if not self._xp.on_host:
            return torch.empty(shape, dtype=DTYPES[dtype], device=self._xp.device)
        return POOL.empty(shape, DTYPES[dtype])

    def concat_bytes(self, arrays: Sequence[Array]) -> Array:
        whole = span(arrays)
        return self._copied(arrays) if whole is None else whole

    def joined(self, arrays: Sequence[Array], donated: bool = False) -> Array:
        whole = span(arrays) if donated and all(array.dtype == torch.float32 for array in arrays) else None
        return super().joined(arrays) if whole is None else whole.view(torch.float32)

    def parts(self, whole: Array, arrays: Sequence[Array]) -> Sequence[Array]:
        return torch._utils._unflatten_dense_tensors(whole, arrays)

    def _elements(self, arrays: Sequence[Array]) -> int:
        return sum(map(torch.Tensor.numel, arrays))

    def write_all(self, outs: Sequence[Array], arrays: Sequence[Array]) -> None:
        torch._foreach_copy_(list(outs), list(arrays))

    def addresses(self, arrays: Sequence[Array]) -> list[int] | None:
        for array in arrays:
            if array.dtype != torch.float32 or not array.is_contiguous():
                return None
        return [array.data_ptr() for array in arrays]

    def same_memory(self, x: Array, y: Array) -> bool:
        return x.data_ptr() == y.data_ptr()

    def contiguous(self, x: Array) -> Array:
        return x.contiguous()

    def address(self, x: Array | None) -> int:
        return 0 if x is None else x.data_ptr()

    def overlap(self, x: Array, y: Array) -> bool:
        return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() and x.numel() > 0

    def write(self, out: Array, x: Any) -> None:
        if isinstance(x, torch.Tensor):
            out.copy_(x)
        else:
            out.fill_(x)

    def fetch(self, x: Array) -> Callable[[], Any]:
        if not x.is_cuda:
            return super().fetch(x)
        found = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        found.copy_(x, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()

        def wait() -> Any:
            arrived.synchronize()
            return found.numpy()

        return wait

    # Messages are packed and unpacked per array: return arrays of the right form unchanged.
    def to_bytes(self, x: Array) -> Array:
        return x if x.dtype == torch.uint8 and x.ndim == 1 else super().to_bytes(x)

    def from_bytes(self, x: Array, dtype: str, shape: Any) -> Array:
        return x if dtype == "uint8" and len(shape) == 1 else super().from_bytes(x, dtype, shape)

    def streaming_writes(self, n: int) -> AbstractContextManager[None]:
        return self._xp.host_kernels.arrays.streaming_writes(n) if self._xp.host_kernels else nullcontext()

    def _copied(self, arrays: Sequence[Array]) -> Array:
        if not self._xp.on_host:
            return self._xp.concat([self.to_bytes(array) for array in arrays])
        # There may be hundreds of small arrays: copy each into place without creating a byte view.
        arrays = [array.contiguous() for array in arrays]
        out = POOL.empty((sum(array.nbytes for array in arrays),), torch.uint8)
        place = out.data_ptr()
        for array in arrays:
            ctypes.memmove(place, array.data_ptr(), array.nbytes)
            place += array.nbytes
        return out
