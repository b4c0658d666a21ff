"""Numerics of each PyTorch integration, over two workers: OUT TRANSPORT. Saves a dictionary of findings."""

import copy
import sys
from contextlib import nullcontext

import numpy as np
import torch
from launch import join_torch, leave_gloo, save
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

out, transport = sys.argv[1:]
rank, size = join_torch(transport)

import grace

found = {}
DENSE = {"compressor": "none"}
FP16 = {"compressor": "fp16", "min_numel": 0}
TOPK = {"compressor": "topk", "compress_ratio": 0.1, "min_numel": 0}
POWERSGD = {"compressor": "powersgd", "compress_rank": 2, "min_numel": 0}
DOORS = ["optimizer", "ddp"] if transport == "torch" else ["optimizer"]
ALL = range(size)


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5)).to(dtype)


def batch(step, worker):
    generator = torch.Generator().manual_seed(100 * step + worker)
    return torch.randn(8, 20, generator=generator), torch.randint(0, 5, (8,), generator=generator)


def loss_of(model, step, worker):
    x, y = batch(step, worker)
    return cross_entropy(model(x), y)


def flat(tensors):
    return torch.cat([t.detach().to_dense().flatten().double() for t in tensors]).numpy()


def weights(net):
    return flat(net.parameters())


def sgd(net):
    return torch.optim.SGD(net.parameters(), 0.1, momentum=0.5)


def enter(door, net, params=DENSE, passes=1, make=sgd, **options):
    """The model to call, the optimizer and the Grace, of one integration."""
    grc = grace.grace_from_params(params)
    if door == "optimizer":
        return net, grace.torch.DistributedOptimizer(make(net), grc, net.named_parameters(), passes), grc
    model = nn.parallel.DistributedDataParallel(net, **{"bucket_cap_mb": 0.002, **options})
    grace.torch.name_parameters(grc, model)
    model.register_comm_hook(grc, grace.torch.ddp_hook)
    return model, make(net), grc


def train(model, optimizer, net, workers, steps=4, loss=loss_of, before_step=lambda net: None):
    for step in range(steps):
        optimizer.zero_grad()
        sum(loss(model, step, worker) / len(workers) for worker in workers).backward()
        before_step(net)
        optimizer.step()


def both(key, door, make_net=network, params=DENSE, passes=1, make=sgd, options={}, **training):  # noqa: B006
    """Train with an integration, and alone with all workers' batches: the weights of both, and the initial ones."""
    net, whole = make_net(), make_net()
    start = weights(net)
    model, optimizer, grc = enter(door, net, params, passes, make, **options)
    train(model, optimizer, net, [rank], **training)
    train(whole, make(whole), whole, ALL, **training)
    found[f"{key} {door}"] = (weights(net), weights(whole), start)
    return net, grc


def state(grc):
    tensors = grc.state_dict()["tensors"]
    return {f"{name}/{key}": value.numpy().copy() for name, kept in tensors.items() for key, value in kept.items()}


def unchanged(before, after):
    return {key for key in after if np.array_equal(before.get(key), after[key])}


def residuals(grc, net):
    """The residuals in the order of the weights; zeros where there are none."""
    kept = state(grc)
    parts = [kept.get(f"{n}/memory/residual", np.zeros(p.numel())).ravel() for n, p in net.named_parameters()]
    return np.concatenate(parts).astype(np.float64)


# -- bad numbers -------------------------------------------------------------------------------------------------------
for door in DOORS:
    for policy in ("poison", "zero", "raise"):
        net = network()
        model, optimizer, grc = enter(door, net, {**TOPK, "nonfinite": policy})
        seen, kept, message = {}, set(), ""
        for step in range(4):
            optimizer.zero_grad()
            before, loss = state(grc) if step else {}, loss_of(model, step, rank)
            if step == 2 and rank == 1:
                loss = loss + float("nan") * net[0].weight[3, 7]
            failed = False
            try:
                loss.backward()
            except FloatingPointError as error:
                failed, message = True, str(error)
            if step == 2:
                seen = {name: p.grad.numpy().copy() for name, p in net.named_parameters()}
            if not failed and all(p.grad.isfinite().all() for p in net.parameters()):
                optimizer.step()
            steps = grc.report().steps
            if step == 2:
                kept = unchanged(before, state(grc))
            if failed and door == "ddp":
                break  # DDP itself cannot continue after an error
        found[f"nonfinite {policy} {door}"] = (weights(net), seen, kept, message, steps)

