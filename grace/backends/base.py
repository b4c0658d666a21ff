"""The definition of each array function. Methods use these and the operators + - * / // % @ == != < <= > >= and slices.

dtypes are strings: "float16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64", "bool" (and "bfloat16"
if the toolkit has it). There is no dtype promotion: cast first. No function changes its argument unless it says so. A
function's body, if it has one, is its definition; a backend may override it with a faster version that gives the same
bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, pairwise
from typing import Any

from grace.core.dtypes import ITEMSIZE
from grace.core.rng import NOISE

Array = Any
PIECE = 2**19
"""Elements per chunk that fit a core's cache with a few temporaries; smaller chunks cost more calls."""

LARGE = 2**14
"""Minimum elements for computing a whole noise table, which all tensors of a step share."""

HOSTED = 2**14
"""Minimum elements for passing arrays to another toolkit's kernels on the same host."""

RECENT = 16
"""Number of cached tables: those of a step's labels and workers."""


def recent(known: dict[Any, Array], key: Any, make: Callable[[], Array]) -> Array:
    """The cached value of a key, computed if missing; evicts the oldest entries. Thread-safe."""
    found = known.get(key)
    if found is None:
        found = make()
        for old in list(known)[: max(0, len(known) + 1 - RECENT)]:
            known.pop(old, None)
        known[key] = found
    return found


