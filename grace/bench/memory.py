"""Measures the peak memory of a few whole steps of one worker, in a process of its own."""

from __future__ import annotations

import ctypes
import gc
import math
import os
from pathlib import Path
from typing import Any

from grace.bench.plan import Case, Config, method_of, shapes
from grace.bench.subjects import backend, cuda_of, gradient, own, stepper
from grace.factory import grace_from_params

STEPS = 3


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Peak bytes of a step beyond parameters and gradients, and bytes of the state."""
    config, case = Config(**job["config"]), Case(**job["case"])
    xp = backend(config)
    if not cuda_of(xp) and not Path("/proc/self/clear_refs").exists():
        return {"left_out": "a process's largest size is only told, and reset, in Linux's /proc"}
    tensors = shapes(config, method_of(case.params).compressor.traits.needs_shape)
    n = sum(math.prod(shape) for shape in tensors.values())
    # Run a small step first: the libraries that it loads and threads that it starts are not the method's memory.
    small = {"w": xp.reshape(own(xp, gradient(128 * 128, 0)), (128, 128))}
    run(xp, case, [small], job["mode"])
    parameters = own(xp, gradient(n, 9))
    flats = [own(xp, gradient(n, seed)) for seed in range(2)]
    models = []
    for flat in flats:
        model, start = {}, 0
        for name, shape in tensors.items():
            model[name] = xp.reshape(flat[start : start + math.prod(shape)], shape)
            start += math.prod(shape)
        models.append(model)
    del flats, flat
    gc.collect()
    before = forgotten(xp)
    largest, state_bytes = run(xp, case, models, job["mode"])
    peak = largest - before
    del parameters
    return {
        "peak_bytes": peak,
        "state_bytes": state_bytes,
        "step_bytes": peak - state_bytes,
        "step_share": (peak - state_bytes) / (4 * n),
        "state_share": state_bytes / (4 * n),
        "elements": n,
    }


def run(xp: Any, case: Case, models: list[dict[str, Any]], mode: str) -> tuple[int, int]:
    """Run a few steps; returns the process's peak size in bytes since `forgotten`, and the state's."""
    grace = grace_from_params({**case.params, "min_numel": 1024}, "local")
    grace.learning_rate = lambda name: 0.1
    grace.build(models[0])
    step = stepper(grace, mode)
    for number in range(STEPS):
        step(models[number % len(models)])
    largest = size(xp, "VmHWM", "max_memory_allocated")  # before the state is read, which copies it
    return largest, sum(array.nbytes for arrays in grace.state_dict()["tensors"].values() for array in arrays.values())


def forgotten(xp: Any) -> int:
    """Reset the peak to the current size, and return that in bytes."""
    if cuda := cuda_of(xp):
        cuda.reset_peak_memory_stats()
    else:
        trim()
        Path("/proc/self/clear_refs").write_text("5")
    return size(xp, "VmRSS", "memory_allocated")


def size(xp: Any, host: str, device: str) -> int:
    """A size in bytes: the entry ``host`` of /proc/self/status, or on a CUDA device ``device`` of torch.cuda."""
    if cuda := cuda_of(xp):
        return int(getattr(cuda, device)())
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(host)).split()[1])


def trim() -> None:
    """Return freed memory to the system, so that using it again raises the size."""
    if os.name == "posix":
        release = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if release is not None:
            release(0)
