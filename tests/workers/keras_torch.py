"""Use of Keras on PyTorch, over two workers: OUT. Saves a dictionary of findings."""

import os
import sys
import warnings
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"
from launch import join_torch, leave_gloo, save

(out,) = sys.argv[1:]
rank, size = join_torch("torch")

import keras
import keras_equal
import numpy as np
import torch
from keras_equal import BATCH, LOSS, STEPS, data, network, train, weights

import grace
import grace.keras
from grace.factorize import WarmUp

TOPK = {"compressor": "topk", "compress_ratio": 0.1, "min_numel": 0}
found = {"dense": keras_equal.dense_losses(rank)}
assert "tensorflow" not in sys.modules

# Top-k; weights, optimizer states and learning rates differ between workers at the start.
grc, net = grace.grace_from_params({**TOPK, "record": str(Path(out, "run.jsonl"))}), network(seed=rank)
optimizer = keras.optimizers.Adam(0.01)
optimizer.build(net.trainable_variables)
optimizer.iterations.assign(rank)
watch = [grace.keras.BroadcastCallback(0), grace.keras.RecordCallback(), grace.keras.PolicyCallback()]
losses = train(net, optimizer, grc, rank, epochs=8, callbacks=watch)
report = grc.report()
found["topk"] = (weights(net), losses, int(optimizer.iterations.numpy()))
found["report"] = (
    report.steps,
    report.bytes_sent,
    report.bytes_dense,
    grc.names == [v.path for v in net.trainable_variables],
)
found["record"] = Path(out, "run.jsonl").exists()

# Small batches, compared with one worker that trains on all batches, with various settings of Keras's optimizers.
for name, settings in {
    "clipnorm": {"clipnorm": 0.05},
    "accumulation": {"gradient_accumulation_steps": 2},
    "loss scale": {"loss_scale_factor": 64.0},
    "weight decay and averages": {"weight_decay": 0.01, "use_ema": True},
}.items():
    net = network()
    train(net, keras.optimizers.SGD(0.2, **settings), grace.grace_from_params({"compressor": "none"}), rank, epochs=1)
    mine, net = weights(net), network()
    net.compile(keras.optimizers.SGD(0.2, **settings), LOSS, jit_compile=False)
    parts = [data(worker) for worker in range(size)]
    x, y = (np.concatenate([p[i].reshape(STEPS, BATCH, *p[i].shape[1:]) for p in parts], 1) for i in (0, 1))
    net.fit(x.reshape(-1, 20), y.reshape(-1), BATCH * size, epochs=1, shuffle=False, verbose=0)
    found[name] = (mine, weights(net))

# An overflow on one worker: all skip the step and halve the scale, and residuals stay.
net, grc = network(), grace.grace_from_params(TOPK)
scaler = keras.optimizers.LossScaleOptimizer(
    grace.keras.DistributedOptimizer(keras.optimizers.SGD(0.1), grc), initial_scale=16.0
)
skipped, residuals_kept = [], []
for step in range(4):
    x, y = (torch.as_tensor(part[BATCH * step :][:BATCH]) for part in data(rank))
    before, state = weights(net), grc.state_dict() if step else None
    net.zero_grad()
    scaler.scale_loss(LOSS(y, net(x))).backward()
    gradients = [v.value.grad for v in net.trainable_variables]
    if step == 2 and rank == 1:
        gradients[0].fill_(float("inf"))
    with torch.no_grad():
        scaler.apply(gradients, net.trainable_variables)
    skipped.append(bool(np.array_equal(before, weights(net))))
    if step == 2:
        kept, given = (each["tensors"][net.trainable_variables[0].path] for each in (grc.state_dict(), state))
        residuals_kept = [bool(torch.equal(kept[key], given[key])) for key in given]
found["scaler"] = (weights(net), skipped, residuals_kept, float(scaler.dynamic_scale.numpy()))

# A custom loop, with a variable that only worker 0 uses and an embedding.
table, unused = keras.Variable(np.ones((6, 3), "float32"), name="table"), keras.Variable([1.0], name="unused")
absent = keras.Variable([1.0], name="absent")
grc = grace.grace_from_params({"compressor": "none"})
(torch.nn.functional.embedding(torch.tensor([rank, 5]), table.value, sparse=True).sum()).backward()
if rank == 0:
    (3 * unused.value).sum().backward()
