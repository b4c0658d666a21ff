"""Low-rank approximation by one step of power iteration."""

from __future__ import annotations

from dataclasses import dataclass

from grace.compressors.lowrank import WarmStarted
from grace.core import Array, Context, Payload, Program, State
from grace.core.collectives import Reduce
from grace.core.registry import register


@register("powersgd")
@dataclass(frozen=True)
class PowerSGD(WarmStarted):
    """Send the factors of a low-rank approximation of the mean gradient, warm-started from the last step.

    Two rounds: P = M Qᵀ and Q = orth(P)ᵀ M, each averaged over the workers.
    Payload: P float32[a, r], Q float32[r, b], agreed on by all workers. State: Q float32[r, b], equal on all workers.
    ``compress_rank``: r, at least 1. ``min_rate``: tensors that do not shrink by this positive factor go dense, as do
    vectors.
    The paper's matrix is shape[0] x rest; here the shape is cut where a + b is smallest, which is the same for
    PyTorch's convolutions and also right for Keras's, whose output channels come last.
    Vogels, Karimireddy and Jaggi, "PowerSGD", NeurIPS 2019, arXiv:1905.13727, algorithm 1.
    """

    def compress(self, x: Array, state: State, ctx: Context) -> Program[tuple[Payload, State]]:
        xp = ctx.xp
        a, b, _ = self.sizes(ctx)
        matrix = xp.reshape(x, (a, b))
        # Only directions matter: unit scale keeps the products in range.
        q = self.revived(state["q"], ctx, "q")
        (p,) = yield Reduce((xp.linalg.left_factor(matrix, q),), "mean")
        p = xp.linalg.qr(p)
        # Pᵀ M rather than Mᵀ P: the same numbers without a strided pass over M.
        (q,) = yield Reduce((xp.linalg.right_factor(p, matrix),), "mean")
        return (p, q), {"q": q}
