"""`grace bench gpu`: checks laws, kernels and trainings, and times methods and exchanges, on a CUDA device.

The results are one file. On a CPU the same parts run, to test the command itself; the file says so.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from grace.backends import get_backend
from grace.bench import kernels as bench
from grace.bench import plan
from grace.bench.subjects import backend, cuda_of, drive, gradient, own, stepper
from grace.core import Context
from grace.core.method import Method, materialize
from grace.core.registry import compressors
from grace.factory import grace_from_params
from grace.planner import models
from grace.testing.compressors import LAWS
from grace_bench import gpt2_steps, processes, streams, text
from grace_bench import trainings as loops

FORMAT = 2
SIZE, QUICK_SIZE = 25_000_000, 100_000
QUICK = ("blockint", "powersgd", "topk")
"""Methods of a quick run."""
KERNELS = (
    "efsignsgd:block_size=512",
    "efsignsgd:block_size=0",
    "blockint:bits=4",
    "blockint:bits=8,rounding=stochastic,memory=residual",
    "topk:compress_ratio=0.01",
    "eden:bits=1,biased=True,memory=residual",
    "eden:bits=2",
    "eden:bits=3,block_size=64",
)
"""Methods whose kernels are compared with the plain functions."""
BASELINE = "bf16 allreduce"
EXCHANGED = {
    BASELINE: None,
    "fp16": {"compressor": "fp16"},
    "blockint, 8 bits": {"compressor": "blockint", "bits": 8},
    "blockint, 4 bits": {"compressor": "blockint", "bits": 4},
    "efsignsgd": {"compressor": "efsignsgd", "block_size": 512},
    "topk, 1 %": {"compressor": "topk", "compress_ratio": 0.01},
    "powersgd, rank 4": {"compressor": "powersgd", "compress_rank": 4},
    "eden, 3 bits": {"compressor": "eden", "bits": 3, "block_size": 64},
}
PARTS = ("kernels", "loops", "steps", "training")
"""What can be run alone: laws, bits and times of kernels; loops as on the CPU; steps with an exchange; a training."""
BUCKET = 25 * 2**20 // 4
"""Elements of each of the baseline's buckets."""
WARM_UPS, STEPS = 3, 20


class Run:
    """The results so far; the file is written after each part."""

    def __init__(self, device: str, quick: bool, output: Path | None, progress: Callable[[str], None]):
        xp = backend(plan.Config(device, 1, "asis", 1))
        cuda = cuda_of(xp)
        self.device, self.quick, self.xp, self._output, self.progress = device, quick, xp, output, progress
        self.device_type = "cuda" if cuda else "cpu"
        self.data: dict[str, Any] = {
            "format": FORMAT,
            "gpu": bool(cuda),
            "device": str(cuda.get_device_name()) if cuda else "CPU",
            "quick": quick,
            "machine": bench.machine(),
            "complete": False,
        }

    def keep(self, part: str, found: dict[str, Any]) -> None:
        """Add a part, and write the file."""
        self.data[part] = found
        self.save()

    def save(self) -> None:
        """Write the file atomically."""
        if self._output is not None:
            draft = self._output.with_suffix(".part")
            draft.write_text(json.dumps(self.data, indent=1) + "\n")
            draft.replace(self._output)


