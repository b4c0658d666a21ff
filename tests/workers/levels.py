"""A policy over two workers, with PyTorch or TensorFlow: OUT TRANSPORT. Saves a dictionary of findings."""

import copy
import math
import sys

import numpy as np
from launch import join_torch, leave_gloo, save
from policies import BASES, EPOCHS, RUNS, STEPS, levels_of, sequence

out, transport = sys.argv[1:]
if transport == "tensorflow":
    import horovod.tensorflow as hvd
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    array = tf.constant
else:
    import torch

    rank, size = join_torch(transport)
    array = torch.tensor

import grace

found = {}


def made(params):
    """A Grace, and a function that exchanges with it: in TensorFlow a graph, whose traces are counted."""
    grc = grace.grace_from_params({"policy": "accordion", "window": 2, "min_numel": 0, **params})
    grc.build({name: array(x) for name, x in sequence(size)[0][rank].items()})
    traces = []

    def step(gradients):
        traces.append(1)
        return grc.step(gradients)

    return grc, tf.function(step, autograph=False) if transport == "tensorflow" else step, traces


def go(grc, step, first, last, spoil=None):
    """Exchange some steps of the sequence; returns the levels in each step, and the means of the last one."""
    held, means = [], {}
    for number in range(first, last):
        held.append(dict(grc.decision.levels))
        mine = {name: x.copy() for name, x in sequence(size)[number][rank].items()}
        if number == spoil and rank == 1:
            mine["calm"][0, 0] = math.nan
        means = step({name: array(x) for name, x in mine.items()})
        if (number + 1) % STEPS == 0:
            grc.end_epoch()
    return held, {name: np.array(x) for name, x in means.items()}


LAST = STEPS * EPOCHS
for name, granularity, source in RUNS:
    grc, step, traces = made({**BASES[name], "granularity": granularity, "norm_source": source})
    held, means = go(grc, step, 0, LAST)
    sent = sum(tensor.bytes_sent for tensor in grc.report().tensors)  # without headers
    found[name, granularity, source] = (held, means, levels_of(grc.report()), sent, len(traces))

# Continue from the middle of a window with new objects.
for source in ("rank0", "mean"):
    params = {**BASES["powersgd"], "norm_source": source}
    grc, step, _ = made(params)
    middle = 4 * STEPS + 1
    go(grc, step, 0, middle)
    saved = copy.deepcopy(grc.state_dict())
    whole = go(grc, step, middle, LAST)
    grc, step, _ = made(params)
    grc.load_state_dict(saved)
    found["resume", source] = (whole, go(grc, step, middle, LAST))

# NaN on worker 1 only, in a watched epoch.
for source in ("rank0", "mean", "aggregated"):
    grc, step, _ = made({**BASES["topk"], "norm_source": source})
    found["nan", source] = go(grc, step, 0, LAST, spoil=6 * STEPS)[0]

# Different settings, different states, one more epoch: all workers raise, and none waits.
try:
    made({**BASES["topk"], "eta": 0.5 + 0.1 * rank})
except ValueError as error:
    found["settings"] = str(error)
grc, step, _ = made(BASES["topk"])
saved = copy.deepcopy(grc.state_dict())
saved["policy"]["levels"]["calm"] = rank
try:
    grc.load_state_dict(saved)
except ValueError as error:
    found["states"] = str(error)
grc, step, _ = made(BASES["topk"])
grc.schedule.epoch = rank
try:
    grc.end_epoch()
except RuntimeError as error:
    found["epochs"] = str(error)

# The integrations.
TOPK = {"compressor": "topk", "compress_ratio": 0.05, "k_low": 0.5, "min_numel": 0, "policy": "accordion", "window": 2}
RATES = [0.1, 0.1, 0.1, 0.1, 0.1, 0.01, 0.01, 0.01]
rng = np.random.default_rng(rank)
x, y = rng.standard_normal((64, 20)).astype("float32"), rng.integers(0, 5, 64)
if transport == "tensorflow":
    import keras

    def network():
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        layers = keras.layers
        net = keras.Sequential([keras.Input((20,)), layers.Dense(30, activation="tanh"), layers.Dense(5)])
        grc = grace.grace_from_params(TOPK)
        optimizer = grace.tensorflow.DistributedOptimizer(keras.optimizers.SGD(RATES[0]), grace=grc)
        net.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
        return net, grc

    class Watch(keras.callbacks.Callback):
        def __init__(self, grc):
            super().__init__()
            self.grc, self.held = grc, []

        def on_epoch_begin(self, epoch, logs=None):
            self.held.append(sorted(self.grc.decision.levels.values()))

    def fit(net, grc, first, last):
        rates = keras.callbacks.LearningRateScheduler(lambda epoch: RATES[epoch])
        watch = Watch(grc)
        callbacks = [rates, grace.tensorflow.PolicyCallback(), watch]
        net.fit(x, y, 16, epochs=last, initial_epoch=first, shuffle=False, verbose=0, callbacks=callbacks)
        return watch.held, np.concatenate([w.ravel() for w in net.get_weights()])

    net, grc = network()
    held, weights = fit(net, grc, 0, 8)
    found["door"] = (held, weights, grc.report().steps)
else:

    def network(kind="optimizer"):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 5))
        grc = grace.grace_from_params(TOPK)
        optimizer = torch.optim.SGD(net.parameters(), RATES[0])
        if kind == "ddp":
            net = torch.nn.parallel.DistributedDataParallel(net)
            grace.torch.name_parameters(grc, net)
            net.register_comm_hook(grc, grace.torch.ddp_hook)
        else:
            grace.torch.DistributedOptimizer(optimizer, grc, net.named_parameters())
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: RATES[min(epoch, 7)] / RATES[0])
        return net, optimizer, grc, rates, grace.torch.PolicyScheduler(optimizer, grc)

    def fit(net, optimizer, grc, rates, policy):
        held = []
        for _ in RATES:
            held.append(sorted(grc.decision.levels.values()))
            for start in range(0, 64, 16):
                optimizer.zero_grad()
                part = slice(start, start + 16)
                torch.nn.functional.cross_entropy(net(torch.tensor(x[part])), torch.tensor(y[part])).backward()
                optimizer.step()
            rates.step()
            policy.step()
        return held, torch.cat([p.detach().flatten() for p in net.parameters()]).numpy().copy(), grc.report().steps

    found["door"] = fit(*network())
    if transport == "torch":
        found["ddp"] = fit(*network("ddp"))

save(out, rank, found)
if transport == "torch":
    leave_gloo()
