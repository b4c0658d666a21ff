"""Profiles of PyTorch models: the time of each gradient, measured by hooks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from grace.planner.profile import Profile, medians


def profile(model: torch.nn.Module, loss: Callable[[], torch.Tensor], steps: int = 20, warmup: int = 3) -> Profile:
    """Measure a model's backward pass, tensor by tensor; medians over ``steps``.

    ``loss``: a function that runs a forward pass on a typical batch and returns the loss. The model's gradients are
    None afterwards; its parameters are unchanged. Call it before the model is wrapped: hooks that exchange gradients
    would be included in the times. Devices are timed by their own clock.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise ValueError("the model has no parameters that require gradients")
    moments: list[tuple[str, Any]] = []

    def noted(name: str) -> Callable[[torch.Tensor], None]:
        return lambda p: moments.append((name, _now(p)))

    hooks = [p.register_post_accumulate_grad_hook(noted(name)) for name, p in named.items()]
    found, forwards = [], []
    example = next(iter(named.values()))
    try:
        for step in range(warmup + steps):
            model.zero_grad(set_to_none=True)
            moments.clear()
            before = _now(example)
            value = loss()
            began = _now(example)
            value.backward()
            if step >= warmup:
                forwards.append(_seconds(before, began))
                found.append([(name, _seconds(began, moment)) for name, moment in moments])
    finally:
        for hook in hooks:
            hook.remove()
        model.zero_grad(set_to_none=True)
    made = medians(found, {name: tuple(p.shape) or (1,) for name, p in named.items()})
    return replace(made, forward=sorted(forwards)[len(forwards) // 2])


def _now(p: torch.Tensor) -> Any:
    if not p.is_cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(began: Any, ended: Any) -> float:
    if isinstance(began, float):
        return float(ended - began)
    ended.synchronize()
    return float(began.elapsed_time(ended)) * 1e-3