def measure(
    device: str,
    quick: bool,
    minutes: float,
    output: Path | None,
    progress: Callable[[str], None] = lambda text: None,
    parts: Sequence[str] = PARTS,
) -> dict[str, Any]:
    """Run some `PARTS` on "cuda" or "cpu"; ``quick``: small tensors, few methods. RuntimeError without a device."""
    run = Run("torch" if device == "cpu" else device, quick, output, progress)
    began = time.monotonic()

    def left(share: float) -> float:
        # Seconds for a part: ``share`` of the remaining time, or all of it if this is the only part.
        rest = 60 * minutes - (time.monotonic() - began)
        return share * rest if len(parts) > 1 else rest

    run.data["parts"] = list(parts)
    # The named training takes as long as all other parts together.
    if "kernels" in parts:
        run.keep("laws", laws(run, left(0.1) if len(parts) > 1 else 0.4 * left(1)))
        run.keep("kernels", same_bits(run))
        run.keep("times", times(run, left(0.1) if len(parts) > 1 else 0.9 * left(1)))
    if "loops" in parts:
        run.keep("trainings", trainings(run, left(0.25) if len(parts) > 1 else 0.8 * left(1)))
        run.keep("streams", on_streams(run, left(0.08) if len(parts) > 1 else left(1)))
    if "steps" in parts:
        run.keep("gpt2", gpt2(run, left(0.15) if len(parts) > 1 else 0.6 * left(1)))
        run.keep("exchange", exchanges(run, left(0.1) if len(parts) > 1 else left(1)))
    if "training" in parts:
        run.keep("training", learning(run, left(0.95)))
    run.data["complete"], run.data["seconds"] = True, round(time.monotonic() - began, 1)
    run.save()
    return run.data


# -- parts -------------------------------------------------------------------------------------------------------------
def laws(run: Run, seconds: float) -> dict[str, Any]:
    """Check the laws of `grace.testing` for every compressor on the device."""
    ends, held, broken, left = time.monotonic() + seconds, 0, [], []
    for name in QUICK if run.quick else compressors:
        if time.monotonic() > ends:
            left.append(name)
            continue
        run.progress(f"laws of {name}")
        for law, check in LAWS.items():
            if getattr(check, "graphs", False) or getattr(check, "reference", False):
                continue
            try:
                check(compressors[name](), run.xp)
                held += 1
            except Exception as error:
                broken.append(f"{name}: {law}: {type(error).__name__}: {error}"[:300])
    return {"held": held, "broken": broken, "left_out": left}


@contextmanager
def kernels(setting: str) -> Iterator[None]:
    """Set GRACE_KERNELS inside the block."""
    before = os.environ.get("GRACE_KERNELS")
    os.environ["GRACE_KERNELS"] = setting
    try:
        yield
    finally:
        if before is None:
            del os.environ["GRACE_KERNELS"]
        else:
            os.environ["GRACE_KERNELS"] = before


def same_bits(run: Run) -> dict[str, Any]:
    """Compare two steps of each method with kernels on the device to the plain functions in NumPy."""
    on = "triton" if run.data["gpu"] else "on"
    with kernels(on):
        isa = getattr(run.xp.kernels, "isa", "")
    cases = []
    for spec in KERNELS if isa else ():
        for n in (4101, QUICK_SIZE if run.quick else 3_000_001):
            run.progress(f"kernels: {spec}, n = {n:,}")
            with kernels(on):
                fast = _steps(plan.method_of(plan.parse(spec).params), run.xp, n)
            with kernels("off"):
                method = plan.method_of(plan.parse(spec).params)
                plain = _steps(Method(method.compressor, method.memory), get_backend("numpy"), n)
            ulps = max(map(_ulps, fast, plain))
            # Sums in float64 may be computed in another order, which may change the last bit of a scale.
            cases.append({"case": f"{spec}, n = {n}", "ulps": ulps, "equal": ulps <= 1})
    return {"isa": isa, "cases": cases}


def _steps(method: Method, xp: Any, n: int) -> list[Any]:
    # Returns payload, residual and mean of two steps, as NumPy arrays.
    ctx = Context(xp, "w", (n,), lr=lambda: 0.1)
    state, found = method.init(ctx), []
    for step in range(2):
        ctx = Context(xp, "w", (n,), step=step, lr=lambda: 0.1)
        payload, state = drive(method.encode(own(xp, gradient(n, step)), state, ctx), [])
        mean = materialize(method.mean([payload] * 3, ctx))
        arrays = [*payload, *(state[key] for key in sorted(state)), mean]
        found += [np.array(xp.to_numpy(array)) for array in arrays]  # the next step reuses memory
    return found