means = grace.keras.average_gradients(grc, [v.value.grad for v in (table, unused, absent)], [table, unused, absent])
found["loop"] = (means[0].numpy(), means[1].numpy(), means[2], grc.names)

# Integers in blocks: for kernels, an embedding, and a kernel without a gradient.
INT4 = {"compressor": "blockint", "bits": 4, "block_size": 16, "communicator": "allgather", "min_numel": 0}
shapes = {"kernel": (12, 20), "lstm_kernel": (8, 30), "embeddings": (12, 20), "absent_kernel": (4, 8)}
tensors = [keras.Variable(np.zeros(shape, "float32"), name=name) for name, shape in shapes.items()]
grc = grace.grace_from_params({**INT4, "memory": "residual"})
grace.keras.build(grc, tensors)
rng = np.random.default_rng(rank)
given = [torch.as_tensor(rng.standard_normal(v.shape).astype("float32")) for v in tensors[:3]]
sent = [each.clone() for each in given]
means = grace.keras.average_gradients(grc, [*given, None], tensors)
found["blockwise"] = {
    "gradients": [each.numpy() for each in sent],
    "unchanged": all(map(torch.equal, given, sent)),
    "means": [each.numpy() for each in means[:3]],
    "absent": means[3],
    "contiguous": all(each.is_contiguous() for each in means[:3]),
    "residuals": [next(iter(grc.state_dict()["tensors"][name].values())).numpy() for name in list(shapes)[:3]],
    "transposed": grc.state_dict().get("transposed"),
}

# Save after two epochs, and continue with a new model and Grace.
whole, grc = network(), grace.grace_from_params(TOPK)
train(whole, keras.optimizers.Adam(0.01), grc, rank, epochs=2)
whole.save(Path(out, f"{rank}.keras"))
grace.checkpoint.save(grc, Path(out, "state"))
train_on = [weights(whole)]
for resumed in (False, True):
    grc = grc if not resumed else grace.grace_from_params(TOPK)
    net = whole if not resumed else keras.models.load_model(Path(out, f"{rank}.keras"))
    if resumed:
        grace.checkpoint.load(grc, Path(out, "state"))
        found["plain"] = not hasattr(net.optimizer, "_grace")
        grace.keras.DistributedOptimizer(net.optimizer, grace=grc)
        net.compile(net.optimizer, LOSS, jit_compile=False)
    x, y = data(rank)
    net.fit(x, y, BATCH, epochs=2, shuffle=False, verbose=0)
    train_on.append(weights(net))
found["resume"] = train_on

# Local training.
net = network(seed=rank)
local = grace.local.from_params({**TOPK, "local": {"sync_every": 3}})
train(
    net,
    keras.optimizers.SGD(0.1),
    None,
    rank,
    epochs=2,
    callbacks=[grace.keras.BroadcastCallback(0, grace=local.grace), grace.keras.LocalCallback(local)],
)
found["local"] = weights(net)

# Errors: models that differ, and a model whose gradients no worker averages.
net = keras.Sequential([keras.Input((3 + rank,)), keras.layers.Dense(4)])
try:
    grace.keras.broadcast_variables(net.variables)
except ValueError as error:
    found["mismatch"] = str(error)
net = network()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    net.compile(keras.optimizers.SGD(0.1), LOSS)
    net.fit(*data(rank), BATCH, verbose=0, callbacks=[grace.keras.BroadcastCallback(0)])
found["warned"] = any("no gradient of this model was averaged" in str(each.message) for each in caught)

# Pufferfish changes layers in place, which this backend does not allow.
try:
    WarmUp(1, keep_first=0, min_numel=0).switch(network(), keras.optimizers.SGD(0.1), keras.optimizers.SGD)
except RuntimeError as error:
    found["factorised"] = str(error)

# A keras.distribution, which would average gradients in addition to GRACE.
grc = grace.grace_from_params(TOPK)
keras.distribution.set_distribution(keras.distribution.DataParallel(devices=["cpu:0"], auto_shard_dataset=False))
try:
    grace.keras.DistributedOptimizer(keras.optimizers.SGD(0.1), grc)
except RuntimeError as error:
    found["distribution"] = str(error)
keras.distribution.set_distribution(None)
save(out, rank, found)
leave_gloo()
