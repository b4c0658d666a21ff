"""Which exchanges count, cell by cell, over two workers: OUT KIND. KIND is optimizer, ddp or fsdp, or one of these with
"flags": then a step is judged by flags that nothing waits for, as on a device.

Each cell trains twice: with an irregular step, and as the oracle, without the discarded passes. Losses are linear, so
the gradient of a parameter is its coefficient. Saves the differences or the error of each cell.
"""

import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from launch import error_of, leave_gloo, save
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import grace
from grace.torch import signals, watch

out, kind, *flags = sys.argv[1:]
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=30))
rank, size = dist.get_rank(), dist.get_world_size()
warnings.simplefilter("ignore")
if flags:
    signals.waits = watch.waits = lambda device: False
SHARDED = {"communicator": "reducescatter"} if kind == "fsdp" else {}
METHODS = {
    "none": {"compressor": "none", **SHARDED},
    "topk": {"compressor": "topk", "compress_ratio": 0.3, **SHARDED},
    "drawn": {"compressor": "blockint", "bits": 4, "block_size": 64, "rounding": "stochastic", "memory": "residual"}
    | (SHARDED or {"communicator": "twostage"}),
}
SHAPES = {"w": (24, 16), "v": (16, 10), "b": (30,)}
found = {}


class Probe(torch.nn.Module):
    """The loss is the sum of <p, c> over the named parameters."""

    def __init__(self, dtype):
        super().__init__()
        for number, (name, shape) in enumerate(SHAPES.items()):
            generator = torch.Generator().manual_seed(number)
            setattr(self, name, torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))

    def forward(self, coefficients):
        return sum((getattr(self, name) * c).sum() for name, c in coefficients.items())


def coefficients(step, extra=0, names=SHAPES, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * step + 10 * extra + rank)
    return {name: torch.randn(SHAPES[name], generator=generator).to(dtype) for name in names}


class Run:
    """A model, its optimizer and its Grace."""

    def __init__(self, method, make=lambda ps: torch.optim.SGD(ps, 0.1), dtype=torch.float32):
        self.dtype = dtype
        self.net = self.model = Probe(dtype)
        self.grc = grace.grace_from_params({"min_numel": 0, "timeout": 20.0, **METHODS[method]})
        if kind == "fsdp":
            fully_shard(self.net)
            grace.torch.fsdp(self.net, grace=self.grc)
        if kind == "ddp":
            self.model = DistributedDataParallel(self.net, find_unused_parameters=True)
            grace.torch.name_parameters(self.grc, self.model)
            self.model.register_comm_hook(self.grc, grace.torch.ddp_hook)
        made = make(list(self.net.parameters()))
        self.optimizers = made if isinstance(made, list) else [made]
        self.optimizer = self.optimizers[0]
        if kind == "optimizer":
            grace.torch.DistributedOptimizer(self.optimizer, self.grc, self.net.named_parameters())

    def parameters(self):
        return list(self.net.parameters())

    def zero_grad(self):
        for each in self.optimizers:
            each.zero_grad()

    def backward(self, step, extra=0, names=SHAPES, scale=1.0):
        loss = self.model(coefficients(step, extra, names, self.dtype)) * scale
        loss.backward()
        return loss

    def step(self):
        for each in self.optimizers:
            each.step()

    def plain(self, step):
        self.zero_grad()
        self.backward(step)
        self.step()

    def weights(self):
        values = [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in self.parameters()]
        return torch.cat([v.detach().reshape(-1).double() for v in values])

    def state(self):
        arrays = [a for cells in self.grc.state_dict()["tensors"].values() for a in cells.values()]
        return torch.cat([a.reshape(-1).double() for a in arrays]) if arrays else torch.zeros(0)

    def gradient(self, scale):
        for p in self.parameters():
            if p.grad is not None:
                p.grad.mul_(scale)


def difference(one, other, residuals=True):
    """Describes the differences between two runs; empty if they, and the workers, are equal to the bit."""
    texts = []
    if not torch.equal(one.weights(), other.weights()):
        texts.append(f"weights are {float((one.weights() - other.weights()).abs().max()):.3g} apart")
    if residuals and not torch.equal(one.state(), other.state()):
        texts.append(f"the state is {float((one.state() - other.state()).abs().max()):.3g} apart")
    if one.grc.steps != other.grc.steps:
        texts.append(f"{one.grc.steps} steps instead of {other.grc.steps}")
    every = [torch.zeros_like(one.weights()) for _ in range(size)]
    dist.all_gather(every, one.weights())
    if any(not torch.equal(each, every[0]) for each in every):
        texts.append("workers differ")
    return "; ".join(texts)


