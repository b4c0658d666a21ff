"""What all trainers share: the exchange in their model, its figures for their logs, its state in their checkpoints."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from grace import checkpoint
from grace.engine.session import Grace
from grace.factory import grace_from_params
from grace.torch.checks import check_grace
from grace.torch.ddp import ddp_hook, name_parameters
from grace.torch.fsdp import fsdp
from grace.torch.optimizer import is_dummy

FOLDER = "grace"
"""The folder within a trainer's checkpoint that holds one file per worker."""
SILENT = (
    "no gradient went through GRACE in this step: it calls the module inside DistributedDataParallel, not its "
    "forward, or stays inside no_sync, so that each worker trains a model of its own. Call the prepared model; in "
    "a trainer switch off the option that does so (fused losses, such as use_liger_kernel), or train without GRACE"
)


def compress(model: nn.Module, params: Mapping[str, Any] | Grace) -> Grace:
    """Compress what a prepared model exchanges; call it before the first backward pass, on every worker.

    ``model``: a DistributedDataParallel or FSDP2 model, also inside the wrappers of Fabric, Ray Train, torch.compile.
    ``params``: as for `grace.grace_from_params`, or a Grace. For FSDP2 the communicator is "reducescatter" by default,
    and "parameters" compresses the all-gather, as in `grace.torch.fsdp`. Returns the Grace, for its report and state.

    State has the model's parameter names. Raises TypeError for other objects; ValueError for a plain model if there are
    several processes; RuntimeError after an optimizer's first step if no gradient has passed through
    DistributedDataParallel. A plain model of a single process sends nothing.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"a model is needed, not {type(model).__name__}: grace.torch.compress(model, {{...}})")
    exchange = Exchange(params, any(isinstance(each, FSDPModule) for each in model.modules()))
    exchange.attach(model)
    return exchange.averages


class Exchange:
    """A Grace in the model of a trainer. ``params``: as for `grace_from_params`, or a Grace.

    ``sharded``: the model will be an FSDP2 one; then "communicator" is "reducescatter" by default, and "parameters" is
    the argument of `grace.torch.fsdp`. Raises as `grace_from_params`, and ValueError for "local".
    """

    def __init__(self, params: Mapping[str, Any] | Grace, sharded: bool = False):
        self._gather = None
        if isinstance(params, Mapping):
            if "local" in params:
                raise ValueError(
                    "local training steps a plain model, but this one is prepared for FSDP2 or "
                    "DistributedDataParallel: call grace.torch.local with the optimizer of a plain model"
                )
            params = dict(params)
            if sharded:
                self._gather = params.pop("parameters", None)
                params = {"communicator": "reducescatter", **params}
            self.averages = grace_from_params(params)
        else:
            check_grace(params, "pass it, or the dictionary for it")
            self.averages = params
        self._model: ref[nn.Module] | None = None

    def attach(self, model: nn.Module) -> bool:
        """Compress what a prepared model exchanges; call it before the first backward pass, on every worker.

        ``model``: DistributedDataParallel or with FSDP2 modules, also inside other wrappers. A second call with the
        same model does nothing. Returns whether anything is exchanged: a plain model of a single process sends
        nothing. Raises ValueError for a plain model of several, RuntimeError for a second model.
        """
        found = [each for each in model.modules() if isinstance(each, (DistributedDataParallel, FSDPModule))]
        if not found and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise ValueError(
                f"{type(model).__name__} is neither DistributedDataParallel nor an FSDP2 model, so that GRACE finds no "
                "exchange to compress: start one process per device (torchrun, accelerate launch) and let the trainer "
                "prepare the model for DDP or FSDP2"
            )
        known = None if self._model is None else self._model()
        if not found or known is found[0]:
            return bool(found)
        if self._model is not None:
            raise RuntimeError(
                "the trainer has made a second model, but the state here belongs to the first: make a new trainer for "
                "each model"
            )
        self._model = ref(found[0])
        if isinstance(found[0], DistributedDataParallel):
            _hook(self.averages, found[0])
        else:
            fsdp(model, self.averages, parameters=self._gather)
            sizes = {p.device_mesh.size() for p in model.parameters() if isinstance(p, DTensor)}
            if sizes != {self.averages.world_size}:
                raise ValueError(
                    f"the model is sharded over {', '.join(map(str, sorted(sizes)))} workers, but grace averages over "
                    f"{self.averages.world_size}: shard over all (ModelParallelStrategy(data_parallel_size=...)), or "
                    "pass a Grace with transport=TorchDistributedTransport(mesh.get_group())"
                )
        return True

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write this worker's state into a trainer's checkpoint. Every worker makes this call."""
        save(self.averages, folder)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Load what `save` wrote; raises as `grace.checkpoint.load`, on all workers alike."""
        load(self.averages, folder)


def figures(averages: Any) -> dict[str, float]:
    """For a trainer's log: ratio, and bytes that this worker has sent since the training began or was resumed."""
    report = averages.report()
    return {"grace_ratio": report.ratio, "grace_bytes_sent": float(report.bytes_sent)}


def save(averages: Any, folder: str | os.PathLike[str]) -> None:
    """Write the state of a Grace or a DiLoCo into the folder of a trainer's checkpoint."""
    here = Path(folder) / FOLDER
    shutil.rmtree(here, ignore_errors=True)  # files of an earlier run in the same folder
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    checkpoint.save(averages, here, keep=0)


def load(averages: Any, folder: str | os.PathLike[str]) -> None:
    """Load what `save` wrote."""
    try:
        checkpoint.load(averages, Path(folder) / FOLDER)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{error}. The trainer wrote this checkpoint without GRACE, or was stopped meanwhile: resume from an "
            "earlier one, or train without resuming"
        ) from error


def _hook(grace: Grace, model: DistributedDataParallel) -> None:
    # The hook must not hold a strong reference to the model: DDP's C++ part holds the hook, and the garbage collector
    # does not see this cycle.
    weak = ref(model)

    # Check after the step, not before it: the step's closure may run the backward passes.
    def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        model = weak()
        mine = {p for p in model.parameters() if p.grad is not None} if model is not None else set()
        held = {p for group in optimizer.param_groups for p in group["params"]}
        if not mine.isdisjoint(held) and not is_dummy(optimizer):
            raise RuntimeError(SILENT)

    first = register_optimizer_step_post_hook(after_step)

    def fired(grace, bucket):
        first.remove()
        return ddp_hook(grace, bucket)

    name_parameters(grace, model)
    # Build now, so that the workers can agree on a checkpoint's tensors before the first pass.
    named, ignored = model.module.named_parameters(), model.parameters_to_ignore
    grace.build([(name, p) for name, p in named if p.requires_grad and name not in ignored])
    model.register_comm_hook(grace, fired)
