"""Local training: weights changed outside its steps, and workers that do different things. Arguments: OUT KIND.

KIND: "torch" (torch.distributed), "horovod" (PyTorch over Horovod) or "tensorflow" (over Horovod).
"""

import sys
import time

import numpy as np
from launch import leave_gloo, save

import grace
from grace.local import DiLoCo

out, kind = sys.argv[1:]
if kind == "tensorflow":
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
else:
    import torch
    from launch import join_torch

    rank, size = join_torch(kind)
transport = "torch" if kind == "torch" else "horovod"
TOPK = {"compressor": "topk", "compress_ratio": 0.3, "min_numel": 0}
# large enough for PyTorch's own collectives: with different sizes gloo ends the process
SHAPES = {"a": (300, 400), "b": (900,), "c": (200, 100), "d": (7,)}
found = {}


class Net:
    """Parameters that a plain optimizer moves by given amounts, with local training."""

    def __init__(self, shapes=SHAPES, params=TOPK, timeout=20, **settings):
        rng = np.random.default_rng(0)
        values = {name: rng.standard_normal(shape).astype("f") for name, shape in shapes.items()}
        self.local = DiLoCo(grace.grace_from_params({**params, "timeout": timeout}, transport), 4, **settings)
        self.t = 0
        if kind == "tensorflow":
            self.named = {name: tf.Variable(value, name=name) for name, value in values.items()}
            grace.tensorflow.local_variables(self.local, list(self.named.values()))
        else:
            self.named = {name: torch.nn.Parameter(torch.from_numpy(value)) for name, value in values.items()}
            self.optimizer = torch.optim.SGD(self.named.values(), lr=1.0)
            grace.torch.local(self.optimizer, self.local, self.named.items())

    def train(self, steps):
        for _ in range(steps):
            rng = np.random.default_rng(100 * self.t + rank)
            self.t += 1
            for p in self.named.values():
                change = 0.1 * rng.standard_normal(p.shape).astype("f")
                if kind == "tensorflow":
                    p.assign_sub(change)
                else:
                    p.grad = torch.from_numpy(change)
            if kind == "tensorflow":
                self.local.step()
            else:
                self.optimizer.step()

    def write(self, values):
        for name, p in self.named.items():
            if kind == "tensorflow":
                p.assign(values[name])
            else:
                p.data.copy_(torch.from_numpy(values[name]))  # a write that PyTorch's version counter misses

    def values(self):
        return {name: np.array(p.numpy() if kind == "tensorflow" else p.detach()) for name, p in self.named.items()}

    def momentum(self):
        return {name: np.array(each) for name, each in self.local.global_state()["momentum"].items()}


def error_of(call, *args):
    began = time.monotonic()
    try:
        call(*args)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


# -- weights that were written since the last step: what each worker had, and what all have then -----------------------
def finished(net):
    before = {"mine": net.values(), "momentum": net.momentum(), "bytes": net.local.report().bytes_sent}
    net.local.finish()
    after = {"all": net.values(), "after": net.momentum(), "sent": net.local.report().bytes_sent - before["bytes"]}
    return {**before, **after, "landed": net.local.landed}


for name, steps in (("in a slot", 6), ("after a landing", 8)):
    net = Net()
    net.train(2)
    best = net.values()
    net.train(steps - 2)
    net.write(best)  # as early stopping restores the best weights
    found[f"best {name}"] = finished(net)
    net.train(4)
    found[f"goes on {name}"] = net.values()

net = Net(fragments=2)
net.train(8)
if rank == 1:
    net.write({name: value + 1 for name, value in net.values().items()})  # as if one worker loaded a model
found["one worker"] = finished(net)

net = Net(fragment_sync_delay=2)
net.train(7)  # an exchange is in flight
net.write({name: value * (1 + rank) for name, value in net.values().items()})
found["in flight"] = finished(net)

net = Net()
net.train(6)
found["steps"] = finished(net)  # nothing was written: the outer optimizer steps
found["nothing"] = finished(net)


# -- workers that do different things: an error on both ----------------------------------------------------------------
def alone(net):
    net.train(6)
    if rank == 0:
        net.local.finish()  # as for an evaluation on one worker
    net.train(6)


