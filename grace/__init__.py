"""GRACE: gradient compression for distributed training, one method definition for every toolkit."""

from __future__ import annotations

import importlib
from typing import Any

from grace.aliases import ALIASES
from grace.core import Combine, Compressor, Context, Memory, Traits, Transport
from grace.core.collectives import AllToAll, Broadcast, Gather, Reduce
from grace.core.communicator import Communicator
from grace.core.method import Method
from grace.core.registry import register
from grace.core.version import VERSION
from grace.engine.session import Grace
from grace.factory import grace_from_params
from grace.simulate import simulate
from grace.start import init

__version__ = VERSION
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
    "Traits",
    "Transport",
    "__version__",
    "grace_from_params",
    "init",
    "register",
    "simulate",
]


def __getattr__(name: str) -> Any:
    # Import these modules on first use; `torch`, `tensorflow`, `keras` and `jax` import their toolkit.
    if (
        name in ("torch", "tensorflow", "keras", "jax", "checkpoint", "elastic", "local", "patch", "trackers")
        or f"grace.{name}" in ALIASES
    ):
        return importlib.import_module(f"grace.{name}")
    raise AttributeError(f"module 'grace' has no attribute {name!r}")
