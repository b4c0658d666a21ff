"""Local training: averages pseudo-gradients every H steps of an optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from grace.local import Access, DiLoCo
from grace.torch.checks import check_optimizer, check_parameters, check_unique, named_pairs, ordinary


def local(
    optimizer: torch.optim.Optimizer,
    local: DiLoCo,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    named_buffers: Iterable[tuple[str, torch.Tensor]] | None = None,
    hook: bool = True,
) -> torch.optim.Optimizer:
    """Let each step of an optimizer count as a step of local training. Returns the same optimizer.

    Gradients stay local. ``named_parameters``: as ``model.named_parameters()``; without them parameters are
    numbered in the optimizer's order. ``named_buffers``: as ``model.named_buffers()``; floats among them (BatchNorm's
    moving means) are averaged once in H steps. ``hook``: if False, call ``local.settle()`` before the first batch and
    ``local.step()`` after each batch yourself, as needed if a GradScaler skips the optimizer's step on some workers.

    Every worker must make this call. Parameters must be equal on all workers before the first step; they may be
    broadcast after this call. Raises TypeError and ValueError for unsupported arguments and parameters, as
    `DistributedOptimizer` does. A step raises RuntimeError if the optimizer has gained parameters.
    """
    check_optimizer(optimizer, "grace.torch.local(optimizer, local)")
    if not isinstance(local, DiLoCo):
        raise TypeError(f"a grace.local.DiLoCo is needed, not {type(local).__name__}: grace.local.DiLoCo(grc, 100)")
    pairs = named_pairs(named_parameters)
    check_parameters(optimizer, pairs)
    check_unique(pairs)
    names = {p: name for name, p in pairs or ()}
    parameters = _trained(optimizer)
    named = {names.setdefault(p, f"parameter{number}"): p for number, p in enumerate(parameters)}
    local.build(named, dict(named_buffers or ()), Access(torch.Tensor.detach, torch.Tensor.copy_, ordinary))
    known = set(parameters)

    def count(*_: Any) -> None:
        if any(p not in known for p in _trained(optimizer)):
            raise RuntimeError(
                "the optimizer has parameters that local training does not know, so that each worker's would stay its "
                "own: call grace.torch.local once all of them are there and trained"
            )
        local.step()

    def begin(*_: Any) -> None:
        if not local.settled:
            local.settle()

    if hook:
        optimizer.register_step_pre_hook(begin)
        optimizer.register_step_post_hook(count)
    return optimizer


def _trained(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
