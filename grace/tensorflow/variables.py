"""TensorFlow's variables, and the exchange of their gradients, eagerly or while a graph is traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from grace.backends import Backend, get_backend
from grace.core import Array
from grace.engine.session import SPARSE, Grace
from grace.keras.layout import transposed
from grace.keras.names import EXCHANGED, names_for
from grace.keras.toolkits import Toolkit


class TensorflowToolkit(Toolkit):
    """TensorFlow's own variables, and Keras's variables on TensorFlow."""

    def backend(self) -> Backend:
        return get_backend("tensorflow")

    def path_of(self, variable: Any) -> str:
        if isinstance(variable, keras.Variable):
            return str(variable.path)
        return str(variable.name).removesuffix(":0") if isinstance(variable, tf.Variable) else ""

    def identity(self, variable: Any) -> Any:
        # A Keras variable and its TensorFlow variable have the same ID.
        inner = getattr(variable, "_value", None) if isinstance(variable, keras.Variable) else variable
        return getattr(inner, "_unique_id", None)

    def dtype_of(self, variable: Any) -> str:
        return str(tf.as_dtype(variable.dtype).name)

    def is_float(self, variable: Any) -> bool:
        return bool(tf.as_dtype(variable.dtype).is_floating)

    def can_broadcast(self, dtype: str) -> bool:
        kind = tf.as_dtype(dtype)
        return bool(kind.is_bool or kind.is_complex or kind.is_floating or kind.is_integer) and not kind.is_quantized

    def tensor(self, variable: Any) -> Array:
        return tf.convert_to_tensor(variable)

    def like(self, variable: Any, transposed: bool) -> Array:
        # Outside the graph, a symbolic source has no value; only its shape counts.
        if transposed or tf.is_symbolic_tensor(variable):
            shape = tuple(variable.shape)
            return tf.TensorSpec(shape[::-1] if transposed else shape, variable.dtype)
        return variable

    def pack(self, variables: Sequence[Any]) -> Array:
        body = b"".join(np.asarray(variable.numpy()).tobytes() for variable in variables)
        return tf.constant(np.frombuffer(body, np.uint8))

    def unpack(self, variables: Sequence[Any], data: Array) -> None:
        body, start = data.numpy().tobytes(), 0
        for variable in variables:
            value = np.asarray(variable.numpy())
            part = np.frombuffer(body[start : start + value.nbytes], value.dtype).reshape(value.shape)
            variable.assign(tf.constant(part, tf.as_dtype(variable.dtype)))
            start += value.nbytes

    def inside_graph(self) -> bool:
        return bool(tf.inside_function())

    def outside_graphs(self) -> AbstractContextManager[Any]:
        return tf.init_scope()

    def opaque(self, function: Callable[..., Any]) -> Any:
        return tf.autograph.experimental.do_not_convert(function)

    def exchange(self, grace: Grace, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        return list(exchange(grace, gradients, variables))

    def check_alone(self, optimizer: Any = None) -> None:
        check_replicas()
        check_replicas(getattr(optimizer, "_distribution_strategy", None))


TOOLKIT = TensorflowToolkit()


@tf.autograph.experimental.do_not_convert  # its loops run once, during tracing
def exchange(grace: Grace, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """As `average_gradients`, but without its check that the Grace drives no optimizer."""
    check_replicas()
    names = names_for(TOOLKIT, grace, variables)
    EXCHANGED.update(map(TOOLKIT.identity, variables))
    eager = tf.executing_eagerly()
    turned = dict(zip(names, transposed(TOOLKIT, grace, variables), strict=True))
    handed, built = {}, {}
    for name, variable, gradient in zip(names, variables, gradients, strict=True):
        if gradient is not None and not tf.TensorShape(variable.shape).is_fully_defined():
            raise ValueError(f"{name!r} has shape {variable.shape} in this graph: only known shapes can be averaged")
        if isinstance(gradient, tf.IndexedSlices):
            grace.note(name, SPARSE)
        if gradient is not None:
            # A graph may not know the shape of a gradient, but the variable does.
            gradient = tf.ensure_shape(tf.convert_to_tensor(gradient), variable.shape)
            handed[name] = tf.transpose(gradient) if turned[name] else gradient
        elif eager and tf.as_dtype(variable.dtype).is_floating:
            handed[name] = None
        if name in handed:
            built[name] = TOOLKIT.like(variable, turned[name])
    grace.track_missing = grace.track_missing or eager
    with tf.init_scope():  # state must outlive the traced graph
        grace.build(built)
        grace.settle()
    if not eager and grace.transport.elastic:
        _check_workers(grace.world_size)
    means = grace.step(handed)
    found = [(means.get(name), turned[name]) for name in names]
    return [tf.transpose(mean) if back and mean is not None else mean for mean, back in found]


def check_replicas(strategy: Any = None) -> None:
    """Raise RuntimeError inside a tf.distribute strategy with several replicas."""
    strategy = strategy or tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync > 1:
        raise RuntimeError(
            f"{type(strategy).__name__} has {strategy.num_replicas_in_sync} replicas, whose gradients tf.distribute "
            "would add up beside GRACE's exchange: start one process for each device with horovodrun, and train "
            "without tf.distribute (OneDeviceStrategy may stay)"
        )


def _check_workers(number: int) -> None:
    # Check that a graph runs with as many workers as it was traced for: otherwise it would silently omit some workers.
    from horovod.tensorflow import size_op

    tf.debugging.assert_equal(
        size_op(),
        number,
        f"this graph averages over {number} workers, and now there are others: make the tf.function inside the "
        "function that grace.elastic.run wraps",
    )
