"""NumPy: the reference, on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np

from grace.backends.base import LARGE, PIECE, Array, Backend, Cell
from grace.core.dtypes import ITEMSIZE
from grace.core.rng import MASK32, noise_offset, noise_rows
from grace.kernels.host import host_kernels, settled

NAMES = {np.dtype(name): name for name in ITEMSIZE if name != "bfloat16"}
"""NumPy builds a dtype's name on each access, which is slower than a lookup."""


class NumpyBackend(Backend):
    """NumPy arrays."""

    name = "numpy"
    mutable = True
    piece = PIECE

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

    def empty(self, shape: Any, dtype: str = "float32") -> Array:
        return np.empty(shape, dtype)

    def same_memory(self, x: Array, y: Array) -> bool:
        return x.__array_interface__["data"][0] == y.__array_interface__["data"][0]

    def contiguous(self, x: Array) -> Array:
        return np.ascontiguousarray(x)

    def address(self, x: Array | None) -> int:
        return 0 if x is None else x.__array_interface__["data"][0]

    def overlap(self, x: Array, y: Array) -> bool:
        return np.may_share_memory(x, y)

    def write(self, out: Array, x: Any) -> None:
        out[...] = x

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

    def add_to(self, x: Array, y: Array) -> Array:
        return np.add(x, y, out=x)

    def subtract_from(self, x: Array, y: Array) -> Array:
        return np.subtract(x, y, out=x)

    def multiply_in(self, x: Array, y: Any) -> Array:
        return np.multiply(x, y, out=x)

    def divide_in(self, x: Array, y: Any) -> Array:
        return np.divide(x, y, out=x)

    def divided(self, x: Array, y: Any, out: Array | None = None) -> Array:
        return np.divide(x, y, out=out)

    def add_product(self, x: Array, y: Array, z: Array) -> Array:
        return np.add(x, np.multiply(y, z), out=x)

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

    def floor_in(self, x: Array) -> Array:
        return np.floor(x, out=x)

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

    def unit_rows(self, x: Array) -> tuple[Array, Array]:
        return unit_rows(x)

    def all(self, x: Array) -> Array:
        return np.all(x)

    def cumsum(self, x: Array) -> Array:
        return np.cumsum(x, dtype=x.dtype)

    def excess(self, x: Array, bound: Array) -> Array:
        if self.kernels:
            return self.kernels.excess(x, float(bound[0]))
        return np.array(excess(x, float(bound[0])))

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
            return self.kernels.topk_abs(x, k)
        if x.ndim == 2:
            return largest_in_rows(x, k)
        return largest_magnitudes(x, k) if len(x) > 65536 and 0 < k <= len(x) // 8 else self.topk(np.abs(x), k)

    def sort(self, x: Array) -> Array:
        return np.sort(x)

    def ranked(self, x: Array, ranks: Array) -> Array:
        return ranked(x, ranks)

    def nonzero(self, mask: Array) -> Array:
        return np.flatnonzero(mask).astype(np.int32)

    def beyond(self, x: Array, bound: Array) -> Array:
        return self.kernels.beyond(x, float(bound[0])) if self.kernels else beyond(x, float(bound[0]))

    def searchsorted(self, bounds: Array, x: Array) -> Array:
        return searchsorted(bounds, x)

    def take(self, x: Array, indices: Array) -> Array:
        return x[indices]

    def scatter(self, x: Array, indices: Array, values: Any) -> Array:
        x = x.copy()
        x[indices] = values
        return x

    def put(self, x: Array, indices: Array, values: Any) -> Array:
        x[indices] = values
        return x

    def scatter_add(self, x: Array, indices: Array, values: Array) -> Array:
        x[indices] += values
        return x

    def segment_sum(self, values: Array, segments: Array, count: int) -> Array:
        return np.bincount(segments, values, count).astype(np.float32)

    def qr(self, x: Array) -> Array:
        return np.linalg.qr(x)[0]

    def left_factor(self, matrix: Array, q: Array, residual: Array | None = None) -> Array:
        return (self.kernels.left_factor if self.kernels else left_factor)(matrix, q, residual)

    def right_factor(self, p: Array, matrix: Array, residual: Array | None = None) -> Array:
        return (self.kernels.right_factor if self.kernels else right_factor)(p, matrix, residual)

    def product_into(self, out: Array, p: Array, q: Array) -> Array:
        if self.kernels:
            return self.kernels.product(None, p, q, out)
        write_product(out, p, q)
        return out

    def subtract_product(self, x: Array, p: Array, q: Array) -> Array:
        if self.kernels:
            return self.kernels.product(x, p, q, x)
        for part, product in products(p, q, np.empty(room(p, q), np.float32)):
            x[part] -= product
        return x

    def part_product(self, x: Array, p: Array, q: Array, rest: Array, taken: tuple[Array, Array] | None = None) -> None:
        (self.kernels.part if self.kernels else part_product)(x, p, q, rest, taken)

    def eigh(self, x: Array) -> tuple[Array, Array]:
        values, vectors = np.linalg.eigh(x)
        return values[::-1], vectors[:, ::-1]

    def solve(self, a: Array, b: Array) -> Array:
        return np.linalg.solve(a, b)

    def words(self, key0: Any, key1: Any, start: int, n: int) -> Array:
        if self.kernels:
            return self.kernels.words(key0, key1, start, n)
        counter = np.arange(start, start + n, dtype=np.int64)
        h = _mix(((counter + int(key0)) & MASK32).astype(np.uint32))
        h ^= (((counter >> 32) + int(key1)) & MASK32).astype(np.uint32)
        return _mix(h).view(np.int32)

    def sample(self, key0: Any, key1: Any, start: int, n: int, k: int) -> Array:
        if self.kernels:
            return self.kernels.sample(key0, key1, start, n, k)
        return smallest(self.words(key0, key1, start, n), k)

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

    def pack_signs(self, x: Array) -> Array:
        return np.packbits(np.greater_equal(x, 0), bitorder="little")

    def unpack_signs(self, packed: Array, n: int) -> Array:
        signs = np.unpackbits(packed, count=n, bitorder="little").astype(np.float32)
        signs *= 2.0
        signs -= 1.0
        return signs

    def by_byte(self, values: Callable[[Array, int], Array], packed: Array, m: int) -> Array:
        if m < 512:
            return values(packed, m)
        table = values(np.arange(256, dtype=np.uint8), 256)  # a byte is always in range
        if len(table) == 256:
            return np.take(table, packed, mode="clip")
        return np.take(table.reshape(256, -1), packed, axis=0, mode="clip").reshape(-1)

    def pack_bits(self, mask: Array) -> Array:
        return np.packbits(mask, bitorder="little")

    def unpack_bits(self, packed: Array, n: int) -> Array:
        return np.unpackbits(packed, count=n, bitorder="little").view(bool)

    def cell(self, value: Array) -> Any:
        return Cell(value)

    def together(self, n: int) -> AbstractContextManager[None]:
        return self.kernels.together(n) if self.kernels else nullcontext()

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


