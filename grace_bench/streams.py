"""Whether the host waits for a device between backward and step, and which work overlaps the backward pass.

On a device only. One process, over NCCL, so an exchange has no header; a test of processes covers that one.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import grace
from grace.factory import grace_from_params
from grace_bench import gpt2_steps, text
from grace_bench.device_trace import beside, traced
from grace_bench.processes import Measurement

METHODS = ("none", "fp16", "blockint, 4 bits", "eden, 3 bits", "efsignsgd", "powersgd, rank 4")
"""Methods with payloads of a fixed length."""
WARM_UPS, STEPS = 4, 3
SMALL = text.QUICK._replace(layers=2, width=256, heads=4)
LARGE = text.LARGE._replace(layers=4, length=512, batch=8)


def measurements(device: str, quick: bool) -> Iterator[Measurement]:
    """A row for each integration and method; then one for each method's streams."""
    for method in METHODS:
        for loop in ("ddp", "optimizer"):
            yield f"host waits, {loop}, {method}", partial(waits, loop, method, device)
    for method in (gpt2_steps.DENSE, *METHODS):
        yield f"streams, {method}", partial(streams, method, device, SMALL if quick else LARGE)


def _ready(loop: str, method: str, device: str, size: text.Size) -> tuple[Any, Any, Any]:
    model: Any = text.Gpt2(size).to(device)
    if loop == "ddp":
        model = gpt2_steps.exchanged(method, model)
        optimizer: Any = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    else:
        grc = grace_from_params(dict(gpt2_steps.METHODS[method]), "torch")
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        optimizer = grace.torch.DistributedOptimizer(optimizer, grc, named_parameters=model.named_parameters())
    x = torch.randint(size.vocabulary, (size.batch, size.length + 1)).to(device)
    return model, optimizer, x


def _steps(count: int, model: Any, optimizer: Any, x: torch.Tensor) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()


def waits(loop: str, method: str, device: str) -> dict[str, Any]:
    """Step with `torch.cuda.set_sync_debug_mode("error")`; returns a row with where the host waits, or ""."""
    parts, found = _ready(loop, method, device, SMALL), ""
    for number in range(WARM_UPS + STEPS):
        torch.cuda.set_sync_debug_mode("error" if number >= WARM_UPS else "default")
        try:
            _steps(1, *parts)
        except RuntimeError as error:
            (*_, last) = traceback.extract_tb(error.__traceback__)
            found = f"{str(error).splitlines()[0]} ({last.filename.rpartition('/')[2]}:{last.lineno})"
            break
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return {"check": "waits", "loop": loop, "method": method, "waits": found}


def streams(method: str, device: str, size: text.Size) -> dict[str, Any]:
    """A row with the milliseconds per step in which other streams than the busiest one run: in total, and beside it."""
    parts = _ready("ddp", method, device, size)
    _steps(WARM_UPS, *parts)
    torch.cuda.synchronize()
    work = traced(partial(_steps, STEPS, *parts))
    others, shared = beside(work)
    milliseconds = 1e-3 / STEPS
    return {
        "check": "streams",
        "method": method,
        "others_ms": others * milliseconds,
        "beside_ms": shared * milliseconds,
    }
