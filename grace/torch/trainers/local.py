"""Local training in a trainer: its model stays plain, and its optimizer's steps count."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from grace.local import DiLoCo, from_params
from grace.torch.broadcast import broadcast_parameters
from grace.torch.outer import local
from grace.torch.trainers.exchange import FOLDER, load, save


class LocalTraining:
    """A `grace.local.DiLoCo` in the model and the optimizer of a trainer. ``params``: as for `grace.local.from_params`.

    Between landings the workers' models differ, and the trainer's checkpoint holds only worker 0's. Therefore each
    worker's model and optimizer are saved beside its state.
    """

    def __init__(self, params: Mapping[str, Any]):
        self.averages: DiLoCo = from_params(params)
        self._parts: dict[str, Any] = {}

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
        """Begin with worker 0's parameters, and count the optimizer's steps. Returns True. Every worker calls it.

        Raises RuntimeError for a second model or optimizer, and as `grace.torch.local`.
        """
        parts = {"model": model, "optimizer": optimizer}
        if self._parts:
            if any(self._parts[key] is not part for key, part in parts.items()):
                raise RuntimeError("local training has begun with another model or optimizer: make a new trainer")
            return True
        broadcast_parameters(model.state_dict(), root_rank=0)
        local(optimizer, self.averages, model.named_parameters(), model.named_buffers())
        self._parts = parts
        return True

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write this worker's state, model and optimizer into a trainer's checkpoint."""
        save(self.averages, folder)
        torch.save({key: part.state_dict() for key, part in self._parts.items()}, self._file(folder))

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Load what `save` wrote; with another number of workers all continue from the last model they agreed on."""
        load(self.averages, folder)
        if (path := self._file(folder)).exists():
            saved = torch.load(path, weights_only=True, map_location="cpu")
            for key, part in self._parts.items():
                part.load_state_dict(saved[key])

    def _file(self, folder: str | os.PathLike[str]) -> Path:
        return Path(folder) / FOLDER / f"worker-{self.averages.rank:05}-of-{self.averages.world_size:05}.pt"
