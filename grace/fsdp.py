"""PyTorch's sharded training: compressed gradients for models under `fully_shard` (FSDP2), through its public hooks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard

from grace.core import name_of
from grace.pipeline import Grace

__all__ = ["fsdp"]


def fsdp(model: nn.Module, grace: Grace | None = None, replicas: Grace | None = None) -> nn.Module:
    """Let a model under `fully_shard` reduce its gradients compressed. Returns the model.

    ``grace``: for the reduce-scatter between the workers that share the parameters; its communicator must be
    "reducescatter", its transport theirs. What FSDP reduces at once, the parameters of one `fully_shard` call, is one
    tensor here, of which each worker's row is compressed by itself. Error feedback takes 4 bytes per unsharded element.
    ``replicas``: for hybrid sharding, the mean over the copies of each shard: shard over a mesh of one dimension, and
    give the transport of the other one's group. Any communicator but "reducescatter" fits. This is where compression
    pays first: within machines links are fast, between them slow.

    FSDP's own mean and sum are both understood (also its scaling for fp16); reductions are computed in float32. Every
    worker must make this call, after `fully_shard` and before the first backward pass. Raises TypeError for a model
    without FSDP2 modules, ValueError for a Grace that does not fit.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"a model is needed, not {type(model).__name__}: grace.torch.fsdp(model, grace=grc)")
    for each in (grace, replicas):
        if each is not None and not isinstance(each, Grace):
            raise TypeError(
                f"a Grace is needed, not {type(each).__name__}: make one with grace_from_params({{'compressor': ..., "
                "'communicator': 'reducescatter'})"
            )
    modules = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    if not modules:
        raise TypeError("the model has no FSDP2 module: call torch.distributed.fsdp.fully_shard on it first")
    if grace is None and replicas is None:
        raise ValueError("give a Grace for the reduce-scatter (grace=), for copies of shards (replicas=), or both")
    if grace is not None and not grace.communicator.scattered:
        raise ValueError(
            f"grace= has communicator {name_of(grace.communicator)!r}, but each worker wants its own shard: use "
            "communicator 'reducescatter'"
        )
    if replicas is not None and replicas.communicator.scattered:
        raise ValueError("replicas= wants the whole mean on all workers: leave its communicator out")
    groups = {name or "(root)": (module, list(_managed(module))) for name, module in modules.items()}
    rows = {name: _row(parameters) for name, (_, parameters) in groups.items() if parameters}
    for each, lead in ((grace, True), (replicas, False)):
        if each is not None:
            # Only shapes count.
            size = (each.world_size,) if lead else ()
            each.build({name: example.expand(*size, row) for name, (example, row) in rows.items()})
    for name in rows:
        module = groups[name][0]
        if grace is not None:
            module.set_custom_reduce_scatter(_ReduceScatter(grace, name))
        if replicas is not None:
            module.set_all_reduce_hook(_Replicas(replicas, name))
    return model


def _managed(module: nn.Module) -> Iterator[nn.Parameter]:
    # The trained parameters that FSDP reduces with this module: those of modules inside that have no FSDP of their own.
    inner = {
        p
        for child in module.modules()
        if child is not module and isinstance(child, FSDPModule)
        for p in child.parameters()
    }
    return (p for p in module.parameters() if p.requires_grad and p not in inner)


def _row(parameters: list[Any]) -> tuple[torch.Tensor, int]:
    # One element of the kind that is reduced, and how many of them each worker gets: its shards, filled up.
    numel = 0
    for p in parameters:
        (place,) = p.placements
        if not isinstance(place, Shard):
            raise TypeError(f"a parameter of shape {list(p.shape)} is placed as {place}: only shards are reduced")
        size = p.shape[place.dim]
        numel += -(-size // p.device_mesh.size()) * (p.numel() // size if size else 0)
    return torch.zeros((), device=parameters[0].to_local().device), numel


class _Exchange:
    """One tensor of a Grace, exchanged when FSDP has it; the step ends with the backward pass."""

    _ending: set[Grace] = set()  # noqa: RUF012 - those whose step ends after the backward pass that is under way

    def __init__(self, grace: Grace, name: str):
        self._grace, self._name = grace, name

    def mean(self, x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        grace = self._grace
        if grace not in self._ending:
            self._ending.add(grace)
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        grace.launch({self._name: x.reshape(shape)}, spent=True)
        grace.land(last=False)
        mean = grace.mean(self._name)
        assert mean is not None
        return mean

    def _end(self) -> None:
        self._ending.discard(self._grace)
        self._grace.land()


class _ReduceScatter(_Exchange):
    """FSDP's reduce-scatter (`torch.distributed.fsdp.FSDPModule.set_custom_reduce_scatter`)."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        size = dist.get_world_size(group)
        if size != self._grace.world_size:
            raise ValueError(
                f"the shards of {self._name!r} lie on {size} workers, but grace has {self._grace.world_size}: make it "
                "with transport=TorchDistributedTransport(mesh.get_group())"
            )
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise ValueError(
                "FSDP asks for neither mean nor sum: leave set_gradient_divide_factor alone and scale the loss"
            )
        mean = self.mean(input_tensor, (size, math.prod(output_tensor.shape)))
        if op == dist.ReduceOp.SUM:
            mean = mean * size
        output_tensor.copy_(mean.reshape(output_tensor.shape))


class _Replicas(_Exchange):
    """FSDP's all-reduce of a shard over its copies (`torch.distributed.fsdp.FSDPModule.set_all_reduce_hook`)."""

    def __call__(self, reduce_output: torch.Tensor) -> None:
        reduce_output.copy_(self.mean(reduce_output.clone(), tuple(reduce_output.shape)))
