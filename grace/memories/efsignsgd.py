"""Error feedback in units of the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from grace.core import Array, Compressor, Context, MaybeProgram, Memory, Payload, Resize, State
from grace.core.registry import register


@register("efsignsgd")
@dataclass(frozen=True)
class EFSignSGDMemory(Memory):
    """As memory "residual", for changing learning rates: unsent gradients keep the learning rate of their step.

    x = gradient + (last rate / this rate) * residual; residual = x - sent. The optimizer multiplies by the current
    rate, so every gradient is applied with the rate of the step that computed it, as in the paper, whose residual has
    the units of parameters. With a constant rate it equals the memory "residual". At rate 0 the residual is neither
    added nor changed.
    State: residual float32[n], lr float32[1].
    ``lr``: the fallback rate, a positive number; the integrations of PyTorch and Keras read the optimizer's own.
    Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019, arXiv:1901.09847, algorithm 1.
    """

    lr: float = 0.1
    feedback = True
    reshard: ClassVar[Mapping[str, Resize]] = {"residual": Resize.SUM}

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"lr={self.lr!r} must be positive")

    def init(self, ctx: Context) -> State:
        return {"residual": ctx.xp.zeros(ctx.size), "lr": ctx.xp.zeros(1)}

    def compensate(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Array, State]]:
        xp, now, last = ctx.xp, self.rate(ctx), state["lr"]
        share = xp.where(now > 0, xp.where(last > 0, last, now) / xp.where(now > 0, now, 1.0), 0.0)
        return x + state["residual"] * share, state

    def update(self, x: Array, payload: Payload, compressor: Compressor, state: State, ctx: Context) -> State:
        xp, now = ctx.xp, self.rate(ctx)
        return {
            "residual": xp.where(now > 0, compressor.residual(x, payload, ctx), state["residual"]),
            "lr": xp.where(now > 0, now, state["lr"]),
        }

    def rate(self, ctx: Context) -> Any:
        """Return float32[1], the learning rate of this step."""
        return ctx.xp.reshape(ctx.xp.asarray(self.lr if ctx.lr is None else ctx.lr(), "float32"), (1,))
