"""Thousands of steps of irregular training loops on four workers, in PyTorch.

    python -m benchmarks.loops [--steps 5000] [--json FILE] [--seed N]

Each step is of a random kind, the same on all workers. In some kinds all is applied: a plain step, accumulation that
ends early, passes inside no_sync, means scaled in place, one worker that asks for a report. In others something is
discarded: a pass before the step, as a GAN's generator leaves gradients in the discriminator (weights may then be
written by hand), or a step that the loop or the optimizer skips. Gradients may be set by hand, as after an attack, or
written into kept buffers, as for float32 masters. A backward pass may fail on one worker: all then drop the batch. Half
of the models train with DistributedOptimizer, half with DistributedDataParallel and the hook. With the hook, a pass may
add to undecided means, and two optimizers step a model's parts. The program fails unless:

- Weights are bit-identical on all workers.
- Nothing is lost: the sum of all gradients that were not discarded, averaged over the workers, equals the weights plus
  the residuals. Gradients are integers, so the sums are exact for methods that do not round elements.
- A pass that fails on one worker raises on all within the time limit, and there are no other errors.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

Work = Callable[[Path, int, int, int], None]
"""What a worker runs: of a folder for its results, its rank, the number of steps, and a seed."""
SIZE = 4
TIMEOUT = 20.0
"""Seconds that a worker waits for the others."""
COMMON = {"plain": 8, "thrown away": 3, "written": 2, "skipped": 2, "skips inside": 2, "scaled": 1, "asked": 1}
KINDS = {
    "optimizer": {**COMMON, "by hand": 2, "masters": 2, "ends early": 2, "no_sync": 2, "failed": 1},
    "hook": {**COMMON, "joined": 2, "parts": 2},
}
"""Relative frequency of each kind of step, by integration."""
METHODS = {
    "topk": {"compressor": "topk", "compress_ratio": 0.05},
    "randomk": {"compressor": "randomk", "compress_ratio": 0.1},
    "threshold": {"compressor": "threshold", "threshold": 20.0},
}
CHECKED = 100
"""Steps between two checks."""


class Failure(RuntimeError):
    """The error of a failing backward pass."""


def work(folder: Path, rank: int, steps: int, seed: int) -> None:
    """Train as one worker, and write its results."""
    import torch
    import torch.distributed as dist

    import grace
    from grace.engine.handshake import OutOfStep

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, on: bool) -> Any:
            ctx.on = on
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            if ctx.on:
                raise Failure("out of memory")
            return gradient, None

    class Linear(torch.nn.Module):
        """Its gradients are the batch. Fails comes first in the forward pass, so its backward runs last."""

        def __init__(self) -> None:
            super().__init__()
            self.parts = torch.nn.ParameterList([torch.zeros(48, 64), torch.zeros(700), torch.zeros(20)])

        def forward(self, whole: list[Any], fails: bool) -> Any:
            leaves = [Fails.apply(self.parts[0], fails), *self.parts[1:]]
            return sum((p * x).sum() for p, x in zip(leaves, whole, strict=True))

    class Skips(torch.optim.SGD):
        skips = False

        def step(self, closure: Any = None) -> Any:
            return None if self.skips else super().step(closure)

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), SIZE), rank=rank, world_size=SIZE)
    found: dict[str, Any] = {"steps": {}, "different": 0, "lost": 0.0, "unexpected": [], "slowest": 0.0}
    models, wrapped, optimizers, graces, counted, applied = {}, {}, {}, {}, {}, {}
    cases = [(integration, name) for integration in KINDS for name in METHODS]
    for case in cases:
        integration, name = case
        models[case] = net = Linear()
        graces[case] = grc = grace.grace_from_params(
            {"min_numel": 0, "bucket_mb": 0.004, "timeout": TIMEOUT, **METHODS[name]}
        )
        first, *rest = net.parameters()
        optimizers[case] = (
            [Skips([first, *rest], 1.0)] if integration == "optimizer" else [Skips([first], 1.0), Skips(rest, 1.0)]
        )
        wrapped[case] = net
        if integration == "optimizer":
            grace.torch.DistributedOptimizer(
                optimizers[case][0], grc, net.named_parameters(), backward_passes_per_step=2
            )
        else:
            wrapped[case] = torch.nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
            grace.torch.name_parameters(grc, net)
            wrapped[case].register_comm_hook(grc, grace.torch.ddp_hook)
        counted[case] = [torch.zeros(p.shape, dtype=torch.float64) for p in net.parameters()]
        applied[case] = [torch.zeros(p.shape, dtype=torch.float64) for p in net.parameters()]
    draw = random.Random(seed)
    data = torch.Generator().manual_seed(seed * SIZE + rank)
    kinds: Counter[str] = Counter()
    for step in range(steps):
        case = draw.choice(cases)
        (kind,) = draw.choices(list(KINDS[case[0]]), list(KINDS[case[0]].values()))
        victim, net, model = draw.randrange(SIZE), list(models[case].parameters()), wrapped[case]
        optimizer, several = optimizers[case][0], case[0] == "optimizer"
        if kind == "skips inside" and case[1] == "threshold":
            kind = "plain"  # means may be 0: then a skipped step cannot be told from one that was made
        kinds[kind] += 1

        def batch() -> list[Any]:
            return [torch.randint(-8, 9, p.shape, generator=data).float() for p in net]  # noqa: B023

        def backward(whole: list[Any], fails: bool = False) -> None:
            model(whole, fails).backward()  # noqa: B023

        def counts(*batches: list[Any]) -> None:
            for whole in batches:
                for total, x in zip(counted[case], whole, strict=True):  # noqa: B023
                    total += x

        def all_steps() -> None:
            for each in optimizers[case]:  # noqa: B023
                each.step()

        for each in optimizers[case]:
            each.zero_grad()
        first, second = batch(), batch()
        begin = time.monotonic()
        try:
            if kind in ("thrown away", "written", "skips inside"):
                backward(batch())
                if several:
                    backward(batch())
                with torch.no_grad():
                    for p in net:
                        if kind == "written":
                            p.add_(1.0).sub_(1.0).clamp_(-0.5, 0.5)
                if kind == "skips inside":
                    for each in optimizers[case]:
                        each.skips = True
                    all_steps()
                    for each in optimizers[case]:
                        each.skips = False
                for p in net:
                    p.grad = None
            if kind == "masters":
                for p, x in zip(net, first, strict=True):
                    p.grad = torch.zeros_like(p)
                    p.grad.data.copy_(x)
                counts(first)
            elif kind in ("by hand", "ends early"):
                backward(first)
                if kind == "by hand":
                    optimizer.zero_grad()
                    for p, x in zip(net, first, strict=True):
                        p.grad = x
                optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(net, 1e9)
                counts(first)
            elif kind == "no_sync":
                with optimizer.no_sync():
                    backward(first)
                backward(second)
                backward(third := batch())
                counts(first, second, third)
            elif kind == "parts":  # each optimizer applies its part of the means, and discards the rest
                backward(first)
                optimizers[case][0].step()
                for each in optimizers[case]:
                    each.zero_grad()
                backward(second)
                optimizers[case][1].step()
                counts([first[0], *second[1:]])
                for each in optimizers[case]:
                    each.zero_grad()
            else:
                backward(first)
                if several or kind == "joined":
                    backward(second, kind == "failed" and rank == victim)
                if kind not in ("skipped", "failed"):
                    counts(first, *[second] * (several or kind == "joined"))
            if kind == "scaled":  # the weights move by half of the means: ``applied`` counts the other half
                for p in net:
                    p.grad.mul_(0.5)
            if kind == "asked" and rank == victim:
                graces[case].report()
            if kind == "scaled":
                all_steps()
                with torch.no_grad():
                    for p in net:
                        p.sub_(p.grad)
            elif kind not in ("skipped", "parts"):
                all_steps()
        except Failure:
            try:
                optimizer.zero_grad()
                found["unexpected"].append(f"step {step}: no error after a pass that failed")
            except OutOfStep:
                pass
        except OutOfStep as error:
            if kind != "failed":
                found["unexpected"].append(f"step {step}, {kind}: {error}")
        else:
            if kind == "failed":
                found["unexpected"].append(f"step {step}: worker {victim} failed, and worker {rank} has no error")
        found["slowest"] = max(found["slowest"], time.monotonic() - begin)
        with torch.no_grad():
            for total, p in zip(applied[case], net, strict=True):
                total -= p  # the learning rate is 1
                p.zero_()
        if (step + 1) % CHECKED == 0 or step + 1 == steps:
            for each in cases:
                found["different"] += differ(applied[each])
                found["lost"] = max(found["lost"], lost(graces[each], counted[each], applied[each]))
    found["steps"] = dict(kinds)
    (folder / f"found-{rank}.json").write_text(json.dumps(found))


def differ(arrays: list[Any]) -> int:
    """Return 1 if the workers' arrays differ, else 0."""
    import torch.distributed as dist

    digest = hashlib.sha256(b"".join(array.numpy().tobytes() for array in arrays)).hexdigest()
    digests: list[Any] = [None] * SIZE
    dist.all_gather_object(digests, digest)
    return int(len(set(digests)) > 1)


