"""An optimizer's parameters, by the names that key their state."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from grace.core import Transport
from grace.torch.checks import check_parameter, check_parameters, check_unique, kind_of, ordinary
from grace.torch.gradients import plain

SAMPLED = 4096
"""Number of elements by which `check_order` distinguishes tensors of one shape."""


class Names(dict[int, str]):
    """The names of parameters, by the parameters' IDs. ``named``: as ``model.named_parameters()``.

    Raises ValueError if two parameters have the same name.
    """

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]] = ()):
        super().__init__()
        self._kept: list[torch.Tensor] = []  # so that no other parameter gets one of these IDs
        named = [(plain(name), p) for name, p in named]
        check_unique(named)
        for name, p in named:
            self._add(p, name)

    def of(self, p: torch.Tensor) -> str:
        """A parameter's name; "parameter" and a number if it had none."""
        self._add(p, f"parameter{len(self)}")
        return self[id(p)]

    def _add(self, p: torch.Tensor, name: str) -> None:
        if id(p) not in self:
            self[id(p)] = name
            self._kept.append(p)


class NamedParameters:
    """The parameters of an optimizer, whose groups may change later and whose parameters may be unfrozen.

    ``named``: as ``model.named_parameters()``; without it, parameters are numbered in the optimizer's order. Raises
    ValueError if a trained parameter has no name, or if two have the same.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.Tensor]] | None):
        self._optimizer = optimizer
        self.names = Names(named or ())
        self.built: dict[str, torch.Tensor] = {}
        """The parameters whose gradients are exchanged, by name."""
        if named is not None:
            unnamed = [list(p.shape) for p in self.trained() if id(p) not in self.names]
            if unnamed:
                raise ValueError(
                    f"named_parameters lacks {len(unnamed)} of the optimizer's parameters, of shapes {unnamed[:3]}"
                )

    def all(self) -> list[torch.Tensor]:
        """All parameters, frozen ones included."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def trained(self) -> list[torch.Tensor]:
        """The parameters that require gradients."""
        return trained(self._optimizer)

    def learning_rate(self, name: str) -> Any:
        """The learning rate of a parameter in `built`."""
        p, groups = self.built[name], self._optimizer.param_groups
        return next(group["lr"] for group in groups if any(p is q for q in group["params"]))

    def unbuilt(self) -> dict[str, torch.Tensor]:
        """Trained parameters not yet in `built`, by name, in the order of ``named``.

        Raises as `check_parameter` if the gradient of an unfrozen parameter cannot be averaged.
        """
        new = [p for p in self.trained() if self.names.get(id(p)) not in self.built]
        for p in new:
            check_parameter(self.names.of(p), p)
        order = {key: index for index, key in enumerate(self.names)}
        return {self.names[id(p)]: p for p in sorted(new, key=lambda p: order[id(p)])}


def trained_by_name(
    optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, torch.Tensor]] | None
) -> dict[str, torch.Tensor]:
    """The trained parameters of an optimizer by their names, or by their numbers.

    Raises TypeError or ValueError as `check_parameters` and `check_unique`.
    """
    check_parameters(optimizer, named)
    check_unique(named)
    names = {p: name for name, p in named or ()}
    return {names.setdefault(p, f"parameter{number}"): p for number, p in enumerate(trained(optimizer))}


def trained(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters of an optimizer that require gradients."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def check_order(parameters: Iterable[torch.Tensor], transport: Transport) -> None:
    """Raise ValueError on all workers if one holds the same weights as worker 0, but in another order.

    For parameters that workers match by position. All workers make this call together; ``transport`` is bound. Workers
    whose weights differ, as before a broadcast, cannot be compared, and pass.
    """
    if transport.size == 1:
        return
    with ordinary():
        mine = [_digest(p) for p in parameters]
        orders = [json.loads(text) for text in transport.exchange(json.dumps(mine))]
    for rank, order in enumerate(orders):
        if order != orders[0] and sorted(order) == sorted(orders[0]):
            place = next(place for place, pair in enumerate(zip(order, orders[0], strict=True)) if len(set(pair)) > 1)
            raise ValueError(
                f"worker 0 and worker {rank} have the same parameters in another order, from number {place} on: a set "
                "has another order in each process. Make the optimizer's groups of lists, or name the parameters: "
                "named_parameters=model.named_parameters(), or torch.optim.SGD(model.named_parameters())"
            )


def _digest(p: torch.Tensor) -> str:
    # Identifies a tensor by its dtype, shape and some of its elements.
    about = f"{p.dtype}{list(p.shape)}"
    if kind_of(p) is not None:
        return about
    flat = (torch.view_as_real(p.detach()) if p.is_complex() else p.detach()).reshape(-1)
    sample = flat[:: max(1, flat.numel() // SAMPLED)].contiguous().cpu()
    return about + hashlib.sha256(sample.view(torch.uint8).numpy().tobytes()).hexdigest()
