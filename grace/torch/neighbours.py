"""Gossip: mixes parameters between neighbours after each optimizer step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from grace.gossip import Gossip
from grace.torch.checks import check_optimizer, named_pairs, ordinary
from grace.torch.named import trained_by_name


def gossip(
    optimizer: torch.optim.Optimizer, gossip: Gossip, named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None
) -> torch.optim.Optimizer:
    """Mix parameters between neighbours after each step of an optimizer. Returns the same optimizer.

    Gradients stay local. ``named_parameters``: as ``model.named_parameters()``; without them, parameters are numbered
    in the optimizer's order. Every worker must make this call, and start from the same parameters. Raises TypeError and
    ValueError for invalid arguments and parameters, as `DistributedOptimizer` does.
    """
    check_optimizer(optimizer, "grace.torch.gossip(optimizer, gossip)")
    if not isinstance(gossip, Gossip):
        raise TypeError(f"a grace.gossip.Gossip is needed, not {type(gossip).__name__}: gossip(optimizer, Gossip())")
    named = trained_by_name(optimizer, named_pairs(named_parameters))
    with ordinary():
        gossip.build(named)

    @ordinary()
    def mix(*_: Any) -> None:
        for name, mixed in gossip.step({name: p.detach() for name, p in named.items()}).items():
            named[name].copy_(mixed)

    optimizer.register_step_post_hook(mix)
    return optimizer
