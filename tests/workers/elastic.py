"""An elastic example, run while workers are lost and join, and then once more undisturbed: OUT TOOLKIT."""

import os
import sys
import time
from pathlib import Path

import numpy as np
from launch import TESTS, save

out, toolkit = sys.argv[1:]
sys.path.insert(0, str(TESTS.parent / "examples"))
if toolkit == "torch":
    import elastic_torch as example
    import horovod.torch as hvd
else:
    import elastic_keras as example
    import horovod.tensorflow as hvd

import grace

EPOCHS = 24
states = []
make = {"torch": "TorchState", "tensorflow": "KerasState"}[toolkit]
original = getattr(grace.elastic, make)
summary = example.digits.summary


def made(*args, **kwargs):
    # Allow more time for the next worker to start: this machine may be busy.
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "60"
    folder = {"folder": Path(out, "commits")} if toolkit == "torch" and not states else {}
    states.append(original(*args, **folder, **kwargs))
    return states[-1]


def paced(epoch):
    # After half of the epochs, three workers slow down until the fourth has joined.
    if epoch["workers"] == 3 and epoch["epoch"] > EPOCHS // 2:
        time.sleep(1.5)
    return summary(epoch)


setattr(grace.elastic, make, made)
example.digits.summary = paced


def weights(state):
    if toolkit == "torch":
        return np.concatenate([p.detach().numpy().ravel() for p in state.model.parameters()])
    return np.concatenate([np.ravel(v.numpy()) for v in state.model.variables])


followed = []
reset = grace.Grace.reset


def counted(self, transport, given):
    followed.append((self.world_size, len(given)))
    reset(self, transport, given)


grace.Grace.reset = counted
found = {"followed": followed}
for name in ("interrupted", "in peace"):
    sys.argv = ["example", "--epochs", str(EPOCHS), "--json", str(Path(out, f"{name}.json"))]
    example.main()
    grc = states[-1].grace
    history = [(epoch["epoch"], epoch["workers"], epoch["accuracy"]) for epoch in states[-1].history]
    found[name] = (weights(states[-1]), history, grc.state_dict()["step"])
if toolkit == "tensorflow":
    # Four workers run a graph that was traced with three.
    import tensorflow as tf

    grc, variable = grace.grace_from_params({"compressor": "none"}), tf.Variable(tf.zeros(3))
    grace.tensorflow.build(grc, [variable])
    grc.settle()
    grc.transport.size = 3
    graph = tf.function(lambda: grace.tensorflow.average_gradients(grc, [tf.ones(3)], [variable]))
    try:
        graph()
    except tf.errors.InvalidArgumentError as error:
        found["stale"] = str(error)
save(out, hvd.rank(), found)
