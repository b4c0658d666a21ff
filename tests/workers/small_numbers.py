"""Dtypes on the wire, and second derivatives under DDP, over real workers: OUT KIND. Saves a dictionary of findings."""

import sys

import torch
from launch import leave_gloo, save

import grace

out, kind = sys.argv[1:]
torch.set_num_threads(1)
found = {}
if kind == "horovod":
    import horovod.torch as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
else:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
for communicator in ("allreduce", "allgather", "twostage"):
    grc = grace.grace_from_params(
        {"compressor": "none", "communicator": communicator, "min_numel": 0, "timeout": 60.0}, kind
    )
    every = [
        {
            f"{name}{n}": torch.randn(n, generator=torch.Generator().manual_seed(n + worker)).to(dtype)
            for name, dtype in DTYPES.items()
            for n in (7, 3001)
        }
        for worker in range(size)
    ]
    grc.build(every[rank])
    means = grc.step({name: g.clone() for name, g in every[rank].items()})
    off = {
        name: (mean.double() - sum(each[name].double() for each in every) / size).abs().max().item()
        for name, mean in means.items()
    }
    sent = {t.name: t.bytes_sent / t.bytes_dense for t in grc.report().tensors}
    found[communicator] = {"off": off, "sent": sent, "dtypes": {name: str(mean.dtype) for name, mean in means.items()}}

if kind != "horovod":

    class Square(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.p = torch.nn.Parameter(torch.linspace(0.0, 1.0, 2000))

        def forward(self):
            return ((1 + dist.get_rank()) * self.p.pow(2)).sum()

    found["twice"] = {}
    for compressor in ("none", "topk", "powersgd", "qsgd"):
        net = torch.nn.parallel.DistributedDataParallel(Square())
        grc = grace.grace_from_params({"compressor": compressor, "min_numel": 0, "timeout": 60.0})
        net.register_comm_hook(grc, grace.torch.ddp_hook)
        for _ in range(3):
            net.zero_grad()
            net().backward(create_graph=True)
        found["twice"][compressor] = net.module.p.grad.detach().numpy().copy()

save(out, rank, found)
if kind != "horovod":
    leave_gloo()
