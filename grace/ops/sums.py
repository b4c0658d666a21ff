"""Weighted sums of gradients and state arrays. Written over a backend."""

from __future__ import annotations

from grace.core import Array, Context


def weighted_sum(ctx: Context, x: Array, last: Array, beta: float = 1.0, gamma: float = 1.0) -> Array:
    """Return beta * last + gamma * x, float32[n]. x is donated."""
    xp = ctx.xp
    if beta == gamma == 1.0:
        return xp.inplace.add(x, last)
    if not 0 < xp.piece < ctx.size:
        return xp.inplace.add(xp.inplace.multiply(x, gamma), last * beta)
    for start in range(0, ctx.size, xp.piece):
        part = x[start : start + xp.piece]
        xp.inplace.add(xp.inplace.multiply(part, gamma), last[start : start + xp.piece] * beta)
    return x
