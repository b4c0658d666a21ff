"""Error feedback by differences, plus a fraction of the accumulated error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from grace.core import Array, Compressor, Context, MaybeProgram, Payload, Resize, State
from grace.core.registry import register
from grace.memories.tracked import TracksMean


@register("econtrol")
@dataclass(frozen=True, repr=False)
class EControl(TracksMean):
    """As memory "ef21", but feed back a fraction of the accumulated error, which corrects the lag of the estimates.

    x = eta * error + gradient - estimate; estimate = estimate + sent; error = error + gradient - estimate. The result
    is the mean of all estimates, which every worker tracks.
    State: error, estimate, mean float32[n]; mean is equal on all workers.
    ``eta``: the fraction of the error that is fed back, in (0, 1]; near 0 this is the memory "ef21".
    ``refresh``: each element of the tracked mean is replaced by the exact mean of all estimates once in this many
    steps, ceil(n / refresh) elements per step, as float32 in a round of its own. 0: never. Rounding errors of the
    first, large gradients then stay in the mean, so that descent ends at about 1e-7 of their size.
    Gao, Islamov and Stich, "EControl: Fast Distributed Optimization with Compression and Error Control", ICLR 2024,
    arXiv:2311.05645, algorithm 1.
    """

    eta: float = 0.1
    reshard: ClassVar[Mapping[str, Resize]] = {
        "error": Resize.MEAN,
        "estimate": Resize.TRACKED,
        "mean": Resize.MEAN,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.eta <= 1:
            raise ValueError(f"eta={self.eta!r} must lie in (0, 1]; for no error at all use memory 'ef21'")

    def init(self, ctx: Context) -> State:
        return {key: ctx.xp.zeros(ctx.size) for key in ("error", "estimate", "mean")}

    def compensate(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Array, State]]:
        return self.refreshed(x - state["estimate"] + state["error"] * self.eta, state, ctx)

    def update(self, x: Array, payload: Payload, compressor: Compressor, state: State, ctx: Context) -> State:
        unsent = compressor.residual(ctx.xp.buffers.copy(x), payload, ctx)
        # error + gradient - estimate - sent, where gradient - estimate is x - eta * error.
        error = state["error"] * (1.0 - self.eta) + unsent
        return {**state, "error": error, "estimate": state["estimate"] + (x - unsent)}
