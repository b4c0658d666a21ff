"""Requirements of PyTorch's tests of DDP, and of Horovod's tests of its optimizer, tried with GRACE: OUT."""

import inspect
import sys
from collections import namedtuple

import torch
import torch.distributed as dist
from launch import join_torch, leave_gloo, save
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import relu
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import grace

rank, _ = join_torch("torch")
METHODS = {
    "plain": None,
    "none": {"compressor": "none"},
    "topk": {"compressor": "topk", "compress_ratio": 0.1, "min_numel": 0},
}


class Net(nn.Module):
    """A module of these parts; ``forward`` is a function of the module and the input."""

    def __init__(self, forward, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._forward, self.calls = forward, 0

    def forward(self, x, *args):
        self.calls += 1
        return self._forward(self, x, *args)


def linear():
    return nn.Linear(20, 20)


def mlp():
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))


def data():
    return torch.randn(8, 20)


def loss(model, *args):
    return model(data(), *args).square().mean()


def layouts():
    a, b = nn.Conv2d(8, 16, 2).to(memory_format=torch.channels_last), nn.Conv2d(16, 8, 2, dtype=torch.float64)
    c = nn.Conv2d(8, 8, 2, dtype=torch.bfloat16)
    return Net(lambda m, x: m.c(m.b(m.a(x).double()).bfloat16()).float(), a=a, b=b, c=c)


def checkpointed(reentrant):
    def forward(m, x):
        once = checkpoint(m.b, m.a(x), use_reentrant=reentrant)
        return checkpoint(m.b, once, use_reentrant=reentrant)

    net = Net(forward, a=linear(), b=linear())
    net.a.weight = net.b.weight
    return net


def alternating():
    return Net(lambda m, x: checkpoint(m.a if m.calls % 2 else m.b, x, use_reentrant=False), a=linear(), b=linear())


def branches():
    def forward(m, x, which):
        return m.a(x) + (m.b(x) if which == 1 else m.c(x) if which == 2 else 0)

    return Net(forward, a=linear(), b=linear(), c=linear())


def shared_and_unused():
    net = Net(
        lambda m, x: m.b(x), a=nn.Linear(20, 5, bias=False), b=nn.Linear(20, 5), bias=nn.Parameter(torch.zeros(5))
    )
    net.a.bias = net.bias
    return net


def nested():
    pair = namedtuple("pair", "a b")
    return Net(lambda m, x: pair(m.a(x), {"key": [m.b(x), None]}), a=linear(), b=linear())


def odd_shapes():
    def forward(m, x):
        return m.a(x) * m.scale + m.none(x).sum()

    return Net(forward, a=linear(), none=nn.Linear(20, 0), scale=nn.Parameter(torch.tensor(1.0)))


def hooked():
    net = mlp()
    net[0].register_forward_pre_hook(lambda module, inputs: relu(inputs[0]))
    net[0].register_full_backward_hook(lambda module, given, got: None)
    return net


def nested_loss(model, step):
    out = model(data())
    return out.a.square().mean() + (out.b["key"][0].square().mean() if step % 2 else 0)


def ignored(model, step):
    model(data())
    return loss(model) if step % 2 else None


def in_no_sync(model, step):
    with torch.no_grad(), model.no_sync():
        model(data())
    with model.no_sync():
        loss(model).backward()
    late = loss(model)
    with model.no_sync():
        late.backward()  # DDP exchanges, as the forward pass was outside no_sync


def profiled(model, step):
    with torch.autograd.profiler.profile():
        loss(model).backward()


def new_tensor():
    return Net(lambda m, x: torch.cat([m.a(x), torch.rand(3, 20, requires_grad=True)]), a=linear())


def adam(parameters, lr):
    return ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.Adam, lr=lr)


