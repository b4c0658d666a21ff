"""What GRACE adds to a step of many small tensors: calls and time, in one process of PyTorch.

    python -m benchmarks.overhead [--against CHECKOUT] [--rounds 5] [--only ddp,optimizer,step] [--methods none,int4]
                                  [--large] [--device cuda] [--json FILE]

Each case trains two models of equal tensors by turns, one without GRACE, and takes the difference: of the calls that
Python makes in a step (of Python and C functions, by sys.setprofile), and of the median times of steps. Calls and times
of 37 and 148 tensors in 1 and in 8 buckets are fitted to a + b buckets + c tensors. ``--against``: another checkout,
with its kernels built, whose processes alternate with this one's. ``--large``: a single tensor of 25,000,000 elements
instead. On a CUDA device the table also has the device's time, and the number of kernels that it launches.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
METHODS: dict[str, dict[str, Any]] = {
    "none": {"compressor": "none"},
    "fp16": {"compressor": "fp16"},
    "int4": {"compressor": "blockint", "bits": 4},
    "signs": {"compressor": "efsignsgd"},
    "eden3": {"compressor": "eden", "bits": 3},
    "topk": {"compressor": "topk", "compress_ratio": 0.01},
    "powersgd": {"compressor": "powersgd", "compress_rank": 4},
}
INTEGRATIONS = ("ddp", "optimizer", "step")
COUNTS, BUCKETS, SIZE = (37, 148), (1, 8), 1024
LARGE = 25_000_000
WARM = 8
"""Steps before the first measured one: DistributedDataParallel rebuilds its buckets in the second."""


@dataclass(frozen=True)
class Case:
    """A method in an integration, on ``tensors`` tensors of ``size`` elements in ``buckets`` buckets."""

    integration: str
    method: str
    tensors: int
    buckets: int
    size: int = SIZE
    device: str = "cpu"

    @property
    def bucket_mb(self) -> float:
        return -(-self.tensors // self.buckets) * self.size * 4 / 2**20


# -- in a process of its own -------------------------------------------------------------------------------------------
def measure(case: Case, steps: int) -> dict[str, Any]:
    """Calls, times in ms and modules of a case."""
    import torch

    torch.set_num_threads(1)
    if case.device == "cpu":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo" if case.device == "cpu" else "nccl", store=store, rank=0, world_size=1)
    alone, ours = trained(case, False), trained(case, True)
    for _ in range(WARM):
        alone()
        ours()
    times: dict[Callable[[], None], list[float]] = {alone: [], ours: []}
    for _ in range(steps):
        for step, taken in times.items():
            _wait(case)
            begin = time.perf_counter()
            step()
            _wait(case)
            taken.append(1e3 * (time.perf_counter() - begin))
    (bare, _), (calls, modules) = profiled(alone), profiled(ours)
    found = {
        "calls alone": bare,
        "calls": calls - bare,
        "ms alone": median(times[alone]),
        "ms": median(times[ours]) - median(times[alone]),
        "modules": sorted(modules),
    }
    if case.device != "cpu":
        found |= {key: value - launched(alone)[key] for key, value in launched(ours).items()}
    torch.distributed.destroy_process_group()
    return found


def trained(case: Case, compressed: bool) -> Callable[[], None]:
    """A function that makes one step of a training, with GRACE or without."""
    import torch

    import grace
    import grace.torch

    def made() -> grace.Grace:
        return grace.grace_from_params({**METHODS[case.method], "bucket_mb": case.bucket_mb})

    draw = torch.Generator().manual_seed(1)
    shape = (32, case.size // 32) if case.size % 32 == 0 else (case.size,)

    def drawn() -> torch.Tensor:
        return torch.randn(shape, generator=draw).to(case.device)

    gradients = [drawn() for _ in range(case.tensors)]
    if case.integration == "step":
        grc, named = made(), {f"layer{n}.weight": gradient for n, gradient in enumerate(gradients)}
        grc.build(named)
        return (lambda: grc.step(named) and None) if compressed else (lambda: None)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = torch.nn.ParameterList([torch.nn.Parameter(drawn()) for _ in gradients])

        def forward(self) -> torch.Tensor:
            terms = [(part * gradient).sum() for part, gradient in zip(self.parts, gradients, strict=True)]
            return torch.stack(terms).sum()

    model: Any = Model()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    if case.integration == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=case.bucket_mb)
        if compressed:
            model.register_comm_hook(made(), grace.torch.ddp_hook)
    elif compressed:
        optimizer = grace.torch.DistributedOptimizer(optimizer, made(), model.named_parameters())

    def step() -> None:
        optimizer.zero_grad()
        model().backward()
        optimizer.step()

    return step


def profiled(step: Callable[[], None]) -> tuple[int, set[str]]:
    """The number of calls in a step, and the modules of grace that it runs."""
    calls, modules = 0, set()

    def see(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        if event == "call":
            modules.add(frame.f_globals.get("__name__", ""))
        calls += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls, {name for name in modules if name.split(".")[0] == "grace"}


def launched(step: Callable[[], None]) -> dict[str, float]:
    """The number of kernels that a step launches on a CUDA device, and their time."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return {"launches": len(kernels), "device ms": sum(event.device_time for event in kernels) / 1e3}


