"""PyTorch, on the CPU or any device that it supports."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import numpy as np
import torch

from grace.backends.base import LARGE, PIECE, Array, Backend, Cell
from grace.backends.numpy import (
    beyond,
    excess,
    largest_in_rows,
    largest_magnitudes,
    left_factor,
    part_product,
    products,
    ranked,
    right_factor,
    room,
    searchsorted,
    smallest,
    unit_rows,
    write_product,
)
from grace.core.rng import MASK32, NOISE, noise_offset, noise_rows
from grace.kernels.device import device_kernels, runs_on
from grace.kernels.host import host_kernels, settled

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
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SIGNS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(np.float32) * 2 - 1
"""float32[256, 8]: the signs of each byte of bits. A lookup is faster than the computation."""
MANY = 4
"""Number of threads from which PyTorch computes low-rank products; below, NumPy does, with one thread."""


def _octets(size: int) -> Any:
    return np.empty(size, np.uint8)


def _sparse_octets(size: int) -> Any:
    # Untouched pages take no memory here, whereas NumPy would request huge pages.
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


class Pool:
    """Host memory that is reused as soon as no reference to it remains.

    The C library returns a large array to the system immediately, and fresh pages cost several times the work done on
    them. An array's reference count tells whether it is free, so there is no explicit release.
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
            whole = torch.from_numpy(self._find(size))
        return whole[:size].view(dtype).view(shape)

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
            # More memory is idle than in use: drop arrays not used recently. Large and small ones may be requested
            # alternately.
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
SPARSE = Pool(_sparse_octets)
"""For arrays that will not be filled."""


class Room(threading.local):
    """A thread-local arena: memory allocated from front to back."""

    memory: Array | None = None
    size = used = 0

    @contextmanager
    def of(self, size: int) -> Iterator[None]:
        self.size, self.used = size, 0
        try:
            yield
        finally:
            self.memory, self.size = None, 0

    def next(self, shape: Sequence[int], dtype: torch.dtype) -> Array | None:
        """The next array; None if it does not fit, or its elements would be misaligned."""
        start, stop = self.used, self.used + math.prod(shape) * dtype.itemsize
        if not self.size or stop > self.size or start % dtype.itemsize:
            return None
        if self.memory is None:
            self.memory = SPARSE.empty((self.size,), torch.uint8)
        self.used = stop
        found = self.memory[start:stop].view(dtype)
        return found if len(shape) == 1 else found.view(shape)


ROOM = Room()


