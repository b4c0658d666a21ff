"""Handwritten digits with Keras on TensorFlow, on workers that may die and join during training.

    horovodrun -np 4 --min-np 2 --max-np 4 --host-discovery-script ./hosts.sh python examples/elastic_keras.py

hosts.sh prints the available hosts as "host:workers" lines; Horovod calls it repeatedly. If a worker dies, Horovod
excludes its whole host. `--blacklist-cooldown-range 10 60` lets the host come back.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow: warnings and errors only
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import digits
import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from digits_keras import make_model

import grace
from grace import grace_from_params


class Commit(keras.callbacks.Callback):
    """Commit after each epoch, so that it is not repeated."""

    def __init__(self, state: Any):
        super().__init__()
        self._state = state

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        state = self._state
        record = {"epoch": epoch + 1, "loss": logs["loss"], "accuracy": logs["val_accuracy"]}
        record["workers"] = state.grace.world_size
        state.epoch, state.history = epoch + 1, [*state.history, record]
        if state.grace.rank == 0:
            print(f"{digits.summary(record)}, {record['workers']} workers", flush=True)
        state.commit()


@grace.elastic.run
def train(state: Any, options: argparse.Namespace) -> None:
    """All communication with other workers. Restarts from the last commit when workers are lost or join."""
    grc = state.grace
    images, labels, test_images, test_labels = digits.load(grc.rank, grc.world_size)  # this worker's current share
    batches = tf.data.Dataset.from_tensor_slices((images[..., None], labels))
    batches = batches.shuffle(len(images), seed=options.seed).batch(options.batch_size, drop_remainder=True)
    decay = keras.optimizers.schedules.CosineDecay(options.lr, options.epochs)
    state.model.fit(
        batches,
        initial_epoch=state.epoch,
        epochs=options.epochs,
        validation_data=(test_images[..., None], test_labels),
        validation_batch_size=len(test_images),
        callbacks=[
            keras.callbacks.LearningRateScheduler(lambda epoch: float(decay(epoch))),
            grace.tensorflow.MetricAverageCallback(),
            Commit(state),
        ],
        shuffle=False,  # the dataset shuffles
        verbose=0,
    )


def main() -> None:
    options = digits.arguments("Handwritten digits with Keras, on workers that come and go.").parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)  # more threads do not help so small a model
    tf.config.threading.set_inter_op_parallelism_threads(1)
    hvd.init()
    keras.utils.set_random_seed(options.seed)
    model = make_model()
    grc = grace_from_params({"compressor": options.method, **options.params})
    optimizer = keras.optimizers.SGD(options.lr, momentum=options.momentum)
    model.compile(
        optimizer=grace.tensorflow.DistributedOptimizer(optimizer, grace=grc),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=False,  # Horovod's operations have no XLA form
    )
    # Until `train`, nothing may wait for other workers: existing ones would not answer.
    state = grace.elastic.KerasState(model, epoch=0, history=[])
    train(state, options)
    digits.finish(options, grc, {"history": state.history})


if __name__ == "__main__":
    main()