def lost(grace: Any, counted: list[Any], applied: list[Any]) -> float:
    """The largest difference between ``counted`` and ``applied`` plus the residuals, averaged over the workers."""
    import torch
    import torch.distributed as dist

    from grace.engine.reshard import parsed

    state, worst = grace.state_dict(), 0.0
    for number, (total, weights) in enumerate(zip(counted, applied, strict=True)):
        name = f"parts.{number}"
        rest = total.reshape(-1).clone() / SIZE
        for cell, array in state["tensors"].get(name, {}).items():
            point, _, key = parsed(cell)
            if key == "residual":
                start, count = state["points"][name][point]
                rest[start : start + count] -= array.double() / (1 if point == "server" else SIZE)
        dist.all_reduce(rest)
        worst = max(worst, float(torch.abs(rest - weights.reshape(-1)).max()))
    return worst


def _child(work: Work, folder: Path, rank: int, steps: int, seed: int) -> None:
    warnings.simplefilter("ignore")
    try:
        work(folder, rank, steps, seed)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # gloo's threads may abort a regular shutdown


def run(work: Work, folder: Path, steps: int, seed: int = 0) -> dict[str, Any]:
    """Run ``work`` on all workers. Returns their results, with problems under "failures"."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_child, args=(work, folder, rank, steps, seed)) for rank in range(SIZE)]
    begin = time.monotonic()
    for worker in workers:
        worker.start()
    limit = begin + 60 + steps * 0.5
    for worker in workers:
        worker.join(max(0.1, limit - time.monotonic()))
    hangs = [worker for worker in workers if worker.is_alive()]
    for worker in hangs:
        worker.kill()
    failures = [f"worker {rank} ended with {w.exitcode}" for rank, w in enumerate(workers) if w.exitcode != 0]
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("found-*.json"))]
    total = {
        "seconds": time.monotonic() - begin,
        "steps": reports[0]["steps"] if reports else {},
        "different": sum(each["different"] for each in reports),
        "lost": max([each["lost"] for each in reports], default=float("nan")),
        "slowest": max([each["slowest"] for each in reports], default=float("nan")),
        "hangs": len(hangs),
    }
    failures += [f"{total[key]} {key}" for key in ("different", "lost", "hangs") if total[key]]
    failures += [text for each in reports for text in each["unexpected"]]
    if total["slowest"] > TIMEOUT:
        failures.append(f"a step took {total['slowest']:.1f} s")
    return {**total, "failures": failures}


def main(work: Work, title: str, steps: int, arguments: list[str] | None = None) -> int:
    """Run ``work`` by the command line's arguments, print its results, and return the exit status."""
    parser = argparse.ArgumentParser(description=title.split("\n", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="grace-loops-") as folder:
        found = run(work, Path(folder), args.steps, args.seed)
    for name, value in found.items():
        print(f"{name:<10} {value}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main(work, __doc__ or "", 5000))
