"""Gradient averaging in custom TensorFlow loops: average_gradients, DistributedGradientTape."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf

from grace.engine.session import SPARSE, Grace
from grace.tensorflow.checks import HOROVOD_TAPE, check_grace, check_horovod, check_replicas
from grace.tensorflow.names import EXCHANGED, identity, names_for

DRIVEN: WeakKeyDictionary[Grace, str] = WeakKeyDictionary()
"""Descriptions of the optimizers that Graces drive. An entry ends with its Grace or with `release`."""


def build(grace: Grace, variables: Iterable[Any]) -> None:
    """Create the state of these variables now instead of with their first gradients. Call it eagerly.

    Variables with non-float dtypes are skipped. Raises as `Grace.build` does.
    """
    check_grace(grace, "build")
    variables = [variable for variable in variables if tf.as_dtype(variable.dtype).is_floating]
    grace.build(dict(zip(names_for(grace, variables), variables, strict=True)))


def average_gradients(grace: Grace, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Means of gradients over all workers, eagerly or while a graph is traced.

    Eagerly, a None gradient counts as zero if another worker has one, and stays None otherwise. Inside a graph it
    stays None: all workers trace the same program, so they lack the same gradients. IndexedSlices (of embeddings)
    become dense. ValueError if the Grace drives an optimizer, which would average again; RuntimeError inside a
    tf.distribute strategy with several replicas.
    """
    check_grace(grace, "average_gradients")
    if grace in DRIVEN:
        raise ValueError(
            f"this Grace drives an optimizer ({DRIVEN[grace]}), which averages what it applies: take the gradients of "
            "a plain tf.GradientTape, or release the optimizer (grace.tensorflow.release), or use a second Grace"
        )
    return exchange(grace, gradients, variables)


@tf.autograph.experimental.do_not_convert  # its loops run once, during tracing
def exchange(grace: Grace, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """`average_gradients`, for integrations that drive the Grace."""
    check_replicas()
    names = names_for(grace, variables)
    EXCHANGED.update(map(identity, variables))
    eager = tf.executing_eagerly()
    handed = {}
    for name, variable, gradient in zip(names, variables, gradients, strict=True):
        if gradient is not None and not tf.TensorShape(variable.shape).is_fully_defined():
            raise ValueError(f"{name!r} has shape {variable.shape} in this graph: only known shapes can be averaged")
        if isinstance(gradient, tf.IndexedSlices):
            grace.note(name, SPARSE)
        if gradient is not None:
            # A graph may not know the shape of a gradient, but the variable does.
            handed[name] = (variable, tf.ensure_shape(tf.convert_to_tensor(gradient), variable.shape))
        elif eager and tf.as_dtype(variable.dtype).is_floating:
            handed[name] = (variable, None)
    grace.track_missing = grace.track_missing or eager
    built = {name: _like(variable) for name, (variable, _) in handed.items()}
    with tf.init_scope():  # state must outlive the traced graph
        grace.build(built)
        grace.settle()
    if not eager and grace.transport.elastic:
        _check_workers(grace.world_size)
    means = grace.step({name: gradient for name, (_, gradient) in handed.items()})
    if eager:
        grace.tune()
    return [means.get(name) for name in names]


class DistributedGradientTape:
    """A gradient tape whose gradients are averaged over all workers.

    ``tape = grace.tensorflow.DistributedGradientTape(tape, grace=grc)`` wraps a recorded tf.GradientTape; everything
    else is the tape's own. ``horovod``: arguments of Horovod's class of the same name, accepted if they match GRACE's
    behaviour. TypeError for other types of tape or Grace, ValueError for a tape that is already distributed.
    """

    def __init__(self, tape: tf.GradientTape, grace: Grace, **horovod: Any):
        if isinstance(tape, Grace):
            raise TypeError("the tape comes first: DistributedGradientTape(tape, grace=grc)")
        if isinstance(tape, DistributedGradientTape):
            raise ValueError("this tape is distributed already: wrap it once")
        if not isinstance(tape, tf.GradientTape):
            raise TypeError(f"DistributedGradientTape wraps a tf.GradientTape, not {type(tape).__name__}")
        check_grace(grace, "DistributedGradientTape")
        check_horovod(grace, horovod, HOROVOD_TAPE)
        self._tape = tape
        self._grace = grace

    def gradient(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """As tf.GradientTape.gradient, then averaged; the structure of ``sources`` is kept.

        Sources that are not variables (watched tensors) are averaged, too. Their index in ``sources`` identifies them,
        so one index must always have the same shape.
        """
        gradients = self._tape.gradient(target, sources, *args, **kwargs)
        flat = tf.nest.flatten(sources)
        means = average_gradients(self._grace, _leaves(gradients), flat)
        return tf.nest.pack_sequence_as(sources, means)

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._tape.__exit__(*exception)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)


def _check_workers(number: int) -> None:
    # A graph run by other workers than it was traced for would silently omit some of them.
    from horovod.tensorflow import size_op

    tf.debugging.assert_equal(
        size_op(),
        number,
        f"this graph averages over {number} workers, and now there are others: make the tf.function inside the "
        "function that grace.elastic.run wraps",
    )


def _like(variable: Any) -> Any:
    # Outside the graph, a symbolic source has no value; only its shape counts.
    return tf.TensorSpec(variable.shape, variable.dtype) if tf.is_symbolic_tensor(variable) else variable


def _leaves(structure: Any) -> list[Any]:
    # tf.nest.flatten would split IndexedSlices.
    if isinstance(structure, dict):
        return [leaf for key in sorted(structure) for leaf in _leaves(structure[key])]
    if isinstance(structure, (list, tuple)):
        return [leaf for part in structure for leaf in _leaves(part)]
    return [structure]
