"""GRACE: gradient compression for distributed training, one method definition for every toolkit."""

from __future__ import annotations

import importlib
from typing import Any

from grace.collectives import AllToAll, Broadcast, Gather, Reduce
from grace.communicators.base import Communicator
from grace.core import Combine, Compressor, Context, Memory, Transport
from grace.method import Method
from grace.pipeline import Grace
from grace.registry import grace_from_params, register
from grace.simulate import simulate

__version__ = "0.1.0"
__all__ = [
    "AllToAll",
    "Broadcast",
    "Combine",
    "Communicator",
    "Compressor",
    "Context",
    "Gather",
    "Grace",
    "Memory",
    "Method",
    "Reduce",
    "Transport",
    "__version__",
    "grace_from_params",
    "register",
    "simulate",
]


def __getattr__(name: str) -> Any:
    # `grace.torch` and `grace.tensorflow` import their toolkit when they are first used.
    if name in ("torch", "tensorflow", "checkpoint", "elastic"):
        return importlib.import_module(f"grace.{name}")
    raise AttributeError(f"module 'grace' has no attribute {name!r}")
