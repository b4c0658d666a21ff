"""The compressor "auto" over two workers: OUT INTEGRATION (torch, ddp or keras) TRIALS (every or few).

Saves a dictionary of findings.
"""

import hashlib
import os
import sys
import time
from dataclasses import dataclass

import numpy as np
from launch import leave_gloo, save

out, door, trials = sys.argv[1:]
gloo = "TORCHELASTIC_RUN_ID" in os.environ
if door == "keras":
    import horovod.tensorflow as hvd
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
else:
    import torch

    torch.set_num_threads(1)
    if gloo:
        torch.distributed.init_process_group("gloo")
    else:
        import horovod.torch as hvd

        hvd.init()

import grace
from grace.compressors.measured.topk import TopK
from grace.policies.auto import Auto

SECONDS = 0.05


def asleep(x):
    """Return the same numbers after a delay, also when called in a graph."""
    if door != "keras":
        time.sleep(SECONDS)
        return x
    later = tf.py_function(lambda value: (time.sleep(SECONDS), value)[1], [x], tf.float32)
    return tf.ensure_shape(later, x.shape)


@grace.register("slow")
@dataclass(frozen=True)
class Slow(TopK):
    def compress(self, x, state, ctx):
        return super().compress(asleep(x), state, ctx)


Auto.predicts = trials == "few"
STEPS = 40
grc = grace.grace_from_params({"compressor": "auto", "candidates": ["topk", "slow"], "trial_steps": 5})
rng = np.random.default_rng(grc.rank)
x, y = rng.standard_normal((STEPS * 8, 40)).astype("float32"), rng.integers(0, 5, STEPS * 8)
if door == "keras":
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(5)])
    optimizer = grace.tensorflow.DistributedOptimizer(keras.optimizers.SGD(0.05), grc)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False)
    callbacks = [grace.tensorflow.BroadcastCallback(0), grace.tensorflow.PolicyCallback()]
    model.fit(x, y, batch_size=8, callbacks=callbacks, verbose=0, shuffle=False)
    weights = [np.asarray(weight) for weight in model.get_weights()]
else:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(40, 64), torch.nn.ReLU(), torch.nn.Linear(64, 5))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    if door == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(net)
        grace.torch.name_parameters(grc, model)
        model.register_comm_hook(grc, grace.torch.ddp_hook)
    else:
        model = net
        grace.torch.DistributedOptimizer(optimizer, grc, net.named_parameters())
    for batch, labels in zip(torch.tensor(x).split(8), torch.tensor(y).split(8), strict=True):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch), labels).backward()
        optimizer.step()
    weights = [p.detach().numpy() for p in net.parameters()]

report = grc.report()
found = {
    "weights": hashlib.sha256(b"".join(weight.tobytes() for weight in weights)).hexdigest(),
    "levels": [tensor.levels for tensor in report.tensors],
    "trials": report.trials,
    "noise": report.noise,
    "chosen": report.method.split(" + ")[0],
    "bytes_sent": report.bytes_sent,
}
save(out, grc.rank, found)
if gloo:
    leave_gloo()
