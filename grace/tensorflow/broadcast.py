"""Broadcasts of variables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from grace.backends import get_backend
from grace.collectives import Broadcast
from grace.core import Transport
from grace.pipeline import Grace
from grace.transports import get_transport


def broadcast_variables(variables: Iterable[Any], root_rank: int = 0, grace: Grace | None = None) -> None:
    """Assign worker ``root_rank``'s values to the variables of all workers (eagerly, before training)."""
    variables = [variable for variable in variables if tf.as_dtype(variable.dtype) not in (tf.string, tf.resource)]
    if not variables:
        return
    values = [tf.convert_to_tensor(variable) for variable in variables]
    wait = transport_of(grace).start([Broadcast((value,), root_rank) for value in values], "variables")
    for variable, (value,) in zip(variables, wait(), strict=True):
        variable.assign(value)


def transport_of(grace: Grace | None) -> Transport:
    """A Grace's transport, or the one that is initialised, for TensorFlow's tensors."""
    transport = get_transport() if grace is None else grace.transport
    return transport.bind(get_backend("tensorflow")) if getattr(transport, "xp", None) is None else transport
