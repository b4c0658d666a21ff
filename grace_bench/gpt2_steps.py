"""Steps of GPT-2 124M with each exchange: time of step, device and host, launches, and peak memory.

One process, so that nothing waits for a network: this shows the costs of an exchange on the GPU and its host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

import grace
from grace.factory import grace_from_params
from grace_bench import text
from grace_bench.device_trace import busy, length, traced
from grace_bench.processes import Measurement

ALONE = "no exchange"
"""The model without DistributedDataParallel."""
DENSE = "DDP, float32"
HOOKS = ("fp16_compress_hook", "bf16_compress_hook", "powerSGD_hook, rank 4")
"""PyTorch's own."""
METHODS: dict[str, dict[str, Any]] = {
    "none": {"compressor": "none"},
    "fp16": {"compressor": "fp16"},
    "blockint, 4 bits": {"compressor": "blockint", "bits": 4},
    "blockint, 8 bits": {"compressor": "blockint", "bits": 8},
    "eden, 3 bits": {"compressor": "eden", "bits": 3, "block_size": 64},
    "efsignsgd": {"compressor": "efsignsgd", "block_size": 512},
    "topk, 1 %": {"compressor": "topk", "compress_ratio": 0.01},
    "powersgd, rank 4": {"compressor": "powersgd", "compress_rank": 4},
}
LARGE, QUICK = text.LARGE._replace(length=1024, batch=4, steps=20), text.QUICK._replace(steps=3)
WARM_UPS, TRACED = 5, 3
"""Steps before measuring (DDP rebuilds its buckets, kernels are compiled), and steps in a trace."""


def measurements(device: str, quick: bool) -> Iterator[Measurement]:
    """A row for each exchange that this device has."""
    hooks = HOOKS if device != "cpu" else tuple(each for each in HOOKS if not each.startswith("bf16"))  # NCCL only
    for label in (ALONE, DENSE, *hooks, *METHODS):
        yield label, partial(measure, label, device, QUICK if quick else LARGE)


def exchanged(label: str, model: torch.nn.Module) -> Any:
    """The model with an exchange."""
    if label == ALONE:
        return model
    ddp = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if label in METHODS:
        grc = grace_from_params(dict(METHODS[label]), "torch")
        grace.torch.name_parameters(grc, ddp)
        ddp.register_comm_hook(grc, grace.torch.ddp_hook)
    elif label != DENSE:
        ddp.register_comm_hook(*_hook(label))
    return ddp


def _hook(label: str) -> tuple[Any, Callable[..., Any]]:
    # A state and a hook of PyTorch.
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if label.startswith("powerSGD"):
        return powerSGD_hook.PowerSGDState(None, 4, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook
    return None, getattr(default_hooks, label)


def measure(label: str, device: str, size: text.Size) -> dict[str, Any]:
    """Returns a row; figures that only a CUDA device has are None on a CPU."""
    cuda = torch.cuda if device != "cpu" else None
    wait = cuda.synchronize if cuda else lambda: None
    if cuda:
        cuda.empty_cache()
        cuda.reset_peak_memory_stats()
    model = exchanged(label, text.Gpt2(size).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=bool(cuda))
    drawn = torch.Generator().manual_seed(0)
    x = torch.randint(size.vocabulary, (size.batch, size.length + 1), generator=drawn).to(device)

    def steps(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16, enabled=bool(cuda)):
                loss = model(x)
            loss.backward()
            optimizer.step()

    steps(WARM_UPS)
    wait()
    began = time.perf_counter()
    steps(size.steps)
    wait()
    found = {"method": label, "ms": 1e3 * (time.perf_counter() - began) / size.steps}
    return {**found, **(_on_device(steps, cuda) if cuda else dict.fromkeys(DEVICE))}


DEVICE = ("host_ms", "device_ms", "launches", "peak_mib")
"""What only a device can tell: the time until the host has launched a step, and the time that the device works."""


def _on_device(steps: Callable[[int], None], cuda: Any) -> Mapping[str, float]:
    peak, host = cuda.max_memory_allocated() / 2**20, []
    for _ in range(TRACED):
        began = time.perf_counter()
        steps(1)
        host.append(time.perf_counter() - began)
        cuda.synchronize()
    work = traced(lambda: steps(TRACED))
    launches = sum(each.kernel for each in work) / TRACED
    return dict(zip(DEVICE, (1e3 * min(host), 1e-3 * length(busy(work)) / TRACED, launches, peak), strict=True))
