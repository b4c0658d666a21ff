"""PyTorch integrations: DistributedOptimizer, a DDP communication hook, FSDP2, pipeline stages, broadcasts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grace.torch.boundary import Boundary
from grace.torch.broadcast import broadcast_optimizer_state, broadcast_parameters
from grace.torch.checkpoint import CheckpointState, GatheredState
from grace.torch.ddp import ddp_hook, name_parameters
from grace.torch.fsdp import fsdp
from grace.torch.neighbours import gossip
from grace.torch.optimizer import DistributedOptimizer, release
from grace.torch.outer import local
from grace.torch.policy import PolicyScheduler

if TYPE_CHECKING:
    from grace.torch.stages import PipelineStage

__all__ = [
    "Boundary",
    "CheckpointState",
    "DistributedOptimizer",
    "GatheredState",
    "PipelineStage",
    "PolicyScheduler",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ddp_hook",
    "fsdp",
    "gossip",
    "local",
    "name_parameters",
    "release",
]


def __getattr__(name: str) -> Any:
    # torch.distributed.pipelining takes a while to import.
    if name == "PipelineStage":
        from grace.torch.stages import PipelineStage

        return PipelineStage
    raise AttributeError(f"module 'grace.torch' has no attribute {name!r}")
