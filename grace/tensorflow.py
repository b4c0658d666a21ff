"""TensorFlow's doors: DistributedGradientTape, DistributedOptimizer for Keras 3, callbacks and broadcasts."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from grace import checkpoint
from grace.backends import get_backend
from grace.collectives import Broadcast, Reduce
from grace.core import Transport, name_of
from grace.gossip import Gossip
from grace.pipeline import MOMENTUM_TWICE, SPARSE, Grace
from grace.transports import get_transport

__all__ = [
    "BroadcastCallback",
    "CheckpointState",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "GossipCallback",
    "MetricAverageCallback",
    "PolicyCallback",
    "RecordCallback",
    "average_gradients",
    "broadcast_variables",
    "gossip_variables",
    "release",
]


@tf.autograph.experimental.do_not_convert  # its loops run once, while the graph is made
def average_gradients(grace: Grace, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Means of gradients over all workers, eagerly or while a graph is traced.

    A gradient that is None counts as zero if another worker has one, and stays None if none has. Inside a graph it just
    stays None: all workers trace the same program, so they lack the same ones. IndexedSlices (of embeddings) become
    dense.
    """
    names = _names(variables)
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


def DistributedOptimizer(optimizer: keras.optimizers.Optimizer, grace: Grace) -> keras.optimizers.Optimizer:
    """Let a Keras 3 optimizer apply gradients averaged over all workers: in custom loops, tf.function and model.fit.

    Returns the optimizer that was passed in. Its clipping and weight decay act on the means. Wrap a LossScaleOptimizer
    from the outside, so that all workers see an overflow together. Compile models with ``jit_compile=False``: Horovod's
    operations have no XLA form.
    """
    cls = type(optimizer)
    if hasattr(optimizer, "_grace"):
        raise ValueError("this optimizer is distributed already: wrap it once")
    if hasattr(getattr(optimizer, "inner_optimizer", None), "_grace"):
        raise ValueError(
            "wrap the LossScaleOptimizer, not the optimizer inside: DistributedOptimizer(LossScaleOptimizer(...))"
        )

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        means = average_gradients(self._grace, list(grads), variables)
        return cls.apply(self, means, trainable_variables)

    if grace.schedule is not None and grace.schedule.policy.batch:
        raise ValueError(
            f"policy {name_of(grace.schedule.policy)!r} adds up gradients before they are exchanged, and Keras "
            "exchanges them in every step: use it in a loop of your own, or with PyTorch"
        )
    if grace.method.memory.momentum_inside and getattr(optimizer, "momentum", None):
        warnings.warn(MOMENTUM_TWICE.format(name_of(grace.method.memory)), stacklevel=2)
    grace.learning_rate = lambda name: tf.convert_to_tensor(optimizer.learning_rate)

    # The user's own object, of a class that differs in this one method and saves as what it was.
    names = {"apply": apply, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    optimizer.__class__ = type(cls.__name__, (cls,), names)
    object.__setattr__(optimizer, "_grace", grace)
    return optimizer


def release(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Undo `DistributedOptimizer`: gradients stay here, and the Grace may drive another optimizer."""
    if not hasattr(optimizer, "_grace"):
        raise ValueError("this optimizer is not distributed")
    optimizer.__class__ = type(optimizer).__base__
    object.__delattr__(optimizer, "_grace")
    return optimizer


class CheckpointState(tf.train.experimental.PythonState):
    """A Grace in a tf.train.Checkpoint: ``tf.train.Checkpoint(model=model, grace=CheckpointState(grc))``.

    Residuals differ between workers, so each worker saves under a path of its own, and restores from there.
    """

    def __init__(self, grace: Grace):
        super().__init__()
        self._grace = grace

    def serialize(self) -> bytes:
        return checkpoint.to_bytes(self._grace.state_dict())

    def deserialize(self, string_value: bytes) -> None:
        self._grace.load_state_dict(checkpoint.from_bytes(string_value))


def broadcast_variables(variables: Iterable[Any], root_rank: int = 0, grace: Grace | None = None) -> None:
    """Assign worker ``root_rank``'s values to the variables of all workers (eagerly, before training)."""
    variables = [variable for variable in variables if tf.as_dtype(variable.dtype) not in (tf.string, tf.resource)]
    if not variables:
        return
    values = [tf.convert_to_tensor(variable) for variable in variables]
    wait = _transport(grace).start([Broadcast((value,), root_rank) for value in values], "variables")
    for variable, (value,) in zip(variables, wait(), strict=True):
        variable.assign(value)


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
        ((means,),) = _transport(self._grace).start([Reduce((values,), "mean")], "metrics")()
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
    named = dict(zip(_names(variables), variables, strict=True))
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


def _transport(grace: Grace | None) -> Transport:
    transport = get_transport() if grace is None else grace.transport
    return transport.bind(get_backend("tensorflow")) if getattr(transport, "xp", None) is None else transport


def _names(variables: Sequence[Any]) -> list[str]:
    # Keras paths or TensorFlow names; a number tells apart those that are used twice.
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
