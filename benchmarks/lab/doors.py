"""Integrations that exchange gradients, by name. Each takes a model and its optimizer and returns a `Joined`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn


class Joined(NamedTuple):
    """A model trained by several workers."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    exchange: Callable[[], None] | None = None
    """Called between backward and step, if needed."""
    grc: Any = None
    finish: Callable[[], None] | None = None
    """Called after the last step, if the workers' models differ until then."""


def alone(model: nn.Module, optimizer: torch.optim.Optimizer, params: dict[str, Any], peer: str) -> Joined:
    """No communication: the workers train side by side, each alone."""
    return Joined(model, optimizer)


def horovod(model: nn.Module, optimizer: torch.optim.Optimizer, params: dict[str, Any], peer: str) -> Joined:
    """Horovod's own optimizer."""
    import horovod.torch as hvd

    compression = getattr(hvd.Compression, params.get("compression", "none"))
    named = model.named_parameters()
    return Joined(model, hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compression))


def _ddp(model: nn.Module, bucket_mb: float = 25) -> Any:
    # DDP's default size, given explicitly: otherwise the first bucket has another size, and torch's PowerSGD hook
    # aborts. Gradients that are views of the buckets need not be copied to and from them.
    return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)


def ddp(model: nn.Module, optimizer: torch.optim.Optimizer, params: dict[str, Any], peer: str) -> Joined:
    """DistributedDataParallel, with one of torch's own hooks or none."""
    wrapped = _ddp(model, params.get("bucket_mb", 25))
    if params.get("hook") == "fp16":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        wrapped.register_comm_hook(None, fp16_compress_hook)
    elif params.get("hook") == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

        state = PowerSGDState(None, matrix_approximation_rank=params["rank"], start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook)
    return Joined(wrapped, optimizer)


def upstream(model: nn.Module, optimizer: torch.optim.Optimizer, params: dict[str, Any], peer: str) -> Joined:
    """Upstream GRACE over torch.distributed, from a checkout: parameter by parameter, as in its examples."""
    if peer not in sys.path:
        sys.path.insert(0, peer)
    from grace_dl.dist.helper import grace_from_params

    size = dist.get_world_size()
    given = {"memory": "residual", "communicator": "allgather", **params, "world_size": size}
    method = grace_from_params({key: size if value == "world_size" else value for key, value in given.items()})

    def exchange() -> None:
        for name, p in model.named_parameters():
            p.grad = method.step(p.grad, name)

    return Joined(model, optimizer, exchange)


def grace(model: nn.Module, optimizer: torch.optim.Optimizer, params: dict[str, Any], peer: str) -> Joined:
    """GRACE's distributed optimizer, over torch.distributed or Horovod, by the launcher."""
    import grace.torch
    from grace import grace_from_params

    grc = grace_from_params(params)
    if params.get("memory") == "dgc":  # the memory has momentum
        for group in optimizer.param_groups:
            group["momentum"] = 0.0
    named = model.named_parameters()
    return Joined(model, grace.torch.DistributedOptimizer(optimizer, grace=grc, named_parameters=named), grc=grc)


def grace_ddp(model: nn.Module, optimizer: torch.optim.Optimizer, params: dict[str, Any], peer: str) -> Joined:
    """DistributedDataParallel with GRACE's hook."""
    import grace.torch
    from grace import grace_from_params

    grc = grace_from_params(params)
    if params.get("memory") == "dgc":
        for group in optimizer.param_groups:
            group["momentum"] = 0.0
    wrapped = _ddp(model)
    grace.torch.name_parameters(grc, wrapped)
    wrapped.register_comm_hook(grc, grace.torch.ddp_hook)
    return Joined(wrapped, optimizer, grc=grc)


def grace_local(model: nn.Module, optimizer: torch.optim.Optimizer, params: dict[str, Any], peer: str) -> Joined:
    """Local training: workers average pseudo-gradients every H steps."""
    import grace.local
    import grace.torch

    local = grace.local.from_params(params)
    grace.torch.local(optimizer, local, model.named_parameters(), model.named_buffers())
    return Joined(model, optimizer, grc=local.grace, finish=local.finish)


DOORS = {door.__name__: door for door in (alone, horovod, ddp, upstream, grace, grace_ddp, grace_local)}
