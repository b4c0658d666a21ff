"""Faults that PyTorch's workers survive, and a last one that ends them: OUT TRANSPORT. Saves findings."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import torch
from launch import join_torch, save

out, transport = sys.argv[1:]
rank, size = join_torch(transport)

import grace
from grace.compressors.measured.topk import TopK

found = {}
disturb = lambda step: None  # noqa: E731 - replaced by each fault


@grace.register("disturbed")
@dataclass(frozen=True)
class Disturbed(TopK):
    """Top-k with a disturbance during compression."""

    def compress(self, x, state, ctx):
        if ctx.name == "0.weight":
            disturb(ctx.step)
        return super().compress(x, state, ctx)


def train(steps=6, timeout=600.0):
    """The weights after a training, and the error raised in it."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(200, 300), torch.nn.Tanh(), torch.nn.Linear(300, 5))
    params = {"compressor": "disturbed", "compress_ratio": 0.1, "min_numel": 0, "timeout": timeout}
    grc = grace.grace_from_params(params)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    optimizer = grace.torch.DistributedOptimizer(optimizer, grace=grc, named_parameters=net.named_parameters())
    for step in range(steps):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + rank)
        loss = net(torch.randn(8, 200, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()]).numpy()


def refused(make):
    try:
        make()
    except ValueError as error:
        return str(error)


def stop(seconds):
    """Stop this process with all its threads for this many seconds."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


found["undisturbed"] = train()

# Settings, versions and parameters that differ.
linear = torch.nn.Linear(4, 4)
for name, version, ratio, names in [
    ("settings", "1", 0.1 * (rank + 1), "ab"),
    ("versions", f"1.{rank}", 0.1, "ab"),
    ("parameters", "1", 0.1, "ac"[rank] + "b"),
]:
    grace.engine.setup.VERSION = version
    grc = grace.grace_from_params({"compressor": "topk", "compress_ratio": ratio})
    found[f"other {name}"] = refused(lambda grc=grc, names=names: grc.build(dict.fromkeys(names, linear.weight)))

# Workers wait for a slow worker, and for one that is stopped for 10 seconds in the middle of a step.
for name, wait in (("slow", lambda: time.sleep(2)), ("stopped", lambda: stop(10))):
    disturb = lambda step, wait=wait: wait() if (rank, step) == (1, 3) else None  # noqa: E731
    began = time.monotonic()
    found[name] = (train(timeout=60), time.monotonic() - began)

# If a worker is slower than the timeout, the others raise an error. Later the slow worker finds that they have ended
# (gloo), or receives their earlier messages (Horovod, where messages have names).
disturb = lambda step: time.sleep(6) if (rank, step) == (1, 5) else None  # noqa: E731
began = time.monotonic()
try:
    train(timeout=3)
except (TimeoutError, ConnectionError) as error:
    found["late"] = (type(error).__name__, str(error), time.monotonic() - began)
save(out, rank, found)


# Last: a worker raises inside compress.
def fail(step):
    if (rank, step) == (1, 3):
        print("raised at", time.time(), flush=True)
        raise ArithmeticError("a compressor that fails")


if transport == "torch":
    torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("gloo", init_method=f"file://{out}/again", rank=rank, world_size=size)
disturb = fail
train(timeout=60)
