"""Light compression in critical regimes of training, heavy compression outside of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from grace.core import Compressor
from grace.core.policy import Decision, Level, Policy, level_of, number, own_level
from grace.core.registry import register

LOW, HIGH = 0, 1  # levels of low and of high compression
MODEL = "(model)"  # key of the norm over all tensors


def critical(before: float | None, now: float, eta: float) -> bool:
    """Whether the norm of an epoch's summed gradient changed by at least a fraction ``eta``.

    ``before``: the norm one window earlier; None: unknown, which gives True, as do 0, NaN and infinity.
    """
    return before is None or before == 0 or not abs(before - now) / before < eta


@dataclass(frozen=True)
class Detector(Policy):
    """Base class of both Accordion policies: watches norms every ``window`` epochs; detects falling learning rates."""

    eta: float = 0.5
    window: int = 10
    norm_source: str = "rank0"
    lr_rule: bool = True

    def __post_init__(self) -> None:
        if not self.eta > 0:
            raise ValueError(f"eta={self.eta!r} must be positive")
        if self.window < 1:
            raise ValueError(f"window={self.window!r} must be at least 1 epoch")
        if self.norm_source not in ("rank0", "mean", "aggregated"):
            raise ValueError(f"norm_source={self.norm_source!r}: choose 'rank0', 'mean' or 'aggregated'")

    def watches(self, epoch: int, decision: Decision) -> bool:
        return epoch % self.window == 0

    def falls(self, lr: float | None, next_lr: float | None) -> bool:
        """Whether the learning rate falls after this epoch; always False without ``lr_rule``."""
        return self.lr_rule and lr is not None and next_lr is not None and next_lr < lr


@register("accordion")
@dataclass(frozen=True)
class Accordion(Detector):
    """Compress lightly while gradients change fast, as early in training and after the learning rate falls.

    Every ``window`` epochs the norm of each tensor's gradients, summed over the epoch, is compared with that of the
    last comparison: if it changed by a fraction of at least ``eta``, the tensor gets level ``k_low``, else ``k_high``.
    When the learning rate falls (``lr_rule``), all tensors get ``k_low`` until the next comparison. For a rate that
    falls in every epoch, set ``lr_rule=False``.
    ``k_low``, ``k_high``: the levels of low and of high compression: fields of the compressor, such as
    ``{"compress_rank": 2}``, or a number for its main field; without ``k_high``: the compressor unchanged.
    ``granularity``: "layer", or "model": one level for all tensors, from their joint norm.
    ``norm_source``: "rank0": worker 0's own gradients, as in the paper; "mean": every worker's own gradients, whose
    squared norms are averaged; "aggregated": the means that all workers receive. A norm that is NaN leads to low
    compression.
    Agarwal et al., "Accordion: Adaptive Gradient Communication via Critical Learning Regime Identification",
    MLSys 2021, arXiv:2010.16248, algorithm 1.
    """

    k_low: Any = None
    k_high: Any = None
    granularity: str = "layer"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k_low is None:
            raise ValueError("policy 'accordion' needs k_low, the level of low compression, such as k_low=0.1")
        if self.granularity not in ("layer", "model"):
            raise ValueError(f"granularity={self.granularity!r}: choose 'layer' or 'model'")

    @property
    def together(self) -> bool:
        return self.granularity == "model"

    def levels(self, compressor: Compressor) -> tuple[Level, ...]:
        low = level_of("k_low", self.k_low, compressor)
        high = own_level(low, compressor) if self.k_high is None else level_of("k_high", self.k_high, compressor)
        return low, high

    def on_epoch_end(
        self, decision: Decision, epoch: int, lr: float | None, next_lr: float | None, norms: Mapping[str, float]
    ) -> Decision:
        if self.watches(epoch, decision):
            now = {MODEL: _norm(norms)} if self.together else dict(norms)
            before = decision.memo.get("norms", {})
            found = {name: LOW if critical(before.get(name), norm, self.eta) else HIGH for name, norm in now.items()}
            levels = {name: found[MODEL if self.together else name] for name in decision.levels}
            decision = replace(decision, levels=levels, memo={"norms": now})
        if self.falls(lr, next_lr):
            decision = replace(decision, levels=dict.fromkeys(decision.levels, LOW))
        return decision

    def remembers(self, memo: Mapping[str, Any]) -> bool:
        norms = memo.get("norms", {})
        return set(memo) <= {"norms"} and isinstance(norms, Mapping) and all(map(number, norms.values()))


@register("accordion_batch")
@dataclass(frozen=True)
class AccordionBatch(Detector):
    """Use small batches while gradients change fast, and large ones from the first calm window on.

    A large batch accumulates the gradients of ``batch_growth`` batches before an exchange, which divides the number of
    messages by this factor. There is one decision for the whole model, by the rule of `Accordion`: from small to large,
    never back, and not in an epoch in which the learning rate falls (``lr_rule``). The decision includes the factor by
    which linear scaling raises the learning rate. The training loop must accumulate ``grace.decision.micro_steps``
    batches, as loops in PyTorch can. Agarwal et al., as `Accordion`, section 4.3.
    """

    batch_growth: int = 8
    batch = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_growth < 2:
            raise ValueError(f"batch_growth={self.batch_growth!r} must be at least 2")

    def watches(self, epoch: int, decision: Decision) -> bool:
        return decision.micro_steps == 1 and super().watches(epoch, decision)

    def on_epoch_end(
        self, decision: Decision, epoch: int, lr: float | None, next_lr: float | None, norms: Mapping[str, float]
    ) -> Decision:
        decision = replace(decision, lr_scale=1.0)
        if not self.watches(epoch, decision):
            return decision
        now = _norm(norms)
        calm = not critical(decision.memo.get("norm"), now, self.eta) and not self.falls(lr, next_lr)
        if calm:
            return replace(decision, micro_steps=self.batch_growth, lr_scale=float(self.batch_growth), memo={})
        return replace(decision, memo={"norm": now})

    def remembers(self, memo: Mapping[str, Any]) -> bool:
        return set(memo) <= {"norm"} and all(map(number, memo.values()))


def _norm(norms: Mapping[str, float]) -> float:
    # Norm of the whole model. hypot avoids the overflow of squares. Of infinity and NaN it returns infinity, which
    # counts as critical, as NaN does.
    return math.hypot(*norms.values())
