"""Compressed differences for unbiased methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from grace.core import Array, Compressor, Context, MaybeProgram, Memory, Payload, Resize, State, name_of
from grace.core.registry import register


@register("diana")
@dataclass(frozen=True)
class Diana(Memory):
    """Compress the difference to a slowly learned shift, so that compression noise fades as training converges.

    x = gradient - shift; shift = shift + alpha * sent. The result, mean shift + mean of all workers' sent values, is
    unbiased if the method is.
    State: shift float32[n], mean float32[n]; mean is equal on all workers.
    ``alpha``: the shift's learning rate, in [0, 1]; 0 means 1 / (1 + w), the maximum in theory for a method of variance
    w.
    Mishchenko, Gorbunov, Takac and Richtarik, "Distributed Learning with Compressed Gradient Differences", 2019,
    arXiv:1901.09269, algorithm 1.
    """

    alpha: float = 0.0
    reshard: ClassVar[Mapping[str, Resize]] = {"shift": Resize.TRACKED, "mean": Resize.MEAN}

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha={self.alpha!r} must lie in [0, 1]; 0 chooses by the method's variance")

    def check(self, compressor: Compressor) -> None:
        if not compressor.traits.unbiased or compressor.variance(2**20) is None:
            raise ValueError(
                f"memory 'diana' works with unbiased methods of known variance, such as 'qsgd' or 'natural'; "
                f"{name_of(compressor)!r}, as it is set, is none. Use memory 'ef21' or {compressor.traits.memory!r}"
            )

    def init(self, ctx: Context) -> State:
        return {"shift": ctx.xp.zeros(ctx.size), "mean": ctx.xp.zeros(ctx.size)}

    def compensate(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Array, State]]:
        return x - state["shift"], state

    def update(self, x: Array, payload: Payload, compressor: Compressor, state: State, ctx: Context) -> State:
        sent = x - compressor.residual(ctx.xp.buffers.copy(x), payload, ctx)
        return {**state, "shift": state["shift"] + sent * self.rate(compressor, ctx)}

    def after_mean(self, mean: Array, compressor: Compressor, state: State, ctx: Context) -> tuple[Array, State]:
        return state["mean"] + mean, {**state, "mean": state["mean"] + mean * self.rate(compressor, ctx)}

    def rate(self, compressor: Compressor, ctx: Context) -> float:
        """The shift's learning rate: ``alpha``, or for 0 the rate for the method's variance."""
        return self.alpha or 1 / (1 + (compressor.variance(ctx.size) or 0.0))
