"""A worker's parameters, with the base and the outer momentum that are equal on all workers."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from grace.backends import backend_of
from grace.core import Array
from grace.engine.buckets import Tensor
from grace.engine.reshard import host
from grace.engine.session import FLOATS

SAMPLED = 4, 64
"""Maximum number of parameters that `Model.sample` reads, and of elements of each."""


@dataclass(frozen=True)
class Access:
    """How to read and write a toolkit's parameters. Default: parameters are mutable arrays."""

    read: Callable[[Any], Array] = lambda parameter: parameter
    """The array of a parameter; may share its memory."""
    write: Callable[[Any, Array], None] | None = None
    """Copies an array of the parameter's dtype and shape into the parameter; None: the parameter is written as an
    array."""
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Context manager around all arithmetic."""


@dataclass(eq=False)
class Model:
    """Parameters and buffers of a worker; base and momentum in float32, or float64 for float64 parameters."""

    xp: Any = None
    access: Access = field(default_factory=Access)
    on_host: bool = False
    """Store bases and momentum as NumPy arrays."""
    parameters: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, Any] = field(default_factory=dict)
    """The float buffers, by name."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    bases: dict[str, Any] = field(default_factory=dict)
    momenta: dict[str, Any] = field(default_factory=dict)
    sampled: dict[str, Array] = field(default_factory=dict)
    """The positions that `sample` reads, int32[up to 64], by parameter."""
    averages: list[Array] | None = None
    """The values of the buffers that all workers agreed on; None: unknown."""

    @classmethod
    def of(
        cls, parameters: dict[str, Any], buffers: dict[str, Any], access: Access, on_host: bool, momentum: bool
    ) -> Model:
        """A model whose current parameters are the base. Raises TypeError for parameters that are not floats."""
        values = {name: access.read(parameter) for name, parameter in parameters.items()}
        xp = backend_of(next(iter(values.values())))
        if xp.tracing:
            raise RuntimeError("local training is no part of a graph: call build outside of tf.function")
        tensors = {name: Tensor(name, xp.shape(value), xp.dtype(value)) for name, value in values.items()}
        if odd := [tensor for tensor in tensors.values() if tensor.dtype not in FLOATS]:
            raise TypeError(f"{odd[0].name!r} has dtype {odd[0].dtype}: only {', '.join(FLOATS)} can be averaged")
        buffers = {name: each for name, each in buffers.items() if xp.dtype(access.read(each)) in FLOATS}
        model = cls(xp, access, on_host, parameters, buffers, tensors)
        count, length = SAMPLED
        for name in [*reversed(tensors)][:: -(-len(tensors) // count)]:  # includes the last tensor, often a head
            size = tensors[name].size
            places = range(0, size, max(1, size // length))
            model.sampled[name] = xp.asarray(list(places[:length]), "int32")
        model.adopt()
        if momentum:
            zeros = {name: xp.zeros(tensor.shape, _wide(tensor.dtype)) for name, tensor in tensors.items()}
            model.momenta = {name: model._stored(value) for name, value in zeros.items()}
        return model

    def adopt(self) -> None:
        """Make the current parameters the base."""
        self.bases = {name: self._stored(self.xp.buffers.copy(self.current(name))) for name in self.tensors}
        self.averages = self.buffer_values()

    def restore(self) -> None:
        """Set the current parameters to the base."""
        for name in self.parameters:
            self.put(name, self.base(name))

    def current(self, name: str) -> Array:
        """The value of a parameter, in the dtype of its base."""
        return self.xp.cast(self.access.read(self.parameters[name]), _wide(self.tensors[name].dtype))

    def base(self, name: str) -> Array:
        """The base of a parameter."""
        return self._array(self.bases[name])

    def momentum(self, name: str) -> Array | None:
        """The outer momentum of a parameter, if there is one."""
        return self._array(self.momenta[name]) if name in self.momenta else None

    def store(self, name: str, base: Array, momentum: Array | None) -> None:
        """Replace base and momentum of a parameter."""
        self.bases[name] = self._stored(base)
        if momentum is not None:
            self.momenta[name] = self._stored(momentum)

    def put(self, name: str, value: Array) -> None:
        """Write a parameter."""
        self._write(self.parameters[name], value, self.tensors[name].dtype)

    def buffer_values(self) -> list[Array]:
        """Copies of the buffers, in float32 or float64."""
        values = [self.access.read(buffer) for buffer in self.buffers.values()]
        return [self.xp.buffers.copy(self.xp.cast(value, _wide(self.xp.dtype(value)))) for value in values]

    def put_buffers(self, values: Sequence[Array]) -> None:
        """Write all buffers, with equal values on all workers."""
        for buffer, value in zip(self.buffers.values(), values, strict=True):
            self._write(buffer, value, self.xp.dtype(self.access.read(buffer)))
        self.averages = self.buffer_values()

    def moved(self) -> bool:
        """Whether a parameter differs from its base, in the parameter's dtype."""
        xp = self.xp
        return any(
            self._differ(self.access.read(parameter), xp.cast(self.base(name), self.tensors[name].dtype))
            for name, parameter in self.parameters.items()
        )

    def buffers_moved(self) -> bool:
        """Whether a buffer differs from the last value that all workers agreed on, if that is known."""
        return self.averages is not None and any(map(self._differ, self.buffer_values(), self.averages))

    def _differ(self, one: Array, other: Array) -> bool:
        return not bool(self.xp.to_numpy(self.xp.all(one == other)))

    def same(self, one: Array, other: Array) -> bool:
        """Whether two samples have the same bits."""
        return bool(self.xp.to_numpy(one).tobytes() == self.xp.to_numpy(other).tobytes())

    def sample(self) -> Array:
        """A copy of a few elements of some parameters, to see later whether the parameters were written."""
        xp = self.xp
        wide = "float64" if any(self.tensors[name].dtype == "float64" for name in self.sampled) else "float32"
        flat = {name: xp.reshape(self.access.read(self.parameters[name]), (-1,)) for name in self.sampled}
        return xp.concat([xp.cast(xp.take(flat[name], places), wide) for name, places in self.sampled.items()])

    def checksum(self) -> int:
        """A checksum of all bases."""
        found = 0
        for name in self.bases:
            found = zlib.crc32(self.xp.to_numpy(self.base(name)).tobytes(), found)
        return found

    def state(self) -> dict[str, Any]:
        """The state: "base" and "momentum", each as host arrays by parameter name."""
        return {"base": self._exported(self.bases), "momentum": self._exported(self.momenta)}

    def take(self, state: Mapping[str, Any]) -> None:
        """Replace base and momentum with those of a `state`."""
        for mine, theirs in ((self.bases, state["base"]), (self.momenta, state["momentum"])):
            for name in mine:
                mine[name] = self._stored(self.loaded(theirs[name]))
        self.averages = None

    def loaded(self, array: Any) -> Array:
        """An array of this toolkit, from a host array of a state."""
        array = host(array)
        return self.xp.buffers.copy(self.xp.asarray(array, str(array.dtype)))

    def _exported(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.xp.exported(self._array(array)) for name, array in arrays.items()}

    def _write(self, handle: Any, value: Array, dtype: str) -> None:
        value = self.xp.cast(value, dtype)
        if self.access.write is None:
            self.xp.buffers.write(handle, value)
        else:
            self.access.write(handle, value)

    def _stored(self, value: Array) -> Any:
        return self.xp.to_numpy(value) if self.on_host else value

    def _array(self, stored: Any) -> Array:
        return self.xp.asarray(stored, str(stored.dtype)) if self.on_host else stored


def _wide(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"
