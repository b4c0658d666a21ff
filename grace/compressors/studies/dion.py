"""Orthonormal updates of low rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

from grace.compressors.lowrank import Factored, cut
from grace.core import Array, Combine, Context, Payload, Program, State, Traits
from grace.core.collectives import Reduce
from grace.core.registry import register


@register("dion")
@dataclass(frozen=True)
class Dion(Factored):
    """Return an orthonormal update of low rank, computed from all workers' momenta, in place of the mean gradient.

    For an optimizer without momentum (SGD), whose weight decay equals the paper's. Two rounds, each averaged over the
    workers: P = orth(M Qᵀ) and R = Pᵀ M, with M the momentum of memory "decoupled". Q becomes R with rows of unit norm,
    and the result is P Q sqrt(fan_out / fan_in). The momenta themselves are never averaged. If P is zero, the result is
    zero and Q does not change.
    Payload: P float32[a, r], R float32[r, b], agreed on by all workers. State: Q float32[r, b], equal on all workers.
    Vectors, and tensors with (a + b) r >= a b, are averaged exactly.
    ``rank_fraction``: r = ceil(rank_fraction * min(a, b)), in (0, 1].
    ``output_axis``: the axis whose length is fan_out: 0 in PyTorch, -1 in Keras.
    ``epsilon``: a positive number that is added to the norms of R's rows.
    The shape is cut where a + b is smallest. Departure from the paper: a row of Q that became zero is replaced by a
    random one. Non-finite gradients are treated as with any other method: the option ``nonfinite``.
    Ahn et al., "Dion: Distributed Orthonormalized Updates", 2025, arXiv:2504.05295.
    """

    rank_fraction: float = 0.25
    output_axis: int = 0
    epsilon: float = 1e-8

    traits = Traits(
        family="low rank",
        combine=Combine.AGREED,
        needs_shape=True,
        nonfinite_in_payload=True,
        update_direction=True,
        memory="decoupled",
    )

    def __post_init__(self) -> None:
        if not 0 < self.rank_fraction <= 1:
            raise ValueError(f"rank_fraction={self.rank_fraction!r} must lie in (0, 1]")
        if self.output_axis not in (0, -1):
            raise ValueError(f"output_axis={self.output_axis!r}: choose 0 (PyTorch) or -1 (Keras)")
        if not self.epsilon > 0:
            raise ValueError(f"epsilon={self.epsilon!r} must be positive")

    def sizes(self, ctx: Context) -> tuple[int, int, int]:
        a, b = cut(ctx.shape)
        return a, b, math.ceil(self.rank_fraction * min(a, b))

    def applies(self, ctx: Context) -> bool:
        a, b, r = self.sizes(ctx)
        return len(ctx.shape) >= 2 and r * (a + b) < a * b

    def init(self, ctx: Context) -> State:
        return {"q": self.directions(ctx, "q", self.sizes(ctx)[1])}

    def compress(self, x: Array, state: State, ctx: Context) -> Program[tuple[Payload, State]]:
        xp, (a, b, _) = ctx.xp, self.sizes(ctx)
        matrix = xp.reshape(x, (a, b))
        (p,) = yield Reduce((matrix @ xp.transpose(self.revived(state["q"], ctx, "q")),), "mean")
        zero = xp.max(xp.abs(p)) == 0  # false for NaN, which must stay visible
        p = xp.where(zero, p, xp.linalg.qr(p))
        (r,) = yield Reduce((xp.transpose(p) @ matrix,), "mean")
        return (p, r), {"q": xp.where(zero, state["q"], self._normalized(r, ctx))}

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        p, r = self.factors(payload, ctx)
        return ctx.xp.reshape(p @ (self._normalized(r, ctx) * self.scale(ctx)), (-1,))

    def scale(self, ctx: Context) -> float:
        """sqrt(fan_out / fan_in), where fan_in = size / fan_out."""
        return float(ctx.shape[self.output_axis] / math.sqrt(ctx.size))

    def _normalized(self, r: Array, ctx: Context) -> Array:
        # Divide by the largest magnitude first: squares of large numbers overflow.
        xp = ctx.xp
        largest = xp.reshape(xp.max_abs(r), (-1, 1))
        unit, _ = xp.linalg.unit_rows(r)
        norm = xp.sqrt(xp.sum(unit * unit, 1, keepdims=True))
        return r / (largest * norm + self.epsilon)
