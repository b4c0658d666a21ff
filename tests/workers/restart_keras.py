"""Keras on digits, with checkpoints, over two workers: OUT [DEATH], the step in which worker 1 kills itself."""

import os
import signal
import sys
from pathlib import Path

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from launch import TESTS, save

sys.path.insert(0, str(TESTS.parent / "examples"))
import digits

import grace

out, death = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None
STEPS, EVERY = 14, 4
tf.config.threading.set_intra_op_parallelism_threads(1)
hvd.init()
rank = hvd.rank()
images, labels, _, _ = digits.load(rank, hvd.size())


def train(folder=None):
    keras.utils.set_random_seed(0)
    net = keras.Sequential([keras.Input((8, 8)), keras.layers.Flatten(), keras.layers.Dense(64, activation="relu")])
    net.add(keras.layers.Dense(10))
    grc = grace.grace_from_params({"compressor": "topk", "compress_ratio": 0.05, "min_numel": 0})
    optimizer = grace.tensorflow.DistributedOptimizer(keras.optimizers.Adam(0.01), grc)
    optimizer.build(net.trainable_variables)
    grace.tensorflow.build(grc, net.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    variables = [*net.weights, *optimizer.variables]
    first = 0
    if folder and grace.checkpoint.steps(folder):
        first = grace.checkpoint.load(grc, folder)
        with np.load(folder / f"{first}.npz") as saved:
            for number, variable in enumerate(variables):
                variable.assign(saved[str(number)])

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, net(x, training=True))
        optimizer.apply(tape.gradient(loss, net.trainable_variables), net.trainable_variables)

    for number in range(first, STEPS):
        if folder and rank == 1 and number == death:
            os.kill(os.getpid(), signal.SIGKILL)  # the other worker is in the middle of this step, and waits
        batch = slice(32 * number, 32 * number + 32)
        step(tf.constant(images[batch]), tf.constant(labels[batch]))
        if folder and (number + 1) % EVERY == 0:
            if rank == 0:
                np.savez(folder / f"{number + 1}.npz", **{str(i): np.asarray(v) for i, v in enumerate(variables)})
            grace.checkpoint.save(grc, folder)
    return np.concatenate([np.ravel(weight) for weight in net.get_weights()]), first


folder = out / "checkpoints"
folder.mkdir(exist_ok=True)
weights, first = train(folder)
save(str(out), rank, {"first": first, "weights": weights, "uninterrupted": train()[0]})
