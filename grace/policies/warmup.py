"""A policy that begins with a high ratio and lowers it from epoch to epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count

from grace.core import Compressor, name_of
from grace.core.policy import Decision, Level, Policy, own_level
from grace.core.registry import register


@register("warmup")
@dataclass(frozen=True)
class Warmup(Policy):
    """Send 25% of the elements in the first epoch, 6.25% in the second and so on, down to the method's own ratio.

    ``warmup_ratio``: the ratio of the first epoch. ``warmup_factor``: the factor of each reduction.
    ``warmup_epochs``: epochs between reductions.
    Lin et al., "Deep Gradient Compression", ICLR 2018, arXiv:1712.01887, section 3.3.
    """

    warmup_ratio: float = 0.25
    warmup_factor: float = 0.25
    warmup_epochs: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.warmup_ratio <= 1:
            raise ValueError(f"warmup_ratio={self.warmup_ratio!r} must lie in (0, 1]")
        if not 0 < self.warmup_factor < 1:
            raise ValueError(f"warmup_factor={self.warmup_factor!r} must lie between 0 and 1")
        if self.warmup_epochs < 1:
            raise ValueError(f"warmup_epochs={self.warmup_epochs!r} must be at least 1")

    def levels(self, compressor: Compressor) -> tuple[Level, ...]:
        last = own_level(["compress_ratio"], compressor).get("compress_ratio")
        if last is None:
            raise ValueError(
                f"policy 'warmup' lowers compress_ratio, which {name_of(compressor)!r} has not: use it with a sparse "
                "method, such as 'topk' or 'dgc'"
            )
        ratios = []
        for step in count():
            ratio = self.warmup_ratio * self.warmup_factor**step
            if ratio <= last:
                break
            ratios.append(ratio)
        return tuple({"compress_ratio": ratio} for ratio in (*ratios, last))

    def on_epoch_end(
        self, decision: Decision, epoch: int, lr: float | None, next_lr: float | None, norms: Mapping[str, float]
    ) -> Decision:
        level = (epoch + 1) // self.warmup_epochs  # too large an index selects the last level
        return replace(decision, levels=dict.fromkeys(decision.levels, level))
