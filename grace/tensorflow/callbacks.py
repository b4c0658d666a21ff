"""Keras callbacks: broadcasts, means of metrics, policies, records, gossip."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from grace.collectives import Reduce
from grace.gossip import Gossip
from grace.pipeline import Grace
from grace.tensorflow.broadcast import broadcast_variables, transport_of
from grace.tensorflow.gradients import names_of


class BroadcastCallback(keras.callbacks.Callback):
    """Start ``model.fit`` from worker ``root_rank``'s weights and optimizer state."""

    def __init__(self, root_rank: int = 0, grace: Grace | None = None):
        super().__init__()
        self.root_rank, self._grace = root_rank, grace

    def on_train_begin(self, logs: Any = None) -> None:
        if self.model.jit_compile:
            raise ValueError("Horovod's operations have no XLA form: compile the model with jit_compile=False")
        optimizer = self.model.optimizer
        if not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        broadcast_variables([*self.model.weights, *optimizer.variables], self.root_rank, self._grace)


class MetricAverageCallback(keras.callbacks.Callback):
    """Average the metrics of each epoch over all workers. Put it before callbacks that act on them."""

    def __init__(self, grace: Grace | None = None):
        super().__init__()
        self._grace = grace

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not logs:
            return
        keys = sorted(logs)
        values = tf.constant([float(logs[key]) for key in keys], tf.float32)
        ((means,),) = transport_of(self._grace).start([Reduce((values,), "mean")], "metrics")()
        logs.update(zip(keys, means.numpy().tolist(), strict=True))


class PolicyCallback(keras.callbacks.Callback):
    """Tell a Grace's policy that a step or an epoch is over. Put it after callbacks that set the learning rate.

    An epoch ends where the next one begins, when its learning rate is known, or with the training. ``grace``: by
    default that of the model's optimizer.
    """

    def __init__(self, grace: Grace | None = None):
        super().__init__()
        self._grace = grace
        self._rate: float | None = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        _grace_of(self).tune()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        rate = float(self.model.optimizer.learning_rate)
        self._end(rate)
        self._rate = rate

    def on_train_end(self, logs: Any = None) -> None:
        self._end(self._rate)

    def _end(self, next_rate: float | None) -> None:
        grace = _grace_of(self)
        if grace.steps_this_epoch:
            grace.end_epoch(self._rate, next_rate)


class RecordCallback(keras.callbacks.Callback):
    """Write the record of a training in ``fit`` (`Options.record`), which a graph cannot do by itself.

    A line after every ``record_every`` batches and one at the end. ``grace``: by default that of the model's optimizer.
    """

    def __init__(self, grace: Grace | None = None):
        super().__init__()
        self._grace = grace
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batches += 1
        if self._batches % _grace_of(self).options.record_every == 0:
            _grace_of(self).record()

    def on_train_end(self, logs: Any = None) -> None:
        _grace_of(self).record()


def gossip_variables(gossip: Gossip, variables: Sequence[Any]) -> None:
    """Mix variables between neighbours, once; the first call builds their state. Eagerly, after an optimizer's step.

    RuntimeError inside a graph: which side of a matrix is next depends on the round.
    """
    if tf.inside_function():
        raise RuntimeError("gossip_variables is no part of a graph: call it after the tf.function that steps")
    named = dict(zip(names_of(variables), variables, strict=True))
    values = {name: tf.convert_to_tensor(variable) for name, variable in named.items()}
    if not gossip.built:
        gossip.build(values)
    for name, mixed in gossip.step(values).items():
        named[name].assign(mixed)


class GossipCallback(keras.callbacks.Callback):
    """Mix the model's trainable variables between neighbours after each call of its training step in ``fit``.

    The optimizer is a plain one: gradients stay each worker's own. With ``steps_per_execution`` above 1 workers mix
    once for so many steps. Begin with `BroadcastCallback`, so that all start from the same variables.
    """

    def __init__(self, gossip: Gossip):
        super().__init__()
        self._gossip = gossip

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        gossip_variables(self._gossip, self.model.trainable_variables)


def _grace_of(callback: Any) -> Grace:
    grace: Grace | None = callback._grace or getattr(callback.model.optimizer, "_grace", None)
    if grace is None:
        name = type(callback).__name__
        raise ValueError(f"the model's optimizer is not distributed: name the Grace, as {name}(grace)")
    return grace
