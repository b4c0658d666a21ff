"""The NumPy backend: the reference, on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import numpy as np

from grace.backends import products, selection
from grace.backends.base import PIECE, Array, Backend, Cell
from grace.backends.bits import Bits
from grace.backends.buffers import Buffers, InPlace
from grace.backends.linalg import Linalg
from grace.backends.random import LARGE, Random
from grace.core.dtypes import ITEMSIZE
from grace.core.rng import MASK32, noise_offset, noise_rows
from grace.kernels.host import host_kernels, settled

NAMES = {np.dtype(name): name for name in ITEMSIZE if name != "bfloat16"}
"""The name of each dtype. A lookup is faster than NumPy, which builds the name on each access."""


class NumpyBuffers(Buffers):
    """NumPy arrays as memory."""

    def empty(self, shape: Any, dtype: str = "float32") -> Array:
        return np.empty(shape, dtype)

    def same_memory(self, x: Array, y: Array) -> bool:
        return x.__array_interface__["data"][0] == y.__array_interface__["data"][0]

    def addresses(self, arrays: Sequence[Array]) -> list[int] | None:
        for array in arrays:
            if type(array) is not np.ndarray or array.dtype != np.float32 or not array.flags.c_contiguous:
                return None
        return [array.__array_interface__["data"][0] for array in arrays]

    def contiguous(self, x: Array) -> Array:
        return np.ascontiguousarray(x)

    def address(self, x: Array | None) -> int:
        return 0 if x is None else x.__array_interface__["data"][0]

    def overlap(self, x: Array, y: Array) -> bool:
        return np.may_share_memory(x, y)

    def write(self, out: Array, x: Any) -> None:
        out[...] = x

    def streaming_writes(self, n: int) -> AbstractContextManager[None]:
        return self._xp.kernels.arrays.streaming_writes(n) if self._xp.kernels else nullcontext()


class NumpyInPlace(InPlace):
    """NumPy functions with `out=x`."""

    def add(self, x: Array, y: Array) -> Array:
        return np.add(x, y, out=x)

    def subtract(self, x: Array, y: Array) -> Array:
        return np.subtract(x, y, out=x)

    def multiply(self, x: Array, y: Any) -> Array:
        return np.multiply(x, y, out=x)

    def divide(self, x: Array, y: Any) -> Array:
        return np.divide(x, y, out=x)

    def add_product(self, x: Array, y: Array, z: Array) -> Array:
        return np.add(x, np.multiply(y, z), out=x)

    def floor(self, x: Array) -> Array:
        return np.floor(x, out=x)

    def scatter(self, x: Array, indices: Array, values: Any) -> Array:
        x[indices] = values
        return x


class NumpyLinalg(Linalg):
    """NumPy linear algebra."""

    def unit_rows(self, x: Array) -> tuple[Array, Array]:
        return products.unit_rows(x)

    def qr(self, x: Array) -> Array:
        return np.linalg.qr(x)[0]

    def left_factor(self, matrix: Array, q: Array) -> Array:
        return (self._xp.kernels.arrays.left_factor if self._xp.kernels else products.left_factor)(matrix, q)

    def right_factor(self, p: Array, matrix: Array) -> Array:
        return (self._xp.kernels.arrays.right_factor if self._xp.kernels else products.right_factor)(p, matrix)

    def product_into(self, out: Array, p: Array, q: Array) -> Array:
        if self._xp.kernels:
            return self._xp.kernels.arrays.product(None, p, q, out)
        products.write_product(out, p, q)
        return out

    def subtract_product(self, x: Array, p: Array, q: Array) -> Array:
        if self._xp.kernels:
            return self._xp.kernels.arrays.product(x, p, q, x)
        for part, product in products.products(p, q, np.empty(products.room(p, q), np.float32)):
            x[part] -= product
        return x

    def eigh(self, x: Array) -> tuple[Array, Array]:
        values, vectors = np.linalg.eigh(x)
        return values[::-1], vectors[:, ::-1]

    def solve(self, a: Array, b: Array) -> Array:
        return np.linalg.solve(a, b)


class NumpyRandom(Random):
    """Random bits, with a kernel if there is one."""

    def words(self, key0: Any, key1: Any, start: int, n: int) -> Array:
        if self._xp.kernels:
            return self._xp.kernels.arrays.words(key0, key1, start, n)
        counter = np.arange(start, start + n, dtype=np.int64)
        h = _mix(((counter + int(key0)) & MASK32).astype(np.uint32))
        h ^= (((counter >> 32) + int(key1)) & MASK32).astype(np.uint32)
        return _mix(h).view(np.int32)

    def sample(self, key0: Any, key1: Any, start: int, n: int, k: int) -> Array:
        if self._xp.kernels:
            return self._xp.kernels.arrays.sample(key0, key1, start, n, k)
        return selection.smallest(self.words(key0, key1, start, n), k)

    def noise(self, table: tuple[Any, Any], keys: tuple[Any, Any], start: int, n: int) -> Array:
        if n < LARGE:
            return super().noise(table, keys, start, n)
        whole = self._whole_table(table)
        noise = np.empty(n, np.float32)
        for row, at, first, count in noise_rows(start, n):
            part = noise[at : at + count]
            np.add(whole[first : first + count], np.float32(noise_offset(keys, row)), out=part)
            np.subtract(part, np.floor(part), out=part)
        return noise


class NumpyBits(Bits):
    """Bits, packed by NumPy."""

    def pack_signs(self, x: Array) -> Array:
        return np.packbits(np.greater_equal(x, 0), bitorder="little")

    def unpack_signs(self, packed: Array, n: int) -> Array:
        signs = np.unpackbits(packed, count=n, bitorder="little").astype(np.float32)
        signs *= 2.0
        signs -= 1.0
        return signs

    def map_bytes(self, values: Callable[[Array, int], Array], packed: Array, m: int) -> Array:
        if m < 512:
            return values(packed, m)
        table = values(np.arange(256, dtype=np.uint8), 256)  # a byte is always in range
        if len(table) == 256:
            return np.take(table, packed, mode="clip")
        return np.take(table.reshape(256, -1), packed, axis=0, mode="clip").reshape(-1)

    def pack(self, mask: Array) -> Array:
        return np.packbits(mask, bitorder="little")

    def unpack(self, packed: Array, n: int) -> Array:
        return np.unpackbits(packed, count=n, bitorder="little").view(bool)


class NumpyBackend(Backend):
    """NumPy arrays."""

    name = "numpy"
    mutable = True
    piece = PIECE
    buffers = cached_property(NumpyBuffers)
    inplace = cached_property(NumpyInPlace)
    bits = cached_property(NumpyBits)
    linalg = cached_property(NumpyLinalg)
    random = cached_property(NumpyRandom)

    @property
    def kernels(self) -> Any:
        return host_kernels(self)

    def asarray(self, values: Any, dtype: str) -> Array:
        return np.asarray(values, dtype)

    def to_numpy(self, x: Array) -> Any:
        return np.asarray(x)

    def zeros(self, shape: Any, dtype: str = "float32") -> Array:
        return np.zeros(shape, dtype)

    def full(self, shape: Any, value: Any, dtype: str = "float32") -> Array:
        return np.full(shape, value, dtype)

    def arange(self, n: int, dtype: str = "int32") -> Array:
        return np.arange(n, dtype=dtype)

    def dtype(self, x: Array) -> str:
        return NAMES.get(x.dtype) or x.dtype.name

    def shape(self, x: Array) -> tuple[int, ...]:
        return tuple(x.shape)

    def nbytes(self, x: Array) -> Any:
        return x.nbytes

    def lengths(self, arrays: Sequence[Array]) -> Array:
        return np.array([len(x) for x in arrays], np.int64)

    def integers(self, x: Array) -> list[Any]:
        return x.tolist()

    def reshape(self, x: Array, shape: Any) -> Array:
        return x.reshape(shape)

    def concat(self, arrays: Sequence[Array], axis: int = 0) -> Array:
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis)

    def pad(self, x: Array, n: int) -> Array:
        if len(x) == n:
            return x
        padded = np.zeros(n, x.dtype)
        padded[: len(x)] = x
        return padded

    def transpose(self, x: Array, axes: Sequence[int] = (1, 0)) -> Array:
        return np.transpose(x, axes)

    def cast(self, x: Array, dtype: str) -> Array:
        with np.errstate(invalid="ignore", over="ignore"):
            return x.astype(dtype, copy=False)

    def bitcast(self, x: Array, dtype: str) -> Array:
        return np.ascontiguousarray(x).view(dtype)

    def where(self, condition: Array, x: Any, y: Any) -> Array:
        return np.where(condition, x, y)

    def mended(self, ok: Array, x: Array, other: Callable[[], Array]) -> Array:
        return x if ok.all() else np.where(ok, x, other())

    def abs(self, x: Array) -> Array:
        return np.abs(x)

    def sign(self, x: Array) -> Array:
        return np.sign(x)

    def floor(self, x: Array) -> Array:
        return np.floor(x)

    def round(self, x: Array) -> Array:
        return np.rint(x)

    def sqrt(self, x: Array) -> Array:
        return np.sqrt(x)

    def log(self, x: Array) -> Array:
        return np.log(x)

    def exp(self, x: Array) -> Array:
        return np.exp(x)

    def cos(self, x: Array) -> Array:
        return np.cos(x)

    def lgamma(self, x: Array) -> Array:
        return np.vectorize(math.lgamma, otypes=[np.float64])(x)

    def igammac(self, a: Array, x: Array) -> Array:
        return np.vectorize(_upper_gamma, otypes=[np.float64])(a, x)

    def minimum(self, x: Array, y: Any) -> Array:
        return np.minimum(x, y)

    def maximum(self, x: Array, y: Any) -> Array:
        return np.maximum(x, y)

    def invert(self, mask: Array) -> Array:
        return np.logical_not(mask)

    def isfinite(self, x: Array) -> Array:
        return np.isfinite(x)

    def sum(self, x: Array, axis: int | None = None, keepdims: bool = False) -> Array:
        wide = np.float64 if x.dtype.kind == "f" else x.dtype
        with np.errstate(invalid="ignore", over="ignore"):  # inf - inf = NaN is the right answer
            return np.asarray(np.sum(x, axis, dtype=wide, keepdims=keepdims)).astype(x.dtype)

    def max(self, x: Array, axis: int | None = None, keepdims: bool = False) -> Array:
        return np.asarray(np.max(x, axis, keepdims=keepdims))

    def all(self, x: Array) -> Array:
        return np.all(x)

    def cumsum(self, x: Array) -> Array:
        return np.cumsum(x, dtype=x.dtype)

    def excess(self, x: Array, bound: Array) -> Array:
        if self.kernels:
            return self.kernels.arrays.excess(x, float(bound[0]))
        return np.array(selection.excess(x, float(bound[0])))

    def bitwise_and(self, x: Array, y: Any) -> Array:
        return np.bitwise_and(x, y)

    def bitwise_or(self, x: Array, y: Any) -> Array:
        return np.bitwise_or(x, y)

    def bitwise_xor(self, x: Array, y: Any) -> Array:
        return np.bitwise_xor(x, y)

    def shift_left(self, x: Array, bits: Any) -> Array:
        return np.left_shift(x, bits)

    def shift_right(self, x: Array, bits: Any) -> Array:
        return np.right_shift(x, bits)

    def topk(self, x: Array, k: int) -> Array:
        if x.ndim == 2:
            return np.stack([self.topk(row, k) for row in x]) if len(x) else np.zeros((0, k), np.int32)
        n = len(x)
        if k >= n:
            return np.arange(n, dtype=np.int32)
        if k == 0:
            return np.zeros(0, np.int32)
        if x.dtype.kind == "f":
            x = np.where(np.isnan(x), np.inf, x)
        bound = np.partition(x, n - k)[n - k]
        above = np.flatnonzero(x > bound)
        ties = np.flatnonzero(x == bound)[: k - len(above)]
        return np.sort(np.concatenate([above, ties])).astype(np.int32)

    def topk_abs(self, x: Array, k: int) -> Array:
        if self.kernels and x.dtype == np.float32:
            return self.kernels.arrays.topk_abs(x, k)
        if x.ndim == 2:
            return selection.largest_in_rows(x, k)
        return (
            selection.largest_magnitudes(x, k) if len(x) > 65536 and 0 < k <= len(x) // 8 else self.topk(np.abs(x), k)
        )

    def sort(self, x: Array) -> Array:
        return np.sort(x)

    def ranked(self, x: Array, ranks: Array) -> Array:
        return selection.ranked(x, ranks)

    def nonzero(self, mask: Array, count: int | None = None) -> Array:
        return np.flatnonzero(mask).astype(np.int32)

    def beyond(self, x: Array, bound: Array) -> Array:
        return self.kernels.arrays.beyond(x, float(bound[0])) if self.kernels else selection.beyond(x, float(bound[0]))

    def searchsorted(self, bounds: Array, x: Array) -> Array:
        return selection.searchsorted(bounds, x)

    def take(self, x: Array, indices: Array) -> Array:
        return x[indices]

    def scatter(self, x: Array, indices: Array, values: Any) -> Array:
        x = x.copy()
        x[indices] = values
        return x

    def scatter_add(self, x: Array, indices: Array, values: Array) -> Array:
        x[indices] += values
        return x

    def segment_sum(self, values: Array, segments: Array, count: int) -> Array:
        return np.bincount(segments, values, count).astype(np.float32)

    def cell(self, value: Array) -> Any:
        return Cell(value)

    def quiet(self) -> AbstractContextManager[Any]:
        return _quiet()

    def choose(self, ok: Array, new: Array, old: Array) -> Array:
        return new if ok else old

    def sound(self, x: Array, ok: Callable[[], Array], message: str) -> Array:
        if not ok():
            raise ValueError(message)
        return x

    def require(self, ok: Array, message: str) -> None:
        if not ok:
            raise FloatingPointError(message)


@contextmanager
def _quiet() -> Iterator[None]:
    with np.errstate(all="ignore"), settled():
        yield


def _mix(h: Array) -> Array:
    # grace.core.rng.mix on uint32 vectors, in place.
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> np.uint32(13)
    h *= np.uint32(0xC2B2AE35)
    h ^= h >> np.uint32(16)
    return h


def _upper_gamma(a: float, x: float) -> float:
    # Q(a, x): one minus the series of P for small x, else the continued fraction by Lentz's algorithm.
    if not (0 < a < math.inf and x >= 0):
        return math.nan
    if x in (0.0, math.inf):
        return 1.0 if x == 0 else 0.0
    front = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:
        term = total = 1 / a
        number = a
        while term > 1e-17 * total:
            number += 1
            term *= x / number
            total += term
        return 1 - front * total
    tiny = 1e-300
    b = x + 1 - a
    c, d = 1 / tiny, 1 / b
    fraction = d
    for i in range(1, 10_000):
        numerator = -i * (i - a)
        b += 2
        d = 1 / (numerator * d + b or tiny)
        c = b + numerator / c or tiny
        fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * fraction
