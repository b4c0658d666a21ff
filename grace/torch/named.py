"""An optimizer's parameters, by the names that key their state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from grace.torch.gradients import plain


class NamedParameters:
    """The parameters of an optimizer, whose groups may change later and whose parameters may be unfrozen.

    ``named``: as ``model.named_parameters()``; without it, parameters are numbered in the optimizer's order. Raises
    ValueError if a trained parameter has no name, or if two have the same.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.Tensor]] | None):
        self._optimizer = optimizer
        self._names = _names(named or ())
        self.built: dict[str, torch.Tensor] = {}
        """The parameters whose gradients are exchanged, by name."""
        if named is not None:
            unnamed = [list(p.shape) for p in self.trained() if p not in self._names]
            if unnamed:
                raise ValueError(
                    f"named_parameters lacks {len(unnamed)} of the optimizer's parameters, of shapes {unnamed[:3]}"
                )

    def all(self) -> list[torch.Tensor]:
        """All parameters, frozen ones included."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def trained(self) -> list[torch.Tensor]:
        """The parameters that require gradients."""
        return [p for p in self.all() if p.requires_grad]

    def name(self, p: torch.Tensor) -> str:
        """A parameter's name; empty for a parameter without a name."""
        return self._names.get(p, "")

    def learning_rate(self, name: str) -> Any:
        """The learning rate of a parameter in `built`."""
        p, groups = self.built[name], self._optimizer.param_groups
        return next(group["lr"] for group in groups if any(p is q for q in group["params"]))

    def unbuilt(self) -> dict[str, torch.Tensor]:
        """Trained parameters not yet in `built`, by name, in the order of ``named``."""
        new = [p for p in self.trained() if self._names.get(p) not in self.built]
        for p in new:
            self._names.setdefault(p, f"parameter{len(self._names)}")
        if not new:  # the case of nearly every step
            return {}
        order = {p: index for index, p in enumerate(self._names)}
        return {self._names[p]: p for p in sorted(new, key=order.__getitem__)}


def _names(named: Iterable[tuple[str, torch.Tensor]]) -> dict[torch.Tensor, str]:
    names: dict[torch.Tensor, str] = {}
    owners: dict[str, torch.Tensor] = {}
    for name, p in named:
        name = plain(name)
        if owners.setdefault(name, p) is not p:
            raise ValueError(
                f"two parameters are named {name!r}: names key the state, so give each module a prefix, as "
                "named_parameters(prefix='encoder')"
            )
        names.setdefault(p, name)
    return names
