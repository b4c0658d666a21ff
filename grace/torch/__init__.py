"""PyTorch integrations: DistributedOptimizer, a DDP hook, FSDP2, pipeline stages, trainers, broadcasts."""

from __future__ import annotations

from importlib import import_module
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
from grace.torch.trainers.accelerate import AccelerateHook
from grace.torch.trainers.exchange import compress

if TYPE_CHECKING:
    from grace.torch.stages import PipelineStage
    from grace.torch.trainers.huggingface import trainer
    from grace.torch.trainers.lightning import LightningCallback

__all__ = [
    "AccelerateHook",
    "Boundary",
    "CheckpointState",
    "DistributedOptimizer",
    "GatheredState",
    "LightningCallback",
    "PipelineStage",
    "PolicyScheduler",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "compress",
    "ddp_hook",
    "fsdp",
    "gossip",
    "local",
    "name_parameters",
    "release",
    "trainer",
]

# torch.distributed.pipelining takes a while to import; trainers need not be installed.
_LATER = {
    "LightningCallback": "grace.torch.trainers.lightning",
    "PipelineStage": "grace.torch.stages",
    "trainer": "grace.torch.trainers.huggingface",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module 'grace.torch' has no attribute {name!r}")
