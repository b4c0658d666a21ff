"""Measure the links between workers on two machines of two: OUT TRANSPORT."""

import os
import sys

from launch import leave_gloo, save

out, transport = sys.argv[1:]
os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
if transport == "torch":
    import torch.distributed as dist

    dist.init_process_group("gloo")
else:
    import horovod.torch as hvd

    hvd.init()

from grace.backends import get_backend
from grace.bench import costs as measure
from grace.transports import get_transport

carrier = get_transport().bind(get_backend("torch"))
found = measure.links(carrier, node_size=2, sizes=(2**10, 2**16, 2**20), repeats=3)
save(out, carrier.rank, found)
if transport == "torch":
    leave_gloo()
