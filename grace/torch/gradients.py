"""Helpers for the optimizer and the DDP hook: names of parameters, and sparse gradients."""

from __future__ import annotations

import torch

from grace.engine.session import SPARSE, Grace


def dense(grad: torch.Tensor, grace: Grace, name: str) -> torch.Tensor:
    """Return the gradient as a dense tensor; note in the report that it was sparse."""
    if not grad.is_sparse:
        return grad
    grace.note(name, SPARSE)
    return grad.to_dense()


def gradient_of(p: torch.Tensor, grace: Grace, name: str) -> torch.Tensor | None:
    """A parameter's gradient, dense and without a graph; None if it is frozen, since it may have an old gradient."""
    gradient = p.grad
    if gradient is None or not p.requires_grad:
        return None
    gradient = gradient.detach() if gradient.requires_grad else gradient
    return dense(gradient, grace, name) if gradient.is_sparse else gradient


def plain(name: str) -> str:
    """A parameter's name without torch.compile's prefix, so that compiled and plain models share checkpoints."""
    return name.replace("_orig_mod.", "")
