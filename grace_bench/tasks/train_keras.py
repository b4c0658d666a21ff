"""A task's training in Keras over Horovod. Horovod's own Keras optimizer is broken on Keras 3, so the baselines are
GRACE's compressors `none` and `fp16`, which are one allreduce.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import grace.tensorflow
from grace import Grace, grace_from_params
from grace.local import DiLoCo, from_params
from grace_bench.tasks.data import Arrays
from grace_bench.tasks.keras_models import MODELS, loss_of, one_or_list, optimizer_of
from grace_bench.tasks.plan import CHOICE, LIMIT
from grace_bench.tasks.tasks import Scale, Task


class Trainer:
    """See `train_torch.Trainer`."""

    def __init__(self, task: Task, scale: Scale, sizes: dict[str, int], params: dict[str, Any] | str, seed: int):
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        hvd.init()
        self.rank, self.size = hvd.rank(), hvd.size()
        keras.utils.set_random_seed(seed)
        self._model = task.builder("keras", MODELS)(**sizes, **scale.model)
        self.tensors = [int(np.prod(variable.shape)) for variable in self._model.trainable_variables]
        names = {"dense": "none", "fp16": "fp16"}
        self._local: DiLoCo | None = None
        self._grace: Grace | None = None
        momentum = 0.9
        if isinstance(params, dict) and "local" in params:
            self._local = from_params(params)
            self._grace = self._local.grace
        elif params != LIMIT:
            self._grace = grace_from_params({"compressor": names[params]} if isinstance(params, str) else params)
            if self._grace.method.memory.includes_momentum:
                momentum = 0.0
        optimizer: Any = optimizer_of(task, scale.lr, momentum)
        if self._local is None and self._grace is not None:
            optimizer = grace.tensorflow.DistributedOptimizer(optimizer, grace=self._grace)
        self._optimizer = optimizer
        self._model.compile(self._optimizer, loss_of(task), jit_compile=False)
        grace.tensorflow.broadcast_variables(self._model.variables, root_rank=0)
        if self._local is not None:
            variables, others = self._model.trainable_variables, self._model.non_trainable_weights
            grace.tensorflow.local_variables(self._local, variables, others)
            self._local.settle()
        self._logits = tf.function(lambda *inputs: self._model(one_or_list(inputs), training=False))

    def step(self, inputs: Arrays, targets: Any, lr: float) -> None:
        """Train on one batch."""
        self._optimizer.learning_rate = lr
        self._model.train_on_batch(one_or_list(inputs), targets)
        if self._local is not None:
            self._local.step()
        elif self._grace is not None:
            self._grace.tune()  # a graph cannot do this itself

    def finish(self) -> None:
        """End the training: workers that trained their own models now get the same one."""
        if self._local is not None:
            self._local.finish()

    def predict(self, inputs: Arrays) -> Any:
        """Return logits, as a NumPy array."""
        return self._logits(*map(tf.constant, inputs)).numpy()

    @property
    def sent(self) -> int:
        """Bytes that this worker has passed to collectives so far."""
        source = self._local or self._grace
        return 0 if source is None else source.report().bytes_sent

    @property
    def choice(self) -> dict[str, Any]:
        """What method "auto" measured, predicted and chose, by `CHOICE`; empty values for other methods."""
        if self._grace is None:
            return {}
        report = self._grace.report()
        return {key: getattr(report, key) for key in CHOICE}

    def agree(self, number: int) -> int:
        """Return worker 0's number on all workers; also a barrier."""
        value = tf.constant([number if self.rank == 0 else 0], tf.int64)
        return int(hvd.allreduce(value, op=hvd.Sum, name="agree")[0])