WAITING = ("2 skipped, then stepped with the same means",)
"""Cells that only a host decides: on a device, a step that changed nothing is discarded at once."""


def cell(name, methods=tuple(METHODS), kinds=("optimizer", "ddp", "fsdp")):
    """Run a cell for each method. A cell is a function of a method that returns the differences."""

    def decorate(function):
        for method in methods if kind in kinds and not (flags and name in WAITING) else ():
            torch.manual_seed(0)
            try:
                found[f"{name}, {method}"] = function(method)
            except Exception as error:
                found[f"{name}, {method}"] = f"{type(error).__name__}: {error}"
            dist.barrier()
        return function

    return decorate


def versus(
    method, irregular, steps=4, at=(0, 2), make=lambda ps: torch.optim.SGD(ps, 0.1), dtype=torch.float32, oracle=None
):
    """Compare a training that calls ``irregular(run, step)`` before some steps with one that calls ``oracle`` there."""
    runs = [Run(method, make, dtype) for _ in range(2)]
    for run, extra in zip(runs, (irregular, oracle), strict=True):
        for step in range(steps):
            if step in at and extra is not None:
                extra(run, step)
            run.plain(step)
    return difference(*runs)


# -- oracles by hand ---------------------------------------------------------------------------------------------------
def select(x):
    """The elements of largest magnitude, 30 %, and zeros."""
    flat = x.reshape(-1)
    kept = torch.zeros_like(flat)
    at = flat.abs().topk(max(1, int(0.3 * flat.numel()))).indices
    kept[at] = flat[at]
    return kept.view(x.shape)


class ByHand:
    """Error feedback with top-k, or plain averages, without GRACE. For unsharded parameters."""

    def __init__(self, method):
        self.method, self.left = method, {name: torch.zeros(shape) for name, shape in SHAPES.items()}

    def mean(self, name, x):
        if self.method == "topk":
            whole = x + self.left[name]
            x = select(whole)
            self.left[name] = whole - x
        every = [torch.zeros_like(x) for _ in range(size)]
        dist.all_gather(every, x.contiguous())
        return sum(every) / size

    def difference(self, run, weights):
        texts = []
        wanted = torch.cat([weights[name].reshape(-1).double() for name in SHAPES])
        if (off := float((run.weights() - wanted).abs().max())) > 1e-6:
            texts.append(f"weights are {off:.3g} from those by hand")
        if self.method == "topk":
            kept = torch.cat([self.left[name].reshape(-1).double() for name in SHAPES])
            mine = torch.cat(
                [run.grc.state_dict()["tensors"][n]["memory/residual"].reshape(-1).double() for n in SHAPES]
            )
            if (off := float((mine - kept).abs().max())) > 1e-6:
                texts.append(f"residuals are {off:.3g} from those by hand")
        return "; ".join(texts)


WHOLE = ("optimizer", "ddp")
SIMPLE = ("none", "topk")


def against_hand(method, step_of, updates, make=lambda ps: torch.optim.SGD(ps, 0.1), steps=4):
    """Compare ``step_of(run, step)`` with ``updates(hand, weights, step)``, which updates the weights by hand."""
    run, hand = Run(method, make), ByHand(method)
    weights = {name: getattr(run.net, name).detach().clone() for name in SHAPES}
    for step in range(steps):
        step_of(run, step)
        updates(hand, weights, step)
    steps_text = "" if run.grc.steps == steps else f"{run.grc.steps} steps instead of {steps}"
    return "; ".join(filter(None, (hand.difference(run, weights), steps_text)))


def sgd(hand, weights, step, rate=0.1):
    for name, c in coefficients(step).items():
        weights[name] -= rate * hand.mean(name, c)


@cell("1 stepped, changed", SIMPLE, WHOLE)
def _(method):
    return against_hand(method, Run.plain, sgd)


@cell("1 rate 0 with moments", SIMPLE, WHOLE)
def _(method):
    def step_of(run, step):
        run.optimizer.param_groups[0]["lr"] = 0.0 if step == 1 else 0.1
        run.plain(step)

    def momentum(hand, weights, step, buffers={}):  # noqa: B006
        if step == 0:
            buffers.clear()
        for name, c in coefficients(step).items():
            mean = hand.mean(name, c)
            buffers[name] = mean if name not in buffers else 0.9 * buffers[name] + mean
            weights[name] -= (0.0 if step == 1 else 0.1) * buffers[name]

    return against_hand(method, step_of, momentum, lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9))


