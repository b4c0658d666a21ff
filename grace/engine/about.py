"""The facts needed to repeat a run, as plain data for the record: its parameters, versions and machine."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from grace.backends import toolkits
from grace.core import name_of
from grace.core.communicator import Communicator
from grace.core.method import Method
from grace.core.policy import Policy
from grace.core.version import VERSION
from grace.engine.options import Options
from grace.engine.setup import Setup

OUTPUTS = ("record", "record_every", "tracker", "trace")
"""Names of the options that do not affect the results of a training."""


def about(setup: Setup) -> dict[str, Any]:
    """The constant facts of a run, for the first line of its record."""
    return {
        "grace": VERSION,
        "toolkit": setup.xp.name,
        "kernels": bool(setup.xp.kernels) if setup.xp.on_host else None,
        "graph": setup.xp.traced,
        "transport": type(setup.transport).__name__,
        "params": params_of(setup.method, setup.unresolved, setup.policy, setup.options),
        "versions": versions(),
        "machine": machine(),
    }


def params_of(method: Method, communicator: Communicator, policy: Policy | None, options: Options) -> dict[str, Any]:
    """A Grace's parameters that affect results, seed included; `grace_from_params` builds an equal Grace from them.

    A class that is not registered appears under its class name, which `grace_from_params` does not know.
    """
    from grace.communicators.planned import Planned

    plan: dict[str, Any] = {}
    parts = {"compressor": method.compressor, "memory": method.memory, "communicator": communicator, "policy": policy}
    if isinstance(communicator, Planned) and communicator.ways is not None:
        plan = {"plan": json.loads(communicator.ways.text or "null"), "node_size": communicator.node_size}
        del parts["communicator"]
    found = {kind: name_of(part) for kind, part in parts.items() if part is not None}
    for part in parts.values():
        if part is not None:
            found = {**found, **{key: value for key, value in _keys(part).items() if key not in found}}
    names = [field.name for field in fields(options) if field.name not in OUTPUTS]
    return {**found, **plan, **{name: getattr(options, name) for name in names}}


def _keys(part: Any) -> dict[str, Any]:
    own: dict[str, Any] = {}
    nested: dict[str, Any] = {}
    for field in fields(part):
        value = getattr(part, field.name)
        if field.init:
            own[field.name] = _plain(value)
            nested |= _keys(value) if is_dataclass(value) else {}
    return {**nested, **own}


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return name_of(value)


def versions() -> dict[str, str]:
    """The versions of Python, and of Horovod and the toolkits' packages where they are imported."""
    names = (*(name for toolkit in toolkits() for name in toolkit.modules), "horovod")
    loaded = {name: str(getattr(sys.modules[name], "__version__", "")) for name in names if name in sys.modules}
    return {"python": platform.python_version(), **loaded}


def machine() -> dict[str, Any]:
    """The system, processor, number of cores and GPU of this worker's machine, without its host name."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "cores": cores(),
        "gpu": cuda.get_device_name() if cuda is not None and cuda.is_initialized() else "",
    }


def processor() -> str:
    """The name of this machine's processor."""
    try:
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.processor()


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