class Backend(ABC):
    """One toolkit on one device."""

    name: str
    traced: bool = False
    """Values may be symbolic: the code runs once, while a graph is traced."""
    mutable: bool = False
    """Arrays can be written to: `write`, `empty` and `same_memory` work."""
    piece: int = 0
    """Elements per cache-sized chunk of a long vector; 0: do not cut."""

    @property
    def kernels(self) -> Any:
        """Kernels for whole methods (`grace.kernels.host`, `.triton`; one may raise `Unavailable`), or None."""
        return None

    @property
    def threads(self) -> int:
        """Number of threads that a kernel may use."""
        return 1

    @property
    def host(self) -> Backend | None:
        """NumPy's backend, if its kernels replace missing ones of this backend: `hosted` passes arrays to it."""
        return None

    def hosted(
        self, work: Callable[..., Sequence[Array]], arrays: Sequence[Array], made: Sequence[tuple[str, tuple[Any, ...]]]
    ) -> list[Array]:
        """The results of ``work``, which runs on NumPy arrays and must not change its arguments.

        ``made``: dtypes and shapes of the results, with None for dimensions known only to ``work``. Outside of graphs,
        ValueError propagates unchanged.
        """
        raise NotImplementedError(f"{self.name} has no other host")

    # -- making and reading arrays ------------------------------------------------------------------------------
    @abstractmethod
    def asarray(self, values: Any, dtype: str) -> Array:
        """An array of numbers, nested sequences or another toolkit's host array."""

    @abstractmethod
    def to_numpy(self, x: Array) -> Any:
        """The values as a NumPy array on the host (not inside a graph)."""

    @abstractmethod
    def zeros(self, shape: Any, dtype: str = "float32") -> Array: ...

    @abstractmethod
    def full(self, shape: Any, value: Any, dtype: str = "float32") -> Array: ...

    @abstractmethod
    def arange(self, n: int, dtype: str = "int32") -> Array:
        """0 .. n-1."""

    @abstractmethod
    def dtype(self, x: Array) -> str: ...

    @abstractmethod
    def shape(self, x: Array) -> tuple[int, ...]: ...

    @abstractmethod
    def lengths(self, arrays: Sequence[Array]) -> Array:
        """int64[len(arrays)]: the first dimension of each, even if it is known only when the graph runs."""

    @abstractmethod
    def integers(self, x: Array) -> list[Any]:
        """The elements of an integer vector as numbers that may bound a slice (waits for a device)."""

    def nbytes(self, x: Array) -> Any:
        """Bytes of an array: an int, or a graph scalar if its first dimension is known only at run time."""
        size: Any = ITEMSIZE[self.dtype(x)]
        for length in self.shape(x):
            size = size * (self.integers(self.lengths([x]))[0] if length is None else length)
        return size

    def empty(self, shape: Any, dtype: str = "float32") -> Array:
        """An uninitialised array, to be written to."""
        return self.zeros(shape, dtype)

    def side_by_side(self, size: int) -> AbstractContextManager[None]:
        """A context whose `part` arrays are adjacent, if they fit into ``size`` bytes: joining them is free."""
        return nullcontext()

    def together(self, n: int) -> AbstractContextManager[None]:
        """A context for writing n elements in total that are not read soon."""
        return nullcontext()

    def part(self, shape: Any, dtype: str = "float32") -> Array:
        """As `empty`, for an array that will be part of a message."""
        return self.empty(shape, dtype)

    def joined(self, arrays: Sequence[Array]) -> Array:
        """uint8[nbytes of all]: their memory, concatenated. Not copied if the arrays are already adjacent."""
        return self.concat([self.to_bytes(array) for array in arrays])

    def copy(self, x: Array) -> Array:
        """A separate array with the values of x; x itself if arrays are immutable."""
        if not self.mutable:
            return x
        out = self.empty(self.shape(x), self.dtype(x))
        self.write(out, x)
        return out

    def same_memory(self, x: Array, y: Array) -> bool:
        """Whether both arrays begin at the same address."""
        return False

    def contiguous(self, x: Array) -> Array:
        """The same values, contiguous in memory."""
        return x

    def address(self, x: Array | None) -> int:
        """Address of a host array; 0 for None."""
        raise TypeError(f"arrays of {self.name} have no address")

    def overlap(self, x: Array, y: Array) -> bool:
        """Whether the arrays may share memory."""
        return False

    def write(self, out: Array, x: Any) -> None:
        """Copy x, an array or a number, into an existing array of a backend that is `mutable`."""
        raise TypeError(f"arrays of {self.name} cannot be written to")

    # -- shape ------------------------------------------------------------------------------------------------------
    @abstractmethod
    def reshape(self, x: Array, shape: Any) -> Array: ...

    @abstractmethod
    def concat(self, arrays: Sequence[Array], axis: int = 0) -> Array: ...

    def split(self, x: Array, sizes: Sequence[Any]) -> Sequence[Array]:
        """Split a vector into consecutive ones of these sizes, which add up to its own."""
        ends = list(accumulate(sizes, initial=0))
        return [x[start:stop] for start, stop in pairwise(ends)]

    @abstractmethod
    def pad(self, x: Array, n: int) -> Array:
        """A vector padded with zeros to n elements (unchanged if it has n)."""

    @abstractmethod
    def transpose(self, x: Array, axes: Sequence[int] = (1, 0)) -> Array:
        """Axis i of the result is axis ``axes[i]`` of x; the default transposes a matrix."""

    # -- dtype ------------------------------------------------------------------------------------------------------
    @abstractmethod
    def cast(self, x: Array, dtype: str) -> Array:
        """Nearest value, halves to even; float to integer truncates. Out-of-range values: undefined, no warning."""

    @abstractmethod
    def bitcast(self, x: Array, dtype: str) -> Array:
        """Reinterpret a vector's bytes as another dtype; the length changes with the item size."""

    def to_bytes(self, x: Array) -> Array:
        """uint8[nbytes], the array's memory in C order."""
        return self.bitcast(self.reshape(x, (-1,)), "uint8")

    def from_bytes(self, x: Array, dtype: str, shape: Any) -> Array:
        """The inverse of `to_bytes`."""
        return self.reshape(self.bitcast(x, dtype), shape)

    # -- elementwise ------------------------------------------------------------------------------------------------
    def add_to(self, x: Array, y: Array) -> Array:
        """x + y, but may reuse x's memory: x is donated."""
        return x + y

    def subtract_from(self, x: Array, y: Array) -> Array:
        """x - y, but may reuse x's memory: x is donated."""
        return x - y

    def multiply_in(self, x: Array, y: Any) -> Array:
        """x * y, but may reuse x's memory: x is donated, and y broadcasts to its shape."""
        return x * y

    def divide_in(self, x: Array, y: Any) -> Array:
        """x / y, but may reuse x's memory: x is donated, and y broadcasts to its shape."""
        return x / y

    def divided(self, x: Array, y: Any, out: Array | None = None) -> Array:
        """x / y, where y broadcasts to x's shape; written to ``out`` if `mutable`."""
        if out is None:
            return x / y
        self.write(out, x / y)
        return out

    def add_product(self, x: Array, y: Array, z: Array) -> Array:
        """x + y * z, but may reuse x's memory: x is donated, and y and z broadcast to its shape.

        Each product must be exact in float32: a toolkit may round once or twice.
        """
        return self.add_to(x, y * z)

    @abstractmethod
    def where(self, condition: Array, x: Any, y: Any) -> Array: ...

    def mended(self, ok: Array, x: Array, other: Callable[[], Array]) -> Array:
        """``where(ok, x, other())``; skips other() if it is not needed, unless finding out requires a wait."""
        return self.where(ok, x, other())

    @abstractmethod
    def abs(self, x: Array) -> Array: ...

    @abstractmethod
    def sign(self, x: Array) -> Array:
        """-1, 0 or 1, in x's dtype."""

    @abstractmethod
    def floor(self, x: Array) -> Array: ...

    def floor_in(self, x: Array) -> Array:
        """`floor`, but may reuse x's memory: x is donated."""
        return self.floor(x)

    @abstractmethod
    def round(self, x: Array) -> Array:
        """To the nearest integer, halves to even."""

    @abstractmethod
    def sqrt(self, x: Array) -> Array:
        """Correctly rounded for float32."""

    @abstractmethod
    def log(self, x: Array) -> Array:
        """Natural logarithm."""

    @abstractmethod
    def exp(self, x: Array) -> Array: ...

    @abstractmethod
    def cos(self, x: Array) -> Array: ...

    @abstractmethod
    def lgamma(self, x: Array) -> Array:
        """Logarithm of the gamma function, for a few positive float64 numbers."""

    @abstractmethod
    def igammac(self, a: Array, x: Array) -> Array:
        """Regularised upper incomplete gamma function Q(a, x), for a few float64 numbers; a > 0, x >= 0."""

    @abstractmethod
    def minimum(self, x: Array, y: Any) -> Array: ...

    @abstractmethod
    def maximum(self, x: Array, y: Any) -> Array: ...

    @abstractmethod
    def invert(self, mask: Array) -> Array:
        """Negation of a bool array, even of a comparison with NaN."""

    @abstractmethod
    def isfinite(self, x: Array) -> Array: ...

    # -- reductions -------------------------------------------------------------------------------------------------
    @abstractmethod
    def sum(self, x: Array, axis: int | None = None, keepdims: bool = False) -> Array:
        """Floats are accumulated in float64 and rounded once to x's dtype, so that toolkits agree."""

    @abstractmethod
    def max(self, x: Array, axis: int | None = None, keepdims: bool = False) -> Array:
        """NaN if any element is NaN. x must not be empty along the axis."""

    def sum_abs(self, x: Array) -> Array:
        """[m, n] -> [m]: each row's sum of magnitudes; accurate up to the last bits for rows of any length."""
        return self.sum(self.abs(x), 1)

    def max_abs(self, x: Array) -> Array:
        """[m, n] -> [m]: each row's largest magnitude; NaN if it has NaN."""
        return self.max(self.abs(x), 1)

    def unit_rows(self, x: Array) -> tuple[Array, Array]:
        """[m, n] -> each row divided by its largest magnitude (or 1 if that is 0), and bool[m, 1]: is it above 0."""
        largest = self.reshape(self.max_abs(x), (-1, 1))
        return x / self.where(largest == 0, 1.0, largest), largest > 0

    @abstractmethod
    def all(self, x: Array) -> Array:
        """bool scalar; true for an empty array."""

    @abstractmethod
    def cumsum(self, x: Array) -> Array:
        """Running sum of a vector."""

    def finite(self, x: Array) -> Array:
        """bool scalar: no element is NaN or infinite."""
        return self.all(self.isfinite(x))

    def excess(self, x: Array, bound: Array) -> Array:
        """float64[3] of the excesses of magnitudes over a bound: their number, their sum, their sum of squares.

        ``bound``: float32[1], >= 0. Accurate up to the last bits of float32; undefined for non-finite x. x must not be
        empty.
        """
        over = self.maximum(self.abs(x) - bound, 0.0)
        largest = self.max(over)
        unit = self.where(largest > 0, largest, 1.0)  # so that squares stay in range
        relative = over / unit
        found = (self.sum(self.cast(over > 0, "int32")), self.sum(over), self.sum(relative * relative))
        number, total, squares = (self.reshape(self.cast(each, "float64"), (1,)) for each in found)
        return self.concat([number, total, squares * self.cast(unit, "float64") * self.cast(unit, "float64")])

    # -- integers ---------------------------------------------------------------------------------------------------
    @abstractmethod
    def bitwise_and(self, x: Array, y: Any) -> Array: ...

    @abstractmethod
    def bitwise_or(self, x: Array, y: Any) -> Array: ...

    @abstractmethod
    def bitwise_xor(self, x: Array, y: Any) -> Array: ...

    @abstractmethod
    def shift_left(self, x: Array, bits: Any) -> Array: ...

    @abstractmethod
    def shift_right(self, x: Array, bits: Any) -> Array:
        """Arithmetic: keeps the sign of a signed integer."""

    # -- selection --------------------------------------------------------------------------------------------------
    @abstractmethod
    def topk(self, x: Array, k: int) -> Array:
        """int32[k]: positions of the k largest elements of a vector, ascending. Ties: lowest position; NaN: largest.

        For a matrix [m, n]: int32[m, k], row by row.
        """

    def topk_abs(self, x: Array, k: int) -> Array:
        """`topk` of magnitudes."""
        return self.topk(self.abs(x), k)

    @abstractmethod
    def sort(self, x: Array) -> Array:
        """Ascending along the last axis; NaN: anywhere."""

    def ranked(self, x: Array, ranks: Array) -> Array:
        """float32[K]: the elements at positions int32[K] of the sorted vector."""
        return self.take(self.sort(x), ranks)

    @abstractmethod
    def nonzero(self, mask: Array) -> Array:
        """int32[K]: ascending positions where a bool vector is true. Only this function's shape depends on values."""

    def beyond(self, x: Array, bound: Array) -> Array:
        """int32[K]: ascending positions where the magnitude is not at or below ``bound``, float32[1]; includes NaN."""
        return self.nonzero(self.invert(self.abs(x) <= bound))

    def ascending(self, x: Array, n: int) -> Array:
        """bool scalar: whether an integer vector is strictly ascending within 0 .. n-1."""
        return self.all(x[1:] > x[:-1]) & self.all(x[:1] >= 0) & self.all(x[-1:] < n)

    @abstractmethod
    def searchsorted(self, bounds: Array, x: Array) -> Array:
        """int32[n]: for each element of a vector, the number of ascending ``bounds`` below it; NaN: undefined."""

    @abstractmethod
    def take(self, x: Array, indices: Array) -> Array:
        """x[indices] along the first dimension."""

    @abstractmethod
    def scatter(self, x: Array, indices: Array, values: Any) -> Array:
        """A copy of a vector with ``values`` (an array or a number) at the distinct ``indices``."""

    def put(self, x: Array, indices: Array, values: Any) -> Array:
        """As `scatter`, but may reuse x's memory: x is donated."""
        return self.scatter(x, indices, values)

    @abstractmethod
    def scatter_add(self, x: Array, indices: Array, values: Array) -> Array:
        """A vector with ``values`` added at the distinct ``indices``. May reuse x's memory: x is donated."""

    @abstractmethod
    def segment_sum(self, values: Array, segments: Array, count: int) -> Array:
        """float32[count]: sums of the float32 ``values`` with equal ``segments`` (int32, 0 .. count-1), in float64."""

    # -- linear algebra ---------------------------------------------------------------------------------------------
    @abstractmethod
    def qr(self, x: Array) -> Array:
        """The orthonormal factor Q[a, r] of a tall matrix x[a, r]; completed arbitrarily if x is rank-deficient."""

    def left_factor(self, matrix: Array, q: Array, residual: Array | None = None) -> Array:
        """matrix[a, b] qᵀ for q[r, b]: float32[a, r].

        ``residual``, float32[a * b], only if `mutable`: first added to the contiguous matrix in place.
        """
        if residual is not None:
            self.add_to(self.reshape(matrix, (-1,)), residual)
        return matrix @ self.transpose(q)

    def right_factor(self, p: Array, matrix: Array, residual: Array | None = None) -> Array:
        """pᵀ matrix[a, b] for p[a, r]: float32[r, b]. ``residual``: as in `left_factor`."""
        if residual is not None:
            self.add_to(self.reshape(matrix, (-1,)), residual)
        return self.transpose(p) @ matrix

    def product_into(self, out: Array, p: Array, q: Array) -> Array:
        """Write the product p[a, r] q[r, b] to the vector ``out``, if `mutable`; returns out."""
        self.write(out, self.reshape(p @ q, (-1,)))
        return out

    def subtract_product(self, x: Array, p: Array, q: Array) -> Array:
        """The vector x minus the product p[a, r] q[r, b], but may reuse x's memory: x is donated."""
        return self.subtract_from(x, self.reshape(p @ q, (-1,)))

    def part_product(self, x: Array, p: Array, q: Array, rest: Array, taken: tuple[Array, Array] | None = None) -> None:
        """Write x minus the product p[a, r] q[r, b] to ``rest``, and the product to the vector x; if `mutable`.

        ``taken``: two factors of the same shapes, whose product is subtracted instead.
        """
        self.write(rest, x)
        self.subtract_product(rest, *(taken or (p, q)))
        self.product_into(x, p, q)

    @abstractmethod
    def eigh(self, x: Array) -> tuple[Array, Array]:
        """w[n], descending, and v[n, n], columns, with x v = v diag(w), for a symmetric and finite x[n, n]."""

    @abstractmethod
    def solve(self, a: Array, b: Array) -> Array:
        """x[n, m] with a x = b, for a regular a[n, n]."""

    # -- random bits ------------------------------------------------------------------------------------------------
    @abstractmethod
    def words(self, key0: Any, key1: Any, start: int, n: int) -> Array:
        """int32[n]: the bits of mix(mix(lo(j) + key0) ^ (hi(j) + key1)), j = start .. start+n-1 (`grace.core.rng`)."""

    def sample(self, key0: Any, key1: Any, start: int, n: int, k: int) -> Array:
        """int32[k]: ascending positions of the k smallest of the n `words`, as unsigned numbers; read-only."""
        return self.topk(self.bitwise_xor(self.words(key0, key1, start, n), 0x7FFFFFFF), k)

    def uniform(self, key0: Any, key1: Any, start: int, n: int) -> Array:
        """float32[n] in [0, 1): the upper 24 bits of each word."""
        upper = self.bitwise_and(self.shift_right(self.words(key0, key1, start, n), 8), 0xFFFFFF)
        return self.cast(upper, "float32") * 2.0**-24

    def noise(self, table: tuple[Any, Any], keys: tuple[Any, Any], start: int, n: int) -> Array:
        """float32[n] in (0, 1): `grace.core.rng.Rng.noise`, elements start .. start+n-1."""
        first, rows = start % NOISE, -(-(start % NOISE + n) // NOISE)
        if rows < 2:
            sums = self._upper(table, first, n) + self._upper(keys, start // NOISE, 1)
        else:
            offsets = self.reshape(self._upper(keys, start // NOISE, rows), (-1, 1))
            sums = self.reshape(offsets + self.reshape(self._upper(table, 0, NOISE), (1, -1)), (-1,))
            sums = sums[first : first + n]
        return sums - self.floor(sums) + 2.0**-17

    def kept(self, keys: tuple[int, int], make: Callable[[], Array]) -> Array:
        """The cached result of ``make()``, which depends on these keys alone; also valid while a graph is traced."""
        return recent(self.__dict__.setdefault("_kept", {}), keys, lambda: self._outside(make))

    def _outside(self, make: Callable[[], Array]) -> Array:
        return make()

    def _whole_table(self, keys: tuple[Any, Any]) -> Array:
        # For eager toolkits: one table per step serves all its tensors. Centred in steps of 2**-16.
        known = self.__dict__.setdefault("_tables", {})
        return recent(known, keys, lambda: self._upper(keys, 0, NOISE) + 2.0**-17)

    def _upper(self, keys: tuple[Any, Any], start: int, n: int) -> Array:
        # The upper 16 bits of words, as fractions of 1.
        upper = self.bitwise_and(self.shift_right(self.words(*keys, start, n), 16), 0xFFFF)
        return self.cast(upper, "float32") * 2.0**-16

    # -- bits -------------------------------------------------------------------------------------------------------
    def pack_bits(self, mask: Array) -> Array:
        """bool[n] -> uint8[ceil(n/8)]; element j is bit j % 8 of byte j // 8, padded with 0."""
        n = self.shape(mask)[0]
        octets = self.bitcast(self.pad(self.cast(mask, "uint8"), -(-n // 8) * 8), "int64")
        # One multiplication moves byte i of the word to bit 56 + i: the sum of 2**(56 - 7i).
        gathered = self.shift_right(octets * 0x0102040810204080, 56)
        return self.cast(self.bitwise_and(gathered, 0xFF), "uint8")

    def pack_signs(self, x: Array) -> Array:
        """float32[n] -> uint8[ceil(n/8)]: `pack_bits` of x >= 0, which is false for NaN."""
        return self.pack_bits(x >= 0)

    def unpack_signs(self, packed: Array, n: int) -> Array:
        """uint8[ceil(n/8)] -> float32[n]: 1 for a set bit, else -1."""
        return self.cast(self.unpack_bits(packed, n), "float32") * 2.0 - 1.0

    def by_byte(self, values: Callable[[Array, int], Array], packed: Array, m: int) -> Array:
        """``values(packed, m)``: float32[m * k] from uint8[m], k numbers per byte, each byte independently.

        If a table is faster, a toolkit may compute the values of all 256 bytes once and look them up.
        """
        return values(packed, m)

    def unpack_bits(self, packed: Array, n: int) -> Array:
        """uint8[ceil(n/8)] -> bool[n]."""
        spread = self.cast(packed, "int64") * 0x0101010101010101
        return self.bitcast(self.bitwise_and(spread, -0x7FBFDFEFF7FBFDFF), "uint8")[:n] != 0

    # -- control -----------------------------------------------------------------------------------------------------
    def loop(
        self, more: Callable[..., Array], body: Callable[..., tuple[Array, ...]], values: tuple[Array, ...]
    ) -> tuple[Array, ...]:
        """Repeat ``values = body(*values)`` while ``more(*values)``, a bool of one element, is true.

        Shapes and dtypes are fixed. Each round waits for a device.
        """
        while more(*values):
            values = body(*values)
        return values

    # -- state ------------------------------------------------------------------------------------------------------
    @abstractmethod
    def cell(self, value: Array) -> Any:
        """Storage for an array between steps: ``read()``, ``assign(array)``, and ``add(array)``, in place."""

    def quiet(self) -> AbstractContextManager[Any]:
        """A context without warnings on infinities and NaN, which are valid results here.

        Steps run inside; `kernels` do not change during it.
        """
        return nullcontext()

    @abstractmethod
    def choose(self, ok: Array, new: Array, old: Array) -> Array:
        """``new`` if the bool scalar is true, else ``old``."""

    @property
    def tracing(self) -> bool:
        """Whether a graph is being traced, so that values are symbolic."""
        return False

    def switch(self, index: Array, branches: Sequence[Callable[[], Any]]) -> Any:
        """``branches[index]()``, chosen at run time inside a graph; index is an int32 scalar.

        Branches return the same structure of arrays, with equal shapes and dtypes. A graph contains them all.
        """
        return branches[int(index)]()

    @abstractmethod
    def sound(self, x: Array, ok: Callable[[], Array], message: str) -> Array:
        """x itself if the bool scalar ok() is true, else ValueError(message). A graph gets an assertion on x.

        Skipped on a device, to avoid a synchronisation.
        """

    @abstractmethod
    def require(self, ok: Array, message: str) -> None:
        """Raise FloatingPointError(message) unless the bool scalar is true (in a graph: at run time)."""


class Cell:
    """A cell of an eager toolkit."""

    def __init__(self, value: Array):
        self._value = value

    def read(self) -> Array:
        return self._value

    def assign(self, value: Array) -> None:
        self._value = value

    def add(self, value: Array) -> None:
        self._value += value
