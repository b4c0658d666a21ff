"""Decoupled momentum: its large components are sent, the rest decays locally."""

from __future__ import annotations

from dataclasses import dataclass

from grace.core.registry import register
from grace.memories.residual import Residual


@register("decoupled_momentum")
@dataclass(frozen=True)
class DecoupledMomentum(Residual):
    """A local momentum: sent values are subtracted from it, the rest decays.

    This is the memory "residual" with ``beta`` near 1, under its name in the literature: m = beta * m + gamma *
    gradient, from which the sent values are then subtracted. State: residual float32[n] (m).
    ``beta``: the momentum's decay. ``gamma``: the weight of the gradient.
    Peng, Quesnelle and Kingma, "DeMo: Decoupled Momentum Optimization", 2024, arXiv:2411.19870, algorithm 1.
    """

    beta: float = 0.999
    includes_momentum = True
    second_stage = Residual()
