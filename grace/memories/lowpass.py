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
    """Keep a slowly changing residual, which averages out the residual's noise with many workers or large batches.

    residual = (1 - rate) * residual + rate * (x - sent). State: residual float32[n].
    ``rate``: in (0, 1]; 1 is the memory "residual". Chen et al. recommend 0.1 to 0.3 for large batches.
    ``beta``, ``gamma``: as in the memory "residual".
    ``reset_every``: period, in steps, at the end of which the residual is set to zero; 0: never.
    Chen et al., "ScaleCom", NeurIPS 2020, arXiv:2104.11125, section 2 (low-pass filtering); for resets Xie, Lin, Toh
    and Zhou, "LoCo: Low-Bit Communication Adaptor for Large-scale Model Training", 2024, arXiv:2407.04480.
    """

    rate: float = 0.3
    reset_every: int = 0
    standard_feedback = False

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate={self.rate!r} must lie in (0, 1]")
        if self.reset_every < 0:
            raise ValueError(f"reset_every={self.reset_every!r} must be a number of steps, or 0 for never")

    def update(self, x: Array, payload: Payload, compressor: Compressor, state: State, ctx: Context) -> State:
        fresh = compressor.residual(x, payload, ctx)
        return self.stored(weighted_sum(ctx, fresh, state["residual"], 1.0 - self.rate, self.rate), ctx)

    def stored(self, residual: Array, ctx: Context) -> State:
        """The next state: the residual, or zeros after every ``reset_every`` steps."""
        if self.reset_every:
            last = (ctx.step + 1) % self.reset_every == 0
            residual = ctx.xp.choose(last, ctx.xp.zeros(ctx.size), residual)
        return {"residual": residual}
