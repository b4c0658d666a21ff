"""Detects groups of workers: initialised, or requested by a launcher."""

from __future__ import annotations

import os
import sys
from typing import Any

LAUNCHED = {
    "WORLD_SIZE": "torch.distributed.init_process_group()",
    "HOROVOD_SIZE": "hvd.init()",
    "OMPI_COMM_WORLD_SIZE": "hvd.init() or torch.distributed.init_process_group()",
    "MV2_COMM_WORLD_SIZE": "hvd.init() or torch.distributed.init_process_group()",
    "PMI_SIZE": "hvd.init() or torch.distributed.init_process_group()",
    "SLURM_STEP_NUM_TASKS": "torch.distributed.init_process_group()",
    "SLURM_NTASKS": "torch.distributed.init_process_group()",
}
"""Maps each launcher's variable for the number of workers to the call that creates their group."""

JOINED = (
    "a worker has called hvd.join(), which gives zeros for its gradients, and no exchange of GRACE can do without it: "
    "make as many steps on all workers (drop the last batches, or stop all when the first one has no more), and call "
    "hvd.join() after the last step of all"
)


def initialised() -> str | None:
    """The name of the initialised transport; None if no group of workers exists."""
    if process_group() is not None:
        return "torch"
    return "horovod" if any(module.is_initialized() for module in loaded_horovod()) else None


def group_size() -> int:
    """The size of the largest initialised group; 1 without one."""
    group = process_group()
    sizes = [module.size() for module in loaded_horovod() if module.is_initialized()]
    return max([1, *sizes] if group is None else [1, *sizes, group.get_world_size()])


def process_group() -> Any:
    """`torch.distributed` if it has a process group; else None."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def refuse_launched() -> None:
    """Raise RuntimeError if the launcher asks for several workers, since no group exists."""
    for key, call in LAUNCHED.items():
        value = os.environ.get(key, "1")
        if key == "SLURM_NTASKS" and (
            "SLURM_PROCID" not in os.environ or any(other in os.environ for other in LAUNCHED if other != key)
        ):  # SLURM_NTASKS counts the allocation's tasks; another launcher, srun or a shell in it started this process
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
