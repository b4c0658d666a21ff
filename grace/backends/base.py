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
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from grace.backends.bits import Bits
from grace.backends.buffers import Buffers, InPlace
from grace.backends.former import FORMER
from grace.backends.linalg import Linalg
from grace.backends.random import Random
from grace.core.dtypes import ITEMSIZE

Array = Any
PIECE = 2**19
"""Number of elements per chunk: small enough for a chunk and a few temporaries to fit into a core's cache."""

HOSTED = 2**14
"""Minimum number of elements for passing an array to NumPy's kernels on the same host."""


class ArrayFunctions(ABC):
    """The functions that methods call."""

    traced: bool = False
    """Values may be symbolic: the code runs once, while a graph is traced."""
    piece: int = 0
    """Number of elements per cache-sized chunk of a long vector; 0: do not cut vectors."""

    inplace = cached_property(InPlace)
    """Functions that may reuse the memory of a donated argument."""
    bits = cached_property(Bits)
    """Packed bits."""

    @cached_property
    @abstractmethod
    def linalg(self) -> Linalg:
        """Linear algebra."""

    @cached_property
    @abstractmethod
    def random(self) -> Random:
        """Random bits."""

    # -- making and reading arrays ------------------------------------------------------------------------------
    @abstractmethod
    def asarray(self, values: Any, dtype: str) -> Array:
        """An array of numbers, nested sequences or another toolkit's host array."""

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
        """Return int64[len(arrays)], the first dimension of each, even if it is known only when the graph runs."""

    @abstractmethod
    def integers(self, x: Array) -> list[Any]:
        """The elements of an integer vector as numbers that may bound a slice (waits for a device)."""

    # -- shape ------------------------------------------------------------------------------------------------------
    @abstractmethod
    def reshape(self, x: Array, shape: Any) -> Array: ...

    @abstractmethod
    def concat(self, arrays: Sequence[Array], axis: int = 0) -> Array: ...

    def split(self, x: Array, sizes: Sequence[Any]) -> Sequence[Array]:
        """Split a vector into consecutive vectors of these sizes, which add up to its size."""
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

    # -- elementwise ------------------------------------------------------------------------------------------------
    @abstractmethod
    def where(self, condition: Array, x: Any, y: Any) -> Array: ...

    def mended(self, ok: Array, x: Array, other: Callable[[], Array]) -> Array:
        """``where(ok, x, other())``; skips other() if ok is known, without waiting for a device, to be all true."""
        return self.where(ok, x, other())

    @abstractmethod
    def abs(self, x: Array) -> Array: ...

    @abstractmethod
    def sign(self, x: Array) -> Array:
        """-1, 0 or 1, in x's dtype."""

    @abstractmethod
    def floor(self, x: Array) -> Array: ...

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

    def max_abs(self, x: Array) -> Array:
        """[m, n] -> [m]: each row's largest magnitude; NaN if it has NaN."""
        return self.max(self.abs(x), 1)

    @abstractmethod
    def all(self, x: Array) -> Array:
        """bool scalar; true for an empty array."""

    @abstractmethod
    def cumsum(self, x: Array) -> Array:
        """Running sum of a vector."""

    def finite(self, x: Array) -> Array:
        """Return a bool scalar: whether no element is NaN or infinite."""
        return self.all(self.isfinite(x))

    def excess(self, x: Array, bound: Array) -> Array:
        """Return float64[3]: number, sum and sum of squares of the excesses of magnitudes over a bound.

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
        """Return int32[k], ascending positions of a vector's k largest elements. Ties: lowest position; NaN: largest.

        For a matrix [m, n]: int32[m, k], row by row.
        """

    def topk_abs(self, x: Array, k: int) -> Array:
        """`topk` of magnitudes."""
        return self.topk(self.abs(x), k)

    @abstractmethod
    def sort(self, x: Array) -> Array:
        """Sort along the last axis, ascending; NaN may end up anywhere."""

    def ranked(self, x: Array, ranks: Array) -> Array:
        """Return float32[K], the elements at positions int32[K] of the sorted vector."""
        return self.take(self.sort(x), ranks)

    @abstractmethod
    def nonzero(self, mask: Array, count: int | None = None) -> Array:
        """Return ascending positions where a bool vector is true, int32[K]. Here and in `beyond`, K depends on values.

        ``count``: K, if known in advance; avoids a device synchronisation. On a device, missing positions are n, and
        those beyond ``count`` are left out; elsewhere ``count`` has no effect.
        """

    def beyond(self, x: Array, bound: Array) -> Array:
        """Return int32[K], ascending positions where the magnitude exceeds ``bound``, float32[1], or is NaN."""
        return self.nonzero(self.invert(self.abs(x) <= bound))

    @abstractmethod
    def searchsorted(self, bounds: Array, x: Array) -> Array:
        """Return int32[n], for each element of a vector the number of ascending ``bounds`` below it; NaN: undefined."""

    @abstractmethod
    def take(self, x: Array, indices: Array) -> Array:
        """x[indices] along the first dimension."""

    @abstractmethod
    def scatter(self, x: Array, indices: Array, values: Any) -> Array:
        """A copy of a vector with ``values`` (an array or a number) at the distinct ``indices``."""

    @abstractmethod
    def scatter_add(self, x: Array, indices: Array, values: Array) -> Array:
        """A vector with ``values`` added at the distinct ``indices``. May reuse x's memory: x is donated."""

    @abstractmethod
    def segment_sum(self, values: Array, segments: Array, count: int) -> Array:
        """Sum the float32 ``values`` with equal ``segments`` (int32, 0 .. count-1) in float64, to float32[count]."""

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

    @abstractmethod
    def choose(self, ok: Array, new: Array, old: Array) -> Array:
        """``new`` if the bool scalar is true, else ``old``."""

    @abstractmethod
    def sound(self, x: Array, ok: Callable[[], Array], message: str) -> Array:
        """Return x if ok(), a bool scalar, is true; else raise ValueError(message). A graph gets an assertion on x.

        Skipped on a device, to avoid a synchronisation.
        """


