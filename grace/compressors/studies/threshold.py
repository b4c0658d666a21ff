"""Hard-threshold sparsification."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

from grace.compressors.sparse import EXACT, Elements, Selector, Sparsifier
from grace.core import Array, Context, State
from grace.core.registry import register


@dataclass(frozen=True)
class Reaching(Selector):
    """Chooses the elements whose magnitude is at or above a threshold."""

    threshold: float

    def choose(self, x: Array, state: State, ctx: Context) -> tuple[Array, State]:
        magnitude = ctx.xp.abs(x)
        return ctx.xp.nonzero((magnitude >= self.threshold) | ctx.xp.invert(ctx.xp.isfinite(x))), state


@register("threshold")
@dataclass(frozen=True)
class Threshold(Sparsifier):
    """Send every element whose magnitude reaches a fixed threshold.

    Payload: values float32[K], positions int32[K], ascending; K depends on the values and may be 0.
    ``threshold``: a positive number. An element of the gradient (with error feedback, of gradient plus residual) is
    sent if its magnitude is at least this, or not finite.
    ``index_coding``: the coding of the positions, "int32" or "bitmap" (n bits).
    Sahu et al., "Rethinking gradient sparsification as total error minimization", NeurIPS 2021, arXiv:2108.00951.
    """

    index_coding: str = field(default="int32", kw_only=True)
    threshold: float = 0.01

    traits = replace(EXACT, variable_length=True)

    def __post_init__(self) -> None:
        self.elements.check()
        if not (self.threshold > 0 and math.isfinite(self.threshold)):
            raise ValueError(f"threshold={self.threshold!r} must be a positive number; 'none' sends every element")

    @cached_property
    def elements(self) -> Elements:
        return Elements(Reaching(self.threshold), self.index_coding)
