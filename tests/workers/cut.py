"""A training over torch.distributed that reports when it is half-way, and an undisturbed one: OUT."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from launch import leave_gloo, save

import grace

out = sys.argv[1]
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()


def train(steps=30):
    """The weights, and the seconds of the longest step."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(200, 300), torch.nn.Tanh(), torch.nn.Linear(300, 5))
    grc = grace.grace_from_params({"compressor": "topk", "compress_ratio": 0.1, "min_numel": 0, "timeout": 60})
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    grace.torch.DistributedOptimizer(optimizer, grace=grc, named_parameters=net.named_parameters())
    longest = 0.0
    for step in range(steps):
        if step == 10:
            Path(out, f"half-way-{rank}").touch()
        began = time.monotonic()
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + rank)
        net(torch.randn(8, 200, generator=generator)).square().mean().backward()
        optimizer.step()
        longest = max(longest, time.monotonic() - began)
        time.sleep(0.1)
    return torch.cat([p.detach().flatten() for p in net.parameters()]).numpy(), longest


save(out, rank, {"cut": train(), "in peace": train()})
leave_gloo()
