"""Handwritten digits with Keras: each worker trains on its own images, and gradients are compressed.

python examples/digits_keras.py                                              # one worker
horovodrun -np 2 --gloo python examples/digits_keras.py --method powersgd    # two, over Horovod
python examples/digits_keras.py --method topk --params '{"compress_ratio": 0.05}'

On PyTorch instead of TensorFlow, and over torch.distributed:

KERAS_BACKEND=torch torchrun --nproc-per-node 2 examples/digits_keras.py
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow: warnings and errors only
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import digits
import keras
from keras import layers

import grace.keras
from grace import Grace, grace_from_params

TOOLKIT = {"tensorflow": "Keras on TensorFlow", "torch": "Keras on PyTorch"}[keras.backend.backend()]


def start() -> None:
    """Join the other workers, if a launcher started some."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)  # more threads do not help so small a model
        tf.config.threading.set_inter_op_parallelism_threads(1)
    else:
        import torch

        torch.set_num_threads(1)
    grace.init()


def make_model() -> keras.Model:
    """283,786 parameters, nearly all of them in two large tensors."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(256, activation="relu"),
            layers.Dense(10),
        ]
    )


class Watch(keras.callbacks.Callback):
    """Stores the results of each epoch, and reports progress."""

    def __init__(self, grc: Grace, epochs: int, steps: int, tell: digits.Tell):
        super().__init__()
        self.history: list[dict[str, Any]] = []
        self._grc, self._steps, self._total, self._tell = grc, steps, epochs * steps, tell
        self._computed = self._busy = 0.0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._busy = time.process_time()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._computed += time.process_time() - self._busy
        if batch + 1 < self._steps:
            self._tell(len(self.history) * self._steps + batch + 1, self._total, None)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        record = {"epoch": epoch + 1, "loss": logs["loss"], "accuracy": logs["val_accuracy"]}
        sent = self._grc.report().bytes_sent
        self.history.append({**record, "bytes_sent": sent, "computed": self._computed})
        self._tell((epoch + 1) * self._steps, self._total, self.history[-1])


def train(grc: Grace, options: argparse.Namespace, tell: digits.Tell) -> dict[str, Any]:
    """Train a new model; returns `digits.result`."""
    images, labels, test_images, test_labels = digits.load(grc.rank, grc.world_size)
    keras.utils.set_random_seed(options.seed)
    model = make_model()
    steps = len(images) // options.batch_size
    kept = steps * options.batch_size  # whole batches only
    schedule = keras.optimizers.schedules.CosineDecay(options.lr, options.epochs * steps)
    optimizer = keras.optimizers.SGD(schedule, momentum=options.momentum)
    optimizer = grace.keras.DistributedOptimizer(optimizer, grace=grc)
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=False,  # Horovod's operations have no XLA form
    )
    watch = Watch(grc, options.epochs, steps, tell)
    callbacks = [grace.keras.BroadcastCallback(0), grace.keras.MetricAverageCallback(), watch]
    callbacks.append(grace.keras.PolicyCallback())  # for `auto`; others have no policy
    began = time.perf_counter()
    model.fit(
        images[:kept, ..., None],
        labels[:kept],
        batch_size=options.batch_size,
        epochs=options.epochs,
        validation_data=(test_images[..., None], test_labels),  # all test images on every worker, since they are few
        validation_batch_size=len(test_images),
        callbacks=callbacks,
        verbose=0,
    )
    return digits.result(TOOLKIT, grc, watch.history, time.perf_counter() - began)


def main() -> None:
    options = digits.arguments(f"Handwritten digits with {TOOLKIT}.").parse_args()
    start()
    grc = grace_from_params({"compressor": options.method, **options.params})
    with digits.progress(f"{TOOLKIT} {options.method}", grc.rank) as tell:
        outcome = train(grc, options, tell)
    digits.finish(options, grc, outcome)


if __name__ == "__main__":
    main()