FEW_RANKS = 8
"""Number of ranks from which sorting is as fast as partitioning."""
FEW = 2**17
"""Elements per low-rank product: they fit a core's own cache, and on AVX-512 OpenBLAS multiplies small matrices two to
three times as fast as OpenBLAS or MKL multiply large ones.
"""


@contextmanager
def _quiet() -> Iterator[None]:
    with np.errstate(all="ignore"), settled():
        yield


def unit_rows(x: Array) -> tuple[Array, Array]:
    """`Backend.unit_rows`: for the few rows of a factor, two NumPy calls cost less than six PyTorch calls."""
    largest = np.abs(x).max(1, keepdims=True)
    alive = largest > 0
    largest[largest == 0] = 1
    return x / largest, alive


def left_factor(matrix: Array, q: Array, residual: Array | None = None) -> Array:
    """m[a, b], q[r, b] -> m qᵀ, float32[a, r]; in groups of rows. Adds the residual to m first, if given."""
    p = np.empty((matrix.shape[0], q.shape[0]), np.float32)
    b = matrix.shape[1]
    for rows in _rows(matrix.shape[0], b):
        part = matrix[rows]
        if residual is not None:
            part += residual[rows.start * b : rows.stop * b].reshape(-1, b)
        np.matmul(part, q.T, out=p[rows])
    return p


def right_factor(p: Array, matrix: Array, residual: Array | None = None) -> Array:
    """p[a, r], m[a, b] -> pᵀ m, float32[r, b]; in groups of rows, large enough to amortise their summation.

    Adds the residual to m first, if given.
    """
    q = np.zeros((p.shape[1], matrix.shape[1]), np.float32)
    b = matrix.shape[1]
    for rows in _rows(matrix.shape[0], b, least=4 * p.shape[1]):
        part = matrix[rows]
        if residual is not None:
            part += residual[rows.start * b : rows.stop * b].reshape(-1, b)
        q += p[rows].T @ part
    return q


