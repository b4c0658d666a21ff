"""Trainers that save one file for all workers, over two workers of torch.distributed: OUT. Saves a dictionary."""

import sys
from pathlib import Path

import numpy as np
from launch import error_of, join_torch, leave_gloo, save

out = Path(sys.argv[1])
rank, size = join_torch("torch")

import torch
from accelerate import Accelerator

import grace
import grace.torch

TOPK = {"compressor": "topk", "compress_ratio": 0.1, "min_numel": 0}
STEPS = 3
found = {}


def gradients(step):
    rng = np.random.default_rng([step, rank])
    return {"w": torch.from_numpy(rng.standard_normal((20, 10)).astype("float32"))}


def train(grc, first, last):
    """The means of some steps."""
    grc.build(gradients(0))
    return [grc.step(gradients(step))["w"].numpy() for step in range(first, last)]


def new():
    return grace.grace_from_params(TOPK)


# Accelerate saves the state of all workers; it is loaded before or after the tensors are known.
grc = new()
train(grc, 0, STEPS)
accelerator = Accelerator(cpu=True)
accelerator.register_for_checkpointing(grace.torch.GatheredState(grc))
accelerator.save_state(str(out / "gathered"))
accelerator.wait_for_everyone()
found["states"] = [x.numpy() for x in grc.state_dict()["tensors"]["w"].values()]
whole = train(grc, STEPS, 2 * STEPS)
for built in (False, True):
    other = new()
    if built:
        train(other, 10, 12)
    accelerator = Accelerator(cpu=True)
    accelerator.register_for_checkpointing(grace.torch.GatheredState(other))
    accelerator.load_state(str(out / "gathered"))
    found["accelerate", built] = (whole, train(other, STEPS, 2 * STEPS), other.steps)

# The same object in Lightning's Fabric.
from lightning.fabric import Fabric

fabric = Fabric(accelerator="cpu", devices=size, strategy="ddp")
fabric.launch()
grc = new()
train(grc, 0, STEPS)
fabric.save(out / "fabric.ckpt", {"grace": grace.torch.GatheredState(grc)})
other = new()
fabric.load(out / "fabric.ckpt", {"grace": grace.torch.GatheredState(other)})
found["fabric"] = (whole, train(other, STEPS, 2 * STEPS), other.steps)

# If the Grace itself is registered, worker 0's state is saved for all workers.
accelerator = Accelerator(cpu=True)
accelerator.register_for_checkpointing(grc)
accelerator.save_state(str(out / "plain"))
accelerator.wait_for_everyone()  # only worker 0 writes
for built in (False, True):
    other = new()
    if built:
        train(other, 0, 1)
        before = other.state_dict()
    accelerator = Accelerator(cpu=True)
    accelerator.register_for_checkpointing(other)
    told = error_of(accelerator.load_state, str(out / "plain"))
    found["plain", built] = told if built else told + error_of(train, other, 0, 1)
    if built:
        after = other.state_dict()
        found["unchanged"] = after["step"] == before["step"] and all(
            torch.equal(value, after["tensors"]["w"][key]) for key, value in before["tensors"]["w"].items()
        )

# Each worker loads the other's state; then a state that one worker cannot read.
torch.save(grc.state_dict(), out / f"{rank}.pt")
torch.distributed.barrier()
other = new()
other.build(gradients(0))
found["swapped"] = error_of(other.load_state_dict, torch.load(out / f"{1 - rank}.pt"))
state = torch.load(out / f"{rank}.pt")
found["spoiled"] = error_of(other.load_state_dict, state if rank == 0 else {**state, "method": "another"})
FOREIGN = {"a model": {"w": torch.ones(3)}, "no step": {k: v for k, v in state.items() if k != "step"}}
FOREIGN |= {"no tensors": {**state, "tensors": None}, "a list": [state]}
for name, foreign in FOREIGN.items():
    found[name] = error_of(other.load_state_dict, state if rank == 0 else foreign)
found["no gathered state"] = error_of(grace.torch.GatheredState(other).load_state_dict, state)
found["goes on"] = len(train(other, 0, 2))
save(str(out), rank, found)
leave_gloo()
