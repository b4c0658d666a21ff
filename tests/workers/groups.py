"""Four workers as two groups of two that train separately: OUT TRANSPORT."""

import sys

import numpy as np
import torch
from exchanges import ROWS, SHAPES, gradients
from launch import leave_gloo, save

import grace

out, transport = sys.argv[1:]
PAIRS = [[0, 2], [1, 3]]
if transport == "torch":
    import torch.distributed as dist

    from grace.transports.torch_distributed import TorchDistributedTransport

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = [dist.new_group(pair) for pair in PAIRS]
    mine, other = (groups[rank % 2], groups[1 - rank % 2])

    def carrier(group):
        return TorchDistributedTransport(group)

else:
    import horovod.torch as hvd

    from grace.transports.horovod import HorovodTransport

    sets = [hvd.ProcessSet(pair) for pair in PAIRS]
    hvd.init(process_sets=sets)
    rank = hvd.rank()
    mine, other = (sets[rank % 2], sets[1 - rank % 2])

    def carrier(group):
        return HorovodTransport(group)


found = {}
for index in (5, 7, 13, 16, 20, 24):
    grc = grace.grace_from_params(ROWS[index], transport=carrier(mine))
    tensors = {name: torch.from_numpy(array) for name, array in gradients(0, rank).items()}
    grc.build(tensors)
    found[index] = ({name: mean.numpy() for name, mean in grc.step(tensors).items()}, grc.rank, grc.world_size)
try:
    carrier(other)
except ValueError as error:
    found["other"] = str(error)
found["names"] = sorted(SHAPES)
assert np.isfinite(found[5][0]["wide"]).all()
save(out, rank, found)
if transport == "horovod":
    hvd.barrier()  # the first worker that ends would shut Horovod down for the other group
else:
    leave_gloo()
