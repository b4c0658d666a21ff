"""What all trainers share: the exchange in their model, its figures for their logs, its state in their checkpoints."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from grace import checkpoint
from grace.engine.session import Grace
from grace.factory import grace_from_params
from grace.local import DiLoCo, from_params
from grace.torch.checks import check_grace
from grace.torch.ddp import ddp_hook, name_parameters
from grace.torch.fsdp import fsdp

FOLDER = "grace"
"""The folder within a trainer's checkpoint that holds one file per worker."""
SILENT = (
    "no gradient went through GRACE in this step: the trainer's step calls the module inside DistributedDataParallel, "
    "not its forward, so that each worker would train a model of its own. Switch off the option that does so (fused "
    "losses, such as use_liger_kernel, do), or use this trainer without GRACE"
)


class Exchange:
    """A Grace in the model of a trainer. ``params``: as for `grace_from_params`, or a Grace.

    With "local" in ``params``, `averages` is a `grace.local.DiLoCo`, and the caller steps it. ``sharded``: the model
    will be an FSDP2 one: "communicator" is "reducescatter" by default, and "parameters" is `grace.torch.fsdp`'s.
    """

    def __init__(self, params: Mapping[str, Any] | Grace, sharded: bool = False):
        self._gather, self.local = None, False
        if isinstance(params, Mapping):
            params = dict(params)
            self.local = "local" in params
            if sharded:
                if self.local:
                    raise ValueError("local training steps whole models: leave out 'local', or FSDP")
                self._gather = params.pop("parameters", None)
                params = {"communicator": "reducescatter", **params}
            self.averages: Grace | DiLoCo = from_params(params) if self.local else grace_from_params(params)
        else:
            check_grace(params, "pass it, or the dictionary for it")
            self.averages = params
        self._model: nn.Module | None = None
        self._buckets = 0

    def attach(self, model: nn.Module) -> bool:
        """Compress what a prepared model exchanges; call it before the first backward pass, on every worker.

        ``model``: DistributedDataParallel or with FSDP2 modules, also inside other wrappers. A second call with the
        same model does nothing. Returns whether anything is exchanged: a plain model of a single process sends
        nothing. Raises ValueError for a plain model of several, RuntimeError for a second model.
        """
        grace = self.averages
        assert isinstance(grace, Grace)
        found = [each for each in model.modules() if isinstance(each, (DistributedDataParallel, _sharded()))]
        if not found and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise ValueError(
                f"{type(model).__name__} is neither DistributedDataParallel nor an FSDP2 model, so that GRACE finds no "
                "exchange to compress: start one process per device (torchrun, accelerate launch) and let the trainer "
                "prepare the model for DDP or FSDP2"
            )
        if not found or self._model is found[0]:
            return bool(found)
        if self._model is not None:
            raise RuntimeError(
                "the trainer has made a second model, but the state here belongs to the first: make a new trainer for "
                "each model"
            )
        self._model = found[0]
        if isinstance(found[0], DistributedDataParallel):
            self._hook(grace, found[0])
        else:
            fsdp(model, grace, parameters=self._gather)
        return True

    def _hook(self, grace: Grace, model: DistributedDataParallel) -> None:
        def counted(grace, bucket):
            self._buckets += 1
            return ddp_hook(grace, bucket)

        name_parameters(grace, model)
        # Built here, the workers can agree on what a checkpoint holds before the first pass.
        named = model.module.named_parameters()
        ignored = model.parameters_to_ignore
        grace.build([(name, p) for name, p in named if p.requires_grad and name not in ignored])
        model.register_comm_hook(grace, counted)

    def check_exchanged(self) -> None:
        """Raise RuntimeError if no bucket of DistributedDataParallel has been exchanged so far."""
        if isinstance(self._model, DistributedDataParallel) and not self._buckets:
            raise RuntimeError(SILENT)

    def figures(self) -> dict[str, float]:
        """For a trainer's log: ratio, and bytes that this worker has sent since the training began or was resumed."""
        report = self.averages.report()
        return {"grace_ratio": report.ratio, "grace_bytes_sent": float(report.bytes_sent)}

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write this worker's state into a trainer's checkpoint. Every worker makes this call."""
        here = Path(folder) / FOLDER
        shutil.rmtree(here, ignore_errors=True)  # of an earlier run in the same folder
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        checkpoint.save(self.averages, here, keep=0)  # type: ignore[arg-type]

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Load what `save` wrote; raises as `grace.checkpoint.load`, on all workers alike."""
        here = Path(folder) / FOLDER
        try:
            checkpoint.load(self.averages, here)  # type: ignore[arg-type]
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{error}. The trainer wrote this checkpoint without GRACE, or was stopped meanwhile: resume from an "
                "earlier one, or train without resuming"
            ) from error


def _sharded() -> type:
    from torch.distributed.fsdp import FSDPModule

    return FSDPModule
