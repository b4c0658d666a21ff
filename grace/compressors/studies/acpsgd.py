"""Low-rank approximation with one factor per step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grace.compressors.lowrank import Agreed
from grace.core import Array, Context, Payload, Program, State
from grace.core.collectives import Reduce
from grace.core.registry import register


@register("acpsgd")
@dataclass(frozen=True)
class ACPSGD(Agreed):
    """Send one factor of a low-rank approximation per step: P in even steps, Q in odd ones.

    Each factor is computed with an orthonormal basis of the other factor, so that a step takes one round instead of
    PowerSGD's two, and half the bytes.
    Payload: P float32[a, r], Q float32[r, b] as agreed on by the workers; then this worker's own P and Q. State: P and
    Q, equal on all workers.
    ``compress_rank``: r, at least 1. ``min_rate``: tensors that do not shrink by this positive factor go dense, as do
    vectors.
    Zhang et al., "Evaluation and Optimization of Gradient Compression for Distributed Deep Learning", ICDCS 2023,
    arXiv:2306.08881, section IV (ACP-SGD).
    """

    def init(self, ctx: Context) -> State:
        a, b, _ = self.sizes(ctx)
        return {"p": ctx.xp.transpose(self.directions(ctx, "p", a)), "q": self.directions(ctx, "q", b)}

    def compress(self, x: Array, state: State, ctx: Context) -> Program[tuple[Payload, State]]:
        xp, (a, b, _) = ctx.xp, self.sizes(ctx)
        matrix, even = xp.reshape(x, (a, b)), ctx.step % 2 == 0
        if xp.traced:
            return (yield from self._either(matrix, state, ctx, even))
        if even:
            q = self._columns(state, ctx)
            mine = xp.linalg.left_factor(matrix, q)
        else:
            p = self._rows(state, ctx)
            mine = xp.linalg.right_factor(p, matrix)
        (mean,) = yield Reduce((mine,), "mean")
        pairs = (mean, q, mine, q) if even else (p, mean, p, mine)
        return pairs, {"p": pairs[0], "q": pairs[1]}

    def _rows(self, state: State, ctx: Context) -> Array:
        # Returns P with orthonormal columns, float32[a, r], from which Q is computed.
        xp = ctx.xp
        return xp.linalg.qr(xp.transpose(self.revived(xp.transpose(state["p"]), ctx, "p")))

    def _columns(self, state: State, ctx: Context) -> Array:
        # Returns Q with orthonormal rows, float32[r, b], from which P is computed.
        xp = ctx.xp
        return xp.transpose(xp.linalg.qr(xp.transpose(self.revived(state["q"], ctx, "q"))))

    def _either(self, matrix: Array, state: State, ctx: Context, even: Any) -> Program[tuple[Payload, State]]:
        # One graph serves both kinds of steps: it computes both factors, padded to the longer one, and sends one.
        xp, (a, b, r) = ctx.xp, self.sizes(ctx)
        p, q, room = self._rows(state, ctx), self._columns(state, ctx), max(a, b) * r

        def flat(factor: Array) -> Array:
            return xp.pad(xp.reshape(factor, (-1,)), room)

        mine = xp.choose(even, flat(xp.linalg.left_factor(matrix, q)), flat(xp.linalg.right_factor(p, matrix)))
        length: Any = xp.choose(even, xp.asarray(a * r, "int64"), xp.asarray(b * r, "int64"))
        (mean,) = yield Reduce((mine[:length],), "mean")
        mean = xp.reshape(xp.concat([mean, xp.zeros(room)])[:room], (room,))
        pairs = []
        for factor in (mean, mine):
            pairs.append(xp.choose(even, xp.reshape(factor[: a * r], (a, r)), p))
            pairs.append(xp.choose(even, q, xp.reshape(factor[: b * r], (r, b))))
        return tuple(pairs), {"p": pairs[0], "q": pairs[1]}

    def residual(self, x: Array, payload: Payload, ctx: Context) -> Array:
        # The residual is relative to this worker's own factors, not to the mean.
        return ctx.xp.linalg.subtract_product(x, payload[2], payload[3])
