"""Gossip on a ring of workers: OUT TRANSPORT. Saves each round's parameters, and the result of a training."""

import sys

import numpy as np
from launch import leave_gloo, save

from grace.gossip import Choco, Full, Gossip, PowerGossip

out, kind = sys.argv[1:]
if kind == "tensorflow":
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    rank, array, transport = hvd.rank(), tf.constant, "horovod"
else:
    import torch

    torch.set_num_threads(1)
    array, transport = torch.from_numpy, kind
    if kind == "torch":
        import torch.distributed as dist

        dist.init_process_group("gloo")
        rank = dist.get_rank()
    else:
        import horovod.torch as hvd

        hvd.init()
        rank = hvd.rank()


def start(worker):
    rng = np.random.default_rng(worker)
    return {"w": rng.standard_normal((12, 20)).astype("f"), "b": rng.standard_normal(7).astype("f")}


found = {}
threshold = {"compressor": "threshold", "threshold": 0.5}
power = (PowerGossip(rank=2), PowerGossip(steps=2), PowerGossip(rank=12), Full())
for mixing in (*power, Choco("efsignsgd", 0.5), Choco(threshold, 0.5)):
    gossip, x = Gossip(mixing, transport=transport), {name: array(value) for name, value in start(rank).items()}
    gossip.build(x)
    history = []
    for _ in range(6):
        x = gossip.step(x)
        history.append({name: value.numpy().copy() for name, value in x.items()})
    found[str(mixing)] = (history, gossip.report().bytes_sent)

try:
    Gossip(PowerGossip(rank=1 + rank), transport=transport).build({"w": array(start(rank)["w"])})
except ValueError as error:
    found["mismatch"] = str(error)

# An integration: least squares, with different data on each worker.
rng = np.random.default_rng(100 + rank)
inputs = rng.standard_normal((64, 20)).astype("f")
truth = np.random.default_rng(9).standard_normal((20, 12)).astype("f")
targets = inputs @ truth
if kind == "tensorflow":
    import keras

    from grace.tensorflow import GossipCallback

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(12)])
    model.compile(keras.optimizers.SGD(0.2), "mse", jit_compile=False)
    x, y = np.tile(inputs, (400, 1)), np.tile(targets, (400, 1))
    model.fit(x, y, batch_size=64, shuffle=False, verbose=0, callbacks=[GossipCallback(Gossip())])
    found["door"] = model.get_weights()[0]
else:
    from grace.torch import gossip as gossiping

    torch.manual_seed(0)
    model = torch.nn.Linear(20, 12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    assert gossiping(optimizer, Gossip(transport=transport), model.named_parameters()) is optimizer
    for _ in range(300):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(torch.from_numpy(inputs)), torch.from_numpy(targets)).backward()
        optimizer.step()
    found["door"] = model.weight.detach().numpy().T
found["truth"] = truth
save(out, rank, found)
if kind == "torch":
    leave_gloo()
