"""Two workers train with and without a thread pool, with slow compression: OUT TRANSPORT."""

import random
import sys
import threading
import time
from dataclasses import dataclass

import torch
from launch import join_torch, leave_gloo, save

out, transport = sys.argv[1:]
rank, size = join_torch(transport)

import grace
from grace.compressors.measured.topk import TopK

found = {"threads": set()}
draw = random.Random(rank)
fails = None


@dataclass(frozen=True)
class Sleepy(TopK):
    """Slow top-k, with a different delay on each worker."""

    def compress(self, x, state, ctx):
        if threading.current_thread() is not threading.main_thread():
            found["threads"].add(threading.current_thread().name)
        time.sleep(draw.random() * 0.02)
        if rank == 1 and ctx.step == fails:
            raise ArithmeticError("worker 1 failed on the pool")
        return super().compress(x, state, ctx)


def train(device, timeout=60.0):
    """The weights after some steps."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(60, 60) for _ in range(6)])
    ways = [f"compress({each}) allgather*(flat) decompress({each})" for each in (device, "gpu")]
    names = [name for name, _ in net.named_parameters()]
    plan = {"tensors": {name: {"option": ways[index % 3 == 2]} for index, name in enumerate(names)}}
    params = {"compressor": Sleepy(compress_ratio=0.1), "plan": plan, "bucket_mb": 1e-3, "timeout": timeout}
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    optimizer = grace.torch.DistributedOptimizer(optimizer, grace.grace_from_params(params), net.named_parameters())
    for step in range(8):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + rank)
        net(torch.randn(8, 60, generator=generator)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()]).numpy()


found["gpu"] = train("gpu")
found["threads"].clear()
found["cpu"] = train("cpu")
if transport == "torch":
    fails = 4
    try:
        train("cpu", timeout=3.0)
    except Exception as error:
        found["error"] = type(error).__name__, str(error)
save(out, rank, found)
if transport == "torch":
    leave_gloo()
