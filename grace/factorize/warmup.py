"""Full-rank warm-up: training starts dense and switches to factors."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from grace.factorize.models import toolkit_of
from grace.factorize.plan import NameMap, Plan, decide


class WarmUp:
    """Train the dense model for some epochs, then continue with its factors (Pufferfish, section 2.3).

    ``epochs``: full-rank epochs. ``ramp_epochs``: epochs after the switch in which the learning rate rises, from
    ``ramp_start`` times its value. ``lr_factor``: scales the learning rate from the switch on. ``settings``: as for
    `plan`.

    In the loop over epochs::

        if warmup.due(epoch):
            model, optimizer = warmup.switch(model, optimizer, make_optimizer)
        rate = base_rate(epoch) * warmup.lr_scale(epoch)
    """

    def __init__(
        self,
        epochs: int,
        *,
        ramp_epochs: float = 0.0,
        ramp_start: float = 0.1,
        lr_factor: float = 1.0,
        **settings: Any,
    ):
        for key, value, good in (
            ("epochs", epochs, epochs >= 0),
            ("ramp_epochs", ramp_epochs, ramp_epochs >= 0),
            ("ramp_start", ramp_start, 0 <= ramp_start <= 1),
            ("lr_factor", lr_factor, lr_factor > 0),
        ):
            if not good:
                raise ValueError(f"{key}={value!r} is out of range")
        inspect.signature(decide).bind((), **settings)  # an unknown setting must fail now, not at the switch
        decide((), **{key: value for key, value in settings.items() if key in ("rank_ratio", "min_numel")})
        self.epochs, self.ramp_epochs, self.ramp_start, self.lr_factor = epochs, ramp_epochs, ramp_start, lr_factor
        self.settings = settings
        self.plan: Plan | None = None
        """The plan that the switch executed; None before."""
        self.names = NameMap()
        """Maps old parameter names to new ones; empty before the switch."""
        self._ranks: dict[str, tuple[int, ...]] | None = None

    @property
    def switched(self) -> bool:
        return self._ranks is not None

    def due(self, epoch: float) -> bool:
        """Whether to switch before this epoch, counted from 0."""
        return not self.switched and epoch >= self.epochs

    def lr_scale(self, epoch: float) -> float:
        """Return the factor for the learning rate at ``epoch``, counted from 0; may be a fraction."""
        if epoch < self.epochs:
            return 1.0
        since = epoch - self.epochs
        if since >= self.ramp_epochs:
            return self.lr_factor
        return self.lr_factor * (self.ramp_start + (1 - self.ramp_start) * since / self.ramp_epochs)

    def switch(
        self, model: Any, optimizer: Any, make_optimizer: Callable[[Any], Any], grace: Any = None
    ) -> tuple[Any, Any]:
        """Factorise the model and give it a new optimizer. Every worker must make this call, between two steps.

        Worker 0 computes the SVD and the others receive its factors, since signs and rounding of an SVD differ between
        machines. ``make_optimizer(model)`` makes a plain optimizer of the new parameters, without the old momentum;
        it is distributed as ``optimizer`` was. The Grace drops the state of removed tensors, keeps that of the others,
        and its report starts again.

        ``grace``: needed without a distributed optimizer (with a tape or DistributedDataParallel's hook). Raises
        RuntimeError on all workers, before factors are sent, if one cannot factorise or if their plans differ.
        """
        toolkit = toolkit_of(model)
        if self.switched:
            raise RuntimeError("the model was factorised already")
        grace = toolkit.grace_of(optimizer) if grace is None else grace
        plan = decide(toolkit.survey(model), **self.settings)
        if not plan.ranks:
            raise ValueError(f"nothing would be factorised:\n{plan}")
        if grace is None:
            model, names = toolkit.replace(model, plan.ranks, "svd")
        else:
            model, names = self._agreed(toolkit, model, plan, grace)
        self.plan, self.names, self._ranks = plan, names, plan.ranks
        new = make_optimizer(model)
        if new is optimizer:
            raise ValueError("make_optimizer must make a new optimizer: the old one holds the old parameters")
        return model, new if grace is None else toolkit.hand_over(grace, model, optimizer, new)

    @staticmethod
    def _agreed(toolkit: Any, model: Any, plan: Plan, grace: Any) -> tuple[Any, NameMap]:
        names, problem = NameMap(), ""
        try:
            model, names = toolkit.replace(model, plan.ranks, "svd" if grace.rank == 0 else "zeros")
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        texts = toolkit.transport_of(grace, model).exchange(json.dumps([problem, plan.to_dict()]))
        for rank, text in enumerate(texts):
            failed, other = json.loads(text)
            if failed:
                raise RuntimeError(f"worker {rank} could not factorise the model: {failed}")
            if other != json.loads(texts[0])[1]:
                raise RuntimeError(f"worker 0 and worker {rank} plan differently: give all of them the same settings")
        toolkit.broadcast(model, names.added, grace)
        return model, names

    def state_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint: the ranks of the factorised layers, or None before the switch."""
        return {"ranks": None if self._ranks is None else {name: list(ranks) for name, ranks in self._ranks.items()}}

    def load_state_dict(self, state: Mapping[str, Any], model: Any) -> Any:
        """Factorise a new dense model as in the saved state, and return it; load its weights afterwards.

        Create the optimizer afterwards, too.
        """
        ranks = state["ranks"]
        if ranks is None:
            return model
        self._ranks = {name: tuple(found) for name, found in ranks.items()}
        model, self.names = toolkit_of(model).replace(model, self._ranks, "zeros")
        return model
