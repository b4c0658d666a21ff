"""Keras 3 integrations for its TensorFlow and PyTorch backends: DistributedOptimizer, callbacks and broadcasts.

`keras.backend.backend()` selects the toolkit. For a custom TensorFlow training loop, see `grace.tensorflow`.
"""

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

__all__ = [
    "BackupAndRestore",
    "BroadcastCallback",
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
