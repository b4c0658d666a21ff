"""Low-rank approximation by alternating least squares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from grace.compressors.lowrank import WarmStarted
from grace.core import Array, Context, Payload, Program, State
from grace.core.collectives import Reduce
from grace.core.registry import register


@register("gradzip")
@dataclass(frozen=True)
class GradZip(WarmStarted):
    """Send the factors of a regularised least squares fit, first P for fixed Q, then Q for fixed P; warm-started.

    P = M Qᵀ (Q Qᵀ + c I)⁻¹ and Q = (Pᵀ P + c I)⁻¹ Pᵀ M, each averaged over the workers. As PowerSGD, with small
    linear solves instead of an orthogonalisation.
    Payload: P float32[a, r], Q float32[r, b], agreed on by all workers. State: Q float32[r, b], equal on all workers.
    ``compress_rank``: r, at least 1. ``min_rate``: tensors that do not shrink by this positive factor go dense, as do
    vectors.
    ``ridge``: c relative to the mean squared norm of the rows of Q (of the columns of P), positive.
    Cho et al., "GradZip", NeurIPS 2019 workshop on systems for machine learning; the ridge form is ours.
    """

    ridge: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.ridge > 0:
            raise ValueError(f"ridge={self.ridge!r} must be positive: it keeps the solves regular")

    def compress(self, x: Array, state: State, ctx: Context) -> Program[tuple[Payload, State]]:
        xp = ctx.xp
        a, b, _ = self.sizes(ctx)
        matrix = xp.reshape(x, (a, b))

        def left(rows: Array) -> Array:
            return xp.transpose(xp.linalg.left_factor(matrix, rows))

        def right(rows: Array) -> Array:
            return xp.linalg.right_factor(xp.transpose(rows), matrix)

        (p,) = yield Reduce((self._fit(left, self.revived(state["q"], ctx, "q"), ctx),), "mean")
        (q,) = yield Reduce((self._fit(right, p, ctx),), "mean")
        return (xp.transpose(p), q), {"q": q}

    def _fit(self, product: Callable[[Array], Array], rows: Array, ctx: Context) -> Array:
        # Returns float32[r, k], the least squares fit of ``rows`` to a matrix, given the matrix's ``product`` with
        # rows. Rows are scaled to stay in range. The small system is solved in double precision: near-equal directions
        # would cost half of the digits in single precision.
        xp = ctx.xp
        r = xp.shape(rows)[0]
        largest = xp.max(xp.abs(rows))
        scale = xp.where(largest > 0, largest, 1.0)
        unit = rows / scale
        double = xp.cast(unit, "float64")
        identity = xp.reshape(xp.cast(xp.arange(r * r) % (r + 1) == 0, "float64"), (r, r))
        size = xp.maximum(xp.sum(double * double) / r * self.ridge, 1e-12)
        system = double @ xp.transpose(double) + identity * size
        # Solvers reject NaN; it still reaches the result through the right-hand side.
        system = xp.where(xp.isfinite(system), system, identity)
        return xp.cast(xp.linalg.solve(system, xp.cast(product(unit), "float64")), "float32") / scale
