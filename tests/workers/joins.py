"""Two workers, one of which runs out of batches or belongs to no group: OUT TRANSPORT COMPRESSOR. Saves findings."""

import sys

import torch
from launch import join_torch, leave_gloo, save

out, transport, compressor = sys.argv[1:]
rank, size = join_torch(transport)

import grace.torch

PARAMS = {"compressor": compressor, "min_numel": 0, "timeout": 30}


def model():
    torch.manual_seed(0)
    return torch.nn.Linear(64, 64)


def step(net, optimizer, number):
    optimizer.zero_grad()
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * number + rank))
    net(x).square().mean().backward()
    optimizer.step()


def joined_horovod():
    import horovod.torch as hvd

    net, steps = model(), 0
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    grace.torch.DistributedOptimizer(optimizer, grace.grace_from_params(PARAMS), net.named_parameters())
    try:
        for steps in range(2 if rank else 5):
            step(net, optimizer, steps)
        hvd.join()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "steps": steps}


def process_set():
    import horovod.torch as hvd

    from grace.transports.horovod import HorovodTransport

    mine = hvd.ProcessSet([0])
    hvd.shutdown()
    hvd.init(process_sets=[mine])
    try:
        made = grace.grace_from_params({"compressor": "none"}, HorovodTransport(mine))
    except ValueError as error:
        return {"error": f"ValueError: {error}"}
    net = model()
    grace.torch.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), made, process_set=mine)
    refused = False
    try:
        grace.torch.DistributedOptimizer(
            torch.optim.SGD(model().parameters(), 0.1),
            grace.grace_from_params({"compressor": "none"}, HorovodTransport(mine)),
            process_set=hvd.global_process_set,
        )
    except ValueError:
        refused = True
    return {"error": "", "world size": made.world_size, "accepted": True, "refused": refused}


def joined_ddp(hook, divide_by_all):
    net = torch.nn.parallel.DistributedDataParallel(model())
    if hook:
        net.register_comm_hook(grace.grace_from_params(PARAMS), grace.torch.ddp_hook)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with net.join(divide_by_initial_world_size=divide_by_all):
        for number in range(2 if rank else 4):
            step(net, optimizer, number)
    return net.module.weight.detach().numpy().copy()


def refused_ddp():
    try:
        joined_ddp(True, False)
    except Exception as error:
        return str(error)


if transport == "torch":
    found = {"all": [joined_ddp(hook, True) for hook in (True, False)], "error": refused_ddp()}
else:
    found = process_set() if compressor == "process set" else joined_horovod()
save(out, rank, found)
if transport == "torch":
    leave_gloo()