UNUSED, STATIC, VIEW = {"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}
DDP = {
    "channels last, three dtypes": (layouts, lambda m, s: m(torch.randn(2, 8, 6, 6)).square().mean(), VIEW),
    "two forward passes": (mlp, lambda m, s: loss(m) + loss(m), {"broadcast_buffers": False}),
    "two forward passes, static graph": (mlp, lambda m, s: loss(m) + loss(m), STATIC),
    "a layer checkpointed twice, shared weights": (lambda: checkpointed(False), lambda m, s: loss(m), {}),
    "the same, reentrant, static graph": (
        lambda: checkpointed(True),
        lambda m, s: m(data().requires_grad_()).square().mean(),
        STATIC,
    ),
    "checkpoints of other layers each step": (alternating, lambda m, s: loss(m), UNUSED),
    "branches, alike on all workers": (branches, lambda m, s: loss(m, s % 3), UNUSED),
    "branches, unlike on workers": (branches, lambda m, s: loss(m, (s + rank) % 3), UNUSED),
    "parameters unused on all, gradients as views": (branches, lambda m, s: loss(m, rank), {**UNUSED, **VIEW}),
    "an unused parameter of two names": (shared_and_unused, lambda m, s: loss(m), UNUSED),
    "outputs that are ignored": (mlp, ignored, {}),
    "nested outputs": (nested, nested_loss, UNUSED),
    "scalars and empty tensors": (odd_shapes, lambda m, s: loss(m), {}),
    "forward and backward hooks": (hooked, lambda m, s: loss(m), {}),
    "passes inside no_sync": (mlp, in_no_sync, {}),
    "a profiler": (mlp, profiled, {}),
    "a tensor made in the forward pass": (new_tensor, lambda m, s: loss(m), {}),
    "ZeroRedundancyOptimizer": (mlp, lambda m, s: loss(m), {}, adam),
}


def train(method, make, forward, options, optimizer=torch.optim.SGD):
    torch.manual_seed(0)
    model = DistributedDataParallel(make(), **options)
    if METHODS[method]:
        grc = grace.grace_from_params(METHODS[method])
        grace.torch.name_parameters(grc, model)
        model.register_comm_hook(grc, grace.torch.ddp_hook)
    optimizer = optimizer(model.parameters(), lr=0.05)
    torch.manual_seed(100 + rank)
    for step in range(6):
        optimizer.zero_grad()
        value = forward(model, step)
        if value is not None:
            value.backward()
        optimizer.step()
    return flat(model)


def flat(model):
    return torch.cat([p.detach().double().flatten() for p in model.parameters()]).numpy()


# -- Horovod: every optimizer of PyTorch, unequal outputs, a state that worker 0 alone has loaded ----------------------
SETTINGS = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "centered": True}
CLASSES = {
    cls.__name__: cls
    for cls in torch.optim.Optimizer.__subclasses__()
    if cls.__module__.startswith("torch.optim") and cls.__name__ not in ("LBFGS", "SparseAdam")
}


def every_optimizer(cls):
    def begin(seed):
        torch.manual_seed(seed)
        bias = cls.__name__ != "Muon"  # Muon takes matrices only
        model = Net(
            None, a=nn.Linear(20, 16, bias=bias), b=nn.Linear(16, 16, bias=bias), c=nn.Linear(16, 16, bias=bias)
        )
        settings = {key: value for key, value in SETTINGS.items() if key in inspect.signature(cls.__init__).parameters}
        optimizer = cls(model.parameters(), **settings)
        grc = grace.grace_from_params(METHODS["topk"])
        grace.torch.DistributedOptimizer(optimizer, grc, named_parameters=model.named_parameters())
        grace.torch.broadcast_parameters(model.state_dict(), grace=grc)
        return model, optimizer, grc

    def steps(model, optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            once = model.b(relu(model.a(data())))
            (once if rank == 0 else model.c(relu(once))).square().mean().backward()
            optimizer.step()

    model, optimizer, grc = begin(rank)
    steps(model, optimizer)
    first, saved = flat(model), (model.state_dict(), optimizer.state_dict())
    model, optimizer, grc = begin(5 + rank)
    if rank == 0:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    grace.torch.broadcast_parameters(model.state_dict(), grace=grc)
    grace.torch.broadcast_optimizer_state(optimizer, grace=grc)
    arrived = flat(model)
    steps(model, optimizer)
    return first, arrived, flat(model)


found = {
    "ddp": {name: {method: train(method, *case) for method in METHODS} for name, case in DDP.items()},
    "optimizers": {name: every_optimizer(cls) for name, cls in CLASSES.items()},
}
dist.barrier()
save(sys.argv[1], rank, found)
leave_gloo()
