"""The switch to factors in the middle of a training, over two workers: OUT TRANSPORT. Saves findings."""

import sys

import numpy as np
import torch
from launch import join_torch, leave_gloo, save
from torch import nn

out, transport = sys.argv[1:]
rank, size = join_torch(transport)

import grace
import grace.factorize.algebra
import grace.factorize.torch
import grace.torch
from grace.factorize import WarmUp

found = {}
DENSE = {"compressor": "none"}
METHODS = {
    "none": DENSE,
    "topk": {"compressor": "topk", "compress_ratio": 0.1, "min_numel": 0},
    "powersgd": {"compressor": "powersgd", "compress_rank": 2, "min_numel": 0},
}


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 5),
    )


def make(model):
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def begin(params, seed=0):
    model = network(seed)
    grc = grace.grace_from_params(params, transport=transport)
    optimizer = grace.torch.DistributedOptimizer(make(model), grc, model.named_parameters())
    return model, grc, optimizer


def train(model, optimizer, steps):
    for number in steps:
        rng = np.random.default_rng([rank, number])
        x = torch.from_numpy(rng.standard_normal((8, 1, 8, 8)).astype("float32"))
        y = torch.from_numpy(rng.integers(0, 5, 8))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def values(model):
    return {name: tensor.detach().numpy().copy() for name, tensor in model.state_dict().items()}


def snapshot(model, optimizer, grc, warmup):
    # Save and load through a file, as a training does.
    path = f"{out}/checkpoint{rank}.pt"
    parts = {"model": model, "optimizer": optimizer, "grace": grc, "warmup": warmup}
    torch.save({key: part.state_dict() for key, part in parts.items()}, path)
    return torch.load(path, weights_only=False)


# Changes at the switch, and values that must not change. Worker 1's own SVD would differ.
original = grace.factorize.torch_layers.svd_factor
for name, params in METHODS.items():
    model, grc, optimizer = begin(params)
    train(model, optimizer, range(3))
    report = grc.report()
    before, state = values(model), grc.state_dict()["tensors"]
    if rank == 1:
        grace.factorize.torch_layers.svd_factor = lambda matrix, r: tuple(-part for part in original(matrix, r))
    warmup = WarmUp(1)
    model, new = warmup.switch(model, optimizer, make)
    grace.factorize.torch_layers.svd_factor = original
    after, kept = values(model), grc.state_dict()["tensors"]
    fresh = new.state_dict()["state"] == {}
    train(model, new, range(3, 6))
    found[f"switch {name}"] = {
        "before": before,
        "after": after,
        "end": values(model),
        "names": dict(warmup.names),
        "state": (state, kept),
        "fresh": fresh,
        "bytes": [sum(t.bytes_sent for t in r.tensors) / r.steps for r in (report, grc.report())],
        "parameters": (warmup.plan.parameters, warmup.plan.parameters_after),
        "grace": grc.names,
    }

# A run that is resumed before or after the switch continues bit for bit.
for name in ("topk", "powersgd"):
    model, grc, optimizer = begin(METHODS[name])
    warmup = WarmUp(1)
    train(model, optimizer, range(2))
    early = snapshot(model, optimizer, grc, warmup)
    train(model, optimizer, range(2, 4))
    model, optimizer = warmup.switch(model, optimizer, make)
    train(model, optimizer, range(4, 6))
    late = snapshot(model, optimizer, grc, warmup)
    train(model, optimizer, range(6, 8))
    whole = values(model)

    model, grc, optimizer = begin(METHODS[name], seed=5)
    for key, part in (("model", model), ("optimizer", optimizer), ("grace", grc)):
        part.load_state_dict(early[key])
    warmup = WarmUp(1)
    model = warmup.load_state_dict(early["warmup"], model)
    train(model, optimizer, range(2, 4))
    model, optimizer = warmup.switch(model, optimizer, make)
    train(model, optimizer, range(4, 8))
    straddled = values(model)

    warmup = WarmUp(1)
    model = warmup.load_state_dict(late["warmup"], network(seed=6))
    model.load_state_dict(late["model"])
    grc = grace.grace_from_params(METHODS[name], transport=transport)
    optimizer = grace.torch.DistributedOptimizer(make(model), grc, model.named_parameters())
    optimizer.load_state_dict(late["optimizer"])
    grc.load_state_dict(late["grace"])
    train(model, optimizer, range(6, 8))
    found[f"resume {name}"] = (whole, straddled, values(model), warmup.due(9))

# An error on one worker is raised on all, before anything is sent.
model, grc, optimizer = begin(DENSE)
if rank == 0:
    model[3].weight.data[0, 0, 0, 0] = float("nan")
try:
    WarmUp(1).switch(model, optimizer, make)
except RuntimeError as error:
    found["not finite"] = str(error)
model, grc, optimizer = begin(DENSE)
try:
    WarmUp(1, rank_ratio=0.25 if rank == 0 else 0.3).switch(model, optimizer, make)
except RuntimeError as error:
    found["plans"] = str(error)

# The switch with DistributedDataParallel's hook.
if transport == "torch":
    from torch.nn.parallel import DistributedDataParallel

    model = network()
    grc = grace.grace_from_params(METHODS["topk"], transport="torch")
    warmup, optimizer, sent = WarmUp(1), make(model), []
    for steps in (range(3), range(3, 6)):
        if warmup.due(steps[0]):
            model, optimizer = warmup.switch(model, optimizer, make, grace=grc)
        wrapped = DistributedDataParallel(model)
        grace.torch.name_parameters(grc, wrapped)
        wrapped.register_comm_hook(grc, grace.torch.ddp_hook)
        train(wrapped, optimizer, steps)
        sent.append(sorted(grc.names) == sorted(name for name, _ in model.named_parameters()))
    # DDP also broadcasts worker 0's buffers.
    found["ddp"] = (values(model), sent, grc.report().steps)

save(out, rank, found)
if transport == "torch":
    leave_gloo()
