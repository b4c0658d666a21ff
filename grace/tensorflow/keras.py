"""DistributedOptimizer: an optimizer of Keras 3 that applies means over all workers."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import tensorflow as tf

from grace.core import name_of
from grace.pipeline import MOMENTUM_TWICE, Grace
from grace.tensorflow.gradients import average_gradients


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