class Data(torch.optim.SGD):
    """Writes weights through .data."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad.data, alpha=-group["lr"])


@cell("1 an optimizer that writes through .data", SIMPLE, WHOLE)
def _(method):
    return against_hand(method, Run.plain, sgd, lambda ps: Data(ps, 0.1))


@cell("1 an optimizer per parameter", SIMPLE, ("ddp",))
def _(method):
    return against_hand(method, Run.plain, sgd, lambda ps: [torch.optim.SGD([p], 0.1) for p in ps])


KINDS = {
    "SGD": lambda ps: torch.optim.SGD(ps, 0.1),
    "SGD, small rate": lambda ps: torch.optim.SGD(ps, 3e-4),
    "AdamW foreach": lambda ps: torch.optim.AdamW(ps, 1e-3, foreach=True),
    "AdamW fused": lambda ps: torch.optim.AdamW(ps, 1e-3, fused=True),
}


def skipped(run, step):
    """A step that the optimizer itself skips, since its gradients are too large."""
    run.optimizer.skips = True
    run.zero_grad()
    run.backward(step, extra=1, scale=100.0)
    run.step()
    run.optimizer.skips = False


def skipping(make):
    def made(ps):
        optimizer = make(ps)

        class Skips(type(optimizer)):
            skips = False

            def step(self, closure=None):
                return None if self.skips else super().step(closure)

        optimizer.__class__ = Skips
        optimizer._patch_step_function()
        return optimizer

    return made


for name, make in KINDS.items():
    for dtype in (torch.float32, torch.bfloat16):

        @cell(f"1 and 2 skipped inside, {name}, {dtype}", ("topk",))
        def _(method, make=make, dtype=dtype):
            return versus(method, skipped, make=skipping(make), dtype=dtype)


@cell("2 skipped inside")
def _(method):
    return versus(method, skipped, make=skipping(KINDS["SGD"]))


@cell("2 skipped, then stepped with the same means")
def _(method):
    runs = [Run(method, skipping(KINDS["SGD"])) for _ in range(2)]
    for run, twice in zip(runs, (True, False), strict=True):
        for step in range(4):
            run.zero_grad()
            run.backward(step)
            if twice:
                run.optimizer.skips = True
                run.step()
                run.optimizer.skips = False
            run.step()
    return difference(*runs)


@cell("2 rate 0, no state")
def _(method):
    def idle(run, step):
        run.optimizer.param_groups[0]["lr"] = 0.0
        run.zero_grad()
        run.backward(step, extra=1)
        run.step()
        run.optimizer.param_groups[0]["lr"] = 0.1

    return versus(method, idle)


def scaled(run, step):
    """A GradScaler skips a step in which one tensor of worker 1 overflows."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=10**6)
    run.zero_grad()
    given = coefficients(step, 1)
    if rank == 1:
        given["b"][0] = torch.inf
    scaler.scale(run.model(given)).backward()
    scaler.step(run.optimizer)
    scaler.update()


@cell("3 a scaler skips the step")
def _(method):
    return versus(method, scaled)


@cell("4 a fused step under a scaler", ("none", "topk"))
def _(method):
    return versus(method, scaled, make=KINDS["AdamW fused"])


@cell("5 a gradient is None at the step", kinds=WHOLE)
def _(method):
    def cancelled(run, step):
        run.zero_grad()
        run.backward(step, extra=1)
        run.net.b.grad = None
        run.step()

    def without(run, step):
        run.zero_grad()
        run.backward(step, extra=1, names=("w", "v"))
        run.step()

    if method == "drawn":  # random numbers must depend only on the tensor's position in its exchange
        return versus(method, cancelled, at=(1,), oracle=without)
    return versus(method, cancelled, oracle=without)


@cell("6 an optimizer that does not hold it steps")
def _(method):
    other = torch.nn.Linear(3, 3)
    another = torch.optim.SGD(other.parameters(), 0.1)

    def visited(run, step):
        run.zero_grad()
        run.backward(step, extra=1)
        other(torch.ones(1, 3)).sum().backward()
        another.step()

    return versus(method, visited, at=(1, 2))


@cell("7 an unwrapped optimizer steps", ("topk",), ("optimizer",))
def _(method):
    run = Run(method)
    other = torch.optim.SGD(run.net.parameters(), 0.1)
    run.backward(0)
    text = error_of(other.step)
    return "" if "whose gradients a DistributedOptimizer exchanges" in text else text


