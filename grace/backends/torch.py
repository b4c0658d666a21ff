"""PyTorch, on the CPU or any device that it supports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import numpy as np
import torch

from grace.backends import products, selection
from grace.backends.base import PIECE, Array, Backend, Cell
from grace.backends.buffers import InPlace
from grace.backends.linalg import Linalg
from grace.backends.torch_bits import TorchBits, TorchRandom
from grace.backends.torch_buffers import CPU, DTYPES, POOL, TorchBuffers
from grace.kernels.device import device_kernels, runs_on
from grace.kernels.host import host_kernels, settled

NAMES = {dtype: name for name, dtype in DTYPES.items()}
MANY = 4
"""Minimum number of threads for computing low-rank products in PyTorch; with fewer, NumPy does it, in one thread."""


class TorchInPlace(InPlace):
    """PyTorch functions that end in _."""

    def add(self, x: Array, y: Array) -> Array:
        return x.add_(y)

    def subtract(self, x: Array, y: Array) -> Array:
        return x.sub_(y)

    def multiply(self, x: Array, y: Any) -> Array:
        return x.mul_(y)

    def divide(self, x: Array, y: Any) -> Array:
        return x.div_(y)

    def add_product(self, x: Array, y: Array, z: Array) -> Array:
        return x.addcmul_(y, z)

    def floor(self, x: Array) -> Array:
        return x.floor_()

    def scatter(self, x: Array, indices: Array, values: Any) -> Array:
        if isinstance(values, torch.Tensor):
            return x.index_copy_(0, indices.long(), values)
        return x.index_fill_(0, indices.long(), values)


class TorchLinalg(Linalg):
    """PyTorch linear algebra; kernels or NumPy for products on the host."""

    def unit_rows(self, x: Array) -> tuple[Array, Array]:
        if not self._xp.on_host:  # few operations, because each one is a kernel launch for a few numbers
            largest = torch.linalg.vector_norm(x, torch.inf, 1, keepdim=True)
            return x / (largest + (largest == 0)), largest > 0
        rows, alive = products.unit_rows(x.numpy())
        return torch.from_numpy(rows), torch.from_numpy(alive)

    def qr(self, x: Array) -> Array:
        return torch.linalg.qr(x).Q

    # On the host, without kernels and with few threads, NumPy computes low-rank products. For the mean (product_into),
    # NumPy is used with any number of threads, because workers with different numbers must get the same bits.
    def left_factor(self, matrix: Array, q: Array) -> Array:
        if self._xp.host_kernels:
            return self._xp.host_kernels.arrays.left_factor(matrix, q)
        if self._threaded:
            return super().left_factor(matrix, q)
        return torch.from_numpy(products.left_factor(matrix.numpy(), q.numpy()))

    def right_factor(self, p: Array, matrix: Array) -> Array:
        if self._xp.host_kernels:
            return self._xp.host_kernels.arrays.right_factor(p, matrix)
        if self._threaded:
            return super().right_factor(p, matrix)
        return torch.from_numpy(products.right_factor(p.numpy(), matrix.numpy()))

    def product_into(self, out: Array, p: Array, q: Array) -> Array:
        if self._xp.host_kernels:
            return self._xp.host_kernels.arrays.product(None, p, q, out)
        if not self._xp.on_host:
            torch.mm(p, q, out=out.view(p.shape[0], q.shape[1]))
            return out
        products.write_product(out.numpy(), p.numpy(), q.numpy())
        return out

    def subtract_product(self, x: Array, p: Array, q: Array) -> Array:
        if self._xp.host_kernels:
            return self._xp.host_kernels.arrays.product(x, p, q, x)
        if self._threaded:
            x.view(p.shape[0], q.shape[1]).addmm_(p, q, alpha=-1)
            return x
        for part, product in self._products(p, q):
            x[part].sub_(product)
        return x

    def eigh(self, x: Array) -> tuple[Array, Array]:
        values, vectors = torch.linalg.eigh(x)
        return values.flip(0), vectors.flip(1)

    def solve(self, a: Array, b: Array) -> Array:
        # On a device, `solve` would wait for the check whether the matrix is singular.
        return torch.linalg.solve(a, b) if self._xp.on_host else torch.linalg.solve_ex(a, b)[0]

    @property
    def _threaded(self) -> bool:
        return not self._xp.on_host or self._xp.threads >= MANY

    def _products(self, p: Array, q: Array) -> Iterator[tuple[slice, Array]]:
        p, q = p.numpy(), q.numpy()
        for part, product in products.products(p, q, POOL.empty((products.room(p, q),), torch.float32).numpy()):
            yield part, torch.from_numpy(product)


PINNED = 2**16
"""Maximum size in bytes of host arrays that are copied to a CUDA device through pinned memory."""


class TorchBackend(Backend):
    """PyTorch tensors of one device."""

    name = "torch"
    mutable = True
    buffers = cached_property(TorchBuffers)
    inplace: cached_property[InPlace] = cached_property(TorchInPlace)
    bits = cached_property(TorchBits)
    linalg = cached_property(TorchLinalg)
    random = cached_property(TorchRandom)

    def __init__(self, device: str = "cpu"):
        self.device = torch.device(device)
        self.on_host = self.device.type == "cpu"
        self.piece = PIECE if self.on_host else 0

    @property
    def kernels(self) -> Any:
        return (self._triton_runs and device_kernels(self)) or self.host_kernels

    @cached_property
    def _triton_runs(self) -> bool:
        return runs_on(self)

    @property
    def host_kernels(self) -> Any:
        # CPU kernels, which also replace single functions of this backend; None on a device.
        return host_kernels(self) if self.on_host else None

    @property
    def threads(self) -> int:
        return torch.get_num_threads()

    def asarray(self, values: Any, dtype: str) -> Array:
        flags = getattr(values, "flags", None)
        if flags is not None and not flags.writeable:  # PyTorch does not support read-only memory
            values = values.copy()
        if self.device.type == "cuda" and not isinstance(values, torch.Tensor):
            host = torch.as_tensor(values, dtype=DTYPES[dtype], device=CPU)
            if host.nbytes <= PINNED:  # a copy from pageable memory waits for the device
                return host.pin_memory().to(self.device, non_blocking=True)
        return torch.as_tensor(values, dtype=DTYPES[dtype], device=self.device)

    def to_numpy(self, x: Array) -> Any:
        x = x.detach().cpu()
        return (x.float() if x.dtype == torch.bfloat16 else x).numpy()

    def exported(self, x: Array) -> Any:
        return x.detach().cpu().clone()

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
        return self.asarray([x.shape[0] for x in arrays], "int64")

    def integers(self, x: Array) -> list[Any]:
        return x.tolist()

    def reshape(self, x: Array, shape: Any) -> Array:
        return x if shape == x.shape or (shape == (-1,) and x.dim() == 1) else x.reshape(shape)

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
        if self.host_kernels:
            return self.host_kernels.arrays.excess(x, float(bound))
        return torch.tensor(selection.excess(x.numpy(), float(bound)), dtype=torch.float64, device=CPU)

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
        # To avoid waiting for the device, take the elements above the k-th largest, then ties from the front.
        bound = torch.topk(x, k, sorted=False).values.min()
        above, ties = x > bound, x == bound
        chosen = above | (ties & (torch.cumsum(ties, 0) <= k - above.sum()))
        return torch.nonzero_static(chosen, size=k).flatten().to(torch.int32)

    def topk_abs(self, x: Array, k: int) -> Array:
        if self.host_kernels and x.dtype == torch.float32:
            return self.host_kernels.arrays.topk_abs(x, k)
        if self.on_host and x.ndim == 2:
            return torch.from_numpy(selection.largest_in_rows(x.numpy(), k))
        if self.on_host and len(x) > 65536 and 0 < k <= len(x) // 8:
            return torch.from_numpy(selection.largest_magnitudes(x.numpy(), k))
        return self.topk(torch.abs(x), k)

    def sort(self, x: Array) -> Array:
        return torch.sort(x).values

    def ranked(self, x: Array, ranks: Array) -> Array:
        return (
            torch.from_numpy(selection.ranked(x.numpy(), ranks.numpy())) if self.on_host else super().ranked(x, ranks)
        )

    def nonzero(self, mask: Array, count: int | None = None) -> Array:
        if self.on_host:  # NumPy's function takes a fifth of the time
            return torch.from_numpy(np.flatnonzero(mask.numpy()).astype(np.int32))
        found = torch.nonzero(mask) if count is None else torch.nonzero_static(mask, size=count, fill_value=len(mask))
        return found.flatten().to(torch.int32)

    def beyond(self, x: Array, bound: Array) -> Array:
        if self.host_kernels:
            return self.host_kernels.arrays.beyond(x, float(bound))
        return torch.from_numpy(selection.beyond(x.numpy(), float(bound))) if self.on_host else super().beyond(x, bound)

    def searchsorted(self, bounds: Array, x: Array) -> Array:
        if self.on_host and x.ndim == 1:
            return torch.from_numpy(selection.searchsorted(bounds.numpy(), x.numpy()))
        return torch.bucketize(x, bounds, out_int32=True)

    def take(self, x: Array, indices: Array) -> Array:
        return torch.index_select(x, 0, indices)

    def scatter(self, x: Array, indices: Array, values: Any) -> Array:
        if isinstance(values, torch.Tensor):
            return x.index_copy(0, indices.long(), values)
        return x.index_fill(0, indices.long(), values)

    def scatter_add(self, x: Array, indices: Array, values: Array) -> Array:
        return x.index_add_(0, indices, values)

    def segment_sum(self, values: Array, segments: Array, count: int) -> Array:
        total = torch.zeros(count, dtype=torch.float64, device=values.device)
        return total.index_add_(0, segments, values.double()).float()

    def cell(self, value: Array) -> Any:
        return Cell(value)

    def quiet(self) -> AbstractContextManager[Any]:
        return settled() if self.on_host else nullcontext()

    def choose(self, ok: Array, new: Array, old: Array) -> Array:
        if isinstance(ok, torch.Tensor) and not self.on_host and ok.device.type == self.device.type:
            return torch.where(ok, new, old)  # avoids waiting for the device
        return new if ok else old

    def sound(self, x: Array, ok: Callable[[], Array], message: str) -> Array:
        if self.on_host and not ok():
            raise ValueError(message)
        return x

    def require(self, ok: Array, message: str) -> None:
        if not ok:
            raise FloatingPointError(message)
