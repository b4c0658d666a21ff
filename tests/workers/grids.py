"""Two-stage exchanges over a grid of real workers: OUT. Saves the last means, and to how many workers each sent."""

import os
import sys

import numpy as np
import torch
from launch import leave_gloo, save

import grace
from grace.communicators import auto

out = sys.argv[1]
torch.set_num_threads(1)
os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"  # for the groups of a grid
kind, peers = "torch", set()
if "HOROVOD_RANK" in os.environ:
    import horovod.torch as hvd

    kind = "horovod"
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
else:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    method = vars(dist.ProcessGroup)["send"]  # to be restored: `send` below would not bind `self`
    send = dist.ProcessGroup.send

    def counting(group, tensors, dst, tag):
        peers.add(dist.get_global_rank(group, dst))
        return send(group, tensors, dst, tag)


GRID = {"communicator": "twostage", "levels": 2}
METHODS = {
    "int4": {"compressor": "blockint", **GRID},
    "lengths that vary": {"compressor": "threshold", "threshold": 1.0, **GRID},
    "default": {"compressor": "blockint"},
}
auto.MANY = 4  # measure the link for these few workers, too
found = {}
for name, params in METHODS.items():
    grc = grace.grace_from_params({**params, "min_numel": 0}, kind)
    for number in range(3):
        rng = np.random.default_rng([number, rank])
        gradients = {f"t{n}": torch.from_numpy(rng.standard_normal(n).astype(np.float32)) for n in (1, 9, 513, 5000)}
        if number == 1 and kind == "torch":
            dist.ProcessGroup.send = counting
        if number == 0:
            grc.build(gradients)
        means = grc.step(gradients)
    if kind == "torch":
        dist.ProcessGroup.send = method
    report = grc.report()
    means = {key: mean.numpy().copy() for key, mean in means.items()}
    found[name] = {"means": means, "exchange": report.exchange, "peers": len(peers)}
    if name == "default":
        found[name] |= {"link": tuple(grc.transport.link), "levels": grc.communicator.levels}
    peers.clear()

save(out, rank, found)
if kind == "torch":
    leave_gloo()
