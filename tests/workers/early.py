"""Graces made before the process group, in two processes that torch.multiprocessing starts: OUT. Saves findings."""

import os
import sys

import torch
import torch.distributed as dist
from launch import leave_gloo, save

import grace.torch
from grace.gossip import Full, Gossip

TOPK = {"compressor": "topk", "compress_ratio": 0.1, "min_numel": 0}


def outcome(call):
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def join(out, rank, name):
    dist.init_process_group("gloo", init_method=f"file://{out}/{name}", rank=rank, world_size=2)


def train(grc, rank, hook):
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 20)
    net, optimizer = model, torch.optim.SGD(model.parameters(), 0.1)
    if hook:
        net = torch.nn.parallel.DistributedDataParallel(model)
        net.register_comm_hook(grc, grace.torch.ddp_hook)
    else:
        grace.torch.DistributedOptimizer(optimizer, grc, named_parameters=model.named_parameters())
    torch.manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(8, 20)).square().mean().backward()
        optimizer.step()
    return grc.world_size, grc.rank, model.weight.detach().numpy().copy()


def forked(call):
    """The error that a call raises in a forked process."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.write(write, str(outcome(call)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return os.read(read, 10000).decode()


def work(rank, out, carried):
    torch.set_num_threads(1)
    found = {}
    gradient = {"w": torch.full((4,), float(rank))}
    dense = {"compressor": "none"}
    made = grace.grace_from_params(TOPK)
    asked, built, local, counted = (grace.grace_from_params(dense, way) for way in (None, None, "local", None))
    found["asked"] = (asked.rank, asked.world_size)
    built.build(gradient)
    local.build(gradient)
    found["alone"] = built.step(gradient)["w"].tolist()
    hierarchical = {**dense, "communicator": "hierarchical"}
    fits, misfit = (grace.grace_from_params({**hierarchical, "node_size": size}) for size in (2, 3))
    mixing = Gossip(Full(), "ring")
    counted = outcome(lambda: grace.grace_from_params({**dense, "world_size": 1}))

    join(out, rank, "first")
    found["pickled"] = train(carried, rank, hook=True)
    found["made"] = train(made, rank, hook=False)
    found["asked early"] = outcome(lambda: asked.build(gradient))
    found["counted early"] = outcome(lambda: counted.build(gradient))
    found["built early"] = outcome(lambda: built.step(gradient))
    built.reset()
    found["reset"] = (built.world_size, built.step(gradient)["w"].tolist())
    found["local"] = (local.world_size, local.step(gradient)["w"].tolist())
    fits.build(gradient)
    found["fits"] = fits.step(gradient)["w"].tolist()
    found["misfit"] = outcome(lambda: misfit.build(gradient))
    mixing.build(gradient)
    found["gossip"] = mixing.step(gradient)["w"].tolist()

    current = grace.grace_from_params(dense)
    current.build(gradient)
    found["forked"] = forked(lambda: current.step(gradient))
    found["not forked"] = current.step(gradient)["w"].tolist()
    dist.destroy_process_group()
    found["destroyed"] = outcome(lambda: current.step(gradient))
    join(out, rank, "second")
    found["again"] = outcome(lambda: current.step(gradient))
    current.reset()
    found["again reset"] = current.step(gradient)["w"].tolist()
    save(out, rank, found)
    leave_gloo()


if __name__ == "__main__":
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    torch.multiprocessing.spawn(work, (sys.argv[1], grace.grace_from_params(TOPK)), nprocs=2)