@cell("8 weights are written, owner")
def _(method):
    def clamp(run):
        with torch.no_grad():
            for p in run.parameters():
                p.clamp_(-0.5, 0.5)

    def written(run, step):
        run.zero_grad()
        run.backward(step, extra=1)
        clamp(run)

    return versus(method, written, at=(1, 2), oracle=lambda run, step: clamp(run))


@cell("9 weights are written, no owner", SIMPLE, WHOLE)
def _(method):
    def by_hand(run, step):
        run.zero_grad()
        run.backward(step)
        with torch.no_grad():
            for p in run.parameters():
                p.sub_(p.grad, alpha=0.1)

    return against_hand(method, by_hand, sgd)


def masters(run, step):
    if not hasattr(run, "masters"):
        run.masters = [p.detach().clone().requires_grad_() for p in run.parameters()]
        run.outer = torch.optim.SGD(run.masters, 0.1)
    run.net.zero_grad()
    run.backward(step)
    for p, master in zip(run.parameters(), run.masters, strict=True):
        master.grad = p.grad.float()
    run.outer.step()
    with torch.no_grad():
        for p, master in zip(run.parameters(), run.masters, strict=True):
            p.copy_(master)


@cell("6 M an optimizer over masters", SIMPLE, ("ddp",))
def _(method):
    return against_hand(method, masters, sgd)


def copied(run, step):
    # As masters of the wrapped optimizer do: write gradients into existing buffers.
    for name, c in coefficients(step).items():
        p = getattr(run.net, name)
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        p.grad.data.copy_(c)
    run.optimizer.step()


@cell("set by hand through .data", SIMPLE, ("optimizer",))
def _(method):
    return against_hand(method, copied, sgd)


@cell("set by hand in NumPy", SIMPLE, ("optimizer",))
def _(method):
    def written(run, step):
        for name, c in coefficients(step).items():
            p = getattr(run.net, name)
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            p.grad.numpy()[:] = c.numpy()
        run.optimizer.step()

    return against_hand(method, written, sgd)


@cell("set by hand, stepped twice", SIMPLE, ("optimizer",))
def _(method):
    def twice(run, step):
        copied(run, step)
        sent = run.grc.report().bytes_sent
        run.optimizer.step()
        return sent

    def both(hand, weights, step):
        for name, c in coefficients(step).items():
            weights[name] -= 0.2 * hand.mean(name, c)

    return against_hand(method, twice, both)


@cell("set by hand, all zero", ("topk",), ("optimizer",))
def _(method):
    def zeros(run, step):
        for p in run.parameters():
            p.grad = torch.zeros_like(p)
        run.optimizer.step()
        run.optimizer.zero_grad()

    return versus(method, zeros, at=(1, 2))


@cell("set by hand on one worker alone", ("topk",), ("optimizer",))
def _(method):
    run = Run(method)
    copied(run, 0)
    if rank == 0:
        for p in run.parameters():
            p.grad.data.mul_(3)
    text = error_of(run.optimizer.step)
    return "" if "out of step" in text and "set by hand" in text else text


