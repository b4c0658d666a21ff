"""PolicyScheduler: reports the end of each epoch to a policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from grace.engine.session import Grace
from grace.policies import Decision


class PolicyScheduler:
    """Report the end of each epoch to a Grace's policy: call ``step()`` after the learning rate's scheduler.

    ``optimizer``: supplies the learning rates. ``grace``: by default that of a distributed optimizer.
    ``scale_lr``: multiply the learning rates when a policy enlarges the batches. In that case pass the learning rate's
    scheduler as ``lr_scheduler``, so that it continues from the new rates.
    Every worker must make the same calls.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        grace: Grace | None = None,
        scale_lr: bool = False,
        lr_scheduler: Any = None,
    ):
        if grace is None and not hasattr(optimizer, "_grace"):
            raise ValueError("this optimizer is not distributed: name the Grace, as PolicyScheduler(optimizer, grace)")
        self.grace: Grace = optimizer._grace.grace if grace is None else grace
        self._optimizer, self._scale_lr, self._lr_scheduler = optimizer, scale_lr, lr_scheduler
        self._rates = self._read()

    def _read(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def step(self) -> Decision:
        """End an epoch; returns the policy's decision."""
        now = self._read()
        # With several groups, use the one whose rate falls most.
        pairs = zip([*self._rates, *now[len(self._rates) :]], now, strict=False)  # a group may have been removed
        lr, next_lr = min(pairs, key=lambda pair: pair[1] / pair[0] if pair[0] else 1.0)
        decision = self.grace.end_epoch(lr, next_lr)
        if self._scale_lr and decision.lr_scale != 1:
            for group in self._optimizer.param_groups:
                group["lr"] = group["lr"] * decision.lr_scale
            if self._lr_scheduler is not None:
                self._lr_scheduler.base_lrs = [lr * decision.lr_scale for lr in self._lr_scheduler.base_lrs]
        self._rates = self._read()
        return decision

    def state_dict(self) -> dict[str, Any]:
        """The learning rates read last; the policy's own state is in the Grace's ``state_dict``."""
        return {"rates": list(self._rates)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self._rates = list(state["rates"])
