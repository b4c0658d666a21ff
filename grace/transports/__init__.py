"""Carry collectives out: this process alone, torch.distributed, Horovod."""

from __future__ import annotations

import os
import sys
from typing import Any

from grace.core import Transport

NAMES = ("local", "torch", "horovod")


def get_transport(name: str | Transport | None = None) -> Transport:
    """A transport by name, or the one that is initialised.

    Raises RuntimeError when none is and the launcher (or "torch"/"horovod") asks for more than one worker.
    """
    if isinstance(name, Transport):
        return name
    if name is None:
        name = _initialised()
    if name == "local":
        from grace.transports.local import LocalTransport

        return LocalTransport()
    if name == "torch":
        from grace.transports.torch_distributed import TorchDistributedTransport

        return TorchDistributedTransport()
    if name == "horovod":
        from grace.transports.horovod import HorovodTransport

        return HorovodTransport()
    raise ValueError(f"unknown transport {name!r}; choose one of {', '.join(NAMES)}")


def _initialised() -> str:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return "torch"
    if any(module.is_initialized() for module in loaded_horovod()):
        return "horovod"
    wanted = {key: os.environ.get(key, "1") for key in ("WORLD_SIZE", "HOROVOD_SIZE")}
    for key, value in wanted.items():
        if value.isdigit() and int(value) > 1:
            call = "torch.distributed.init_process_group()" if key == "WORLD_SIZE" else "hvd.init()"
            raise RuntimeError(
                f"{key}={value} asks for {value} workers, but no transport is initialised: call {call} before "
                "grace_from_params, or pass transport='local' to train this worker by itself"
            )
    return "local"


def loaded_horovod() -> list[Any]:
    """Horovod's bindings that this process has imported."""
    names = ("horovod.torch", "horovod.tensorflow")
    return [sys.modules[name] for name in names if hasattr(sys.modules.get(name), "is_initialized")]
