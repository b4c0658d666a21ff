"""CheckpointState: a Grace in checkpoints of torch.distributed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from grace.engine.session import Grace


class CheckpointState:
    """A Grace in the state that torch.distributed.checkpoint saves: ``{"model": ..., "grace": CheckpointState(grc)}``.

    That library keeps one copy of a tensor that has the same name on all workers, and residuals differ between them:
    here every worker's have a name of their own. For a run with as many workers; `grace.checkpoint` follows their
    number.
    """

    def __init__(self, grace: Grace):
        self._grace, self._name = grace, f"worker{grace.rank} of {grace.world_size}"

    def state_dict(self) -> dict[str, Any]:
        state = self._grace.state_dict()
        return {self._name: {**state, "step": torch.tensor(state["step"], device="cpu")}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        state = state_dict[self._name]
        self._grace.load_state_dict({**state, "step": int(state["step"])})
