"""Training steps whose tensors count as a device's, and where the host reads their values: OUT.

A device would have to finish its work before such a read.
"""

import os
import sys
import traceback
from pathlib import Path

sys.path.append(str(Path(sys.prefix) / "triton"))  # where `make test` installs Triton
os.environ |= {"TRITON_INTERPRET": "1", "GRACE_KERNELS": "triton"}

import torch
from launch import error_of, join_torch, leave_gloo, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

(out,) = sys.argv[1:]
rank, size = join_torch("torch")

import grace
import grace.torch.signals
import grace.torch.watch
from grace.backends import get_backend
from grace.backends.torch_buffers import TorchBuffers
from grace.kernels.triton.launcher import Launcher

METHODS = {
    "none": {"compressor": "none"},
    "fp16": {"compressor": "fp16"},
    "bf16": {"compressor": "bf16"},
    "int4": {"compressor": "blockint", "bits": 4},
    "int4 in two stages": {"compressor": "blockint", "bits": 4, "communicator": "twostage", "min_shard": 64},
    "eden": {"compressor": "eden", "bits": 3, "block_size": 64},
    "signs": {"compressor": "efsignsgd", "block_size": 512},
    "qsgd": {"compressor": "qsgd"},
    "natural": {"compressor": "natural"},
    "terngrad": {"compressor": "terngrad"},
    "topk": {"compressor": "topk", "compress_ratio": 0.05, "index_coding": "int32"},
    "randomk": {"compressor": "randomk", "compress_ratio": 0.05},
    "powersgd": {"compressor": "powersgd", "compress_rank": 2},
    "acpsgd": {"compressor": "acpsgd", "compress_rank": 2},
    "dion": {"compressor": "dion", "rank_fraction": 0.1},
}
READS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim"}
"""Operations that copy values to the host."""
WARM_UPS, STEPS = 2, 2


class Reads(TorchDispatchMode):
    """Records where values are read, except within `allowed` calls."""

    def __init__(self):
        super().__init__()
        self.found, self.allowed = [], 0

    def note(self, what):
        if not self.allowed:
            frames = [each for each in traceback.extract_stack() if "/grace/" in each.filename]
            where = f"{frames[-1].filename.rpartition('/grace/')[2]}:{frames[-1].lineno}" if frames else "the loop"
            self.found.append(f"{what} in {where}")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        indexed = name in ("index", "index_put", "index_put_") and any(
            each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]
        )
        if name in READS or indexed:
            self.note(name)
        return func(*args, **(kwargs or {}))


reads = None
"""The reads of the running step."""


def watched(owner, name, allowed):
    """Wrap a method that reads values on the host, to record each call. ``allowed``: calls are not recorded."""
    original = getattr(owner, name)

    def method(self, *rest, **form):
        if reads is None:
            return original(self, *rest, **form)
        if not allowed:
            reads.note(name)
        reads.allowed += 1
        try:
            return original(self, *rest, **form)
        finally:
            reads.allowed -= 1

    setattr(owner, name, method)


for each in ("cpu", "numpy", "tolist", "__array__"):
    watched(torch.Tensor, each, False)
watched(Launcher, "_launch", True)  # by Triton's interpreter

late = []


def fetch(self, x):
    """Copies at once, and records after how many steps the values are requested."""
    value, made = x.detach().clone(), len(steps)

    def wait():
        late.append(len(steps) - made)
        return allowed(value.numpy)

    return wait


def allowed(call):
    if reads is None:
        return call()
    reads.allowed += 1
    try:
        return call()
    finally:
        reads.allowed -= 1


TorchBuffers.fetch = fetch
grace.torch.signals.waits = grace.torch.watch.waits = lambda device: False
xp = get_backend("torch")
xp.on_host, xp.piece = False, 0
xp.__dict__["_triton_runs"] = True
assert not xp.can_read_values
assert xp.kernels.isa == "triton"
steps = []


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 20))


def sgd(model, params):
    momentum = 0.0 if params["compressor"] == "dion" else 0.9  # dion has its own
    return torch.optim.SGD(model.parameters(), 0.05, momentum=momentum)


def ddp(params):
    model = torch.nn.parallel.DistributedDataParallel(net())
    grc = grace.grace_from_params({**params, "min_numel": 0})
    model.register_comm_hook(grc, grace.torch.ddp_hook)
    return model, sgd(model, params), grc


def optimizer(params):
    model = net()
    grc = grace.grace_from_params({**params, "min_numel": 0})
    return (
        model,
        grace.torch.DistributedOptimizer(sgd(model, params), grc, model.named_parameters()),
        grc,
    )


def fsdp(params):
    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    grc = grace.grace_from_params({**params, "min_numel": 0, "communicator": "reducescatter"})
    grace.torch.fsdp(model, grace=grc)
    return model, sgd(model, params), grc


def train(make, params, clip):
    """The reads in the last steps, by step; the delay in steps of fetched values; and facts of the report."""
    global reads
    model, optimizer, grc = make(params)
    found = []
    late.clear()
    for step in range(WARM_UPS + STEPS):
        steps.append(step)
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(10 * step + rank))
        mode = Reads()
        if step >= WARM_UPS:
            reads = mode
        with mode:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        reads = None
        if step >= WARM_UPS:
            found.append(mode.found)
    return found, sorted(set(late)), grc.report().steps, grc.report().runs_as


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(8, 20)).square().mean().backward()
    optimizer.step()


def apart():
    """Worker 0 makes one more pass: after how many further steps an error is raised, and which."""
    model, optimizer, _ = ddp(METHODS["int4"])
    for _ in range(2):
        step(model, optimizer)
    if rank == 0:
        model(torch.ones(8, 20)).square().mean().backward()
    for number in range(4):
        if error := error_of(step, model, optimizer):
            return number, error
    return 4, ""


found = {("fsdp", name): train(fsdp, METHODS[name], False) for name in ("none", "int4", "signs")}
for name, params in METHODS.items():
    for make in (ddp, optimizer):
        for clip in (False, True):
            if not clip or name in ("eden", "int4"):
                found[name, make.__name__, clip] = train(make, params, clip)
save(out, rank, (found, apart()))
leave_gloo()
