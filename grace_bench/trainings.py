"""Trainings through each integration on a device, compared with the same trainings on the CPU.

The loss is linear in the parameters, so its gradients have the same bits on every device: any difference comes from
GRACE.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import grace
from grace.factory import grace_from_params
from grace_bench.processes import Measurement

STEPS = 6
TOLERANCE = 1e-3
"""Largest difference of parameters in units of their change, by the 2-norm: sums may have another order."""
SHAPES = ((512, 300), (300,), (64, 3, 3, 3), (7,))
METHODS: dict[str, dict[str, Any]] = {
    "none": {"compressor": "none"},
    "fp16": {"compressor": "fp16"},
    "blockint, 4 bits": {"compressor": "blockint", "bits": 4},
    "blockint, 8 bits, stochastic": {"compressor": "blockint", "bits": 8, "rounding": "stochastic"},
    "eden, 2 bits": {"compressor": "eden", "bits": 2},
    "efsignsgd": {"compressor": "efsignsgd", "block_size": 512},
    "qsgd": {"compressor": "qsgd"},
    "topk, 1 %": {"compressor": "topk", "compress_ratio": 0.01},
    "dgc, 1 %": {"compressor": "dgc", "compress_ratio": 0.01, "memory": "dgc"},
    "powersgd, rank 4": {"compressor": "powersgd", "compress_rank": 4},
}
SHARDED = ("none", "blockint, 4 bits", "efsignsgd", "topk, 1 %")


class Linear(torch.nn.Module):
    """Parameters w; the loss is the sum of w * x, whose gradient is x."""

    def __init__(self) -> None:
        super().__init__()
        numbers = torch.Generator().manual_seed(0)
        self.weights = torch.nn.ParameterList([torch.randn(shape, generator=numbers) for shape in SHAPES])

    def forward(self, *xs: torch.Tensor) -> torch.Tensor:
        """The loss, a scalar."""
        return torch.stack([(w * x).sum() for w, x in zip(self.weights, xs, strict=True)]).sum()


def _inputs(device: str) -> Iterator[list[torch.Tensor]]:
    for step in range(STEPS):
        numbers = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        yield [torch.randn(shape, generator=numbers).to(device) for shape in SHAPES]


def ddp(device: str, params: dict[str, Any]) -> list[torch.Tensor]:
    """DistributedDataParallel with the hook, two micro-batches per step, clipping."""
    model = torch.nn.parallel.DistributedDataParallel(Linear().to(device))
    grc = grace_from_params(params, "torch")
    grace.torch.name_parameters(grc, model)
    model.register_comm_hook(grc, grace.torch.ddp_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for xs in _inputs(device):
        with model.no_sync():
            model(*xs).backward()
        model(*xs).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        optimizer.step()
        optimizer.zero_grad()
    return _whole(model)


def scaled(device: str, params: dict[str, Any]) -> list[torch.Tensor]:
    """The wrapped optimizer with a GradScaler, one of whose steps overflows, and a checkpoint in the middle."""
    model = Linear().to(device)

    def wrap() -> Any:
        grc = grace_from_params(params, "torch")
        inner = torch.optim.SGD(model.parameters(), lr=0.25)
        return grc, grace.torch.DistributedOptimizer(inner, grc, named_parameters=model.named_parameters())

    grc, optimizer = wrap()
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    for step, xs in enumerate(_inputs(device)):
        if step == 2:
            xs[1][3] = torch.inf
        if step == 4:
            state, inner = grc.state_dict(), optimizer.state_dict()
            grc, optimizer = wrap()
            grc.load_state_dict(state)
            optimizer.load_state_dict(inner)
        optimizer.zero_grad()
        scaler.scale(model(*xs)).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    return _whole(model)


def fsdp(device: str, params: dict[str, Any]) -> list[torch.Tensor]:
    """FSDP2 with a compressed reduce-scatter of gradients and 8-bit gathers of parameters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Linear().to(device)
    fully_shard(model, mesh=init_device_mesh(device, (dist.get_world_size(),)))
    grc = grace_from_params({**params, "communicator": "reducescatter"}, "torch")
    grace.torch.fsdp(model, grace=grc, parameters={"compressor": "blockint", "bits": 8})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for xs in _inputs(device):
        optimizer.zero_grad()
        model(*xs).backward()
        optimizer.step()
    return _whole(model)


LOOPS: dict[str, Callable[[str, dict[str, Any]], list[torch.Tensor]]] = {"ddp": ddp, "scaled": scaled, "fsdp": fsdp}


def measurements(device: str, quick: bool) -> Iterator[Measurement]:
    """All loops with all methods; ``quick``: those of `SHARDED` only."""
    for loop in LOOPS:
        for method in SHARDED if quick or loop == "fsdp" else METHODS:
            yield f"{loop}, {method}", partial(_row, loop, method, device)


def _row(loop: str, method: str, device: str) -> dict[str, Any]:
    differences: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(differences, compare(loop, method, device))
    largest = max(differences, key=lambda each: (math.isnan(each), each))
    return {"loop": loop, "method": method, "difference": largest}


def compare(loop: str, method: str, device: str) -> float:
    """Train on the CPU and on ``device``: the difference of the parameters relative to their change; may be NaN."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "gradients were exchanged and then thrown away")
        expected, found = (LOOPS[loop](each, METHODS[method]) for each in ("cpu", device))
    start = [w.detach() for w in Linear().weights]
    difference = _norm([a - b for a, b in zip(found, expected, strict=True)])
    return difference / _norm([a - b for a, b in zip(expected, start, strict=True)])


def _whole(model: torch.nn.Module) -> list[torch.Tensor]:
    # The shards travel as CPU tensors: `DTensor.full_tensor` on a device ends the process over gloo (PyTorch 2.11).
    found = []
    for p in model.parameters():
        parts = [(p.to_local() if isinstance(p, DTensor) else p).detach().cpu()]
        if isinstance(p, DTensor):
            own, parts = parts[0], [None] * dist.get_world_size()
            dist.all_gather_object(parts, own)
        found.append(torch.cat(parts))
    return found


def _norm(tensors: list[torch.Tensor]) -> float:
    return float(torch.cat([each.double().flatten() for each in tensors]).norm())
