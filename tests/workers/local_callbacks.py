"""Local training in `fit` beside callbacks and optimizers that write weights: OUT TOOLKIT, over two workers."""

import os
import sys

out, toolkit = sys.argv[1:]
os.environ["KERAS_BACKEND"] = toolkit

import numpy as np
from launch import leave_gloo, save

if toolkit == "torch":
    from launch import join_torch

    rank, _ = join_torch("torch")
else:
    import horovod.tensorflow.keras as hvd

    hvd.init()
    rank = hvd.rank()

import keras

import grace

SYNC, BATCH = 4, 8
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
callbacks = keras.callbacks
found = {}


def data(worker, batches):
    rng = np.random.default_rng(worker)
    x = rng.standard_normal((BATCH * batches, 20)).astype("float32")
    return x, x[:, :5].argmax(1)


class Watch(callbacks.Callback):
    """Records the weights at the end of each epoch, as callbacks see them that restore the best weights."""

    def __init__(self):
        super().__init__()
        self.epochs = []

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(self.model.get_weights())


class Prune(callbacks.Callback):
    """A user's callback that prunes weights at the end, on worker 1 alone."""

    def on_train_end(self, logs=None):
        if rank == 1:
            self.model.set_weights([np.where(np.abs(w) < 0.1, 0, w) for w in self.model.get_weights()])
        self.mine = self.model.get_weights()


def fit(order, batches, optimizer=None, epochs=3, first=True):
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense
    layers = [dense(16, activation="relu"), keras.layers.BatchNormalization(), dense(5)]
    model = keras.Sequential([keras.Input((20,)), *layers])
    model.compile(optimizer or keras.optimizers.Adam(0.05), LOSS, jit_compile=False)
    local = grace.local.from_params({"local": {"sync_every": SYNC}, **TOPK})
    listed = [grace.keras.LocalCallback(local) if each == "local" else each for each in order]
    x, y = data(rank, batches)
    options = {"validation_data": data(9, 8), "shuffle": False, "verbose": 0, "epochs": epochs}
    listed = [grace.keras.BroadcastCallback(), *listed] if first else listed
    return model, model.fit(x, y, BATCH, callbacks=listed, **options)


def values(variables):
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def best(batches, first):
    watch = Watch()
    stop = callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
    others = [grace.keras.MetricAverageCallback(), watch, stop]  # all workers stop at one epoch
    model, history = fit(["local", *others] if first else [*others, "local"], batches, epochs=9)
    scores = history.history["val_loss"]
    restored = watch.epochs[int(np.argmin(scores))]
    return {"mine": restored, "all": model.get_weights(), "epochs": len(scores), "history": vars(history)}


def averages(batches, *order):
    optimizer = keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.9)
    model, _ = fit(order, batches, optimizer)
    return {"mine": values(optimizer._model_variables_moving_average), "all": values(model.trainable_variables)}


def pruned(*history):
    prune = Prune()
    model, _ = fit(["local", prune, *history], 8)
    return {"mine": prune.mine, "all": model.get_weights()}


TOPK = {"compressor": "topk", "compress_ratio": 0.3, "min_numel": 0}
# With 7 batches the last epoch ends within an interval, with 8 at a landing. TensorFlow retraces for each fit.
for batches in (7, 8) if toolkit == "torch" else (7,):
    for first in (True, False):
        found[f"best {batches} {first}"] = best(batches, first)
    if toolkit == "torch":
        found[f"ema {batches}"] = averages(batches, "local")
    for first in (True, False) if toolkit == "torch" else (True,):
        swap = callbacks.SwapEMAWeights(swap_on_epoch=True)
        found[f"swap {batches} {first}"] = averages(batches, *(["local", swap] if first else [swap, "local"]))
found["pruned"] = pruned()
if toolkit == "torch":
    found["own history"] = pruned(callbacks.History())


def error_of(optimizer, **options):
    try:
        fit(["local"], 4, optimizer, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def wrapped():
    transport = "torch" if toolkit == "torch" else "horovod"
    return grace.keras.DistributedOptimizer(keras.optimizers.SGD(0.1), grace.grace_from_params(TOPK, transport))


found["distributed"] = error_of(wrapped())
found["scaled"] = error_of(keras.optimizers.LossScaleOptimizer(wrapped()))
if toolkit == "torch":
    found["released"] = error_of(grace.keras.release(wrapped()))
else:
    found["horovod"] = error_of(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), first=False)
save(out, rank, found)
if toolkit == "torch":
    leave_gloo()
