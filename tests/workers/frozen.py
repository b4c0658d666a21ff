"""Frozen quantised parameters, quantised optimizer states, and parameters in another order, on two workers: OUT."""

import sys

import torch
from launch import join_torch, leave_gloo, save
from torch.utils._pytree import tree_map

out = sys.argv[1]
rank, size = join_torch("torch")

import grace
from grace.torch.broadcast import transport_of
from grace.torch.named import check_order

TOPK = {"compressor": "topk", "compress_ratio": 0.3, "min_numel": 0, "timeout": 30.0}
found = {}


class Quantised(torch.Tensor):
    """Integer codes and a scale, as the weights of QLoRA and the states of 8-bit optimizers."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __repr__(self):
        return "Quantised"

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Quantised(inner["codes"], inner["scale"])

    def plain(self):
        return self.codes.float() * self.scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default, torch.ops.aten.clone.default):
            return cls(args[0].codes, args[0].scale)
        plain = lambda each: each.plain() if isinstance(each, cls) else each  # noqa: E731
        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


def quantised(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return Quantised(torch.randint(-100, 100, shape, generator=generator, dtype=torch.int8), torch.tensor(0.002))


class Adapted(torch.nn.Module):
    """A frozen weight with two trained matrices beside it."""

    def __init__(self, seed, frozen=None):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weight = quantised(seed, 32, 32) if frozen is None else frozen
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.a = torch.nn.Parameter(torch.randn(4, 32, generator=generator) * 0.1)
        self.b = torch.nn.Parameter(torch.randn(32, 4, generator=generator) * 0.1)

    def forward(self, x):
        return x @ self.weight.t() + x @ self.a.t() @ self.b.t()


def train(how, params, frozen=None):
    """The trained parameters after four steps, with all parameters in the optimizer or only the trained ones."""
    net = torch.nn.Sequential(Adapted(0, frozen), torch.nn.Tanh(), Adapted(1, frozen))
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained if how == "trained" else net.parameters(), lr=1e-2)
    if params is not None:
        names = None if how == "unnamed" else net.named_parameters()
        grace.torch.DistributedOptimizer(optimizer, grace.grace_from_params(params), names)
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(8, 32, generator=generator)
        optimizer.zero_grad()
        net(x).square().mean().backward()
        if params is None:
            for p in trained:
                torch.distributed.all_reduce(p.grad)
                p.grad /= size
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in trained]).numpy()


def outcome(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


found["by hand"] = train("all", None)
for how in ("all", "trained", "unnamed"):
    found[f"dense, {how}"] = train(how, {"compressor": "none", "timeout": 30.0})
    found[f"top-k, {how}"] = train(how, TOPK)
# another kind of frozen tensor: a sparse one
found["sparse"] = train("all", TOPK, torch.eye(32).to_sparse()), train("trained", TOPK, torch.eye(32).to_sparse())


class Averaging:
    """Steps weights z, and leaves the model between z and their average, like wrappers of schedule-free optimizers."""

    def __init__(self, base):
        self.base, self.steps = base, 0

    @torch.no_grad()
    def step(self):
        self.steps += 1
        parameters = self.base.param_groups[0]["params"]
        for p in parameters:
            state = self.base.state[p]
            p.copy_(state.setdefault("z", p.clone()))
        self.base.step()
        for p in parameters:
            state = self.base.state[p]
            state["z"].copy_(p)
            state.setdefault("x", p.clone()).lerp_(p, 1 / self.steps)
            p.copy_(state["x"].lerp(p, 0.1))


def averaged(params):
    """The weights after six steps of a wrapper; ``params``: of a distributed optimizer inside (None: a plain one)."""
    p = torch.nn.Parameter(torch.linspace(-1, 1, 50))
    base = torch.optim.SGD([p], 0.1)
    if params is not None:
        grace.torch.DistributedOptimizer(base, grace.grace_from_params(params), [("p", p)])
    wrapper = Averaging(base)
    for step in range(6):
        base.zero_grad()
        target = torch.randn(50, generator=torch.Generator().manual_seed(10 * step + rank))
        (p - target).square().sum().backward()
        if params is None:
            torch.distributed.all_reduce(p.grad)
            p.grad /= size
        wrapper.step()
    return p.detach().numpy()


found["wrapped"] = averaged(None), averaged({"compressor": "none", "min_numel": 0}), averaged(TOPK)


# A frozen parameter is checked when it is unfrozen.
def unfreeze():
    net = Adapted(0)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    grace.torch.DistributedOptimizer(optimizer, grace.grace_from_params(TOPK), net.named_parameters())
    net(torch.ones(2, 32)).sum().backward()
    optimizer.step()
    net.weight.requires_grad_()
    net(torch.ones(2, 32)).sum().backward()
    optimizer.step()


found["unfrozen"] = outcome(unfreeze)

# Broadcasts of quantised weights, also within another wrapper, and of quantised states.
net = Adapted(rank)
net.register_buffer("twice", Quantised(quantised(5 + rank, 3, 3), torch.tensor(1.0 + rank)))
grace.torch.broadcast_parameters(net.state_dict())
codes = [net.weight.codes, net.twice.codes.codes]
found["weights"] = [each.numpy() for each in (*codes, net.twice.scale, net.a.detach())]


def stateful(p, seed):
    optimizer = torch.optim.SGD([p], 0.1)
    optimizer.state[p]["average"] = quantised(seed, 4)
    return optimizer


optimizer = stateful(torch.nn.Parameter(torch.zeros(4)), rank)
broadcast = lambda: grace.torch.broadcast_optimizer_state(optimizer)  # noqa: E731
found["unknown state"] = outcome(broadcast), next(iter(optimizer.state.values()))["average"].codes.numpy()
if rank == 0:
    torch.serialization.add_safe_globals([Quantised])
found["known to one"] = outcome(broadcast), next(iter(optimizer.state.values()))["average"].codes.numpy()
torch.serialization.add_safe_globals([Quantised])
found["known state"] = outcome(broadcast), next(iter(optimizer.state.values()))["average"].codes.numpy()

# Worker 1 holds the parameters in another order, as from a set.
weights = [torch.nn.Parameter(torch.full((3,), 1.0 + number)) for number in range(3)]
order = weights if rank == 0 else [weights[2], weights[0], weights[1]]


def momentum(pairs):
    """An optimizer whose state on worker 0 shows to which parameter it belongs."""
    optimizer = torch.optim.SGD(pairs, 0.1, momentum=0.9)
    for p in weights:
        optimizer.state[p]["momentum_buffer"] = p.detach() * (10 if rank == 0 else 0)
    return optimizer


def buffers(optimizer):
    return [optimizer.state[p]["momentum_buffer"].tolist()[0] for p in weights]


optimizer = momentum(order)
found["set"] = outcome(lambda: grace.torch.broadcast_optimizer_state(optimizer)), buffers(optimizer)
optimizer = momentum([(f"w{int(p[0])}", p) for p in order])
found["named set"] = outcome(lambda: grace.torch.broadcast_optimizer_state(optimizer)), buffers(optimizer)
optimizer = momentum(weights)
found["list"] = outcome(lambda: grace.torch.broadcast_optimizer_state(optimizer)), buffers(optimizer)

transport = transport_of(None, weights[0])
same = [torch.zeros(2), torch.zeros(2), torch.ones(70_000), torch.ones(3, dtype=torch.complex64), quantised(0, 2)]
own = [torch.full((3,), float(rank)), torch.ones(3)]
turned = [torch.arange(9.0).reshape(3, 3).t(), torch.arange(9.0).reshape(3, 3), torch.zeros((), dtype=torch.bfloat16)]
found["orders"] = [
    outcome(lambda order=order: check_order(order, transport))
    for order in (same, own, turned if rank == 0 else [turned[1], turned[0], turned[2]])
]
save(out, rank, found)
leave_gloo()