def _ulps(a: Any, b: Any) -> float:
    # Returns the largest difference between floats, in units in the last place of the largest float; infinity if
    # integers differ.
    if a.dtype != np.float32:
        return 0.0 if np.array_equal(a, b) else math.inf
    unit = np.spacing(np.max(np.abs(b), initial=np.float32(1e-30)))
    return float(np.max(np.abs(a.astype(np.float64) - b), initial=0.0) / unit)


def trainings(run: Run, seconds: float) -> dict[str, Any]:
    """Compare trainings of `trainings.LOOPS` with those on the CPU: with two processes, or one over NCCL."""
    rows, left_out, absent = [], [], []
    networks = (("gloo", 2), ("nccl", 1)) if run.data["gpu"] else (("gloo", 2),)
    for network, size in networks:
        run.progress(f"trainings of {size} processes over {network}")
        share = seconds / len(networks)
        found, reason = processes.measure(loops.measurements, size, share, network, run.device_type, run.quick)
        rows += [{"network": network, **row} for row in found]
        if reason:
            left_out.append({"network": network, "reason": reason})
        reasons = {loop: loops.absent(loop, run.device_type, size) for loop in loops.LOOPS}
        absent += [{"network": network, "loop": loop, "reason": why} for loop, why in reasons.items() if why]
    return {"rows": rows, "left_out": left_out, "absent": absent}


def on_streams(run: Run, seconds: float) -> dict[str, Any]:
    """Host waits and overlap, see `streams`, in one process over NCCL; nothing on a CPU, which has neither."""
    if not run.data["gpu"]:
        return {"rows": [], "left_out": [], "absent": "a CPU has no streams, and its host waits for nothing"}
    run.progress("host waits and streams of one process over nccl")
    rows, reason = processes.measure(streams.measurements, 1, seconds, "nccl", run.device_type, run.quick)
    return {"rows": rows, "left_out": [{"network": "nccl", "reason": reason}] if reason else []}


def gpt2(run: Run, seconds: float) -> dict[str, Any]:
    """Time training steps of one process, for GRACE's methods, DDP and PyTorch's own hooks: see `gpt2_steps`."""
    network = "nccl" if run.data["gpu"] else "gloo"
    run.progress(f"steps of GPT-2 in one process over {network}")
    rows, reason = processes.measure(gpt2_steps.measurements, 1, seconds, network, run.device_type, run.quick)
    return {"rows": rows, "left_out": [{"network": network, "reason": reason}] if reason else []}


def times(run: Run, seconds: float) -> dict[str, Any]:
    """Time encode, commit and decode of every method, and torch's PowerSGD hook, in units of a copy on the device."""
    cases, left_out = plan.everything()
    if run.quick:
        cases = [case for case in cases if case.label in QUICK]
    cases.append(plan.Case(plan.HOOK, {"name": "powersgd", "rank": 4}, "torch"))
    config = plan.Config(run.device, 1, "asis", QUICK_SIZE if run.quick else SIZE)
    budget = max(0.1, seconds / len(cases) / 2)  # half of the time is for gradients and warm-ups
    limits = plan.Limits(rounds=3 if run.quick else STEPS, budget=budget, call=30.0)
    results = bench.Results(run.data["machine"])
    for label, reason in left_out.items():
        results.omit(label, reason)
    bench.measure(results, {"flat": cases}, [config], limits, memory=False, progress=run.progress)
    kept = (
        *("label", "elements", "bytes", "bits_per_element", "state_bytes", "workers_decoded"),
        *("memcpy", "encode", "commit", "decode", "step", "host_waits"),
    )
    records = []
    for record in results.records:
        name = record["compressor"] if record["source"] == "grace" else ""
        varies = bool(name) and compressors[name]().traits.variable_length
        records.append({key: record[key] for key in kept} | {"variable_length": varies})
    return {"elements": config.size, "records": records, "left_out": results.left_out}


