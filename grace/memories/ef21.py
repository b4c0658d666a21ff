"""Error feedback by differences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from grace.core import Array, Compressor, Context, MaybeProgram, Payload, Resize, State
from grace.core.registry import register
from grace.memories.tracked import TracksMean


@register("ef21")
@dataclass(frozen=True, repr=False)
class EF21(TracksMean):
    """Compress the difference between the gradient and this worker's running estimate of it.

    x = gradient - estimate; estimate = estimate + sent. The result is the mean of all workers' estimates, which every
    worker tracks.
    The result lags at first: for a contraction d, its error on a steady gradient shrinks by the factor sqrt(1 - d) per
    step. Unlike a residual, an estimate cannot grow beyond the gradients.
    State: estimate float32[n], mean float32[n]; mean is equal on all workers; with ``momentum`` below 1 also momentum
    float32[n] (v).
    ``momentum``: in (0, 1]. Below 1, v = (1 - momentum) * v + momentum * gradient takes the gradient's place; v begins
    with the first gradient, and averages out the noise of small batches.
    ``refresh``: each element of the tracked mean is replaced by the exact mean of all estimates once in this many
    steps, ceil(n / refresh) elements per step, as float32 in a round of its own. 0: never. Rounding errors of the
    first, large gradients then stay in the mean, so that descent ends at about 1e-7 of their size.
    Richtarik, Sokolov and Fatkhullin, "EF21", NeurIPS 2021, arXiv:2106.05203, algorithm 2; with momentum Fatkhullin,
    Tyurin and Richtarik, "Momentum Provably Improves Error Feedback!", NeurIPS 2023, arXiv:2305.15155 (EF21-SGDM).
    """

    momentum: float = 1.0
    reshard: ClassVar[Mapping[str, Resize]] = {
        "estimate": Resize.TRACKED,
        "mean": Resize.MEAN,
        "momentum": Resize.MEAN,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.momentum <= 1:
            raise ValueError(
                f"momentum={self.momentum!r} must lie in (0, 1]: the weight of the new gradient; 1 for none"
            )

    def init(self, ctx: Context) -> State:
        state = {"estimate": ctx.xp.zeros(ctx.size), "mean": ctx.xp.zeros(ctx.size)}
        return state if self.momentum == 1 else {**state, "momentum": ctx.xp.zeros(ctx.size)}

    def compensate(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Array, State]]:
        if self.momentum != 1:
            last = ctx.xp.choose(ctx.step == 0, x, state["momentum"])
            x = last * (1.0 - self.momentum) + x * self.momentum
            state = {**state, "momentum": x}
        return self.refreshed(x - state["estimate"], state, ctx)

    def update(self, x: Array, payload: Payload, compressor: Compressor, state: State, ctx: Context) -> State:
        sent = x - compressor.residual(ctx.xp.buffers.copy(x), payload, ctx)
        return {**state, "estimate": state["estimate"] + sent}