def _wait(case: Case) -> None:
    if case.device != "cpu":
        import torch

        torch.cuda.synchronize()


# -- all cases ---------------------------------------------------------------------------------------------------------
def run(case: Case, checkout: Path, steps: int) -> dict[str, Any]:
    """Measure a case with a checkout's GRACE, in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--job", json.dumps(asdict(case)), "--steps", str(steps)]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{case} of {checkout} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def fitted(found: dict[tuple[int, int], dict[str, Any]], key: str) -> list[float]:
    """a, b and c of the least squares fit of a + b buckets + c tensors."""
    import numpy as np

    rows = np.array([(1, buckets, tensors) for tensors, buckets in found], float)
    values = np.array([each[key] for each in found.values()], float)
    return [float(each) for each in np.linalg.lstsq(rows, values, rcond=None)[0]]


def middle(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The median over the rounds of each number."""
    return {
        key: value if isinstance(value, list) else median(each[key] for each in found)
        for key, value in found[0].items()
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--against", type=Path, help="another checkout, with its kernels built")
    parser.add_argument("--rounds", type=int, default=5, help="processes of each case and checkout")
    parser.add_argument("--steps", type=int, default=200, help="steps of each process")
    parser.add_argument("--only", default=",".join(INTEGRATIONS), help="integrations")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--large", action="store_true", help="one tensor of 25,000,000 elements")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.job:
        print(json.dumps(measure(Case(**json.loads(args.job)), args.steps)))
        return 0
    checkouts = {"this": ROOT, **({"other": args.against.resolve()} if args.against else {})}
    shapes = [(1, 1, LARGE)] if args.large else [(n, b, SIZE) for n in COUNTS for b in BUCKETS]
    records = []
    for integration in args.only.split(","):
        for method in args.methods.split(","):
            rounds: dict[Any, list[Any]] = {}
            for _ in range(args.rounds):
                for n, b, size in shapes:
                    for name, checkout in checkouts.items():
                        case = Case(integration, method, n, b, size, args.device)
                        rounds.setdefault((name, n, b), []).append(run(case, checkout, args.steps))
            for name in checkouts:
                found = {(n, b): middle(rounds[name, n, b]) for n, b, _ in shapes}
                records.append(record(integration, method, name, found))
                print(line(records[-1]), flush=True)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(records, indent=1) + "\n")
    return 0


def record(integration: str, method: str, checkout: str, found: dict[tuple[int, int], dict[str, Any]]) -> Any:
    """All numbers of a method in an integration."""
    fits = {key: fitted(found, key) for key in ("calls", "ms")} if len(found) > 2 else {}
    cases = [{"tensors": n, "buckets": b, **each} for (n, b), each in found.items()]
    return {"integration": integration, "method": method, "checkout": checkout, "fits": fits, "cases": cases}


def line(record: dict[str, Any]) -> str:
    """A record as a line of the table."""
    last = max(record["cases"], key=lambda each: (each["tensors"], -each["buckets"]))
    text = f"{record['integration']:<10}{record['method']:<9}{record['checkout']:<6}"
    if record["fits"]:
        a, b, c = record["fits"]["calls"]
        text += f"calls {a:6.0f} + {b:4.0f} buckets + {c:5.1f} tensors; "
    text += f"{last['tensors']} tensors: {last['ms']:6.2f} ms beyond {last['ms alone']:.2f}"
    text += "".join(f", {last[key]:g} {key}" for key in ("launches", "device ms") if key in last)
    return f"{text}; {len(last['modules'])} modules"


if __name__ == "__main__":
    sys.exit(main())
