"""Local training in Keras: averages pseudo-gradients every H training steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras

from grace.keras.callbacks import optimizers_of
from grace.keras.names import names_of
from grace.keras.toolkits import toolkit
from grace.local import Access, DiLoCo


def local_variables(local: DiLoCo, variables: Sequence[Any], others: Sequence[Any] = ()) -> None:
    """Set the variables of local training, once; then call ``local.step()`` after each training step.

    Their values must be equal on all workers.

    ``others``: variables that are not trained, of which floats (BatchNorm's moving means) are averaged once in H steps.
    Call it eagerly: inside a graph it raises RuntimeError.
    """
    kit = toolkit("grace.keras.local_variables", variables)
    if kit.inside_graph():
        raise RuntimeError("local training is no part of a graph: call it outside of the tf.function that steps")
    names = names_of(kit, [*variables, *others])
    named = dict(zip(names, [*variables, *others], strict=True))
    floats = [name for name in names[len(variables) :] if kit.is_float(named[name])]
    trained = {name: named[name] for name in names[: len(variables)]}
    local.build(trained, {name: named[name] for name in floats}, Access(kit.tensor, _assign, kit.inside))


def _assign(variable: Any, value: Any) -> None:
    variable.assign(value)


class LocalCallback(keras.callbacks.Callback):
    """Let each training step in ``fit`` count as a step of local training.

    Use a plain optimizer: gradients stay local. BatchNorm's moving means are averaged once in H steps. At the end of
    ``fit`` this callback calls ``local.finish()``, and once more after all other callbacks. So all workers have the
    same model, whatever was written at the end of training (best weights by EarlyStopping, SwapEMAWeights, ``use_ema``)
    and in any order of the callbacks. Call ``local.finish()`` yourself before an evaluation in between. With
    ``steps_per_execution`` above 1, H counts calls of that many steps. Put `BroadcastCallback` before it, so that all
    workers start from the same variables; all must make the same number of steps.

    The second ``finish`` runs with the History callback, which ``fit`` puts after yours: if the list has a History of
    your own, put it behind the callbacks that write weights. Raises TypeError for anything but a DiLoCo, ValueError for
    a distributed optimizer, and for a model that is not built or whose trainable variables have changed.
    """

    def __init__(self, local: DiLoCo):
        self._kit = toolkit("grace.keras.LocalCallback")
        if not isinstance(local, DiLoCo):
            raise TypeError(f"a grace.local.DiLoCo is needed, not {type(local).__name__}: grace.local.DiLoCo(grc, 100)")
        super().__init__()
        self._local = local

    def on_train_begin(self, logs: Any = None) -> None:
        for optimizer in optimizers_of(self.model):
            _check_plain(optimizer)
        history = getattr(self.model, "history", None)
        if isinstance(history, keras.callbacks.History):
            history.on_train_end = partial(_end, history, self._finish)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        trained = self.model.trainable_variables
        if not trained:
            raise ValueError("the model has no variables yet: give it an Input, or call it on a batch before fit")
        if not self._local.built:
            local_variables(self._local, trained, self.model.non_trainable_weights)
        if not self._local.settled:
            self._local.settle()
        if names_of(self._kit, trained) != self._local.names:
            raise ValueError(
                "the model has other trainable variables than local training began with: make a new DiLoCo"
            )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._local.step()

    def on_train_end(self, logs: Any = None) -> None:
        self._finish()

    def _finish(self) -> None:
        if self._local.built:
            self._local.finish()


def _end(history: Any, finish: Callable[[], None], logs: Any = None) -> None:
    # Replaces a History's on_train_end, so that it runs after all other callbacks of `fit`.
    del history.on_train_end
    history.on_train_end(logs)
    finish()


def _check_plain(optimizer: Any) -> None:
    inner = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
    if hasattr(inner, "_grace"):
        remedy = "grace.keras.release(optimizer) undoes DistributedOptimizer"
    elif hasattr(inner, "_allreduce_grads"):  # Horovod's
        remedy = "the one that Horovod's DistributedOptimizer was made of"
    else:
        return
    raise ValueError(
        f"this {type(inner).__name__} is distributed: it averages the gradients of every step, and local training "
        f"would average the parameters too. Use a plain optimizer: {remedy}"
    )
