"""CheckpointState: a Grace in TensorFlow checkpoints."""

from __future__ import annotations

import tensorflow as tf

from grace import checkpoint
from grace.engine.session import Grace
from grace.keras.checks import check_grace


class CheckpointState(tf.train.experimental.PythonState):
    """A Grace in a tf.train.Checkpoint: ``tf.train.Checkpoint(model=model, grace=CheckpointState(grc))``.

    Residuals differ between workers, so each worker must save to, and restore from, its own path.
    """

    def __init__(self, grace: Grace):
        check_grace(grace, "CheckpointState")
        super().__init__()
        self._grace = grace

    def serialize(self) -> bytes:
        return checkpoint.to_bytes(self._grace.state_dict())

    def deserialize(self, string_value: bytes) -> None:
        self._grace.load_state_dict(checkpoint.from_bytes(string_value))
