"""CheckpointState: a Grace in torch.distributed checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from grace.engine.session import Grace


class CheckpointState:
    """A Grace for torch.distributed.checkpoint: ``{"model": ..., "grace": CheckpointState(grc)}``.

    torch.distributed.checkpoint stores one copy of a tensor that has the same name on all workers, but residuals differ
    between workers: here each worker's tensors have their own names. Loading needs the same number of workers; to
    change that number, use `grace.checkpoint`.
    """

    def __init__(self, grace: Grace):
        self._grace, self._name = grace, f"worker{grace.rank} of {grace.world_size}"

    def state_dict(self) -> dict[str, Any]:
        state = self._grace.state_dict()
        return {self._name: {**state, "step": torch.tensor(state["step"], device="cpu")}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        state = state_dict[self._name]
        self._grace.load_state_dict({**state, "step": int(state["step"])})
