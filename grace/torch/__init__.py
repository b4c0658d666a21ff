"""PyTorch integrations: DistributedOptimizer, a DDP communication hook, FSDP2, broadcasts of the initial state."""

from grace.torch.broadcast import broadcast_optimizer_state, broadcast_parameters
from grace.torch.checkpoint import CheckpointState
from grace.torch.ddp import ddp_hook, name_parameters
from grace.torch.fsdp import fsdp
from grace.torch.neighbours import gossip
from grace.torch.optimizer import DistributedOptimizer, release
from grace.torch.outer import local
from grace.torch.policy import PolicyScheduler

__all__ = [
    "CheckpointState",
    "DistributedOptimizer",
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
