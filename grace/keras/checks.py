"""Checks of user arguments before anything is sent."""

from __future__ import annotations

from typing import Any

import keras

from grace.engine.session import Grace
from grace.keras.toolkits import toolkit


def check_grace(grace: Any, where: str) -> None:
    """Raise TypeError unless ``grace`` is a Grace. ``where``: what needs it, for the message."""
    if isinstance(grace, Grace):
        return
    if isinstance(grace, (dict, str)):
        given = "a dictionary" if isinstance(grace, dict) else repr(grace)
        raise TypeError(f"{where} needs a Grace, not {given}: make it once, as grc = grace.grace_from_params({{...}})")
    raise TypeError(f"{where} needs a Grace from grace.grace_from_params, not {_kind(grace)}")


def check_optimizer(optimizer: Any) -> None:
    """Raise TypeError unless this is a Keras 3 optimizer, RuntimeError if Keras runs on an unsupported backend."""
    if isinstance(optimizer, Grace):
        raise TypeError("the optimizer comes first: DistributedOptimizer(optimizer, grace=grc)")
    if isinstance(optimizer, str):
        raise TypeError(f"pass an optimizer, not its name: keras.optimizers.get({optimizer!r})")
    if isinstance(optimizer, type):
        raise TypeError(f"pass an optimizer, not its class: {optimizer.__name__}(learning_rate=...)")
    toolkit("grace.keras.DistributedOptimizer")
    if any(each.__module__ == "tensorflow.python.training.optimizer" for each in type(optimizer).__mro__):
        raise TypeError(
            f"{_kind(optimizer)} is an optimizer of TensorFlow 1: use one of keras.optimizers, or average its "
            "gradients with grace.tensorflow.average_gradients"
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        legacy = " (of Keras 2: use keras.optimizers of Keras 3)" if "keras" in type(optimizer).__module__ else ""
        raise TypeError(f"DistributedOptimizer wraps optimizers of Keras 3, not {_kind(optimizer)}{legacy}")


def check_horovod(grace: Grace, given: dict[str, Any], optional: tuple[str, ...]) -> None:
    """Check arguments of Horovod's function of the same name: their values must match GRACE's behaviour.

    ``optional``: the names of its arguments. Raises TypeError for other names, ValueError with a remedy for unsupported
    values.
    """
    for name, value in given.items():
        if name not in optional:
            raise TypeError(f"unexpected argument {name!r}")
        accepted, remedy = True, ""
        if name == "op":
            accepted = value is None or value == 0 or str(value).endswith("Average")
            remedy = "means are what is applied: scale the loss for sums"
        elif name == "compression":
            accepted = value is None or getattr(value, "__name__", type(value).__name__) == "NoneCompressor"
            remedy = "name the method in grace_from_params, as {'compressor': 'fp16'}"
        elif name == "process_set":
            accepted = value is None or getattr(value, "process_set_id", None) == process_set_of(grace)
            remedy = "grace_from_params(..., transport=grace.transports.horovod.HorovodTransport(process_set))"
        elif name == "backward_passes_per_step":
            accepted = value == 1
            remedy = "gradient_accumulation_steps of the Keras optimizer adds up means of so many steps"
        elif name in ("gradient_predivide_factor", "num_groups", "groups"):
            accepted = value in (None, 0, 1) if name != "groups" else value is None
            remedy = "scale the loss" if name == "gradient_predivide_factor" else "set bucket_mb in grace_from_params"
        elif name in ("device_dense", "device_sparse"):
            accepted = not value
            remedy = "leave it out: gradients travel from where they are"
        elif name == "scale_local_gradients":
            accepted, remedy = value is True, "leave it out: there are no local variables"
        # Any value is accepted for the rest: name, sparse_as_dense, average_aggregated_gradients.
        if not accepted:
            raise ValueError(f"{name}={value!r} is not supported: {remedy}")


HOROVOD_TAPE = (
    *("device_dense", "device_sparse", "compression", "sparse_as_dense", "op", "gradient_predivide_factor"),
    *("num_groups", "groups", "process_set", "scale_local_gradients"),
)
HOROVOD_OPTIMIZER = (*HOROVOD_TAPE, "name", "backward_passes_per_step", "average_aggregated_gradients")


def process_set_of(grace: Grace) -> int:
    """The ID of the Horovod process set over which a Grace averages; 0 for all workers."""
    return getattr(getattr(grace.transport, "_process_set", None), "process_set_id", None) or 0


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
