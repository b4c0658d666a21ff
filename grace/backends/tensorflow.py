"""TensorFlow 2, eager and inside tf.function."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any

import tensorflow as tf

from grace.backends.base import HOSTED, PIECE, Array, Backend
from grace.backends.linalg import Linalg
from grace.backends.numpy import NumpyBackend
from grace.backends.random import Random
from grace.core.dtypes import ITEMSIZE
from grace.core.rng import FIRST, MASK32, SECOND

try:
    from tensorflow.python.ops.resource_variable_ops import ResourceVariable
except ImportError:  # not a public name; see `VariableCell`
    ResourceVariable = tf.Variable


class TensorflowLinalg(Linalg):
    """TensorFlow linear algebra."""

    def qr(self, x: Array) -> Array:
        # float32 squares of very large or small numbers overflow or underflow, and TensorFlow's QR does not scale.
        return tf.cast(tf.linalg.qr(tf.cast(x, tf.float64)).q, x.dtype)

    def eigh(self, x: Array) -> tuple[Array, Array]:
        values, vectors = tf.linalg.eigh(x)
        return values[::-1], vectors[:, ::-1]

    def solve(self, a: Array, b: Array) -> Array:
        return tf.linalg.solve(a, b)


class TensorflowRandom(Random):
    """Random bits; the keys may be symbolic."""

    def words(self, key0: Any, key1: Any, start: int, n: int) -> Array:
        pieces = []
        while n > 0:  # a chunk ends where the upper half of the counter changes
            low, high = start & MASK32, start >> 32
            count = min(n, MASK32 + 1 - low)
            h = _mix(tf.bitcast(tf.range(count), tf.uint32) + _word(low + key0))
            pieces.append(_mix(tf.bitwise.bitwise_xor(h, _word(high + key1))))
            start, n = start + count, n - count
        return tf.bitcast(self._xp.concat(pieces), tf.int32) if pieces else tf.zeros(0, tf.int32)

    def keys(self, stem: int, step: Any, worker: Any) -> tuple[Any, Any]:
        if kernels := self._xp.kernels:
            return kernels.keys(stem, step, worker)
        # Use uint32, whose products wrap: it takes a fifth of the operations of 64-bit arithmetic.
        h = _word(stem)
        for value in (step, worker):
            h = _mix(h + _mix(_word(value)))
        first, second = tf.unstack(tf.cast(_mix(h + tf.constant([FIRST, SECOND], tf.uint32)), tf.int64))
        return first, second

    def cached(self, keys: tuple[int, int], make: Callable[[], Array]) -> Array:
        def outside() -> Array:
            with tf.init_scope():
                return make()

        return super().cached(keys, outside)


class TensorflowBackend(Backend):
    """TensorFlow tensors, concrete or symbolic."""

    name = "tensorflow"
    traced = True
    linalg = cached_property(TensorflowLinalg)
    random = cached_property(TensorflowRandom)
    switching = False
    """Whether a branch of a `switch` is being traced."""

    @property
    def kernels(self) -> Any:
        from grace.kernels import tensorflow  # imported on demand: it looks for the compiled libraries

        return tensorflow.TensorflowKernels(self) if tensorflow.available() and not _on_device() else None

    @property
    def threads(self) -> int:
        return _threads()

    @property
    def host(self) -> Backend | None:
        return _host() if self.kernels else None

    def hosted(
        self, work: Callable[..., Sequence[Array]], arrays: Sequence[Array], made: Sequence[tuple[str, tuple[Any, ...]]]
    ) -> list[Array]:
        if tf.executing_eagerly():
            # Arrays that ``work`` returns unchanged stay the same tensors.
            given = [x.numpy() for x in arrays]
            known = {id(x): tensor for x, tensor in zip(given, arrays, strict=True)}
            return [known[id(x)] if id(x) in known else tf.convert_to_tensor(x) for x in work(*given)]
        found = tf.numpy_function(work, arrays, [dtype for dtype, _ in made])
        for x, (_, shape) in zip(found, made, strict=True):
            x.set_shape(shape)
        return list(found)

    def asarray(self, values: Any, dtype: str) -> Array:
        return tf.convert_to_tensor(values, dtype)

    def to_numpy(self, x: Array) -> Any:
        return x.numpy()

    def zeros(self, shape: Any, dtype: str = "float32") -> Array:
        return tf.zeros(shape, dtype)

    def full(self, shape: Any, value: Any, dtype: str = "float32") -> Array:
        # a constant of this dtype: tf.cast would round a Python number to float32 first
        value = tf.cast(value, dtype) if tf.is_tensor(value) else tf.constant(value, dtype)
        return tf.fill((shape,) if isinstance(shape, int) else shape, value)

    def arange(self, n: int, dtype: str = "int32") -> Array:
        return tf.range(n, dtype=dtype)

    def dtype(self, x: Array) -> str:
        return tf.as_dtype(x.dtype).name

    def shape(self, x: Array) -> tuple[int, ...]:
        return tuple(x.shape)

    def lengths(self, arrays: Sequence[Array]) -> Array:
        return tf.stack([tf.shape(x, out_type=tf.int64)[0] for x in arrays])

    def integers(self, x: Array) -> list[Any]:
        return tf.unstack(x)

    def reshape(self, x: Array, shape: Any) -> Array:
        # Skip reshapes that change nothing: they would make up most of the graph of a large exchange.
        fixed = isinstance(shape, tuple) and len(shape) == x.shape.rank and all(type(size) is int for size in shape)
        return x if fixed and shape in ((-1,), tuple(x.shape)) else tf.reshape(x, shape)

    def concat(self, arrays: Sequence[Array], axis: int = 0) -> Array:
        return arrays[0] if len(arrays) == 1 else tf.concat(arrays, axis)

    def split(self, x: Array, sizes: Sequence[Any]) -> Sequence[Array]:
        known = len(sizes) > 1 and all(isinstance(size, int) for size in sizes)
        return tf.split(x, sizes) if known else super().split(x, sizes)

    def pad(self, x: Array, n: int) -> Array:
        missing = n - x.shape[0]
        return x if missing == 0 else tf.pad(x, [[0, missing]])

    def transpose(self, x: Array, axes: Sequence[int] = (1, 0)) -> Array:
        return tf.transpose(x, axes)

    def cast(self, x: Array, dtype: str) -> Array:
        return tf.cast(x, dtype)

    def bitcast(self, x: Array, dtype: str) -> Array:
        x = tf.cast(x, tf.uint8) if x.dtype == tf.bool else x
        if dtype == "bool":
            return self.bitcast(x, "uint8") != 0
        if x.dtype == dtype:
            return self.reshape(x, (-1,))
        ratio, rest = divmod(ITEMSIZE[dtype], x.dtype.size)
        if ratio > 1 and rest == 0:  # tf.bitcast reads a wider dtype from the last dimension
            x = tf.reshape(x, (-1, ratio))
        return self.reshape(tf.bitcast(x, dtype), (-1,))

    def where(self, condition: Array, x: Any, y: Any) -> Array:
        return tf.where(condition, x, y)

    def mended(self, ok: Array, x: Array, other: Callable[[], Array]) -> Array:
        return tf.cond(tf.reduce_all(ok), lambda: x, lambda: tf.where(ok, x, other()))

    def abs(self, x: Array) -> Array:
        return tf.abs(x)

    def sign(self, x: Array) -> Array:
        return tf.sign(x)

    def floor(self, x: Array) -> Array:
        return tf.floor(x)

    def round(self, x: Array) -> Array:
        return tf.round(x)

    def sqrt(self, x: Array) -> Array:
        return tf.sqrt(x)

    def log(self, x: Array) -> Array:
        return tf.math.log(x)

    def exp(self, x: Array) -> Array:
        return tf.exp(x)

    def cos(self, x: Array) -> Array:
        return tf.cos(x)

    def lgamma(self, x: Array) -> Array:
        return tf.math.lgamma(x)

    def igammac(self, a: Array, x: Array) -> Array:
        return tf.math.igammac(a, x)

    def minimum(self, x: Array, y: Any) -> Array:
        return tf.minimum(x, y)

    def maximum(self, x: Array, y: Any) -> Array:
        return tf.maximum(x, y)

    def invert(self, mask: Array) -> Array:
        # The graph optimiser turns not (x > 0) into x <= 0, which differs for NaN: so avoid logical_not.
        return tf.where(mask, False, True)

    def isfinite(self, x: Array) -> Array:
        return tf.math.is_finite(x)

    def sum(self, x: Array, axis: int | None = None, keepdims: bool = False) -> Array:
        wide = tf.cast(x, tf.float64) if x.dtype.is_floating else x
        return tf.cast(tf.reduce_sum(wide, axis, keepdims=keepdims), x.dtype)

    def max(self, x: Array, axis: int | None = None, keepdims: bool = False) -> Array:
        largest = tf.reduce_max(x, axis, keepdims=keepdims)
        if not x.dtype.is_floating:
            return largest
        # The maximum may drop NaN; a sum does not, and adding zeros keeps other values.
        return largest + tf.reduce_sum(tf.where(tf.math.is_nan(x), x, 0), axis, keepdims=keepdims)

    def all(self, x: Array) -> Array:
        return tf.reduce_all(x)

    def cumsum(self, x: Array) -> Array:
        return tf.cumsum(x)

    def excess(self, x: Array, bound: Array) -> Array:
        # Compute in cache-sized chunks: a temporary as large as x costs more than the computation.
        n = x.shape[0]
        full = n // PIECE * PIECE
        found = _excess(x[full:], bound) if full < n else tf.zeros(3, tf.float64)
        if full:
            _, found = tf.while_loop(
                lambda start, found: start < full,
                lambda start, found: (start + PIECE, found + _excess(x[start : start + PIECE], bound)),
                (0, found),
                parallel_iterations=1,
            )
        return found

    def bitwise_and(self, x: Array, y: Any) -> Array:
        return tf.bitwise.bitwise_and(x, tf.cast(y, x.dtype))

    def bitwise_or(self, x: Array, y: Any) -> Array:
        return tf.bitwise.bitwise_or(x, tf.cast(y, x.dtype))

    def bitwise_xor(self, x: Array, y: Any) -> Array:
        return tf.bitwise.bitwise_xor(x, tf.cast(y, x.dtype))

    def shift_left(self, x: Array, bits: Any) -> Array:
        return tf.bitwise.left_shift(x, tf.cast(bits, x.dtype))

    def shift_right(self, x: Array, bits: Any) -> Array:
        return tf.bitwise.right_shift(x, tf.cast(bits, x.dtype))

    def topk(self, x: Array, k: int) -> Array:
        n = x.shape[-1]
        if k >= n and len(x.shape) == 1:
            return tf.range(n)
        if k == 0 or x.shape[0] == 0:
            return tf.zeros((*x.shape[:-1], k), tf.int32)
        if x.dtype.is_floating:
            x = tf.where(tf.math.is_nan(x), tf.constant(float("inf"), x.dtype), x)
        # top_k prefers the lower index among ties, as required.
        return tf.sort(tf.math.top_k(x, k, sorted=False).indices)

    def topk_abs(self, x: Array, k: int) -> Array:
        host = self.host if x.dtype == tf.float32 and len(x.shape) == 1 and (x.shape[0] or 0) >= HOSTED else None
        if host is None:
            return super().topk_abs(x, k)
        return self.hosted(lambda x: [host.topk_abs(x, k)], [x], [("int32", (min(k, x.shape[0]),))])[0]

    def sort(self, x: Array) -> Array:
        return tf.sort(x)

    def nonzero(self, mask: Array, count: int | None = None) -> Array:
        return tf.cast(tf.reshape(tf.where(mask), (-1,)), tf.int32)

    def searchsorted(self, bounds: Array, x: Array) -> Array:
        # TensorFlow's own function fails on an empty array inside a graph.
        return tf.zeros(0, tf.int32) if x.shape[0] == 0 else tf.searchsorted(bounds, x)

    def take(self, x: Array, indices: Array) -> Array:
        return tf.gather(x, indices)

    def scatter(self, x: Array, indices: Array, values: Any) -> Array:
        if not tf.is_tensor(values):
            values = tf.fill(tf.shape(indices), tf.constant(values, x.dtype))
        return tf.tensor_scatter_nd_update(x, indices[:, None], values)

    def scatter_add(self, x: Array, indices: Array, values: Array) -> Array:
        return tf.tensor_scatter_nd_add(x, indices[:, None], values)

    def segment_sum(self, values: Array, segments: Array, count: int) -> Array:
        return tf.cast(tf.math.unsorted_segment_sum(tf.cast(values, tf.float64), segments, count), tf.float32)

    def loop(
        self, more: Callable[..., Array], body: Callable[..., tuple[Array, ...]], values: tuple[Array, ...]
    ) -> tuple[Array, ...]:
        return tf.while_loop(lambda *values: tf.reshape(more(*values), ()), body, values)

    def cell(self, value: Array) -> Any:
        return VariableCell(value)

    def choose(self, ok: Array, new: Array, old: Array) -> Array:
        # On CPUs Select passes one operand through for a scalar condition, while tf.where copies all elements.
        return tf.raw_ops.Select(condition=ok, x=new, y=old)

    @property
    def tracing(self) -> bool:
        return tf.inside_function()

    def unconverted(self, function: Any) -> Any:
        return tf.autograph.experimental.do_not_convert(function)

    def switch(self, index: Array, branches: Sequence[Callable[[], Any]]) -> Any:
        def inside(branch: Callable[[], Any]) -> Callable[[], Any]:
            def run() -> Any:
                outer, self.switching = self.switching, True
                try:
                    return branch()
                finally:
                    self.switching = outer

            return run

        return tf.switch_case(index, [inside(branch) for branch in branches])

    def sound(self, x: Array, ok: Callable[[], Array], message: str) -> Array:
        if not tf.inside_function():
            if not ok():
                raise ValueError(message)
            return x
        with tf.control_dependencies([tf.debugging.Assert(ok(), [message])]):
            return tf.identity(x)

    def require(self, ok: Array, message: str) -> None:
        if tf.inside_function():
            tf.debugging.Assert(ok, [message])
        elif not ok:
            raise FloatingPointError(message)


def _excess(x: Array, bound: Array) -> Array:
    over = tf.nn.relu(tf.abs(x) - bound)
    number, total, half = tf.reduce_sum(tf.cast(over > 0, tf.float32)), tf.reduce_sum(over), tf.nn.l2_loss(over)
    squares = tf.cond(
        (half > 1e-20) & (half < 1e30),
        lambda: 2 * tf.cast(half, tf.float64),
        lambda: tf.reduce_sum(tf.square(tf.cast(over, tf.float64))),  # at or beyond the ends of float32's range
    )
    return tf.stack([tf.cast(number, tf.float64), tf.cast(total, tf.float64), squares])


class VariableCell:
    """A cell that a traced function reads and writes at run time."""

    def __init__(self, value: Array):
        # Not tf.Variable: a tf.function that creates one in its first trace, such as Keras's, is traced twice.
        dtype = tf.int64 if isinstance(value, int) else None
        self.variable = ResourceVariable(value, trainable=False, dtype=dtype)

    def read(self) -> Array:
        return self.variable.read_value()

    def assign(self, value: Array) -> None:
        self.variable.assign(value)

    def add(self, value: Array) -> None:
        self.variable.assign_add(value)


class _Host(NumpyBackend):
    """NumPy's backend with TensorFlow's number of threads."""

    @property
    def threads(self) -> int:
        return _threads()


@cache
def _host() -> Backend:
    return _Host()


def _threads() -> int:
    return tf.config.threading.get_intra_op_parallelism_threads() or os.cpu_count() or 1


@cache
def _on_device() -> bool:
    # Kernels are for CPUs only.
    return bool(tf.config.list_physical_devices("GPU"))


def _word(word: Any) -> Array:
    if not tf.is_tensor(word):
        return tf.constant(int(word) & MASK32, tf.uint32)
    return tf.cast(word & MASK32, tf.uint32)


def _mix(h: Array) -> Array:
    # grace.core.rng.mix on uint32 vectors: products wrap.
    shift, xor = tf.bitwise.right_shift, tf.bitwise.bitwise_xor
    h = xor(h, shift(h, tf.constant(16, tf.uint32)))
    h = h * tf.constant(0x85EBCA6B, tf.uint32)
    h = xor(h, shift(h, tf.constant(13, tf.uint32)))
    h = h * tf.constant(0xC2B2AE35, tf.uint32)
    return xor(h, shift(h, tf.constant(16, tf.uint32)))
