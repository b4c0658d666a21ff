"""A training that torchrun starts again after a worker was killed: OUT."""

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from launch import leave_gloo, save

import grace
from grace.compressors.measured.topk import TopK

out = Path(sys.argv[1])
STEPS, EVERY, DEATH = 14, 4, 10
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
killing = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"


@grace.register("deadly")
@dataclass(frozen=True)
class Deadly(TopK):
    """Top-k during which worker 1 dies."""

    def compress(self, x, state, ctx):
        if killing and (rank, ctx.step) == (1, DEATH):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().compress(x, state, ctx)


def train(folder=None):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.Dropout(0.1), torch.nn.Linear(300, 5))
    grc = grace.grace_from_params({"compressor": "deadly", "compress_ratio": 0.05, "min_numel": 0})
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    optimizer = grace.torch.DistributedOptimizer(optimizer, grace=grc, named_parameters=net.named_parameters())
    first = 0
    if folder and grace.checkpoint.steps(folder):
        first = grace.checkpoint.load(grc, folder)
        saved = torch.load(folder / f"{first}.pt", weights_only=True)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
    for step in range(first, STEPS):
        torch.manual_seed(100 * step + rank)
        optimizer.zero_grad()
        net(torch.randn(8, 20)).square().mean().backward()
        optimizer.step()
        if folder and (step + 1) % EVERY == 0:
            if rank == 0:
                # Save the weights before the state of the Grace: a step counts once all workers have saved the latter.
                torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, folder / f"{step + 1}.pt")
            grace.checkpoint.save(grc, folder)
    return torch.cat([p.detach().flatten() for p in net.parameters()]).numpy(), first


folder = out / "checkpoints"
folder.mkdir(exist_ok=True)
weights, first = train(folder)
save(str(out), rank, {"first": first, "weights": weights, "uninterrupted": train()[0]})
leave_gloo()
