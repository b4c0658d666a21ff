"""A Grace in checkpoints of torch.distributed, and of trainers that save one file for all workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from grace import checkpoint
from grace.core.collectives import Gather
from grace.engine.session import Grace
from grace.torch.broadcast import transport_of
from grace.torch.checks import check_grace


class CheckpointState:
    """A Grace for torch.distributed.checkpoint: ``{"model": ..., "grace": CheckpointState(grc)}``.

    torch.distributed.checkpoint stores one copy of a tensor that has the same name on all workers, but residuals differ
    between workers, so each worker's tensors get different names here. Loading needs the same number of workers; to
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


class GatheredState:
    """The states of all workers in one object, for trainers that save worker 0's objects and load them on all workers.

    For example Accelerate: ``accelerator.register_for_checkpointing(GatheredState(grc))``. Every worker must call both
    methods, as such trainers do; each worker then holds all states in host memory.
    """

    def __init__(self, grace: Grace):
        check_grace(grace, "GatheredState(grc)")
        self._grace = grace

    def state_dict(self) -> dict[str, list[torch.Tensor]]:
        """The workers' states in rank order, each as bytes: CPU tensors, uint8[n]. Equal on all workers."""
        transport: Any = transport_of(self._grace, None)
        state = torch.frombuffer(bytearray(checkpoint.to_bytes(self._grace.state_dict())), dtype=torch.uint8)
        (found,) = transport.start([Gather((state.to(transport.xp.device),), ragged=True)], "states")()
        return {"workers": [each.cpu() for (each,) in found]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this worker's own state, or, if the number of workers has changed, all states.

        Raises as `Grace.load_state_dict`, and ValueError for a state that `state_dict` did not return.
        """
        workers = state_dict.get("workers")
        if not isinstance(workers, list) or not all(isinstance(each, torch.Tensor) for each in workers):
            raise ValueError("this is no state of a GatheredState: save and load with the same object")
        rank, size = self._grace.rank, self._grace.world_size
        chosen = [workers[rank]] if len(workers) == size else workers
        self._grace.load_state_dict(*(checkpoint.from_bytes(each.cpu().numpy().tobytes()) for each in chosen))
