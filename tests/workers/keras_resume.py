"""A training in Keras that continues in another process: OUT. Saves a dictionary.

The first process trains, and saves the model and the state of GRACE. The second loads both and continues, and also
trains without an interruption.
"""

import sys
from pathlib import Path

import numpy as np
import tensorflow as tf
from launch import save

tf.config.threading.set_intra_op_parallelism_threads(1)

import horovod.tensorflow as hvd
import keras

import grace

out = Path(sys.argv[1])
hvd.init()
rank = hvd.rank()
PARAMS = {"compressor": "randomk", "compress_ratio": 0.1, "memory": "residual", "min_numel": 0}
x = np.random.default_rng(rank).standard_normal((24, 20)).astype("float32")
y = x[:, :5].argmax(1)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def train(net, optimizer, epochs, folder=None):
    grc = grace.grace_from_params(PARAMS)
    optimizer = grace.tensorflow.DistributedOptimizer(optimizer, grc)
    net.compile(optimizer, LOSS, jit_compile=False, run_eagerly=True)  # tracing randomk takes long
    if folder is not None:
        grace.checkpoint.load(grc, folder)
    first = int(net.optimizer.iterations) // 3
    callbacks = [grace.tensorflow.BroadcastCallback(0)]
    net.fit(x, y, 8, epochs=epochs, initial_epoch=first, shuffle=False, verbose=0, callbacks=callbacks)
    return grc


def fresh():
    keras.utils.set_random_seed(0)
    net = keras.Sequential(
        [keras.layers.Dense(30, activation="relu"), keras.layers.Dense(5)]
    )  # the first batch builds the model
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 4, 0.9)
    return net, keras.optimizers.SGD(schedule, momentum=0.9)


def weights(net):
    return np.concatenate([np.ravel(w) for w in net.get_weights()])


path, folder = out / f"{rank}.keras", out / "grace"
if not path.exists():
    net, optimizer = fresh()
    grc = train(net, optimizer, 1)
    net.save(path)
    grace.checkpoint.save(grc, folder)
    save(str(out), rank, {"names": grc.names})
else:
    whole, optimizer = fresh()
    grc = train(whole, optimizer, 3)
    net = keras.models.load_model(path)
    paths = [variable.path for variable in net.trainable_variables]
    resumed = train(net, net.optimizer, 2, folder)
    net.save(path)
    grace.checkpoint.save(resumed, folder)
    hvd.allgather(tf.zeros(1), name="saved")  # a load must see the files of all workers, or of none
    net = keras.models.load_model(path)
    resumed = train(net, net.optimizer, 3, folder)
    found = {"resumed": weights(net), "whole": weights(whole), "paths": paths}
    save(str(out), rank, {**found, "names": resumed.names, "whole names": grc.names})
