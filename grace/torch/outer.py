"""Local training: averages pseudo-gradients every H steps of an optimizer."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from grace.core import Transport
from grace.local import Access, DiLoCo
from grace.torch.checks import check_optimizer, named_pairs, ordinary
from grace.torch.named import trained, trained_by_name
from grace.torch.ownership import OPTIMIZER, claimed
from grace.transports.torch_distributed import TorchDistributedTransport

PLAIN = "train the plain module, model.module"


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
    `DistributedOptimizer` does; ValueError for named parameters that are trained but that no optimizer holds, and, also
    in the first step, if anything else averages gradients among these workers (`DistributedOptimizer`, GRACE's or
    Horovod's, or DistributedDataParallel). A step raises RuntimeError if the optimizer has gained parameters.
    """
    check_optimizer(optimizer, "grace.torch.local(optimizer, local)")
    if not isinstance(local, DiLoCo):
        raise TypeError(f"a grace.local.DiLoCo is needed, not {type(local).__name__}: grace.local.DiLoCo(grc, 100)")
    pairs = named_pairs(named_parameters)
    named = trained_by_name(optimizer, pairs)
    _check_held(optimizer, pairs or ())
    local.build(named, dict(named_buffers or ()), Access(torch.Tensor.detach, torch.Tensor.copy_, ordinary))
    _check_alone(optimizer, local)
    known = set(named.values())

    def count(*_: Any) -> None:
        if any(p not in known for p in trained(optimizer)):
            raise RuntimeError(
                "the optimizer has parameters that local training does not know, so that each worker's would stay its "
                "own: call grace.torch.local once all of them are there and trained"
            )
        local.step()

    def begin(*_: Any) -> None:
        if not local.settled:
            _check_alone(optimizer, local)
            local.settle()

    if hook:
        optimizer.register_step_pre_hook(begin)
        optimizer.register_step_post_hook(count)
    return optimizer


def _check_held(optimizer: torch.optim.Optimizer, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
    # Raise ValueError for a trained parameter that no optimizer holds: its values would never be averaged.
    mine = {p for group in optimizer.param_groups for p in group["params"]}
    if not (free := [(name, p) for name, p in pairs if p.requires_grad and p not in mine]):
        return
    held = {p for other in _alive(torch.optim.Optimizer) for group in other.param_groups for p in group["params"]}
    if names := [name for name, p in free if p not in held]:
        raise ValueError(
            f"named_parameters has {names[0]!r}, which is in no optimizer: local training averages what its optimizer "
            "holds, so each worker's would stay its own. Add it to a parameter group, make its optimizer before this "
            "call, freeze it (requires_grad_(False)), or leave it out of named_parameters"
        )


def _check_alone(optimizer: torch.optim.Optimizer, local: DiLoCo) -> None:
    # Raise ValueError if something else averages gradients in every step, among the workers of local training.
    parameters, outer = trained(optimizer), local.transport
    claims = {claim for claim in map(claimed, parameters) if claim is not None}
    if claim := next((c for c in claims if c.grace is not None and _same(_ranks(c.grace.transport), outer)), None):
        kind, remedy = claim.kind, "grace.torch.release(optimizer) undoes it" if claim.kind == OPTIMIZER else PLAIN
    elif type(optimizer).__module__.startswith("horovod."):
        kind, remedy = "Horovod's DistributedOptimizer", "pass the optimizer that it was made of"
    elif _ddp_averages(parameters, outer):
        kind, remedy = "DistributedDataParallel", PLAIN
    else:
        return
    raise ValueError(
        f"{kind} averages the gradients of these parameters in every step, and local training would average the "
        f"parameters among the same workers: use one of them ({remedy})"
    )


def _ddp_averages(parameters: list[torch.Tensor], outer: Transport) -> bool:
    def found() -> bool:
        return any(
            not set(model.parameters()).isdisjoint(parameters)
            and _same(set(dist.get_process_group_ranks(model.process_group)), outer)
            for model in _alive(torch.nn.parallel.DistributedDataParallel)
        )

    if not found():
        return False
    gc.collect()  # the model may be garbage that was not collected yet
    return found()


def _ranks(transport: Transport) -> set[int] | None:
    return set(transport.ranks) if isinstance(transport, TorchDistributedTransport) else None


def _same(ranks: set[int] | None, outer: Transport) -> bool:
    # Whether the groups have more than this worker in common, as far as known. One common worker is allowed: a group
    # within a machine may average gradients, while local training averages parameters across machines.
    others = _ranks(outer)
    return ranks is None or others is None or ranks == others or len(ranks & others) > 1


def _alive(kind: type) -> list[Any]:
    # All objects of a class, from the garbage collector: PyTorch lists neither optimizers nor models.
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]