class TorchBackend(Backend):
    """PyTorch tensors of one device."""

    name = "torch"
    mutable = True

    def __init__(self, device: str = "cpu"):
        self.device = torch.device(device)
        self.on_host = self.device.type == "cpu"
        self.piece = PIECE if self.on_host else 0

    @property
    def kernels(self) -> Any:
        return (self._triton_runs and device_kernels(self)) or self._native

    @cached_property
    def _triton_runs(self) -> bool:
        return runs_on(self)

    @property
    def _native(self) -> Any:
        # Kernels for single functions.
        return host_kernels(self) if self.on_host else None

    @property
    def threads(self) -> int:
        return torch.get_num_threads()

    def asarray(self, values: Any, dtype: str) -> Array:
        flags = getattr(values, "flags", None)
        if flags is not None and not flags.writeable:  # PyTorch does not support read-only memory
            values = values.copy()
        return torch.as_tensor(values, dtype=DTYPES[dtype], device=self.device)

    def to_numpy(self, x: Array) -> Any:
        x = x.detach().cpu()
        return (x.float() if x.dtype == torch.bfloat16 else x).numpy()

    def zeros(self, shape: Any, dtype: str = "float32") -> Array:
        return torch.zeros(shape, dtype=DTYPES[dtype], device=self.device)

    def full(self, shape: Any, value: Any, dtype: str = "float32") -> Array:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        if isinstance(value, torch.Tensor):
            return value.to(DTYPES[dtype]).expand(shape).contiguous()
        return torch.full(shape, value, dtype=DTYPES[dtype], device=self.device)

    def arange(self, n: int, dtype: str = "int32") -> Array:
        return torch.arange(n, dtype=DTYPES[dtype], device=self.device)

    def dtype(self, x: Array) -> str:
        return NAMES.get(x.dtype) or str(x.dtype).removeprefix("torch.")

    def shape(self, x: Array) -> tuple[int, ...]:
        return tuple(x.shape)

    def nbytes(self, x: Array) -> Any:
        return x.nbytes

    def lengths(self, arrays: Sequence[Array]) -> Array:
        return torch.tensor([x.shape[0] for x in arrays], dtype=torch.int64, device=self.device)

    def integers(self, x: Array) -> list[Any]:
        return x.tolist()

    def empty(self, shape: Any, dtype: str = "float32") -> Array:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        if not self.on_host:
            return torch.empty(shape, dtype=DTYPES[dtype], device=self.device)
        return POOL.empty(shape, DTYPES[dtype])

    def side_by_side(self, size: int) -> AbstractContextManager[None]:
        return ROOM.of(size) if self.on_host else nullcontext()

    def part(self, shape: Any, dtype: str = "float32") -> Array:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        found = ROOM.next(shape, DTYPES[dtype]) if self.on_host else None
        return self.empty(shape, dtype) if found is None else found

    def joined(self, arrays: Sequence[Array]) -> Array:
        filled = [array for array in arrays if array.numel()]  # empty arrays have no address
        if not filled:
            return super().joined(arrays)
        first, storage = filled[0], filled[0].untyped_storage()
        begin = end = first.data_ptr()
        for array in filled:
            if array.data_ptr() != end or not array.is_contiguous():
                return self._copied(filled)
            end += array.nbytes
        if end > storage.data_ptr() + storage.nbytes():  # adjacent by chance, from different storages
            return self._copied(filled)
        return torch.empty(0, dtype=torch.uint8, device=first.device).set_(
            storage, begin - storage.data_ptr(), (end - begin,)
        )

    def _copied(self, arrays: Sequence[Array]) -> Array:
        if not self.on_host:
            return self.concat([self.to_bytes(array) for array in arrays])
        # For hundreds of small arrays: copy each into place without creating a byte view.
        arrays = [array.contiguous() for array in arrays]
        out = POOL.empty((sum(array.nbytes for array in arrays),), torch.uint8)
        place = out.data_ptr()
        for array in arrays:
            ctypes.memmove(place, array.data_ptr(), array.nbytes)
            place += array.nbytes
        return out

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

    def reshape(self, x: Array, shape: Any) -> Array:
        return x.reshape(shape)

    def concat(self, arrays: Sequence[Array], axis: int = 0) -> Array:
        if len(arrays) == 1:
            return arrays[0]
        if axis or not self.on_host or sum(map(torch.Tensor.numel, arrays)) < 2**16:
            return torch.cat(list(arrays), axis)
        out = POOL.empty((sum(array.shape[0] for array in arrays), *arrays[0].shape[1:]), arrays[0].dtype)
        return torch.cat(list(arrays), out=out)

    def split(self, x: Array, sizes: Sequence[Any]) -> Sequence[Array]:
        return x.split(list(sizes)) if sizes else ()

    def pad(self, x: Array, n: int) -> Array:
        return x if x.shape[0] == n else torch.nn.functional.pad(x, (0, n - x.shape[0]))

    def transpose(self, x: Array, axes: Sequence[int] = (1, 0)) -> Array:
        return x.permute(tuple(axes))

    def cast(self, x: Array, dtype: str) -> Array:
        if x.dtype == DTYPES[dtype]:
            return x
        if not self.on_host:
            return x.to(DTYPES[dtype])
        return POOL.empty(x.shape, DTYPES[dtype]).copy_(x)

    # Messages are packed and unpacked per array: return arrays of the right form unchanged.
    def to_bytes(self, x: Array) -> Array:
        return x if x.dtype == torch.uint8 and x.ndim == 1 else super().to_bytes(x)

    def from_bytes(self, x: Array, dtype: str, shape: Any) -> Array:
        return x if dtype == "uint8" and len(shape) == 1 else super().from_bytes(x, dtype, shape)

    def bitcast(self, x: Array, dtype: str) -> Array:
        x = x.contiguous()
        if x.dtype == DTYPES[dtype]:
            return x
        if x.stride(-1) != 1:  # a single element is contiguous with any stride, but a view requires 1
            x = x.new_empty(x.shape).copy_(x)
        size = DTYPES[dtype].itemsize
        if size > x.element_size() and (x.data_ptr() % size or x.storage_offset() * x.element_size() % size):
            x = x.clone()  # a view requires alignment
        return x.view(DTYPES[dtype])

    def add_to(self, x: Array, y: Array) -> Array:
        return x.add_(y)

    def subtract_from(self, x: Array, y: Array) -> Array:
        return x.sub_(y)

    def multiply_in(self, x: Array, y: Any) -> Array:
        return x.mul_(y)

    def divide_in(self, x: Array, y: Any) -> Array:
        return x.div_(y)

    def divided(self, x: Array, y: Any, out: Array | None = None) -> Array:
        out = self._room(x) if out is None else out
        # multiplying by the inverse gives the same result, faster
        if isinstance(y, int) and y & (y - 1) == 0 < y < 2**24:
            return torch.mul(x, 1 / y, out=out)
        return torch.div(x, y, out=out)

    def add_product(self, x: Array, y: Array, z: Array) -> Array:
        return x.addcmul_(y, z)

    def where(self, condition: Array, x: Any, y: Any) -> Array:
        return torch.where(condition, x, y)

    def mended(self, ok: Array, x: Array, other: Callable[[], Array]) -> Array:
        return x if self.on_host and ok.numpy().all() else torch.where(ok, x, other())

    def abs(self, x: Array) -> Array:
        return torch.abs(x, out=self._room(x))

    def sign(self, x: Array) -> Array:
        return torch.sign(x)

    def floor(self, x: Array) -> Array:
        return torch.floor(x, out=self._room(x))

    def floor_in(self, x: Array) -> Array:
        return x.floor_()

    def round(self, x: Array) -> Array:
        return torch.round(x, out=self._room(x))

    def sqrt(self, x: Array) -> Array:
        # PyTorch's vectorised float32 square root is sometimes off by one bit; the other toolkits' are exact.
        return torch.sqrt(x.double()).to(x.dtype)

    def log(self, x: Array) -> Array:
        return torch.log(x)

    def exp(self, x: Array) -> Array:
        return torch.exp(x)

    def cos(self, x: Array) -> Array:
        return torch.cos(x)

    def lgamma(self, x: Array) -> Array:
        return torch.lgamma(x)

    def igammac(self, a: Array, x: Array) -> Array:
        return torch.special.gammaincc(a, x)

    def minimum(self, x: Array, y: Any) -> Array:
        return torch.minimum(x, y) if isinstance(y, torch.Tensor) else torch.clamp(x, max=y)

    def maximum(self, x: Array, y: Any) -> Array:
        return torch.maximum(x, y) if isinstance(y, torch.Tensor) else torch.clamp(x, min=y)

    def invert(self, mask: Array) -> Array:
        return torch.logical_not(mask)

    def isfinite(self, x: Array) -> Array:
        if self.on_host and x.dtype == torch.float32:
            return torch.from_numpy(np.asarray(np.isfinite(x.numpy())))
        return torch.isfinite(x)

    def sum_abs(self, x: Array) -> Array:
        # Short rows need no float64: PyTorch adds in a tree, and a wide copy costs more than the sum.
        return torch.sum(self.abs(x), 1) if self.on_host and x.shape[1] <= 4096 else self.sum(self.abs(x), 1)

    def _room(self, x: Array) -> Array | None:
        # Memory for a result as large as x. None: let PyTorch allocate it.
        if not self.on_host or x.nbytes < POOL.SMALL or x.requires_grad:
            return None
        return POOL.empty(x.shape, x.dtype)

    def max_abs(self, x: Array) -> Array:
        return torch.maximum(x.amax(1), x.amin(1).neg_())  # no temporary; all three functions propagate NaN

    def sum(self, x: Array, axis: int | None = None, keepdims: bool = False) -> Array:
        wide = torch.float64 if x.is_floating_point() else x.dtype
        if axis is None:
            return torch.sum(x, dtype=wide).to(x.dtype)
        return torch.sum(x, axis, keepdim=keepdims, dtype=wide).to(x.dtype)

    def max(self, x: Array, axis: int | None = None, keepdims: bool = False) -> Array:
        return torch.amax(x) if axis is None else torch.amax(x, axis, keepdim=keepdims)

    def unit_rows(self, x: Array) -> tuple[Array, Array]:
        if not self.on_host:  # few operations: each is a kernel launch for a few numbers
            largest = torch.linalg.vector_norm(x, torch.inf, 1, keepdim=True)
            return x / (largest + (largest == 0)), largest > 0
        rows, alive = unit_rows(x.numpy())
        return torch.from_numpy(rows), torch.from_numpy(alive)

    def all(self, x: Array) -> Array:
        return torch.all(x)

    def cumsum(self, x: Array) -> Array:
        return torch.cumsum(x, 0, dtype=x.dtype)

    def finite(self, x: Array) -> Array:
        if x.numel() == 0:
            return torch.ones((), dtype=torch.bool, device=x.device)
        if self.on_host and x.dtype == torch.float32 and x.numel() < PIECE:
            return torch.tensor(bool(np.isfinite(x.numpy()).all()), device=CPU)
        low, high = torch.aminmax(x)  # aminmax propagates NaN: one pass without a temporary
        return torch.isfinite(low) & torch.isfinite(high)

    def excess(self, x: Array, bound: Array) -> Array:
        if not self.on_host:
            return super().excess(x, bound)
        if self._native:
            return self._native.excess(x, float(bound))
        return torch.tensor(excess(x.numpy(), float(bound)), dtype=torch.float64, device=CPU)

    def bitwise_and(self, x: Array, y: Any) -> Array:
        return torch.bitwise_and(x, y)

    def bitwise_or(self, x: Array, y: Any) -> Array:
        return torch.bitwise_or(x, y)

    def bitwise_xor(self, x: Array, y: Any) -> Array:
        return torch.bitwise_xor(x, y)

    def shift_left(self, x: Array, bits: Any) -> Array:
        return torch.bitwise_left_shift(x, bits)

    def shift_right(self, x: Array, bits: Any) -> Array:
        return torch.bitwise_right_shift(x, bits)

    def topk(self, x: Array, k: int) -> Array:
        if x.ndim == 2:  # a stable sort puts the lower index first among ties
            x = torch.where(torch.isnan(x), torch.inf, x)
            order = torch.sort(x, stable=True, descending=True).indices
            return order[:, :k].sort().values.to(torch.int32)
        n = x.shape[0]
        if k >= n:
            return torch.arange(n, dtype=torch.int32, device=x.device)
        if k == 0:
            return torch.zeros(0, dtype=torch.int32, device=x.device)
        if x.is_floating_point():
            x = torch.where(torch.isnan(x), torch.inf, x)
        if self.on_host:
            values = x.numpy()
            bound = np.partition(values, n - k)[n - k]
            above = np.flatnonzero(values > bound)
            ties = np.flatnonzero(values == bound)[: k - len(above)]
            return torch.from_numpy(np.sort(np.concatenate([above, ties])).astype(np.int32))
        # Without waiting for the device: the k-th largest, then ties from the front.
        bound = torch.topk(x, k, sorted=False).values.min()
        above, ties = x > bound, x == bound
        chosen = above | (ties & (torch.cumsum(ties, 0) <= k - above.sum()))
        return torch.nonzero_static(chosen, size=k).flatten().to(torch.int32)

    def topk_abs(self, x: Array, k: int) -> Array:
        if self._native and x.dtype == torch.float32:
            return self._native.topk_abs(x, k)
        if self.on_host and x.ndim == 2:
            return torch.from_numpy(largest_in_rows(x.numpy(), k))
        if self.on_host and len(x) > 65536 and 0 < k <= len(x) // 8:
            return torch.from_numpy(largest_magnitudes(x.numpy(), k))
        return self.topk(torch.abs(x), k)

    def sort(self, x: Array) -> Array:
        return torch.sort(x).values

    def ranked(self, x: Array, ranks: Array) -> Array:
        return torch.from_numpy(ranked(x.numpy(), ranks.numpy())) if self.on_host else super().ranked(x, ranks)

    def nonzero(self, mask: Array) -> Array:
        if self.on_host:  # NumPy's takes a fifth of the time
            return torch.from_numpy(np.flatnonzero(mask.numpy()).astype(np.int32))
        return torch.nonzero(mask).flatten().to(torch.int32)

    def beyond(self, x: Array, bound: Array) -> Array:
        if self._native:
            return self._native.beyond(x, float(bound))
        return torch.from_numpy(beyond(x.numpy(), float(bound))) if self.on_host else super().beyond(x, bound)

    def ascending(self, x: Array, n: int) -> Array:
        if not self.on_host:
            return super().ascending(x, n)
        places = x.numpy()  # NumPy compares faster than PyTorch
        ascends = not len(x) or bool(places[0] >= 0 and places[-1] < n and (places[1:] > places[:-1]).all())
        return torch.tensor(ascends, device=CPU)

    def searchsorted(self, bounds: Array, x: Array) -> Array:
        if self.on_host and x.ndim == 1:
            return torch.from_numpy(searchsorted(bounds.numpy(), x.numpy()))
        return torch.bucketize(x, bounds, out_int32=True)

    def take(self, x: Array, indices: Array) -> Array:
        return torch.index_select(x, 0, indices)

    def scatter(self, x: Array, indices: Array, values: Any) -> Array:
        if isinstance(values, torch.Tensor):
            return x.index_copy(0, indices.long(), values)
        return x.index_fill(0, indices.long(), values)

    def put(self, x: Array, indices: Array, values: Any) -> Array:
        if isinstance(values, torch.Tensor):
            return x.index_copy_(0, indices.long(), values)
        return x.index_fill_(0, indices.long(), values)

    def scatter_add(self, x: Array, indices: Array, values: Array) -> Array:
        return x.index_add_(0, indices, values)

    def segment_sum(self, values: Array, segments: Array, count: int) -> Array:
        total = torch.zeros(count, dtype=torch.float64, device=values.device)
        return total.index_add_(0, segments, values.double()).float()

    def qr(self, x: Array) -> Array:
        return torch.linalg.qr(x).Q

    # On the host NumPy computes low-rank products, up to a few threads. It always computes that of the mean: workers
    # with different numbers of threads must get the same bits.
    def left_factor(self, matrix: Array, q: Array, residual: Array | None = None) -> Array:
        if self._native:
            return self._native.left_factor(matrix, q, residual)
        if self._threaded:
            return super().left_factor(matrix, q, residual)
        return torch.from_numpy(left_factor(matrix.numpy(), q.numpy(), None if residual is None else residual.numpy()))

    def right_factor(self, p: Array, matrix: Array, residual: Array | None = None) -> Array:
        if self._native:
            return self._native.right_factor(p, matrix, residual)
        if self._threaded:
            return super().right_factor(p, matrix, residual)
        return torch.from_numpy(right_factor(p.numpy(), matrix.numpy(), None if residual is None else residual.numpy()))

    def product_into(self, out: Array, p: Array, q: Array) -> Array:
        if self._native:
            return self._native.product(None, p, q, out)
        if not self.on_host:
            torch.mm(p, q, out=out.view(p.shape[0], q.shape[1]))
            return out
        write_product(out.numpy(), p.numpy(), q.numpy())
        return out

    def subtract_product(self, x: Array, p: Array, q: Array) -> Array:
        if self._native:
            return self._native.product(x, p, q, x)
        if self._threaded:
            x.view(p.shape[0], q.shape[1]).addmm_(p, q, alpha=-1)
            return x
        for part, product in self._products(p, q):
            x[part].sub_(product)
        return x

    def part_product(self, x: Array, p: Array, q: Array, rest: Array, taken: tuple[Array, Array] | None = None) -> None:
        if self._native:
            self._native.part(x, p, q, rest, taken)
        elif not self.on_host:
            super().part_product(x, p, q, rest, taken)
        else:
            others = None if taken is None else (taken[0].numpy(), taken[1].numpy())
            part_product(x.numpy(), p.numpy(), q.numpy(), rest.numpy(), others)

    @property
    def _threaded(self) -> bool:
        return not self.on_host or self.threads >= MANY

    def _products(self, p: Array, q: Array) -> Iterator[tuple[slice, Array]]:
        p, q = p.numpy(), q.numpy()
        for part, product in products(p, q, POOL.empty((room(p, q),), torch.float32).numpy()):
            yield part, torch.from_numpy(product)

    def eigh(self, x: Array) -> tuple[Array, Array]:
        values, vectors = torch.linalg.eigh(x)
        return values.flip(0), vectors.flip(1)

    def solve(self, a: Array, b: Array) -> Array:
        return torch.linalg.solve(a, b)

    def words(self, key0: Any, key1: Any, start: int, n: int) -> Array:
        if self._native:
            return self._native.words(key0, key1, start, n)
        pieces = []
        while n > 0:  # a chunk ends where the upper half of the counter changes
            low, high = start & MASK32, start >> 32
            count = min(n, MASK32 + 1 - low)
            h = torch.arange(count, dtype=torch.int32, device=self.device)
            h = _mix(h.add_(_signed(low + key0)))
            pieces.append(_mix(h.bitwise_xor_(_signed(high + key1))))
            start, n = start + count, n - count
        return self.concat(pieces) if pieces else self.zeros(0, "int32")

    def sample(self, key0: Any, key1: Any, start: int, n: int, k: int) -> Array:
        if self._native:
            return self._native.sample(key0, key1, start, n, k)
        if not self.on_host:
            return super().sample(key0, key1, start, n, k)
        return torch.from_numpy(smallest(self.words(key0, key1, start, n).numpy(), k))

    def noise(self, table: tuple[Any, Any], keys: tuple[Any, Any], start: int, n: int) -> Array:
        if n < LARGE:
            return super().noise(table, keys, start, n)
        noise, row, first = self.empty(n), *divmod(start, NOISE)
        rows = 0 if first else n // NOISE
        whole, offsets = self._noise_parts(table, keys, row, rows)
        if rows:  # all whole rows at once
            torch.add(whole, offsets, out=noise[: rows * NOISE].view(rows, NOISE))
        for row, at, first, count in noise_rows(start + rows * NOISE, n - rows * NOISE):
            at += rows * NOISE
            torch.add(whole[first : first + count], noise_offset(keys, row), out=noise[at : at + count])
        return noise.frac_()

    def _noise_parts(self, table: tuple[Any, Any], keys: tuple[Any, Any], row: int, rows: int) -> tuple[Array, Array]:
        """float32[NOISE] and float32[rows, 1]: whole noise rows are the fractions of their sums."""
        offsets = torch.tensor(
            [[noise_offset(keys, row + i)] for i in range(rows)], dtype=torch.float32, device=self.device
        )
        return self._whole_table(table), offsets

    # On the host NumPy shares the memory, and converts numbers to bits many times faster than PyTorch.
    def pack_bits(self, mask: Array) -> Array:
        if not self.on_host:
            return super().pack_bits(mask)
        return torch.from_numpy(np.packbits(mask.numpy(), bitorder="little"))

    def unpack_bits(self, packed: Array, n: int) -> Array:
        if not self.on_host:
            return super().unpack_bits(packed, n)
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=n, bitorder="little").view(bool))

    def pack_signs(self, x: Array) -> Array:
        if not self.on_host:
            return super().pack_signs(x)
        return torch.from_numpy(np.packbits(np.greater_equal(x.numpy(), 0), bitorder="little"))

    def unpack_signs(self, packed: Array, n: int) -> Array:
        if not self.on_host:
            return super().unpack_signs(packed, n)
        signs = POOL.empty((packed.shape[0] * 8,), torch.float32)
        # a byte is always in range
        np.take(SIGNS, packed.numpy(), axis=0, out=signs.numpy().reshape(-1, 8), mode="clip")
        return signs[:n]

    def by_byte(self, values: Callable[[Array, int], Array], packed: Array, m: int) -> Array:
        if not self.on_host or m < 512:
            return values(packed, m)
        table = values(torch.arange(256, dtype=torch.uint8, device=CPU), 256).numpy()
        found = POOL.empty((m * len(table) // 256,), torch.float32)
        row = () if len(table) == 256 else (len(table) // 256,)  # rows of one number are slower than scalars
        out = found.numpy().reshape(m, *row)
        np.take(table.reshape(256, *row), packed.numpy(), axis=0, out=out, mode="clip")  # a byte is always in range
        return found

    def cell(self, value: Array) -> Any:
        return Cell(value)

    def together(self, n: int) -> AbstractContextManager[None]:
        return self._native.together(n) if self._native else nullcontext()

    def quiet(self) -> AbstractContextManager[Any]:
        return settled() if self.on_host else nullcontext()

    def choose(self, ok: Array, new: Array, old: Array) -> Array:
        if isinstance(ok, torch.Tensor) and ok.device.type != "cpu":
            return torch.where(ok, new, old)  # avoids waiting for the device
        return new if ok else old

    def sound(self, x: Array, ok: Callable[[], Array], message: str) -> Array:
        if self.on_host and not ok():
            raise ValueError(message)
        return x

    def require(self, ok: Array, message: str) -> None:
        if not ok:
            raise FloatingPointError(message)


def _signed(word: int) -> int:
    # The int32 with the same bits as the 32-bit word.
    word = int(word) & MASK32
    return word - 2**32 if word >= 2**31 else word


def _mix(h: Array) -> Array:
    # grace.core.rng.mix on int32 vectors, in place: products wrap, and masks undo the arithmetic shift.
    h ^= (h >> 16) & 0xFFFF
    h *= _signed(0x85EBCA6B)
    h ^= (h >> 13) & 0x7FFFF
    h *= _signed(0xC2B2AE35)
    h ^= (h >> 16) & 0xFFFF
    return h