def exchanges(run: Run, seconds: float) -> dict[str, Any]:
    """Time steps of two processes on one device, for two models, over gloo and, on a GPU, NCCL."""
    rows, left_out = [], []
    # NCCL usually rejects two processes on one device immediately, which leaves its time to gloo.
    networks = ("nccl", "gloo") if run.data["gpu"] else ("gloo",)
    ends = time.monotonic() + seconds
    for number, network in enumerate(networks):
        run.progress(f"exchange between two processes over {network}")
        share = (ends - time.monotonic()) / (len(networks) - number)
        found, reason = processes.measure(_measurements, 2, share, network, run.device_type, run.quick)
        rows += [{"network": network, **row} for row in found]
        if reason:
            left_out.append({"network": network, "reason": reason})
    return {"rows": rows, "left_out": left_out}


def learning(run: Run, seconds: float) -> dict[str, Any]:
    """Train `text.Gpt2` in two processes on one device over gloo, once for each of `text.METHODS`."""
    run.progress("training of two processes over gloo")
    rows, reason = processes.measure(text.measurements, 2, seconds, "gloo", run.device_type, run.quick)
    return {"rows": rows, "left_out": [{"network": "gloo", "reason": reason}] if reason else []}


def shapes_of(quick: bool) -> dict[str, dict[str, tuple[int, ...]]]:
    """The parameters' shapes of ResNet-50 and of GPT-2 with 124 million; ``quick``: only 12 small ones of each."""
    found = {}
    for model, layers in (("ResNet-50", models.resnet50()), ("GPT-2 124M", models.gpt2())):
        found[model] = {layer.name: tuple(layer.shape) for layer in layers}
        if quick:
            small = [(name, shape) for name, shape in found[model].items() if math.prod(shape) <= 10**5]
            found[model] = dict(small[:12])
    return found


def _measurements(device: str, quick: bool) -> Iterator[processes.Measurement]:
    xp = backend(plan.Config("torch" if device == "cpu" else device, 1, "asis", 1))
    for model, shapes in shapes_of(quick).items():
        for label, params in EXCHANGED.items():
            about = {"model": model, "method": label}
            yield f"{label} on {model}", partial(_exchange, about, xp, shapes, params, quick)


def _exchange(
    about: Mapping[str, str], xp: Any, shapes: Mapping[str, tuple[int, ...]], params: Any, quick: bool
) -> dict[str, Any]:
    # Returns a row with the median milliseconds of a step, and bytes per step.
    import torch.distributed as dist

    flat = xp.asarray(gradient(sum(map(math.prod, shapes.values())), dist.get_rank()), "float32")
    sizes = [math.prod(shape) for shape in shapes.values()]
    parts = zip(shapes.items(), flat.split(sizes), strict=True)
    gradients = {name: part.view(shape) for (name, shape), part in parts}
    if params is None:
        step, report = (lambda _: _baseline(flat)), None
    else:
        grace = grace_from_params(params, "torch")
        grace.build(gradients)
        step, report = stepper(grace, "eager"), grace.report
    cuda, seconds = cuda_of(xp), []
    for number in range(WARM_UPS + (5 if quick else STEPS)):
        dist.barrier()
        if cuda:
            cuda.synchronize()
        began = time.perf_counter()
        step(gradients)
        if cuda:
            cuda.synchronize()
        if number >= WARM_UPS:
            seconds.append(time.perf_counter() - began)
    sent = 2 * flat.numel() if report is None else report().bytes_sent / report().steps
    return {**about, "ms": 1e3 * statistics.median(seconds), "bytes": sent, "elements": flat.numel()}


def _baseline(flat: Any) -> None:
    # Run the baseline: torch's bf16_compress_hook on buckets of 25 MiB.
    import torch
    import torch.distributed as dist

    sent = [part.to(torch.bfloat16).div_(2) for part in flat.split(BUCKET)]
    for work in [dist.all_reduce(part, async_op=True) for part in sent]:
        work.wait()
    for part, mean in zip(flat.split(BUCKET), sent, strict=True):
        part.copy_(mean)