@cell("a dummy step creates the optimizer's state", ("topk",))
def _(method):
    def dummy(run, step):
        run.zero_grad()
        for p in run.parameters():
            p.grad = torch.zeros_like(p)
        rates = [group["lr"] for group in run.optimizer.param_groups]
        for group in run.optimizer.param_groups:
            group["lr"] = 0.0
        if step == 1 or rank == 0 or kind == "fsdp":  # on all workers, or on one
            run.optimizer.step()
        for group, rate in zip(run.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        run.zero_grad()

    return versus(method, dummy, at=(1, 2))


def removed(how):
    def remove(run, step):
        run.zero_grad()
        run.backward(step, extra=1)
        for p in run.parameters():
            if how == "None":
                p.grad = None
            elif how == "zero_":
                p.grad.zero_()
            elif how == ".data":
                p.grad.data.zero_()
            elif how == "detached":
                p.grad.detach_().zero_()
        if how == "zero_grad":
            run.net.zero_grad(set_to_none=False)
        run.backward(step)
        run.step()

    return remove


for how in ("None", "zero_", ".data", "zero_grad", "detached"):

    @cell(f"10 removed: {how}")
    def _(method, how=how):
        return versus(method, removed(how), steps=3, at=(1, 2), oracle=Run.plain)


def clipped(run, step):
    run.zero_grad()
    run.backward(step)
    torch.nn.utils.clip_grad_norm_(run.net.parameters(), 1.0)
    run.step()


@cell("11 written in place", SIMPLE, WHOLE)
def _(method):
    def by_hand(hand, weights, step):
        means = {name: hand.mean(name, c) for name, c in coefficients(step).items()}
        total = torch.nn.utils.get_total_norm(list(means.values()))
        for name, mean in means.items():
            weights[name] -= 0.1 * mean * torch.clamp(1.0 / (total + 1e-6), max=1.0)

    return against_hand(method, clipped, by_hand)


@cell("11 written in place, shards", kinds=("fsdp",))
def _(method):
    def scaled(run, step):
        run.zero_grad()
        run.backward(step)
        total = torch.nn.utils.get_total_norm([p.grad.full_tensor() for p in run.parameters()])
        for p in run.parameters():
            p.grad.detach().copy_(p.grad.detach() * torch.clamp(1.0 / (total + 1e-6), max=1.0))
        run.step()

    runs = [Run(method) for _ in range(2)]
    for run, one in zip(runs, (clipped, scaled), strict=True):
        for step in range(4):
            one(run, step)
    close = torch.allclose(runs[0].weights(), runs[1].weights(), atol=1e-5)
    return (
        "" if close and [run.grc.steps for run in runs] == [4, 4] else f"{difference(*runs)}, {runs[0].grc.steps} steps"
    )


@cell("12 replaced, equal on all workers", SIMPLE, WHOLE)
def _(method):
    def halved(run, step):
        run.zero_grad()
        run.backward(step)
        for p in run.parameters():
            p.grad = p.grad / 2
        run.step()

    return against_hand(method, halved, lambda hand, weights, step: sgd(hand, weights, step, 0.05))


@cell("12 combined after passes that were thrown away", ("none", "topk"), ("optimizer",))
def _(method):
    texts = []
    # On a device, reading whether gradients were combined in place would wait.
    for way in ("replaced",) if flags else ("replaced", "in place"):
        run = Run(method)
        before = run.weights(), run.state()
        parts = []
        for task in range(3):
            run.optimizer.zero_grad()
            run.backward(0, extra=task)
            parts.append([p.grad.clone() for p in run.parameters()])
        for number, p in enumerate(run.parameters()):
            whole = sum(part[number] for part in parts)
            if way == "replaced":
                p.grad = whole
            else:
                p.grad.copy_(whole)
        text = error_of(run.optimizer.step)
        if "exchanges were thrown away, then the gradients replaced" not in text:
            texts.append(f"{way}: {text}")
        if not torch.equal(run.weights(), before[0]) or not torch.equal(run.state(), before[1]):
            texts.append(f"{way}: something was lost before the error")
    return "; ".join(texts)


def noisy(how):
    def add(p):
        noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(rank))
        if how == "in place":
            p.grad.add_(noise)
        elif how == ".data":
            p.grad.data.add_(noise)
        elif how == "NumPy":
            p.grad.numpy()[:] += noise.numpy()
        else:
            p.grad = p.grad + noise

    return add


for how in ("in place", ".data", "NumPy", "replaced"):

    @cell(f"13 different on the workers: {how}", ("none", "topk"), ("optimizer",))
    def _(method, how=how):
        run = Run(method)
        run.plain(0)
        run.zero_grad()
        run.backward(1)
        for p in run.parameters():
            noisy(how)(p)
        text = error_of(run.optimizer.step)
        return "" if "differ between workers" in text and "grc.discard()" in text else text


@cell("14 a pass adds to undecided means", ("topk",), ("optimizer",))
def _(method):
    run = Run(method)
    run.backward(0)
    text = error_of(lambda: run.backward(1))
    return "" if "added its gradients to means" in text else text


@cell("14 a pass adds to undecided means, J", SIMPLE, ("ddp",))
def _(method):
    def twice(run, step):
        run.zero_grad()
        run.backward(step)
        run.backward(step, extra=1)
        run.step()

    def joined(hand, weights, step):
        for name, c in coefficients(step).items():
            first = hand.mean(name, c)
            weights[name] -= 0.1 * hand.mean(name, first + coefficients(step, 1)[name])

    return against_hand(method, twice, joined)


@cell("14 two passes are thrown away together", kinds=("ddp", "fsdp"))
def _(method):
    def twice(run, step):
        run.zero_grad()
        run.backward(step, extra=1)
        run.backward(step, extra=2)

    return versus(method, twice)


