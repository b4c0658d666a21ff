"""Ownership: at most one integration drives a parameter or a Grace."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from grace.engine.session import Grace

OPTIMIZER, HOOK = "DistributedOptimizer", "ddp_hook"


def weakly(method: Any) -> Callable[..., None]:
    """A function that calls a method, or does nothing once the method's object was garbage-collected.

    For hooks: the garbage collector does not see them, so a method would keep its object alive.
    """
    weak, function = weakref.ref(method.__self__), method.__func__

    def call(*args: Any) -> None:
        if (owner := weak()) is not None:
            function(owner, *args)

    return call


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

    def before_accumulation(self, p: torch.Tensor, function: Callable[[torch.Tensor], None]) -> None:
        """Call a function with the new gradient before autograd accumulates it into p, which may be frozen now."""
        with _trainable(p):
            self.hooks.append(p.register_hook(function))

    def on_accumulated(self, p: torch.Tensor, function: Callable[[torch.Tensor], None]) -> None:
        """Call a function, such as a set's ``add``, with p after autograd accumulated its gradient."""
        with _trainable(p):
            self.hooks.append(p.register_post_accumulate_grad_hook(function))

    def release(self, why: str) -> None:
        """Release the claim and remove its hooks. ``why``: for the error if the integration is used again."""
        self.released = why
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()


@contextmanager
def _trainable(p: torch.Tensor) -> Iterator[None]:
    # A frozen parameter accepts no new hooks, but keeps existing ones.
    frozen = not p.requires_grad
    p.requires_grad_()
    try:
        yield
    finally:
        if frozen:
            p.requires_grad_(False)


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
            f"this Grace drives the parameters of another {held.kind}: make a Grace for each model and optimizer, or "
            "call grace.torch.release(optimizer), grc.rebuild(model.named_parameters()) and DistributedOptimizer"
        )
    for each in earlier:
        each.release(f"its parameters were given to another {kind}")
        if each.grace is not None:
            each.grace.rollback()
    made = Claim(grace, kind, driver)
    _graces[grace] = made
    extend(made, parameters)
    return made


def extend(claim: Claim, parameters: Iterable[torch.Tensor]) -> None:
    """Claim more parameters. Raises ValueError if another integration drives one of them."""
    parameters = list(parameters)
    if any(held is not None and held is not claim for held in map(claimed, parameters)):
        raise ValueError("another DistributedOptimizer or ddp_hook drives these parameters already")
    for p in parameters:
        _parameters[p] = claim


def models_of(parameters: list[torch.Tensor]) -> list[weakref.ref[torch.nn.Module]]:
    """The DistributedDataParallel models of these parameters, found by a search of memory, since no caller has them."""
    kind, wanted = torch.nn.parallel.DistributedDataParallel, set(parameters)
    models = [each for each in gc.get_objects() if issubclass(type(each), kind)]
    return [weakref.ref(model) for model in models if not wanted.isdisjoint(model.parameters())]


def check_alone(parameters: list[torch.Tensor]) -> None:
    """Raise ValueError if a DistributedDataParallel model averages the gradients of these parameters, too."""
    models: list[Any] = [each() for each in models_of(parameters)]
    if any(model is not None and model._lazy_init_ran and model.require_backward_grad_sync for model in models):
        raise ValueError(
            "a DistributedDataParallel model averages the gradients of these parameters, too, and sends them a second "
            "time: register grace.torch.ddp_hook with it and use the plain optimizer, or train model.module"
        )
