"""TensorFlow integrations: DistributedGradientTape, DistributedOptimizer for Keras 3, callbacks and broadcasts."""

from grace.keras.backup import BackupAndRestore
from grace.keras.broadcast import broadcast_variables
from grace.keras.callbacks import (
    BroadcastCallback,
    GossipCallback,
    MetricAverageCallback,
    PolicyCallback,
    RecordCallback,
    gossip_variables,
)
from grace.keras.gradients import average_gradients, build
from grace.keras.local import LocalCallback, local_variables
from grace.keras.optimizer import DistributedOptimizer, release
from grace.tensorflow.checkpoint import CheckpointState
from grace.tensorflow.gradients import DistributedGradientTape
from grace.tensorflow.stages import Boundary

__all__ = [
    "BackupAndRestore",
    "Boundary",
    "BroadcastCallback",
    "CheckpointState",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "GossipCallback",
    "LocalCallback",
    "MetricAverageCallback",
    "PolicyCallback",
    "RecordCallback",
    "average_gradients",
    "broadcast_variables",
    "build",
    "gossip_variables",
    "local_variables",
    "release",
]