class Backend(ArrayFunctions):
    """One toolkit on one device: the array functions, and the functions that the engine needs."""

    name: str
    on_host: bool = True
    """Arrays are in the host's memory."""
    mutable: bool = False
    """Arrays can be written to: all of `buffers` works."""
    buffers = cached_property(Buffers)
    """Arrays as memory."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name not in FORMER:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            group, new = FORMER[name]
            return getattr(getattr(self, group), new)

    @property
    def can_read_values(self) -> bool:
        """Whether values can be read now, without waiting: neither in a graph nor on a device."""
        return self.on_host and not self.traced

    @property
    def kernels(self) -> Any:
        """Kernels for whole methods (`grace.kernels.host`, `.triton`; a kernel may raise `Unavailable`), or None."""
        return None

    @property
    def threads(self) -> int:
        """Number of threads that a kernel may use."""
        return 1

    @property
    def host(self) -> Backend | None:
        """NumPy's backend, if its kernels replace missing ones of this backend (by `hosted`); else None."""
        return None

    def hosted(
        self, work: Callable[..., Sequence[Array]], arrays: Sequence[Array], made: Sequence[tuple[str, tuple[Any, ...]]]
    ) -> list[Array]:
        """Run ``work`` on the arrays, as NumPy arrays, and return its results as arrays of this backend.

        ``work`` must not change its arguments. ``made``: dtypes and shapes of the results, with None for dimensions
        known only to ``work``. Outside of graphs, ValueError propagates unchanged.
        """
        raise NotImplementedError(f"{self.name} has no other host")

    # -- reading arrays ---------------------------------------------------------------------------------------------
    @abstractmethod
    def to_numpy(self, x: Array) -> Any:
        """The values as a NumPy array on the host (not inside a graph)."""

    def exported(self, x: Array) -> Any:
        """A copy on the host for checkpoints: of the toolkit's own kind, if its arrays can live there."""
        return self.to_numpy(x).copy()

    def nbytes(self, x: Array) -> Any:
        """Bytes of an array: an int, or a graph scalar if its first dimension is known only at run time."""
        size: Any = ITEMSIZE[self.dtype(x)]
        for length in self.shape(x):
            size = size * (self.integers(self.lengths([x]))[0] if length is None else length)
        return size

    # -- state ------------------------------------------------------------------------------------------------------
    @abstractmethod
    def cell(self, value: Array) -> Any:
        """Storage for an array between steps: ``read()``, ``assign(array)``, and ``add(array)``, in place.

        ``value``: an array, or an integer, which graphs read as an int64 scalar.
        """

    def quiet(self) -> AbstractContextManager[Any]:
        """A context manager that silences warnings about infinities and NaN, which are valid results here.

        The engine runs steps in this context, in which `kernels` does not change.
        """
        return nullcontext()

    # -- graphs -----------------------------------------------------------------------------------------------------
    @property
    def tracing(self) -> bool:
        """Whether a graph is being traced, so that values are symbolic."""
        return False

    def unconverted(self, function: Any) -> Any:
        """Keep the toolkit from rewriting a function's Python code while it traces a graph."""
        return function

    def switch(self, index: Array, branches: Sequence[Callable[[], Any]]) -> Any:
        """``branches[index]()``, chosen at run time inside a graph; index is an int32 scalar.

        Branches return the same structure of arrays, with equal shapes and dtypes. A graph contains them all.
        """
        return branches[int(index)]()

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
