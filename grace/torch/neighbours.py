"""Gossip: parameters are mixed between neighbours after each step of an optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from grace.gossip import Gossip


def gossip(
    optimizer: torch.optim.Optimizer, gossip: Gossip, named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None
) -> torch.optim.Optimizer:
    """Mix parameters between neighbours after each step of an optimizer. Returns the optimizer that was passed in.

    Gradients stay each worker's own. ``named_parameters``: as ``model.named_parameters()``; without them parameters are
    numbered in the optimizer's order. Every worker must make this call, and start from the same parameters.
    """
    names = {p: name for name, p in named_parameters or ()}
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    named = {names.setdefault(p, f"parameter{number}"): p for number, p in enumerate(parameters)}
    gossip.build(named)

    @torch.no_grad()
    def mix(*_: Any) -> None:
        for name, mixed in gossip.step({name: p.detach() for name, p in named.items()}).items():
            named[name].copy_(mixed)

    optimizer.register_step_post_hook(mix)
    return optimizer
