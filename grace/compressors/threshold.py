"""Hard-threshold sparsification."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from grace.compressors.sparse import EXACT, CodedSparsifier
from grace.core import Array, Context
from grace.core.registry import register


@register("threshold")
@dataclass(frozen=True)
class Threshold(CodedSparsifier):
    """Send every element whose magnitude reaches a fixed threshold.

    Payload: values float32[K], positions int32[K], ascending; K depends on the values and may be 0.
    ``threshold``: in units of the gradient (of the sum with the residual, where there is one), > 0.
    ``index_coding``: of the positions; "int32", or "bitmap" (n bits).
    Sahu et al., "Rethinking gradient sparsification as total error minimization", NeurIPS 2021, arXiv:2108.00951.
    """

    threshold: float = 0.01

    traits = replace(EXACT, variable_length=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.threshold > 0 and math.isfinite(self.threshold)):
            raise ValueError(f"threshold={self.threshold!r} must be a positive number; 'none' sends every element")

    def select(self, x: Array, ctx: Context) -> Array:
        magnitude = ctx.xp.abs(x)
        # What is not finite is sent, and so is seen by every worker.
        return ctx.xp.nonzero((magnitude >= self.threshold) | ctx.xp.invert(ctx.xp.isfinite(x)))
