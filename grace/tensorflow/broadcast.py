"""Broadcasts of variables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from grace.backends import get_backend
from grace.core import Transport
from grace.core.collectives import Broadcast
from grace.engine.session import Grace
from grace.tensorflow.checks import check_grace
from grace.tensorflow.names import path_of
from grace.transports import get_transport


def broadcast_variables(variables: Iterable[Any], root_rank: int = 0, grace: Grace | None = None) -> None:
    """Assign worker ``root_rank``'s values to the variables of all workers. Call it eagerly, before training.

    ``variables``: of any shape and any numeric dtype or bool. ``root_rank``: the rank within the transport of
    ``grace``.
    All workers first compare names, shapes and dtypes: ValueError on all of them, naming the difference, or if no
    worker has a variable (a model has none before it is built). TypeError for variables of strings or resources.
    RuntimeError inside a graph.
    """
    if isinstance(root_rank, Grace):
        raise TypeError("root_rank comes before the Grace: broadcast_variables(variables, 0, grace=grc)")
    if grace is not None:
        check_grace(grace, "broadcast_variables")
    if not isinstance(variables, Iterable) or isinstance(variables, (str, tf.Variable, tf.Tensor)):
        raise TypeError(f"broadcast_variables needs a list of variables, as model.variables, not {type(variables)}")
    if tf.inside_function():
        raise RuntimeError("broadcast_variables is no part of a graph: call it once, outside of tf.function")
    variables = list(variables)
    for variable in variables:
        if not hasattr(variable, "assign"):
            raise TypeError(f"broadcast_variables assigns to variables, and {type(variable).__name__} is none")
    transport = transport_of(grace)
    if not isinstance(root_rank, int) or not 0 <= root_rank < transport.size:
        raise ValueError(f"root_rank={root_rank!r}: there are workers 0 to {transport.size - 1}")
    if compare(variables, transport, root_rank) == 0:
        raise ValueError(
            "there are no variables to broadcast: a model that is built by its first batch has none before. Call it "
            "on a batch (or build it) first; with model.fit, BroadcastCallback sees to it"
        )
    if transport.size > 1:
        assign_from(variables, transport, root_rank)


def compare(variables: Sequence[Any], transport: Transport, root_rank: int) -> int:
    """Compare variables; returns their number. Raises on all workers: ValueError, naming the difference, if variables
    differ; TypeError for dtypes that cannot be sent.
    """
    mine = [[path_of(v), tf.as_dtype(v.dtype).name, list(map(int, v.shape))] for v in variables]
    text = json.dumps([root_rank, mine])
    workers = list(map(json.loads, transport.exchange(text) if transport.size > 1 else [text]))
    first_root, first = workers[0]
    for rank, (root, other) in enumerate(workers):
        if root != first_root:
            raise ValueError(f"worker 0 broadcasts from worker {first_root}, and worker {rank} from worker {root}")
        if other != first:
            raise ValueError(f"worker 0 and worker {rank} differ: {_difference(first, other)}")
    for path, dtype, _ in first:
        if not _carried(tf.as_dtype(dtype)):
            raise TypeError(f"{path!r} has dtype {dtype}, which cannot be broadcast: leave it out")
    return len(first)


def assign_from(variables: Sequence[Any], transport: Transport, root_rank: int) -> None:
    """Send the root's values as bytes, so that no array function needs to support the dtype."""
    values = [np.asarray(variable.numpy()) for variable in variables]
    body = b"".join(value.tobytes() for value in values)
    data = tf.constant(np.frombuffer(body, np.uint8))
    ((data,),) = transport.start([Broadcast((data,), root_rank)], "variables")()
    body, start = data.numpy().tobytes(), 0
    for variable, value in zip(variables, values, strict=True):
        part = np.frombuffer(body[start : start + value.nbytes], value.dtype).reshape(value.shape)
        variable.assign(tf.constant(part, tf.as_dtype(variable.dtype)))
        start += value.nbytes


def transport_of(grace: Grace | None) -> Transport:
    """A Grace's transport, or the initialised one, for TensorFlow tensors."""
    transport = get_transport() if grace is None else grace.transport
    bound = transport.bind(get_backend("tensorflow")) if getattr(transport, "xp", None) is None else transport
    if grace is not None:
        bound.timeout = grace.options.timeout
    return bound


def _carried(dtype: tf.DType) -> bool:
    return bool(dtype.is_bool or dtype.is_complex or dtype.is_floating or dtype.is_integer) and not dtype.is_quantized


def _difference(first: list[Any], other: list[Any]) -> str:
    remedy = "Build the same model, in the same order, on every worker before its variables are broadcast"
    for mine, theirs in zip(first, other, strict=False):
        if mine != theirs:
            (a, kind, shape), (b, other_kind, other_shape) = mine, theirs
            return f"{a!r} is {kind}{shape} on the one where the other has {b!r}, {other_kind}{other_shape}. {remedy}"
    longer, owner = (first, "worker 0") if len(first) > len(other) else (other, "the other")
    names = [name for name, _, _ in longer[min(len(first), len(other)) :]]
    return f"only {owner} has {names[:3]}. {remedy}"