def twice(net):
    net.train(6)
    net.local.finish()
    if rank == 0:
        net.local.finish()
    net.train(6)


def uneven(steps, more):
    def run(net):
        net.train(steps + more * (rank == 0))
        net.local.finish()

    return run


RUNS = {
    "alone": alone,
    "twice": twice,
    "a batch more": uneven(12, 1),
    "two batches more": uneven(9, 2),
    "a slot more": uneven(12, 4),
}
for name, run in RUNS.items():
    for fragments in (1, 2) if kind == "torch" else (2,):
        found[f"{name} {fragments}"] = error_of(run, Net(fragments=fragments))

if kind == "torch":
    # -- what people write, with modules -------------------------------------------------------------------------------
    def module():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))

    def batches(net, optimizer, count, after=lambda: None):
        generator = torch.Generator().manual_seed(rank)
        for _ in range(count):
            x = torch.randn(8, 6, generator=generator)
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
            after()

    def arrays(net):
        return {name: np.array(value) for name, value in net.state_dict().items() if value.is_floating_point()}

    def trained(steps, after=None):
        net = module()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
        local = DiLoCo(grace.grace_from_params({**TOPK, "timeout": 20}), 4)
        grace.torch.local(optimizer, local, net.named_parameters(), net.named_buffers())
        batches(net, optimizer, steps, after(net) if after else lambda: None)
        return net, local

    averaged = []

    def averaging(net):
        averaged.append(torch.optim.swa_utils.AveragedModel(net))
        return lambda: averaged[0].update_parameters(net)

    net, local = trained(6, averaging)
    net.load_state_dict(averaged[0].module.state_dict())
    mine = arrays(net)
    local.finish()
    found["swa"] = {"mine": mine, "all": arrays(net)}

    net, local = trained(8)
    generator = torch.Generator().manual_seed(rank)
    torch.optim.swa_utils.update_bn([torch.randn(8, 6, generator=generator) for _ in range(3)], net)
    mine = arrays(net)
    local.finish()
    found["update_bn"] = {"mine": mine, "all": arrays(net)}

    # -- a second average of gradients is refused, and parameters that no optimizer holds ------------------------------
    def refused(net, optimizer=None, named=None):
        optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1)
        local = DiLoCo(grace.grace_from_params(TOPK), 4)
        return error_of(grace.torch.local, optimizer, local, named or net.named_parameters())

    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    grace.torch.DistributedOptimizer(optimizer, grace.grace_from_params(TOPK), net.named_parameters())
    found["distributed"] = refused(net, optimizer)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    found["ddp"] = refused(net.module)
    plain = torch.nn.Linear(4, 4)
    local = DiLoCo(grace.grace_from_params(TOPK), 4)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    grace.torch.local(optimizer, local, plain.named_parameters())
    later = torch.nn.parallel.DistributedDataParallel(plain)
    later(torch.ones(2, 4)).sum().backward()
    found["ddp later"] = error_of(optimizer.step)
    # DDP within a machine, and local training across machines: groups that share one worker only
    groups = [torch.distributed.new_group([each]) for each in range(size)]
    inner = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4), process_group=groups[rank])
    found["ddp of a machine"] = refused(inner.module)

    net = torch.nn.ModuleDict({"body": torch.nn.Linear(4, 4), "head": torch.nn.Linear(4, 2)})
    body = torch.optim.SGD(net["body"].parameters(), lr=0.1)
    found["no optimizer"] = refused(net, body)
    net["head"].requires_grad_(False)
    found["frozen"] = refused(net, body)
    net["head"].requires_grad_(True)
    head = torch.optim.SGD(net["head"].parameters(), lr=0.1)
    found["two optimizers"] = refused(net, body)
elif kind == "horovod":
    import horovod.torch as hvd

    net = torch.nn.Linear(4, 4)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
    local = DiLoCo(grace.grace_from_params(TOPK), 4)
    found["distributed"] = error_of(grace.torch.local, optimizer, local, net.named_parameters())

# -- with a delay one worker has sent its payload before it hears of the other: last, as that is never received --------
net = Net(timeout=3, fragments=2, fragment_sync_delay=1)
found["alone, with a delay"] = error_of(alone, net)
save(out, rank, found)
if kind == "torch":
    leave_gloo()