class Evaluates(torch.optim.SGD):
    """Evaluates its closure twice; ``moves``: changes the weights in between."""

    moves = True

    def step(self, closure):
        closure()
        if self.moves:
            super().step()
        closure()
        super().step()


@cell("15 a closure is evaluated again, weights changed", SIMPLE, WHOLE)
def _(method):
    def closures(run, step):
        numbers = iter((0, 1))

        def closure():
            run.zero_grad()
            return run.backward(step, extra=next(numbers))

        run.optimizer.step(closure)

    def both(hand, weights, step):
        for name in SHAPES:
            for extra in (0, 1):
                weights[name] -= 0.1 * hand.mean(name, coefficients(step, extra)[name])

    run, hand = Run(method, lambda ps: Evaluates(ps, 0.1)), ByHand(method)
    weights = {name: getattr(run.net, name).detach().clone() for name in SHAPES}
    for step in range(3):
        closures(run, step)
        both(hand, weights, step)
    return "; ".join(
        filter(None, (hand.difference(run, weights), "" if run.grc.steps == 6 else f"{run.grc.steps} steps"))
    )


@cell("15 a closure is evaluated again, weights unchanged")
def _(method):
    def closures(run, step):
        numbers = iter((1, 0))
        run.optimizer.moves = False

        def closure():
            run.zero_grad()
            return run.backward(step, extra=next(numbers))

        run.optimizer.step(closure)

    runs = [Run(method, lambda ps: Evaluates(ps, 0.1)), Run(method)]
    for step in range(3):
        closures(runs[0], step)
        runs[1].plain(step)
    return difference(*runs)


@cell("16 the state is asked for")
def _(method):
    run = Run(method)
    run.plain(0)
    before = run.grc.steps, run.state()
    run.zero_grad()
    run.backward(1)
    texts = []
    if run.grc.steps != before[0] or not torch.equal(run.state(), before[1]):
        texts.append("undecided state was stored")
    run.step()
    if run.grc.steps != 2 or (method != "none" and torch.equal(run.state(), before[1])):
        texts.append("the step was not counted")
    run.net.zero_grad()
    run.backward(2)
    run.net.zero_grad()
    if run.grc.report().discarded != 1:
        texts.append("means that are gone were not discarded")
    return "; ".join(texts)


@cell("16 one worker alone asks")
def _(method):
    def asks(run, step):
        run.zero_grad()
        run.backward(step, extra=1)
        if rank == 0:
            run.grc.report(), run.grc.steps, run.grc.state_dict()

    return versus(method, asks)


@cell("17 evaluation, and the optimizer's state")
def _(method):
    def looked(run, step):
        run.zero_grad()
        run.backward(step)
        with torch.no_grad():
            run.model(coefficients(9))
        run.optimizer.state_dict()
        run.step()

    return versus(method, looked, steps=3, at=(1, 2), oracle=Run.plain)


@cell("18 a state is loaded")
def _(method):
    runs = [Run(method) for _ in range(2)]
    for run, loads in zip(runs, (True, False), strict=True):
        run.plain(0)
        state = run.grc.state_dict()
        if loads:
            run.zero_grad()
            run.backward(1, extra=1)
        run.zero_grad()
        run.grc.load_state_dict(state)
        for step in (1, 2):
            run.plain(step)
    return difference(*runs)


@cell("commit and discard say it exactly")
def _(method):
    runs = [Run(method) for _ in range(2)]
    for run, says in zip(runs, (True, False), strict=True):
        run.plain(0)
        run.zero_grad()
        run.backward(1)
        if says:
            run.grc.commit()
        else:
            run.step()
        if says:
            with torch.no_grad():
                for p in run.parameters():
                    p.add_(p.grad, alpha=-0.1)
        run.zero_grad()
        if says:
            run.backward(2, extra=1)
            run.grc.discard()
        run.plain(2)
    return difference(*runs)


@cell("a pass on one worker alone is an error on all", ("topk",), WHOLE)
def _(method):
    run = Run(method)
    run.plain(0)
    run.zero_grad()

    def train():
        for step in range(1, 4):
            if rank == 0 and step == 2:
                run.backward(step, extra=1)
                run.zero_grad()
            run.plain(step)
        if rank == 1:
            run.backward(9)

    text = error_of(train)
    return "" if "out of step" in text and "The means of" in text else text


save(out, rank, found)
leave_gloo()
