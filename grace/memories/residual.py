"""Error feedback."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from grace.core import Array, Compressor, Context, MaybeProgram, Memory, Payload, Resize, State
from grace.core.registry import register
from grace.ops.sums import weighted_sum


@register("residual", "powersgd")
@dataclass(frozen=True)
class Residual(Memory):
    """Add to each gradient the part of earlier gradients that their payloads did not carry.

    x = beta * residual + gamma * gradient; residual = x - sent. With beta = gamma = 1 nothing is lost: sent values and
    residual add up to all gradients so far.
    State: residual float32[n].
    ``beta``: the weight of the residual, any number. ``gamma``: the weight of the gradient, any number.
    Seide et al., "1-bit SGD", Interspeech 2014, section 3; Karimireddy et al., ICML 2019, arXiv:1901.09847, section 4.
    """

    beta: float = 1.0
    gamma: float = 1.0
    feedback = True
    reshard: ClassVar[Mapping[str, Resize]] = {"residual": Resize.SUM}

    @property
    def standard_feedback(self) -> bool:
        return self.beta == self.gamma == 1.0

    def init(self, ctx: Context) -> State:
        return {"residual": ctx.xp.zeros(ctx.size)}

    def compensate(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Array, State]]:
        return weighted_sum(ctx, x, state["residual"], self.beta, self.gamma), state

    def update(self, x: Array, payload: Payload, compressor: Compressor, state: State, ctx: Context) -> State:
        return {"residual": compressor.residual(x, payload, ctx)}
