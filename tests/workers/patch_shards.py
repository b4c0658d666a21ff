"""Each worker compares its own shards of an FSDP2 model, of DTensors in other placements, and of replicated ones."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import grace

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
rank, workers = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (workers,))


def model():
    torch.manual_seed(0)
    found = torch.nn.Sequential(torch.nn.Linear(33, 17), torch.nn.LayerNorm(17), torch.nn.Linear(17, 1)).bfloat16()
    fully_shard(found, mesh=mesh)
    return found


def tensors(seed):
    torch.manual_seed(1)
    found = {"columns": (torch.randn(6, 9), [Shard(1)]), "same": (torch.randn(5), [Replicate()])}
    torch.manual_seed(seed)
    for each, _ in found.values():
        each[torch.rand(each.shape) < 0.3] += 1
    return {name: distribute_tensor(each, mesh, place) for name, (each, place) in found.items()}


def state(module, seed):
    return {**module.state_dict(), **tensors(seed)}


def whole(held):
    return {name: each.full_tensor() for name, each in held.items()}


net = model()
base = {name: each.clone() for name, each in state(net, 2).items()}
full_base = whole(base)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
net(torch.ones(4, 33).bfloat16()).sum().backward()
optimizer.step()
new = state(net, 3)
full_new = whole(new)

patch = grace.patch.diff(new, base)
reference = grace.patch.diff(full_new, full_base)
assert patch.changed < reference.changed
gathered = [None] * workers
dist.all_gather_object(gathered, patch)
joined = grace.patch.join(gathered)
assert joined.density == reference.density
expected = {item.name: item for item in reference.items()}
for item in joined.items():
    other = expected.pop(item.name)
    assert item[:3] == other[:3]
    assert (item.indices == other.indices).all()
    assert item.values.tobytes() == other.values.tobytes()
assert not expected

# Each saves its own, one finishes; a whole model and a sharded one take the patch.
grace.patch.save(patch, folder, 1, 0, rank=rank, workers=workers)
dist.barrier()
if rank == 0:
    grace.patch.finish(folder, 1, 0, workers)
dist.barrier()
loaded = grace.patch.load(folder)
assert loaded.density == reference.density
target = {name: each.clone() for name, each in full_base.items()}
grace.patch.apply(loaded, target, version=0)
assert all(torch.equal(target[name], full_new[name]) for name in full_new)
mine = {name: each.clone() for name, each in base.items()}
grace.patch.apply(patch, mine)
assert all(torch.equal(mine[name].to_local(), new[name].to_local()) for name in new)
with pytest.raises(grace.patch.Refused, match="use the same sharding"):
    grace.patch.apply(reference, {name: each.clone() for name, each in base.items()})
print("all equal", flush=True)
dist.barrier()
dist.destroy_process_group()
