"""An elastic example, run while workers are lost and come, and then once more in peace: OUT toolkit."""

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
setattr(grace.elastic, make, lambda *args, **kwargs: states.append(original(*args, **kwargs)) or states[-1])
summary = example.digits.summary


def paced(epoch):
    # Three workers wait for the fourth half-way, however fast they are.
    if epoch["workers"] == 3 and epoch["epoch"] > EPOCHS // 2:
        time.sleep(1.5)
    return summary(epoch)


example.digits.summary = paced


def weights(state):
    if toolkit == "torch":
        return np.concatenate([p.detach().numpy().ravel() for p in state.model.parameters()])
    return np.concatenate([np.ravel(v.numpy()) for v in state.model.variables])


found = {}
for name in ("interrupted", "in peace"):
    sys.argv = ["example", "--epochs", str(EPOCHS), "--json", str(Path(out, f"{name}.json"))]
    example.main()
    grc = states[-1].grace
    found[name] = (weights(states[-1]), states[-1].history, grc.state_dict()["step"])
save(out, hvd.rank(), found)
