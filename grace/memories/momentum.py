"""Local momentum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from grace.core import Array, Compressor, Context, MaybeProgram, Memory, Payload, Resize, State
from grace.core.registry import register
from grace.memories.none import NoMemory
from grace.ops.sums import weighted_sum


@register("momentum")
@dataclass(frozen=True)
class Momentum(Memory):
    """Compress a running mean of this worker's gradients: v = momentum * v + (1 - momentum) * gradient.

    There is no error feedback: compression errors are lost. State: momentum float32[n].
    ``momentum``: in [0, 1).
    Bernstein et al., "signSGD", ICML 2018, arXiv:1802.04434, algorithm 2 (SIGNUM).
    """

    momentum: float = 0.9
    second_stage = NoMemory()
    reshard: ClassVar[Mapping[str, Resize]] = {"momentum": Resize.MEAN}

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum={self.momentum!r} must lie in [0, 1)")

    def init(self, ctx: Context) -> State:
        return {"momentum": ctx.xp.zeros(ctx.size)}

    def compensate(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Array, State]]:
        x = weighted_sum(ctx, x, state["momentum"], self.momentum, 1.0 - self.momentum)
        return x, {"momentum": x}

    def update(self, x: Array, payload: Payload, compressor: Compressor, state: State, ctx: Context) -> State:
        return state
