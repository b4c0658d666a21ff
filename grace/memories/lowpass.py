"""Error feedback through a low-pass filter."""

from __future__ import annotations

from dataclasses import dataclass

from grace.core import Array, Compressor, Context, Payload, State
from grace.core.registry import register
from grace.memories.residual import Residual
from grace.ops.sums import weighted_sum


@register("lowpass")
@dataclass(frozen=True)
class LowPass(Residual):
    """As residual, but the residual changes slowly, which averages out its noise with many workers or large batches.

    residual = (1 - rate) * residual + rate * (x - sent). State: residual float32[n].
    ``rate``: in (0, 1]; 1 is the memory "residual". Chen et al. recommend 0.1 to 0.3 for large batches.
    ``beta``, ``gamma``: as in the memory "residual".
    Chen et al., "ScaleCom", NeurIPS 2020, arXiv:2104.11125, section 2 (low-pass filtering).
    """

    rate: float = 0.3
    standard_feedback = False

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate={self.rate!r} must lie in (0, 1]")

    def update(self, x: Array, payload: Payload, compressor: Compressor, state: State, ctx: Context) -> State:
        fresh = compressor.residual(x, payload, ctx)
        return {"residual": weighted_sum(ctx, fresh, state["residual"], 1.0 - self.rate, self.rate)}
