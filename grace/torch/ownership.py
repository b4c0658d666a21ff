"""Ownership: at most one integration drives a parameter or a Grace."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from grace.engine.session import Grace

OPTIMIZER, HOOK = "DistributedOptimizer", "ddp_hook"


class Claim:
    """The record that one integration drives certain parameters and a Grace, until it is released."""

    def __init__(self, grace: Grace, kind: str, driver: Any):
        self.kind = kind
        self.released = ""
        """Why the claim was released; empty while it is valid."""
        self.hooks: list[Any] = []
        """Handles of the hooks that `release` removes."""
        self._grace, self._driver = weakref.ref(grace), weakref.ref(driver)

    @property
    def driver(self) -> Any:
        """The integration that made the claim; None once it was garbage-collected."""
        return self._driver()

    @property
    def grace(self) -> Grace | None:
        """The Grace that the integration drives; None once it was garbage-collected."""
        return self._grace()

    def hook(self, p: torch.Tensor, before: Callable[[], None], after: Callable[[torch.Tensor], None]) -> None:
        """Call ``before`` and ``after`` whenever autograd accumulates the gradient of p, which may be frozen now."""
        # The garbage collector does not see hooks: with strong references, the methods' owner would never be freed.
        weak_before, weak_after = weakref.WeakMethod(before), weakref.WeakMethod(after)

        def on_incoming(gradient: torch.Tensor) -> None:
            if (method := weak_before()) is not None:
                method()

        def on_accumulated(p: torch.Tensor) -> None:
            if (method := weak_after()) is not None:
                method(p)

        frozen = not p.requires_grad
        p.requires_grad_()  # a frozen parameter accepts no new hooks, but keeps existing ones
        self.hooks += [p.register_hook(on_incoming), p.register_post_accumulate_grad_hook(on_accumulated)]
        if frozen:
            p.requires_grad_(False)

    def release(self, why: str) -> None:
        """Release the claim and remove its hooks. ``why``: for the error if the integration is used again."""
        self.released = why
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()


_parameters: Any = WeakTensorKeyDictionary()
_graces: weakref.WeakKeyDictionary[Grace, Claim] = weakref.WeakKeyDictionary()


def claimed(p: torch.Tensor) -> Claim | None:
    """The claim on a parameter, if there is one."""
    claim: Claim | None = _parameters.get(p)
    return None if claim is None or claim.released else claim


def claim(grace: Grace, parameters: Iterable[torch.Tensor], kind: str, driver: Any) -> Claim:
    """Claim parameters and a Grace. Releases earlier claims of the same kind on these parameters.

    Raises ValueError if the other kind of integration drives the parameters, or if the Grace drives other parameters.
    """
    parameters = list(parameters)
    earlier = {claim for claim in map(claimed, parameters) if claim is not None}
    if any(each.kind != kind for each in earlier):
        raise ValueError(
            "DistributedOptimizer and ddp_hook would both average these parameters' gradients: use one of them"
        )
    held = _graces.get(grace)
    if held is not None and not held.released and held not in earlier:
        raise ValueError(
            f"this Grace drives the parameters of another {held.kind}: make a Grace for each optimizer, or call "
            "grace.torch.release(optimizer) first"
        )
    for each in earlier:
        each.release(f"its parameters were given to another {kind}")
        if each.grace is not None:
            each.grace.rollback()
    made = Claim(grace, kind, driver)
    _graces[grace] = made
    extend(made, parameters)
    _watch_optimizers()
    return made


def extend(claim: Claim, parameters: Iterable[torch.Tensor]) -> None:
    """Claim more parameters. Raises ValueError if another integration drives one of them."""
    parameters = list(parameters)
    if any(held is not None and held is not claim for held in map(claimed, parameters)):
        raise ValueError("another DistributedOptimizer or ddp_hook drives these parameters already")
    for p in parameters:
        _parameters[p] = claim


def _watch_optimizers() -> None:
    # Register one pair of hooks for all optimizers of the process, as undistributed ones may step claimed parameters.
    if _watching:
        return

    def drivers(optimizer: Any) -> list[Any]:
        if "_grace" in optimizer.__dict__:
            return []
        claims = {claimed(p) for group in optimizer.param_groups for p in group["params"]}
        return [each.driver for each in claims if each is not None and each.driver is not None]

    def before(optimizer: Any, *_: Any) -> None:
        for driver in drivers(optimizer):
            driver.before_another(optimizer)

    def after(optimizer: Any, *_: Any) -> None:
        for driver in drivers(optimizer):
            driver.after_another(optimizer)

    _watching.extend([register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)])


_watching: list[Any] = []
