"""Low-rank approximation by one step of power iteration."""

from __future__ import annotations

import math
from dataclasses import dataclass

from grace import blocks
from grace.collectives import Reduce
from grace.core import Array, Combine, Compressor, Context, Payload, Program, State
from grace.registry import register


@register("powersgd")
@dataclass(frozen=True)
class PowerSGD(Compressor):
    """Send the factors of a low-rank approximation of the mean gradient, warm-started from the last step.

    Two rounds: P = M Q and Q = Mᵀ orth(P), each averaged over the workers.
    Payload: P float32[a, r], Q float32[r, b], agreed on by all workers. State: Q float32[r, b], equal on all workers.
    ``compress_rank``: r. ``min_rate``: tensors that would not shrink by this factor go dense, as do vectors.
    The paper makes the matrix shape[0] x rest; here the shape is cut where a + b is smallest, which is the same for
    PyTorch's convolutions and also right for Keras's, whose output channels come last.
    Vogels, Karimireddy and Jaggi, "PowerSGD", NeurIPS 2019, arXiv:1905.13727, algorithm 1.
    """

    compress_rank: int = 4
    min_rate: float = 2.0
    family = "low rank"
    combine = Combine.AGREED

    def __post_init__(self) -> None:
        if self.compress_rank < 1:
            raise ValueError(f"compress_rank={self.compress_rank!r} must be at least 1")
        if self.min_rate <= 0:
            raise ValueError(f"min_rate={self.min_rate!r} must be positive")

    def sizes(self, ctx: Context) -> tuple[int, int, int]:
        """Rows a, columns b and rank r of the matrix that a tensor is seen as."""
        cuts = range(1, len(ctx.shape))
        a = min((math.prod(ctx.shape[:cut]) for cut in cuts), key=lambda a: a + ctx.size // max(a, 1), default=1)
        b = ctx.size // max(a, 1)
        return a, b, min(self.compress_rank, a, b)

    def applies(self, ctx: Context) -> bool:
        a, b, r = self.sizes(ctx)
        return len(ctx.shape) >= 2 and ctx.size > 0 and r * (a + b) * self.min_rate <= a * b

    def init(self, ctx: Context) -> State:
        return {"q": self.start(ctx)}

    def start(self, ctx: Context) -> Array:
        """float32[r, b]: random directions, the same on every worker."""
        _, b, r = self.sizes(ctx)
        return ctx.xp.reshape(ctx.shared_rng("q").normal(r * b), (r, b))

    def compress(self, x: Array, state: State, ctx: Context) -> Program[tuple[Payload, State]]:
        xp = ctx.xp
        a, b, _ = self.sizes(ctx)
        matrix = xp.reshape(x, (a, b))
        # Only directions count: unit scale keeps the products in range. A direction that became zero would stay so for
        # ever: it is drawn anew.
        warm, fresh = state["q"], self.start(ctx)
        largest = xp.max(xp.abs(warm), 1)
        warm = xp.where(xp.reshape(largest, (-1, 1)) > 0, warm / blocks.divisor(xp, largest), fresh)
        (p,) = yield Reduce((matrix @ xp.transpose(warm),), "mean")
        p = xp.qr(p)
        # (Pᵀ M) rather than Mᵀ P: the same numbers, without a strided pass over M.
        (q,) = yield Reduce((xp.transpose(p) @ matrix,), "mean")
        return (p, q), {"q": q}

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        p, q = payload
        return ctx.xp.reshape(p @ q, (-1,))