def room(p: Array, q: Array) -> int:
    """Size of the buffer for `products`."""
    return min(p.shape[0], _height(q.shape[1])) * q.shape[1]


def products(p: Array, q: Array, out: Array) -> Iterator[tuple[slice, Array]]:
    """The product p[a, r] q[r, b] in groups of rows: the slice of the flattened product, and its values.

    Each group is written to ``out``, float32[`room`], and overwritten by the next.
    """
    b = q.shape[1]
    for rows in _rows(p.shape[0], b):
        part = out[: (rows.stop - rows.start) * b]
        np.matmul(p[rows], q, out=part.reshape(-1, b))
        yield slice(rows.start * b, rows.stop * b), part


def write_product(out: Array, p: Array, q: Array) -> None:
    """Write the product p[a, r] q[r, b] to the vector ``out``, with the same bits as `products`."""
    b = q.shape[1]
    for rows in _rows(p.shape[0], b):
        np.matmul(p[rows], q, out=out[rows.start * b : rows.stop * b].reshape(-1, b))


def part_product(x: Array, p: Array, q: Array, rest: Array, taken: tuple[Array, Array] | None = None) -> None:
    """`Backend.part_product`. Computes products in place, so that only two arrays occupy the cache."""
    b, (taken_p, taken_q) = q.shape[1], taken or (p, q)
    for rows in _rows(p.shape[0], b):
        part = slice(rows.start * b, rows.stop * b)
        product, left = x[part], rest[part]
        np.copyto(left, product)
        np.matmul(taken_p[rows], taken_q, out=product.reshape(-1, b))
        np.subtract(left, product, out=left)
        if taken is not None:
            np.matmul(p[rows], q, out=product.reshape(-1, b))


def _height(b: int) -> int:
    return max(1, FEW // max(1, b))


def _rows(a: int, b: int, least: int = 1) -> list[slice]:
    height = max(least, _height(b))
    return [slice(start, min(start + height, a)) for start in range(0, a, height)]


def excess(x: Array, bound: float) -> tuple[float, float, float]:
    """The number of |x| above a bound, the sum of their excesses, and of their squares; in cache-sized chunks."""
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
    """int32[K]: positions where |x| is not at or below a bound; in cache-sized chunks."""
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
    """`Backend.searchsorted`; for few bounds without unpredictable branches, in cache-sized chunks."""
    many = len(bounds)
    if not 0 < many < 2**12 or len(x) < 2**10 or bounds.dtype.kind != "f":
        return np.searchsorted(bounds, x).astype(np.int32)
    places, step = np.zeros(len(x), np.int32), 1 << (many.bit_length() - 1)
    padded = np.full(2 * step, np.inf, bounds.dtype)  # no number exceeds it
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
    """int32[k]: positions of the k smallest of distinct int32 numbers taken as unsigned, ascending."""
    n, words = len(words), words.view(np.uint32)
    if k >= n or k == 0:
        return np.arange(min(k, n), dtype=np.int32)
    # With high probability slightly more than k lie below this bound; the exact selection is among them.
    bound = np.uint32(min((k + 6 * k**0.5 + 16) / n, 1.0) * MASK32)
    places = np.concatenate(
        [np.flatnonzero(words[start : start + PIECE] <= bound) + start for start in range(0, n, PIECE)]
    ).astype(np.int32)
    if len(places) < k:
        places = np.arange(n, dtype=np.int32)
    values = words[places]
    return places[values <= np.partition(values, k - 1)[k - 1]]


def largest_in_rows(x: Array, k: int) -> Array:
    """int32[m, k]: ascending positions of the k largest |x| per row of [m, n]; NaN as in `largest_magnitudes`."""
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
    """int32[k]: ascending positions of the k largest |x|; NaN counts as infinite, ties go to the first. 0 < k < len(x).

    A bound from a sample leaves few candidates, from which the exact selection is made. No array of x's size is
    allocated.
    A wrong bound is discarded, so the result is exact for any sample.
    """
    n = len(x)
    sample = np.abs(x[:: n // 65536 | 1])  # odd: a stride that divides the row length would sample only a few columns
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
