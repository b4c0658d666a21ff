"""DistributedOptimizer: a Keras 3 optimizer that applies means over all workers."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras

from grace.core import name_of
from grace.engine.session import MOMENTUM_TWICE, PLAIN_SGD, Grace
from grace.keras.applied import deciding
from grace.keras.broadcast import transport_of
from grace.keras.checks import HOROVOD_OPTIMIZER, check_grace, check_horovod, check_optimizer
from grace.keras.gradients import DRIVEN
from grace.keras.start import begin
from grace.keras.toolkits import Toolkit, toolkit, unconverted


@unconverted
def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer, grace: Grace, **horovod: Any
) -> keras.optimizers.Optimizer:
    """Let a Keras 3 optimizer apply gradients averaged over all workers: in custom loops, tf.function and model.fit.

    Returns the same optimizer. Its clipping and weight decay act on the means. A LossScaleOptimizer, including one that
    ``compile`` adds for the policy mixed_float16, decides by the means, so that all workers skip a step together.
    Compile models for TensorFlow with ``jit_compile=False``: Horovod's operations have no XLA form.

    The means of an ``apply`` count as applied if the optimizer advances its ``_iterations`` or, in an ``apply`` of
    your own, changes a variable. Means that the optimizer accumulates for a later step count as applied, too.
    If the optimizer skips the step or raises, means are discarded, which restores all state and the count of steps.
    `average_gradients` sees no step, so its means always count as applied.

    A Grace drives one optimizer until `release`. Saved models, configurations and copies hold a plain optimizer: wrap
    it, with its own Grace, to continue training. ``horovod``: arguments of Horovod's function of the same name,
    accepted if they match GRACE's behaviour.

    Raises TypeError unless given a Keras 3 optimizer and a Grace, ValueError if either is already distributed or an
    argument of Horovod's does not match, RuntimeError for Keras on another backend and for tf.distribute strategies
    with several replicas or, on PyTorch, a keras.distribution.
    """
    check_optimizer(optimizer)
    check_grace(grace, "DistributedOptimizer")
    check_horovod(grace, horovod, HOROVOD_OPTIMIZER)
    kit = toolkit("grace.keras.DistributedOptimizer")
    kit.check_alone(optimizer)
    _judge_means(kit)
    if hasattr(optimizer, "_grace"):
        raise ValueError("this optimizer is distributed already: wrap it once")
    if grace in DRIVEN:
        raise ValueError(
            f"this Grace drives an optimizer already ({DRIVEN[grace]}): make one Grace for each optimizer, or release "
            "the first, as grace.keras.release(optimizer)"
        )
    if grace.schedule is not None and grace.schedule.policy.batch:
        raise ValueError(
            f"policy {name_of(grace.schedule.policy)!r} adds up gradients before they are exchanged, and Keras "
            "exchanges them in every step: use it in a loop of your own, or with PyTorch"
        )
    moments = any(getattr(optimizer, key, None) for key in ("momentum", "beta_1"))
    if grace.method.compressor.traits.update_direction and (moments or hasattr(optimizer, "beta_1")):
        raise ValueError(PLAIN_SGD.format(name_of(grace.method.compressor), type(optimizer).__name__))
    if grace.method.memory.includes_momentum and moments:
        warnings.warn(MOMENTUM_TWICE.format(name_of(grace.method.memory)), stacklevel=2)

    # Set attributes on the user's object and keep its class, so that it saves, loads and copies as before. The
    # functions hold weak references, so that the optimizer can be garbage-collected.
    reference = weakref.ref(optimizer)
    grace.learning_rate = lambda name: keras.ops.convert_to_tensor(_alive(reference).learning_rate)

    @kit.opaque
    def apply(grads: Any, trainable_variables: Any = None) -> Any:
        self = _alive(reference)
        if self._grace_paused:
            return type(self).apply(self, grads, trainable_variables)
        return _apply_means(kit, self, self._grace, grads, trainable_variables, type(self).apply)

    for key, value in (("_grace", grace), ("_grace_paused", False), ("apply", apply)):
        object.__setattr__(optimizer, key, value)
    DRIVEN[grace] = f"{type(optimizer).__name__} {optimizer.name!r}"
    return optimizer


def release(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Undo `DistributedOptimizer`: gradients stay local, and the Grace may drive another optimizer.

    ``optimizer``: may also be a LossScaleOptimizer around it. ValueError if it is not distributed.
    """
    wrapped = optimizer
    if "_grace" not in vars(wrapped) and hasattr(optimizer, "_grace"):
        wrapped = optimizer.inner_optimizer
    if "_grace" not in vars(wrapped):
        raise ValueError("this optimizer is not distributed")
    DRIVEN.pop(wrapped._grace, None)
    wrapped._grace.learning_rate = None
    for key in ("_grace", "_grace_paused", "apply"):
        object.__delattr__(wrapped, key)
    return optimizer


def _alive(reference: Any) -> Any:
    optimizer = reference()
    if optimizer is None:
        raise ReferenceError("the optimizer that this Grace drives is gone")
    return optimizer


def _apply_means(kit: Toolkit, optimizer: Any, grace: Grace, grads: Any, variables: Any, apply: Any) -> Any:
    # Call ``apply(optimizer, means, variables)``. First check what Keras would reject only after the exchange.
    variables = None if variables is None else list(variables)
    if variables is None and not optimizer.built:
        raise ValueError("build the optimizer first, as optimizer.build(model.trainable_variables), or pass variables")
    if variables is not None and optimizer.built and hasattr(optimizer, "_check_variables_are_known"):
        optimizer._check_variables_are_known(variables)
    known, grads = optimizer._trainable_variables if variables is None else variables, list(grads)
    if len(grads) != len(known):
        raise ValueError(f"there are {len(grads)} gradients for {len(known)} variables")
    begin(kit, optimizer, grace, transport_of(kit, grace))
    with deciding(kit, optimizer, grace, known):
        found = apply(optimizer, kit.exchange(grace, grads, known), variables)
    kit.tune(grace)
    return found


class _Inner:
    # A LossScaleOptimizer exposes the Grace of its inner optimizer; a Grace in its own __dict__ takes precedence.
    def __get__(self, scaler: Any, cls: Any = None) -> Any:
        if scaler is None:
            return self
        return scaler.inner_optimizer._grace


def _judge_means(kit: Toolkit) -> None:
    # Keras's loss scaler skips the inner optimizer if its input is not finite. With local gradients, each worker would
    # decide on its own. Therefore, if the inner optimizer is distributed, pass the means to the scaler.
    scaler = keras.optimizers.LossScaleOptimizer
    if isinstance(vars(scaler).get("_grace"), _Inner):
        return
    plain = scaler.apply

    @kit.opaque
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        inner = self.inner_optimizer
        if "_grace" not in vars(inner) or inner._grace_paused:
            return plain(self, grads, trainable_variables)
        with _paused(inner):
            return _apply_means(kit, self, inner._grace, grads, trainable_variables, plain)

    scaler.apply, scaler._grace = apply, _Inner()


@contextmanager
def _paused(optimizer: Any) -> Iterator[None]:
    object.__setattr__(optimizer, "_grace_paused", True)
    try:
        yield
    finally:
        object.__setattr__(optimizer, "_grace_paused", False)
