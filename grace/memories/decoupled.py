"""Decoupled momentum: each worker subtracts or decays the part of its momentum that was sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from grace.compressors.studies.dion import Dion
from grace.core import Array, Compressor, Context, MaybeProgram, Memory, Payload, Resize, State, name_of
from grace.core.registry import register
from grace.memories.none import NoMemory
from grace.memories.residual import Residual


@register("decoupled_momentum")
@dataclass(frozen=True)
class DecoupledMomentum(Residual):
    """Keep a local momentum: subtract sent values from it, and let the remainder decay.

    This is the memory "residual" with ``beta`` near 1, under its name in the literature: m = beta * m + gamma *
    gradient is compressed, then the sent values are subtracted from m. State: residual float32[n] (m).
    ``beta``: the momentum's decay, any number. ``gamma``: the weight of the gradient, any number.
    Peng, Quesnelle and Kingma, "DeMo: Decoupled Momentum Optimization", 2024, arXiv:2411.19870, algorithm 1.
    """

    beta: float = 0.999
    includes_momentum = True
    second_stage = Residual()


@register("decoupled")
@dataclass(frozen=True)
class Decoupled(Memory):
    """Keep Dion's momentum: add the gradient to it, and let the part that the workers agreed on decay.

    M = M + gradient is compressed; then M = M - (1 - mu) P R, with P and R the payload of compressor "dion".
    Each worker keeps its own M. Only their mean affects the updates, and it is the momentum that one worker would have
    with the mean gradients. State: momentum float32[n] (M).
    ``mu``: the momentum's decay, in [0, 1).
    Ahn et al., "Dion: Distributed Orthonormalized Updates", 2025, arXiv:2504.05295.
    """

    mu: float = 0.95
    feedback = True
    includes_momentum = True
    second_stage = NoMemory()
    reshard: ClassVar[Mapping[str, Resize]] = {"momentum": Resize.MEAN}

    def __post_init__(self) -> None:
        if not 0 <= self.mu < 1:
            raise ValueError(f"mu={self.mu!r} must lie in [0, 1)")

    def check(self, compressor: Compressor) -> None:
        if not isinstance(compressor, Dion):
            raise ValueError(
                f"memory 'decoupled' keeps the momentum of compressor 'dion', not of {name_of(compressor)!r}: use "
                f"memory {compressor.traits.memory!r}"
            )

    def init(self, ctx: Context) -> State:
        return {"momentum": ctx.xp.zeros(ctx.size, ctx.dtype)}

    def compensate(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Array, State]]:
        return ctx.xp.inplace.add(x, state["momentum"]), state

    def update(self, x: Array, payload: Payload, compressor: Compressor, state: State, ctx: Context) -> State:
        assert isinstance(compressor, Dion)
        p, r = compressor.factors(payload, ctx)
        return {"momentum": ctx.xp.inplace.subtract(x, ctx.xp.reshape(p @ (r * (1.0 - self.mu)), (-1,)))}
