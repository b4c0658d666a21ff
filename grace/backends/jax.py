"""JAX: eager, and inside functions that JAX traces, such as those of jit and shard_map.

JAX runs with 64-bit types off. The array functions need them, for sums and codes, and turn them on for themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from grace.backends.base import Array, Backend, Cell
from grace.backends.linalg import Linalg
from grace.backends.random import Random
from grace.core.dtypes import ITEMSIZE
from grace.core.rng import FIRST, MASK32, NOISE, SECOND

T = TypeVar("T", bound=type)
TRACED = "traced"
"""The device's name for arrays without values, inside a function that JAX traces."""


@contextmanager
def wide() -> Iterator[None]:
    """64-bit types, and products of matrices in float32, whatever the program's settings are."""
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        yield


def _wide(cls: T) -> T:
    # Class decorator: runs each public function of the class in `wide`.
    def inside(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            if jax.config.jax_enable_x64:
                return function(*args, **options)
            with wide():
                return function(*args, **options)

        return run

    for name, value in list(vars(cls).items()):
        if callable(value) and not isinstance(value, type) and not name.startswith("_") and name != "quiet":
            setattr(cls, name, inside(value))
    return cls


def device_name(array: Any) -> str:
    """The name of an array's device: "cpu", "gpu", "tpu", or `TRACED`."""
    return TRACED if isinstance(array, jax.core.Tracer) else next(iter(array.devices())).platform


@_wide
class JaxLinalg(Linalg):
    """JAX's linear algebra."""

    def qr(self, x: Array) -> Array:
        return jnp.linalg.qr(x)[0]

    def eigh(self, x: Array) -> tuple[Array, Array]:
        values, vectors = jnp.linalg.eigh(x, symmetrize_input=False)
        return values[::-1], vectors[:, ::-1]

    def solve(self, a: Array, b: Array) -> Array:
        return jnp.linalg.solve(a, b)


class _Slice(NamedTuple):
    # A slice between symbolic bounds, whose length follows from the shape that it gets.
    table: Array
    start: Array

    def reshaped(self, shape: tuple[int, ...]) -> Array:
        return lax.dynamic_slice(self.table, (self.start,), (math.prod(shape),)).reshape(shape)


@dataclass(frozen=True)
class _Table:
    # A table inside a traced function: JAX's own arrays have no slices between symbolic bounds.
    values: Array

    def __getitem__(self, part: Any) -> Any:
        return _Slice(self.values, part.start)


@_wide
class JaxRandom(Random):
    """Random bits. Keys and the position of the first element may be symbolic."""

    def words(self, key0: Any, key1: Any, start: int, n: int) -> Array:
        if isinstance(start, int) and (start & MASK32) + n <= MASK32 + 1:  # 32-bit counters do for nearly all
            low, high = _word(start & MASK32) + lax.iota(jnp.uint32, n), _word(start >> 32)
        else:
            counter = jnp.asarray(start) + lax.iota(jnp.int64, n)
            low, high = _word(counter), _word(counter >> 32)
        return lax.bitcast_convert_type(_mix(_mix(low + _word(key0)) ^ (high + _word(key1))), jnp.int32)

    def keys(self, stem: int, step: Any, worker: Any) -> tuple[Any, Any]:
        h = _word(stem)
        for value in (step, worker):
            h = _mix(h + _mix(_word(value)))
        return _mix(h + _word(FIRST)), _mix(h + _word(SECOND))

    def noise(self, table: tuple[Any, Any], keys: tuple[Any, Any], start: int, n: int) -> Array:
        if isinstance(start, int):
            return super().noise(table, keys, start, n)
        counter = jnp.asarray(start) + lax.iota(jnp.int64, n)
        first, row = _word(counter % NOISE), _word(counter // NOISE)
        sums = sum(
            (_mix(_mix(each + _word(key0)) ^ _word(key1)) >> 16).astype(jnp.float32) * jnp.float32(2.0**-16)
            for each, (key0, key1) in ((first, table), (row, keys))
        )
        return sums - jnp.floor(sums) + jnp.float32(2.0**-17)

    def cached(self, keys: tuple[int, int], make: Callable[[], Array]) -> Array:
        # An array of one trace is of no use in another.
        return _Table(make()) if self._xp.traced else super().cached(keys, make)


@_wide
class JaxBackend(Backend):
    """JAX arrays on one kind of device, or (`TRACED`) inside a function that JAX traces."""

    name = "jax"
    linalg = cached_property(JaxLinalg)
    random = cached_property(JaxRandom)

    def __init__(self, device: str = "cpu"):
        self.traced = device == TRACED
        self.on_host = device in ("cpu", TRACED)
        usual = self.traced or device == jax.default_backend()
        self._device = None if usual else jax.devices(device)[0]

    @property
    def tracing(self) -> bool:
        return self.traced

    def quiet(self) -> AbstractContextManager[Any]:
        return wide()

    def asarray(self, values: Any, dtype: str) -> Array:
        if isinstance(values, jax.Array):
            return values.astype(dtype)
        # A copy: JAX may otherwise keep the memory of a NumPy array, which its owner may write to.
        return jnp.array(np.asarray(values, jnp.dtype(dtype)), device=self._device)

    def to_numpy(self, x: Array) -> Any:
        return np.asarray(x)

    def zeros(self, shape: Any, dtype: str = "float32") -> Array:
        return jnp.zeros(shape, dtype, device=self._device)

    def full(self, shape: Any, value: Any, dtype: str = "float32") -> Array:
        return jnp.full(shape, value, dtype, device=self._device)

    def arange(self, n: int, dtype: str = "int32") -> Array:
        return jnp.arange(n, dtype=dtype, device=self._device)

    def dtype(self, x: Array) -> str:
        return x.dtype.name

    def shape(self, x: Array) -> tuple[int, ...]:
        return tuple(x.shape)

    def lengths(self, arrays: Sequence[Array]) -> Array:
        return self.asarray([x.shape[0] for x in arrays], "int64")

    def integers(self, x: Array) -> list[Any]:
        self._readable("an exchange of payloads whose lengths depend on the values")
        return x.tolist()

    def reshape(self, x: Array, shape: Any) -> Array:
        return x.reshaped(shape) if isinstance(x, _Slice) else jnp.reshape(x, shape)

    def concat(self, arrays: Sequence[Array], axis: int = 0) -> Array:
        return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis)

    def pad(self, x: Array, n: int) -> Array:
        return x if x.shape[0] == n else lax.pad(x, jnp.zeros((), x.dtype), [(0, n - x.shape[0], 0)])

    def transpose(self, x: Array, axes: Sequence[int] = (1, 0)) -> Array:
        return lax.transpose(x, axes)

    def cast(self, x: Array, dtype: str) -> Array:
        return lax.convert_element_type(x, jnp.dtype(dtype))

    def bitcast(self, x: Array, dtype: str) -> Array:
        if x.dtype == bool or dtype == "bool":  # of one byte, 0 or 1, which JAX does not bitcast
            return self.bitcast(x.astype("uint8"), dtype) if x.dtype == bool else self.bitcast(x, "uint8") != 0
        old, new = x.dtype.itemsize, ITEMSIZE[dtype]
        if new > old:  # JAX reads a wider dtype from the last dimension
            x = x.reshape(x.size * old // new, new // old)
        return lax.bitcast_convert_type(x, jnp.dtype(dtype)).reshape(-1) if old != new or x.dtype != dtype else x

    def where(self, condition: Array, x: Any, y: Any) -> Array:
        return jnp.where(condition, x, y)

    def abs(self, x: Array) -> Array:
        return jnp.abs(x)

    def sign(self, x: Array) -> Array:
        return jnp.sign(x)

    def floor(self, x: Array) -> Array:
        return lax.floor(x)

    def round(self, x: Array) -> Array:
        return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)

    def sqrt(self, x: Array) -> Array:
        return lax.sqrt(x)

    def log(self, x: Array) -> Array:
        return lax.log(x)

    def exp(self, x: Array) -> Array:
        return lax.exp(x)

    def cos(self, x: Array) -> Array:
        return lax.cos(x)

    def lgamma(self, x: Array) -> Array:
        return lax.lgamma(x)

    def igammac(self, a: Array, x: Array) -> Array:
        return lax.igammac(a, x)

    def minimum(self, x: Array, y: Any) -> Array:
        return jnp.minimum(x, y)

    def maximum(self, x: Array, y: Any) -> Array:
        return jnp.maximum(x, y)

    def invert(self, mask: Array) -> Array:
        return jnp.logical_not(mask)

    def isfinite(self, x: Array) -> Array:
        return lax.is_finite(x)

    def sum(self, x: Array, axis: int | None = None, keepdims: bool = False) -> Array:
        wide = jnp.float64 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
        return jnp.sum(x, axis, dtype=wide, keepdims=keepdims).astype(x.dtype)

    def max(self, x: Array, axis: int | None = None, keepdims: bool = False) -> Array:
        largest = jnp.max(x, axis, keepdims=keepdims)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return largest
        # On CPUs, XLA's maximum of 4096 elements or more may lose a NaN, and the numbers beside it.
        return jnp.where(jnp.any(jnp.isnan(x), axis, keepdims=keepdims), jnp.nan, largest)

    def all(self, x: Array) -> Array:
        return jnp.all(x)

    def cumsum(self, x: Array) -> Array:
        return jnp.cumsum(x, dtype=x.dtype)

    def bitwise_and(self, x: Array, y: Any) -> Array:
        return jnp.bitwise_and(x, y)

    def bitwise_or(self, x: Array, y: Any) -> Array:
        return jnp.bitwise_or(x, y)

    def bitwise_xor(self, x: Array, y: Any) -> Array:
        return jnp.bitwise_xor(x, y)

    def shift_left(self, x: Array, bits: Any) -> Array:
        return jnp.left_shift(x, bits)

    def shift_right(self, x: Array, bits: Any) -> Array:
        return jnp.right_shift(x, bits)

    def topk(self, x: Array, k: int) -> Array:
        n = x.shape[-1]
        if k >= n and x.ndim == 1:
            return jnp.arange(n, dtype=jnp.int32)
        if k == 0 or x.shape[0] == 0:
            return jnp.zeros((*x.shape[:-1], k), jnp.int32)
        if jnp.issubdtype(x.dtype, jnp.floating):
            # top_k takes -0 for less than 0, and the sign of NaN matters to it.
            x = jnp.where(jnp.isnan(x), jnp.inf, jnp.where(x == 0, 0, x))
        return jnp.sort(lax.top_k(x, k)[1].astype(jnp.int32))

    def sort(self, x: Array) -> Array:
        return jnp.sort(x)

    def nonzero(self, mask: Array, count: int | None = None) -> Array:
        if count is None:
            self._readable("a payload whose length depends on the values")
        fixed = count if self.traced else None
        return jnp.nonzero(mask, size=fixed, fill_value=mask.shape[0])[0].astype(jnp.int32)

    def searchsorted(self, bounds: Array, x: Array) -> Array:
        return jnp.searchsorted(bounds, x).astype(jnp.int32)

    def take(self, x: Array, indices: Array) -> Array:
        return jnp.take(x, indices, axis=0, mode="clip")

    def scatter(self, x: Array, indices: Array, values: Any) -> Array:
        return x.at[indices].set(values, unique_indices=True, mode="drop")

    def scatter_add(self, x: Array, indices: Array, values: Array) -> Array:
        return x.at[indices].add(values, unique_indices=True, mode="drop")

    def segment_sum(self, values: Array, segments: Array, count: int) -> Array:
        totals = jnp.zeros(count, jnp.float64).at[segments].add(values.astype(jnp.float64), mode="drop")
        return totals.astype(jnp.float32)

    def loop(
        self, more: Callable[..., Array], body: Callable[..., tuple[Array, ...]], values: tuple[Array, ...]
    ) -> tuple[Array, ...]:
        if not self.traced:
            return super().loop(more, body, values)
        return lax.while_loop(lambda values: jnp.reshape(more(*values), ()), lambda values: body(*values), values)

    def choose(self, ok: Array, new: Array, old: Array) -> Array:
        return jnp.where(ok, new, old)

    def cell(self, value: Array) -> Any:
        self._readable("a Grace, which keeps its state between calls")
        return Cell(value)

    def sound(self, x: Array, ok: Callable[[], Array], message: str) -> Array:
        if self.can_read_values and not ok():
            raise ValueError(message)
        return x

    def require(self, ok: Array, message: str) -> None:
        if not self.traced and not ok:
            raise FloatingPointError(message)

    def _readable(self, what: str) -> None:
        if self.traced:
            raise TypeError(
                f"{what} cannot be traced by JAX: inside jit use grace.jax.exchange or grace.jax.mean with a method of "
                "fixed length, such as 'topk', 'blockint' or 'eden'"
            )


def _word(value: Any) -> Array:
    # The lower 32 bits.
    if isinstance(value, int):
        return jnp.uint32(value & MASK32)
    return jnp.asarray(value).astype(jnp.uint32)


def _mix(h: Array) -> Array:
    # grace.core.rng.mix on uint32, whose products wrap.
    h = h ^ (h >> 16)
    h = h * jnp.uint32(0x85EBCA6B)
    h = h ^ (h >> 13)
    h = h * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)
