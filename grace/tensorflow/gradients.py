"""Gradient averaging in custom TensorFlow loops: DistributedGradientTape."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from grace.engine.session import Grace
from grace.keras.checks import HOROVOD_TAPE, check_grace, check_horovod
from grace.keras.gradients import average_gradients


class DistributedGradientTape:
    """A gradient tape whose gradients are averaged over all workers.

    ``tape = grace.tensorflow.DistributedGradientTape(tape, grace=grc)`` wraps a recorded tf.GradientTape; all other
    attributes are the tape's own. ``horovod``: arguments of Horovod's class of the same name, accepted if they match
    GRACE's behaviour. Raises TypeError for other types of tape or Grace, ValueError for an already distributed tape.
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
        """Average the result of tf.GradientTape.gradient over all workers; it has the structure of ``sources``.

        Sources that are not variables (watched tensors) are averaged, too. Their index in ``sources`` identifies them,
        so the source at an index must always have the same shape.
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


def _leaves(structure: Any) -> list[Any]:
    # tf.nest.flatten would split IndexedSlices.
    if isinstance(structure, dict):
        return [leaf for key in sorted(structure) for leaf in _leaves(structure[key])]
    if isinstance(structure, (list, tuple)):
        return [leaf for part in structure for leaf in _leaves(part)]
    return [structure]
