"""Pufferfish with Keras on TensorFlow: train digits dense, with factors from the start, and after a warm-up.

python examples/pufferfish_keras.py                                    # one worker
horovodrun -np 2 --gloo python examples/pufferfish_keras.py            # two, over Horovod
python examples/pufferfish_keras.py --forms dense hybrid --rank-ratio 0.25
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import digits
import keras
from digits_keras import start
from keras import layers
from pufferfish import FORMS, WIDTHS, arguments, outcome, show

import grace.tensorflow
from grace import Grace, grace_from_params
from grace.factorize import WarmUp, factorize


class Clock(keras.callbacks.Callback):
    """Seconds of each epoch's training steps."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seconds.append(time.perf_counter() - self._began)


def make_model() -> keras.Model:
    hidden = [layers.Dense(width, activation="relu") for width in WIDTHS[1:-1]]
    return keras.Sequential([keras.Input((8, 8)), layers.Flatten(), *hidden, layers.Dense(WIDTHS[-1])])


def train(form: str, grc: Grace, options: argparse.Namespace) -> dict[str, Any]:
    """Train a new model in one of the forms, and return the measurements."""
    images, labels, test_images, test_labels = digits.load(grc.rank, grc.world_size)
    keras.utils.set_random_seed(options.seed)
    model = make_model()
    settings, warm = FORMS[form](options)
    if settings is not None and not warm:
        factorize(model, init="random", **settings)
    warmup = WarmUp(warm, ramp_epochs=1, **settings) if settings is not None and warm else None

    def make_optimizer(model: keras.Model) -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(options.lr, momentum=options.momentum)

    def rate(epoch: int) -> float:
        # The learning rate of a whole epoch: the schedule's value in its middle.
        now = epoch + 0.5
        return options.lr * (1 - now / options.epochs) * (warmup.lr_scale(now) if warmup else 1)

    def fit(optimizer: keras.optimizers.Optimizer, first: int, last: int) -> float:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, jit_compile=False)  # Horovod's operations have no XLA form
        clock = Clock()
        model.fit(
            images[: steps * options.batch_size],
            labels[: steps * options.batch_size],
            batch_size=options.batch_size,
            initial_epoch=first,
            epochs=last,
            callbacks=[
                grace.tensorflow.BroadcastCallback(0),
                keras.callbacks.LearningRateScheduler(rate),
                clock,
            ],
            verbose=0,
        )
        return statistics.median(clock.seconds)

    steps = len(images) // options.batch_size
    optimizer = grace.tensorflow.DistributedOptimizer(make_optimizer(model), grc)
    if warmup is not None:
        fit(optimizer, 0, warm)
        model, optimizer = warmup.switch(model, optimizer, make_optimizer)
    seconds = fit(optimizer, warm, options.epochs)
    predicted = model.predict(test_images, verbose=0).argmax(1)
    parameters = sum(variable.value.shape.num_elements() for variable in model.trainable_variables)
    return outcome(form, parameters, grc, seconds / steps, float((predicted == test_labels).mean()))


def main() -> None:
    options = arguments("Pufferfish with Keras on TensorFlow.").parse_args()
    start()
    rows = []
    for form in options.forms:
        grc = grace_from_params({"compressor": options.method, **options.params})
        rows.append(train(form, grc, options))
    show("Keras", rows, grc.rank, grc.world_size, options.json)


if __name__ == "__main__":
    main()
