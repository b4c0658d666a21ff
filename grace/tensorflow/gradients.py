"""Means of gradients in loops of TensorFlow: average_gradients, DistributedGradientTape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from grace.pipeline import SPARSE, Grace


def build(grace: Grace, variables: Iterable[Any]) -> None:
    """Make all state of these variables now instead of with their first gradients. Eagerly."""
    variables = [variable for variable in variables if tf.as_dtype(variable.dtype).is_floating]
    grace.build(dict(zip(names_of(variables), variables, strict=True)))


@tf.autograph.experimental.do_not_convert  # its loops run once, while the graph is made
def average_gradients(grace: Grace, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Means of gradients over all workers, eagerly or while a graph is traced.

    A gradient that is None counts as zero if another worker has one, and stays None if none has. Inside a graph it just
    stays None: all workers trace the same program, so they lack the same ones. IndexedSlices (of embeddings) become
    dense.
    """
    names = names_of(variables)
    eager = tf.executing_eagerly()
    handed = {}
    for name, variable, gradient in zip(names, variables, gradients, strict=True):
        if isinstance(gradient, tf.IndexedSlices):
            grace.note(name, SPARSE)
        if gradient is not None:
            # A graph may not know the shape of a gradient: the variable does.
            handed[name] = (variable, tf.ensure_shape(tf.convert_to_tensor(gradient), variable.shape))
        elif eager and tf.as_dtype(variable.dtype).is_floating:
            handed[name] = (variable, None)
    grace.track_missing = grace.track_missing or eager
    with tf.init_scope():  # state must outlive the graph that is being traced
        grace.build({name: variable for name, (variable, _) in handed.items()})
        grace.settle()
    if not eager and grace.transport.elastic:
        _check_workers(grace.world_size)
    means = grace.step({name: gradient for name, (_, gradient) in handed.items()})
    if eager:
        grace.tune()
    return [means.get(name) for name in names]


class DistributedGradientTape:
    """A gradient tape whose gradients are averaged over all workers.

    ``tape = grace.tensorflow.DistributedGradientTape(tape, grace=grc)`` around a recorded tf.GradientTape; everything
    else is the tape's own.
    """

    def __init__(self, tape: tf.GradientTape, grace: Grace):
        self._tape = tape
        self._grace = grace

    def gradient(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """As tf.GradientTape.gradient, then averaged; the structure of ``sources`` is kept."""
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
    # A graph that is run by other workers than it was made for would leave some of them out, and say nothing.
    from horovod.tensorflow import size_op

    tf.debugging.assert_equal(
        size_op(),
        number,
        f"this graph averages over {number} workers, and now there are others: make the tf.function inside the "
        "function that grace.elastic.run wraps",
    )


def names_of(variables: Sequence[Any]) -> list[str]:
    """Keras paths or TensorFlow names; a number tells apart those that are used twice."""
    counts: Counter[str] = Counter()
    names = []
    for variable in variables:
        name = getattr(variable, "path", None) or variable.name.removesuffix(":0")
        counts[name] += 1
        names.append(name if counts[name] == 1 else f"{name}#{counts[name]}")
    return names


def _leaves(structure: Any) -> list[Any]:
    # tf.nest.flatten would take IndexedSlices apart.
    if isinstance(structure, dict):
        return [leaf for key in sorted(structure) for leaf in _leaves(structure[key])]
    if isinstance(structure, (list, tuple)):
        return [leaf for part in structure for leaf in _leaves(part)]
    return [structure]
