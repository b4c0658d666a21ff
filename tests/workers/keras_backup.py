"""Keras trainings that are interrupted and restarted, over two workers: OUT TOOLKIT. Saves a dictionary."""

import os
import shutil
import sys
import warnings
from pathlib import Path
from unittest.mock import patch

out, toolkit = Path(sys.argv[1]), sys.argv[2]
os.environ["KERAS_BACKEND"] = toolkit

from launch import error_of, join_torch, leave_gloo, save

if toolkit == "torch":
    rank, size = join_torch("torch")
else:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    rank, size = hvd.rank(), hvd.size()

import contextlib

import keras
import numpy as np

import grace
import grace.keras

TOPK = {"compressor": "topk", "compress_ratio": 0.1, "min_numel": 0}
BATCH, STEPS, EPOCHS = 8, 3, 4
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
found = {}
rng = np.random.default_rng(rank)
x = rng.standard_normal((BATCH * STEPS, 20)).astype("float32")
y = x[:, :5].argmax(1)


class Stop(keras.callbacks.Callback):
    """Raises an error after this many batches of an epoch."""

    def __init__(self, epoch, batch=0):
        super().__init__()
        self.place, self.epochs = (epoch, batch), []

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append(epoch)

    def on_train_batch_begin(self, batch, logs=None):
        if (self.epochs[-1], batch) == self.place:
            raise InterruptedError


def made():
    keras.backend.clear_session()
    keras.utils.set_random_seed(rank)
    dense = keras.layers.Dense
    net = keras.Sequential([keras.Input((20,)), dense(16, activation="relu"), dense(5)])
    grc = grace.grace_from_params(TOPK)
    optimizer = grace.keras.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), grace=grc)
    net.compile(optimizer, LOSS, jit_compile=False)
    return net, grc


def fit(callbacks, stop=None, epochs=EPOCHS):
    """Train a new model; returns it, its Grace and the epochs that were run."""
    net, grc = made()
    stop = stop or Stop(-1)
    with contextlib.suppress(InterruptedError):
        net.fit(x, y, BATCH, epochs, shuffle=False, verbose=0, callbacks=[*callbacks, stop])
    return net, grc, stop.epochs


def weights(net):
    return np.concatenate([w.ravel() for w in net.get_weights()])


def step(net):
    net.optimizer.apply([0 * keras.ops.convert_to_tensor(v) for v in net.trainable_variables], net.trainable_variables)


def wait():
    grace.keras.broadcast_variables([keras.Variable(0.0)])


def start():
    return grace.keras.BroadcastCallback(0)


def backup(folder, **options):
    return grace.keras.BackupAndRestore(str(out / folder), **options)


# Interrupted in the third epoch and restarted; with a shared folder, and with one for each worker.
whole, grc, epochs = fit([start()])
found["whole"] = (weights(whole), grc.steps, epochs)
for folder in ("shared", f"own {rank}"):
    fit([start(), backup(folder, delete_checkpoint=False)], Stop(2, 1))
    wait()
    shutil.copytree(out / folder, out / f"{folder} copy {rank}")
    net, grc, epochs = fit([backup(folder), start()])
    found["restored", folder.split()[0]] = (weights(net), grc.steps, epochs, (out / folder).exists())

# The workers were killed after they had written their states, and before the weights were written.
net, grc = made()
late = backup(f"own {rank} copy {rank}")
late.set_model(net)
late.on_train_begin()
step(net)
with patch.object(keras.callbacks.BackupAndRestore, "_save_model"):
    late._save_model()
net, grc, epochs = fit([start(), backup(f"own {rank} copy {rank}")])
found["between"] = (weights(net), grc.steps, epochs)

# Save every two batches, so that Keras restarts the interrupted epoch.
fit([start(), backup("batches", save_freq=2)], Stop(1, 2))
net, grc, epochs = fit([start(), backup("batches", save_freq=2)])
found["batches"] = (weights(net), grc.steps, epochs)

# A file of worker 1 is missing; worker 0's weights are damaged.
for kind in ("missing", "damaged"):
    fit([start(), backup(kind, delete_checkpoint=False)], Stop(1))
    wait()
    if kind == "missing" and rank == 1:
        for file in (out / kind).glob("0/*/worker-00001*"):
            file.unlink()
    if kind == "damaged" and rank == 0:
        (out / kind / "latest.weights.h5").write_bytes(b"no weights")
    wait()
    found[kind] = error_of(fit, [start(), backup(kind)])


# Keras's own callback: on worker 0 alone, before or after or without ours; after its last epoch; on every worker.
def plain(folder):
    own = keras.callbacks.BackupAndRestore(str(out / f"{folder} {rank}"), delete_checkpoint=False)
    return [own] if rank == 0 or folder == "plain" else []


fit([start(), *plain("alone")], Stop(2))
fit([start(), *plain("done")])
found["after"] = error_of(fit, [start(), *plain("alone")])
found["before"] = error_of(fit, [*plain("alone"), start()])
found["without"] = error_of(fit, plain("alone"))
found["done"] = error_of(fit, [start(), *plain("done")])
fit([start(), *plain("plain")], Stop(2))
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    net, grc, epochs = fit([start(), *plain("plain")])
found["plain"] = (epochs, [str(each.message) for each in told if "without residuals" in str(each.message)])


# A custom loop: only worker 0 has loaded the optimizer; all have; all have, with the Grace's state.
for kind in ("one", "all", "with its state"):
    net, grc = made()
    if kind == "with its state":
        grace.checkpoint.load(grc, out / "saved")
    if kind != "one" or rank == 0:
        net.optimizer.iterations.assign(1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        error = error_of(step, net)
    found["loop", kind] = (error, [str(each.message) for each in told if "without residuals" in str(each.message)])
    if kind == "all":
        grace.checkpoint.save(grc, out / "saved")
        wait()
save(str(out), rank, found)
if toolkit == "torch":
    leave_gloo()
