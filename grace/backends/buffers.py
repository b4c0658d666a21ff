"""The memory of arrays: its allocation, its bytes, and arithmetic that reuses it."""

from __future__ import annotations

from collections.abc import Sequence
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

    def payload_arena(self, size: int) -> AbstractContextManager[None]:
        """A context manager: arrays that `empty_payload` makes inside it are adjacent, if they fit into ``size`` bytes.

        `concat_bytes` then returns them without a copy.
        """
        return nullcontext()

    def empty_payload(self, shape: Any, dtype: str = "float32") -> Array:
        """An uninitialised array, as from `empty`, that will be part of a message."""
        return self.empty(shape, dtype)

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

    def to_bytes(self, x: Array) -> Array:
        """uint8[nbytes], the array's memory in C order."""
        return self._xp.bitcast(self._xp.reshape(x, (-1,)), "uint8")

    def from_bytes(self, x: Array, dtype: str, shape: Any) -> Array:
        """The inverse of `to_bytes`."""
        return self._xp.reshape(self._xp.bitcast(x, dtype), shape)

    def concat_bytes(self, arrays: Sequence[Array]) -> Array:
        """uint8[nbytes of all]: their memory, concatenated. Not copied if the arrays are already adjacent."""
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