# A loss scaler under autocast, whose scale grows and falls.
for door in DOORS:
    net, whole = network(), network()
    scales = []
    for each, model, optimizer, workers in ((net, *enter(door, net)[:2], [rank]), (whole, whole, sgd(whole), ALL)):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for step in range(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = sum(loss_of(model, step, worker) / len(workers) for worker in workers)
            if step == 4 and 1 in workers:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(each.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
    found[f"scaler {door}"] = (weights(net), weights(whole), weights(network()), scales)

# Gradients fit into float16, but their mean does not: handled like any other overflow.
for door in DOORS:
    torch.manual_seed(0)
    net = nn.Linear(20, 5, bias=False).half()
    model, optimizer, grc = enter(door, net, TOPK)
    trace = []
    for x in (40000.0, 40000.0, 20000.0):
        optimizer.zero_grad()
        before = state(grc) if trace else {}
        model(torch.full((1, 20), x, dtype=torch.float16)).sum().backward()
        finite = bool(net.weight.grad.isfinite().all())
        if finite:
            optimizer.step()
        trace.append((finite, len(unchanged(before, state(grc)))))
    found[f"half {door}"] = trace

# -- dtypes ------------------------------------------------------------------------------------------------------------
for door in DOORS:
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        both(
            f"dtype {dtype}",
            door,
            lambda: network(dtype),
            loss=lambda model, step, worker: model(batch(step, worker)[0].to(dtype)).square().mean(),
        )


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def forward(self, x):
        return (self.phase.abs() * x).sum()


for door in DOORS:
    try:
        model, *_ = enter(door, Complex())
        model(torch.ones(3)).backward()
    except TypeError as error:
        found[f"complex {door}"] = str(error)
for door in DOORS:  # an integer parameter cannot be trained, and does not disturb
    net = network()
    net.register_parameter("table", nn.Parameter(torch.arange(4), requires_grad=False))
    model, optimizer, grc = enter(door, net)
    train(model, optimizer, net, [rank])
    found[f"integer {door}"] = (sorted(grc.names), net.table.tolist())

# -- clipping ----------------------------------------------------------------------------------------------------------
for door in DOORS:
    both("clipped after", door, before_step=lambda net: clip_grad_norm_(net.parameters(), 0.3))

# Clips each worker's own gradient before averaging: by value in a hook, or by norm with gradients set by hand.
LIMIT = 0.01
net, whole = network(), network()
for p in net.parameters():
    p.register_hook(lambda grad: grad.clamp(-LIMIT, LIMIT))
model, optimizer, _ = enter("optimizer", net)
train(model, optimizer, net, [rank])
by_norm = network()
_, clipped, _ = enter("optimizer", by_norm)
for step in range(4):
    own = torch.autograd.grad(loss_of(by_norm, step, rank), list(by_norm.parameters()))
    for p, grad in zip(by_norm.parameters(), own, strict=True):
        p.grad = grad
    clip_grad_norm_(by_norm.parameters(), 0.3)
    clipped.step()
for key, mine in (("value", net), ("norm", by_norm)):
    whole = network()
    optimizer = sgd(whole)
    for step in range(4):
        total = [torch.zeros_like(p) for p in whole.parameters()]
        for worker in ALL:
            own = torch.autograd.grad(loss_of(whole, step, worker), list(whole.parameters()))
            norm = torch.sqrt(sum(g.square().sum() for g in own))
            for t, g in zip(total, own, strict=True):
                t += (g.clamp(-LIMIT, LIMIT) if key == "value" else g * min(1.0, 0.3 / float(norm))) / size
        for p, t in zip(whole.parameters(), total, strict=True):
            p.grad = t
        optimizer.step()
    found[f"clipped before, by {key}"] = (weights(mine), weights(whole), weights(network()))

# -- accumulation ------------------------------------------------------------------------------------------------------
for kind, params in (("none", DENSE), ("topk", TOPK)):
    for door in DOORS:
        for view in (False, True) if door == "ddp" else (False,):
            net, whole = network(), network()
            model, optimizer, grc = enter(door, net, params, passes=2, gradient_as_bucket_view=view)
            alone = sgd(whole)
            for step in range(4):
                optimizer.zero_grad()
                alone.zero_grad()
                for part in range(2):
                    quiet = model.no_sync() if door == "ddp" and part == 0 else nullcontext()
                    with quiet:
                        (loss_of(model, 2 * step + part, rank) / 2).backward()
                    sum(loss_of(whole, 2 * step + part, worker) / 2 / size for worker in ALL).backward()
                optimizer.step()
                alone.step()
            key = f"accumulated {kind} {door}{' view' if view else ''}"
            found[key] = (weights(net), weights(whole), weights(network()), grc.report().steps)


# -- gradients that are absent, sparse, shared, frozen -----------------------------------------------------------------
class Branches(nn.Module):
    """Each step uses the trunk and one branch; `which` selects it by step and worker."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(20, 20)
        self.branches = nn.ModuleList([nn.Linear(20, 5) for _ in range(4)])

    def forward(self, x, which):
        return self.branches[which](torch.tanh(self.trunk(x)))


def branch(step, worker):  # which workers use a branch: 0: both; 1 and 2: one at a time; 3: none
    return 0 if step % 3 == 0 else (1 + (step + worker) % 2)


def branched(model, step, worker):
    x, y = batch(step, worker)
    return cross_entropy(model(x, branch(step, worker)), y)


for door in DOORS:
    for view in (False, True) if door == "ddp" else (False,):
        options = {"find_unused_parameters": True, "gradient_as_bucket_view": view}
        key = f"absent{' view' if view else ''}"
        net, _ = both(key, door, Branches, options=options, steps=6, loss=branched)
        unused = net.branches[3].weight.grad is None
        # Nothing is lost: means and residuals add up to all gradients, whichever workers had them.
        net = Branches()
        model, optimizer, grc = enter(door, net, TOPK, **options)
        total, handed = np.zeros_like(weights(net)), np.zeros_like(weights(net))
        for step in range(7):
            net.zero_grad()
            for worker in ALL:
                own = torch.autograd.grad(branched(net, step, worker), list(net.parameters()), materialize_grads=True)
                total += flat(own) / size
            branched(model, step, rank).backward()
            handed += flat(torch.zeros_like(p) if p.grad is None else p.grad for p in net.parameters())
            optimizer.step()
        found[f"{key} kept {door}"] = (handed, residuals(grc, net), total, unused)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.other = nn.Embedding(50, 8, sparse=True), nn.Embedding(40, 8, sparse=True)
        self.output = nn.Linear(8, 5)

    def forward(self, tokens):
        return self.output(self.words(tokens) + self.other(tokens % 40))


def tokens(model, step, worker):
    generator = torch.Generator().manual_seed(100 * step + worker)
    return cross_entropy(model(torch.randint(50, (6,), generator=generator)), torch.arange(6) % 5)


for door in DOORS:
    _, grc = both("sparse", door, Sparse, loss=tokens, make=lambda net: torch.optim.SGD(net.parameters(), 0.1))
    found[f"sparse report {door}"] = {t.name: t.reason for t in grc.report().tensors}
    net = Sparse()
    model, optimizer, grc = enter(door, net, {**TOPK, "min_numel": 100}, make=sgd)
    train(model, optimizer, net, [rank], loss=tokens)
    report = grc.report()
    found[f"sparse compressed {door}"] = (weights(net), {t.name: (t.method, t.reason) for t in report.tensors})


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.output = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
        self.output.weight = self.words.weight

    def forward(self, tokens):
        return self.output(self.words(tokens))


for door in DOORS:
    _, grc = both("tied", door, Tied, loss=tokens)
    found[f"tied names {door}"] = grc.names

for to_none in (True, False):
    net = network()
    model, optimizer, grc = enter("optimizer", net, TOPK)
    train(model, optimizer, net, [rank])
    optimizer.zero_grad(to_none)
    net[0].requires_grad_(False)
    before, kept = flat(net[0].parameters()), state(grc)
    optimizer.param_groups[0]["momentum"] = 0.0  # momentum would move the weights without a gradient
    for step in range(3):
        optimizer.zero_grad(to_none)
        loss_of(net, step, rank).backward()
        optimizer.step()
    frozen = flat(net[0].parameters()), {k for k in unchanged(kept, state(grc)) if k.startswith("0.")}
    net[0].requires_grad_(True)
    train(model, optimizer, net, [rank])
    found[f"frozen {to_none}"] = (weights(net), before, *frozen, flat(net[0].parameters()))

# -- torch.compile -----------------------------------------------------------------------------------------------------
for door in DOORS:
    for kind, params in (("none", DENSE), ("topk", TOPK)):
        results = []
        for compiled in (False, True):
            net = network()
            if door == "optimizer":
                call = torch.compile(net, backend="aot_eager") if compiled else net
                _, optimizer, grc = enter(door, call, params)
            else:
                model, optimizer, grc = enter(door, net, params, bucket_cap_mb=2)
                call = torch.compile(model, backend="aot_eager") if compiled else model
            train(call, optimizer, net, [rank])
            results.append((weights(net), sorted(grc.names), grc.report().steps, grc.report().bytes_sent))
        found[f"compiled {kind} {door}"] = results

# -- DistributedDataParallel -------------------------------------------------------------------------------------------
if transport == "torch":
    from torch.nn.parallel import DistributedDataParallel

    def deep():
        torch.manual_seed(0)
        return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(20, 20), nn.Tanh())], nn.Linear(20, 5))

    buckets = []

    def watched(state, bucket):
        buckets[-1].append((bucket.index(), [tuple(p.shape) for p in bucket.parameters()]))
        return grace.torch.ddp_hook(state, bucket)

    VARIANTS = {
        "rebuilt": {},
        "static graph": {"static_graph": True},
        "unused": {"find_unused_parameters": True},
        "views": {"gradient_as_bucket_view": True},
        "all": {"static_graph": True, "find_unused_parameters": True, "gradient_as_bucket_view": True},
    }
    for kind, params in (("none", DENSE), ("fp16", FP16), ("topk", TOPK), ("powersgd", POWERSGD)):
        net = deep()
        model, optimizer, _ = enter("optimizer", net, params)
        train(model, optimizer, net, [rank], steps=5)
        reference = weights(net)
        for name, options in VARIANTS.items():
            net = deep()
            model = DistributedDataParallel(net, bucket_cap_mb=0.002, **options)
            grc = grace.grace_from_params(params)
            grace.torch.name_parameters(grc, model)
            model.register_comm_hook(grc, watched)
            optimizer = sgd(net)
            layouts = []
            for step in range(5):
                buckets.append([])
                train(model, optimizer, net, [rank], steps=1, loss=lambda m, _, w: loss_of(m, step, w))
                layouts.append(list(buckets[-1]))
            found[f"ddp {kind} {name}"] = (weights(net), reference, layouts)

    # A checkpoint before the first backward pass, with tensors in several buckets.
    for named in (True, False):

        def fresh():
            net = deep()
            model = DistributedDataParallel(net, bucket_cap_mb=0.002, find_unused_parameters=True)
            grc = grace.grace_from_params(TOPK)
            if named:
                grace.torch.name_parameters(grc, model)
            model.register_comm_hook(grc, watched)
            return net, model, sgd(net), grc

        net, model, optimizer, grc = fresh()
        train(model, optimizer, net, [rank], steps=3)
        saved = copy.deepcopy([each.state_dict() for each in (net, optimizer, grc)])
        again, remodel, reoptimizer, regrc = fresh()
        again.load_state_dict(saved[0])
        reoptimizer.load_state_dict(saved[1])
        regrc.load_state_dict(saved[2])
        for each in ((model, optimizer, net), (remodel, reoptimizer, again)):
            buckets.append([])
            train(*each, [rank], steps=3)
        found[f"checkpoint {named}"] = (weights(net), weights(again), len(buckets[-1]) // 3, regrc.state_dict()["step"])

    # Workers with unequal numbers of batches.
    net = network()
    model, optimizer, grc = enter("ddp", net)
    with model.join():
        train(model, optimizer, net, [rank], steps=3 + rank)
    plain = DistributedDataParallel(network(), bucket_cap_mb=0.002)
    with plain.join():
        train(plain, sgd(plain.module), plain.module, [rank], steps=3 + rank)
    found["join"] = (weights(net), weights(plain.module), weights(network()))

save(out, rank, found)
if transport == "torch":
    leave_gloo()
