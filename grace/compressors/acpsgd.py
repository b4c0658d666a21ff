"""Low-rank approximation with one factor in each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grace.collectives import Reduce
from grace.compressors.lowrank import LowRank
from grace.core import Array, Combine, Context, Payload, Program, State
from grace.registry import register


@register("acpsgd")
@dataclass(frozen=True)
class ACPSGD(LowRank):
    """Send one factor of a low-rank approximation in each step: P in even steps, Q in odd ones.

    Each is taken on an orthonormal basis of the other: one round where PowerSGD has two, and half of its bytes.
    Payload: P float32[a, r], Q float32[r, b] as the workers agreed on them, then this worker's own. State: P and Q,
    equal on all workers.
    ``compress_rank``: r. ``min_rate``: tensors that would not shrink by this factor go dense, as do vectors.
    Zhang et al., "Evaluation and Optimization of Gradient Compression for Distributed Deep Learning", ICDCS 2023,
    arXiv:2306.08881, section IV (ACP-SGD).
    """

    combine = Combine.AGREED

    def init(self, ctx: Context) -> State:
        a, b, _ = self.sizes(ctx)
        return {"p": ctx.xp.transpose(self.directions(ctx, "p", a)), "q": self.directions(ctx, "q", b)}

    def compress(self, x: Array, state: State, ctx: Context) -> Program[tuple[Payload, State]]:
        xp, (a, b, r) = ctx.xp, self.sizes(ctx)
        matrix, even = xp.reshape(x, (a, b)), ctx.step % 2 == 0
        p = xp.qr(xp.transpose(self.revived(xp.transpose(state["p"]), ctx, "p")))
        q = xp.transpose(xp.qr(xp.transpose(self.revived(state["q"], ctx, "q"))))
        room = max(a, b) * r
        if xp.traced:  # one graph serves both kinds of steps: it makes both factors and sends one
            mine = xp.choose(even, self._factor(matrix, q, True, room, xp), self._factor(matrix, p, False, room, xp))
            length: Any = xp.choose(even, xp.asarray(a * r, "int64"), xp.asarray(b * r, "int64"))
        else:
            mine, length = self._factor(matrix, q if even else p, even, room, xp), (a if even else b) * r
        (mean,) = yield Reduce((mine[:length],), "mean")
        mean = xp.reshape(xp.concat([mean, xp.zeros(room)])[:room], (room,))
        pairs = []
        for factor in (mean, mine):
            pairs.append(xp.choose(even, xp.reshape(factor[: a * r], (a, r)), p))
            pairs.append(xp.choose(even, q, xp.reshape(factor[: b * r], (r, b))))
        return tuple(pairs), {"p": pairs[0], "q": pairs[1]}

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        p, q = self.factors(payload, ctx)
        return ctx.xp.reshape(p @ q, (-1,))

    def residual(self, x: Array, payload: Payload, ctx: Context) -> Array:
        # Against what this worker put in, not against the mean.
        return ctx.xp.subtract_product(x, payload[2], payload[3])

    def _factor(self, matrix: Array, basis: Array, even: bool, room: int, xp: Any) -> Array:
        # P = M Qᵀ or Q = Pᵀ M, flat, lengthened to the longer one's size.
        factor = xp.left_factor(matrix, basis) if even else xp.right_factor(basis, matrix)
        return xp.pad(xp.reshape(factor, (-1,)), room)
