"""The memory of arrays: its allocation, its bytes, and arithmetic that reuses it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

Array = Any


class Buffers:
    """A backend's arrays as memory."""

    def __init__(self, xp: Any):
        self._xp = xp

    def empty(self, shape: Any, dtype: str = "float32") -> Array:
        """An uninitialised array, to be written to."""
        return self._xp.zeros(shape, dtype)

    def empty_payload(self, shape: Any, dtype: str = "float32") -> Array:
        """A former name of `empty`."""
        return self.empty(shape, dtype)

    def payload_arena(self, size: int) -> AbstractContextManager[None]:
        """A context manager without effect, kept for methods that use it."""
        return nullcontext()

    def streaming_writes(self, n: int) -> AbstractContextManager[None]:
        """A context manager for writing n elements in total that are not read soon."""
        return nullcontext()

    def copy(self, x: Array) -> Array:
        """A separate array with the values of x; x itself if arrays are immutable."""
        xp = self._xp
        if not xp.mutable:
            return x
        out = self.empty(xp.shape(x), xp.dtype(x))
        self.write(out, x)
        return out

    def write(self, out: Array, x: Any) -> None:
        """Copy x, an array or a number, into an existing array of a backend that is `mutable`."""
        raise TypeError(f"arrays of {self._xp.name} cannot be written to")

    def copies(self, arrays: Sequence[Array]) -> tuple[Array, Sequence[Array]]:
        """A new vector with the values of these float32 arrays, one after the other, and its `parts`."""
        whole = self.empty(self._elements(arrays))
        parts = self.parts(whole, arrays)
        self.write_all(parts, arrays)
        return whole, parts

    def joined(self, arrays: Sequence[Array], donated: bool = False) -> Array:
        """The vector that `copies` returns; also for immutable arrays. ``donated``: it may be the arrays' memory."""
        xp = self._xp
        return self.copies(arrays)[0] if xp.mutable else xp.concat([xp.reshape(array, (-1,)) for array in arrays])

    def parts(self, whole: Array, arrays: Sequence[Array]) -> Sequence[Array]:
        """The parts of a vector that have the sizes and shapes of these arrays."""
        xp, shapes = self._xp, [self._xp.shape(array) for array in arrays]
        parts = xp.split(whole, [*map(math.prod, shapes)])
        return [xp.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]

    def _elements(self, arrays: Sequence[Array]) -> int:
        return sum(math.prod(self._xp.shape(array)) for array in arrays)

    def write_all(self, outs: Sequence[Array], arrays: Sequence[Array]) -> None:
        """`write` each array."""
        for out, array in zip(outs, arrays, strict=True):
            self.write(out, array)

    def addresses(self, arrays: Sequence[Array]) -> list[int] | None:
        """The address of each array; None unless all are contiguous float32."""
        xp = self._xp
        if any(xp.dtype(array) != "float32" or self.contiguous(array) is not array for array in arrays):
            return None
        return [self.address(array) for array in arrays]

    def contiguous(self, x: Array) -> Array:
        """The same values, contiguous in memory."""
        return x

    def address(self, x: Array | None) -> int:
        """Address of a host array; 0 for None."""
        raise TypeError(f"arrays of {self._xp.name} have no address")

    def same_memory(self, x: Array, y: Array) -> bool:
        """Whether both arrays begin at the same address."""
        return False

    def overlap(self, x: Array, y: Array) -> bool:
        """Whether the arrays may share memory."""
        return False

    def fetch(self, x: Array) -> Callable[[], Any]:
        """Begin to copy an array to the host; returns a function that waits for this copy and returns it, in NumPy."""
        return lambda: self._xp.to_numpy(x)

    def to_bytes(self, x: Array) -> Array:
        """Return uint8[nbytes], the array's memory in C order."""
        return self._xp.bitcast(self._xp.reshape(x, (-1,)), "uint8")

    def from_bytes(self, x: Array, dtype: str, shape: Any) -> Array:
        """The inverse of `to_bytes`."""
        return self._xp.reshape(self._xp.bitcast(x, dtype), shape)

    def concat_bytes(self, arrays: Sequence[Array]) -> Array:
        """Return the arrays' memory, concatenated: uint8[nbytes of all]. Adjacent arrays may stay uncopied."""
        return self._xp.concat([self.to_bytes(array) for array in arrays])


class InPlace:
    """Functions that may reuse the memory of their first argument, x: it is donated."""

    def __init__(self, xp: Any):
        self._xp = xp

    def add(self, x: Array, y: Array) -> Array:
        """x + y."""
        return x + y

    def subtract(self, x: Array, y: Array) -> Array:
        """x - y."""
        return x - y

    def multiply(self, x: Array, y: Any) -> Array:
        """x * y, where y broadcasts to x's shape."""
        return x * y

    def divide(self, x: Array, y: Any) -> Array:
        """x / y, where y broadcasts to x's shape."""
        return x / y

    def add_product(self, x: Array, y: Array, z: Array) -> Array:
        """x + y * z, where y and z broadcast to x's shape.

        Each product must be exact in float32: a toolkit may round once or twice.
        """
        return self.add(x, y * z)

    def floor(self, x: Array) -> Array:
        """`Backend.floor`."""
        return self._xp.floor(x)

    def scatter(self, x: Array, indices: Array, values: Any) -> Array:
        """`Backend.scatter`."""
        return self._xp.scatter(x, indices, values)
