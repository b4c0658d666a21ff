"""Carry collectives out: this process alone, torch.distributed, Horovod."""

from __future__ import annotations

import os
import sys
from typing import Any

from grace.core import Transport

NAMES = ("local", "torch", "horovod")


LAUNCHED = {
    "WORLD_SIZE": "torch.distributed.init_process_group()",
    "HOROVOD_SIZE": "hvd.init()",
    "OMPI_COMM_WORLD_SIZE": "hvd.init() or torch.distributed.init_process_group()",
    "PMI_SIZE": "hvd.init() or torch.distributed.init_process_group()",
    "SLURM_STEP_NUM_TASKS": "torch.distributed.init_process_group()",
    "SLURM_NTASKS": "torch.distributed.init_process_group()",
}
"""Variables by which a launcher tells the number of workers, and the call that makes them a group."""


def get_transport(name: str | Transport | None = None) -> Transport:
    """A transport by name, or the one that is initialised.

    Raises RuntimeError when none is and the launcher (or "torch"/"horovod") asks for more than one worker. The single
    worker that is returned where none is, and none is asked for, raises RuntimeError in its first exchange beside a
    group of several that was made later.
    """
    if isinstance(name, Transport):
        return name
    if name is None and (name := initialised()) is None:
        _refuse_launched()
        from grace.transports.local import SingleWorker

        return SingleWorker()
    if name == "local":
        from grace.transports.local import LocalTransport

        return LocalTransport()
    if name == "torch":
        from grace.transports.torch_distributed import TorchDistributedTransport

        return TorchDistributedTransport()
    if name == "horovod":
        from grace.transports.horovod import HorovodTransport

        return HorovodTransport()
    if not isinstance(name, str):
        raise TypeError(
            f"transport={name!r} is {type(name).__name__}, not a name ({', '.join(NAMES)}) or a Transport. Of a "
            "process group: grace.transports.torch_distributed.TorchDistributedTransport(group); of a Horovod process "
            "set: grace.transports.horovod.HorovodTransport(process_set)"
        )
    raise ValueError(f"unknown transport {name!r}; choose one of {', '.join(NAMES)}")


def known_transport(name: str | Transport | None = None) -> Transport | None:
    """`get_transport`; None where the default is asked for and no group of workers has been made yet."""
    return None if name is None and initialised() is None else get_transport(name)


def initialised() -> str | None:
    """The name of the transport that is initialised; None: no group of workers has been made."""
    if _process_group() is not None:
        return "torch"
    return "horovod" if any(module.is_initialized() for module in loaded_horovod()) else None


def group_size() -> int:
    """The number of workers in the largest group that is initialised; 1 without one."""
    group = _process_group()
    sizes = [module.size() for module in loaded_horovod() if module.is_initialized()]
    return max([1, *sizes] if group is None else [1, *sizes, group.get_world_size()])


def _process_group() -> Any:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def _refuse_launched() -> None:
    for key, call in LAUNCHED.items():
        value = os.environ.get(key, "1")
        if key == "SLURM_NTASKS" and (
            "SLURM_PROCID" not in os.environ or "SLURM_STEP_NUM_TASKS" in os.environ
        ):  # of the allocation: a shell within it is one process
            continue
        if value.isdigit() and int(value) > 1:
            raise RuntimeError(
                f"{key}={value} asks for {value} workers, but no transport is initialised: call {call} before the "
                "optimizer is wrapped or tensors are built, or pass transport='local' to grace_from_params to train "
                "this worker by itself"
            )


def loaded_horovod() -> list[Any]:
    """Horovod's bindings that this process has imported."""
    names = ("horovod.torch", "horovod.tensorflow")
    return [sys.modules[name] for name in names if hasattr(sys.modules.get(name), "is_initialized")]
