"""What all methods share that send some elements with their positions."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

from grace.core import Array, Compressor, Context, Payload, State, Steps


class Sparsifier(Compressor):
    """Sends ``x[indices]`` and the indices. Subclasses choose them.

    Payload: values float32[K], indices int32[K], ascending.
    """

    @abstractmethod
    def select(self, x: Array, ctx: Context) -> Array:
        """int32[K]: the positions to send, ascending."""

    def applies(self, ctx: Context) -> bool:
        return ctx.size < 2**31  # positions are int32

    def compress(self, x: Array, state: State, ctx: Context) -> Steps[tuple[Payload, State]]:
        indices = self.select(x, ctx)
        return (ctx.xp.take(x, indices), indices), state

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        values, indices = payload
        return ctx.xp.scatter_add(ctx.xp.zeros(ctx.size), indices, values)

    def residual(self, x: Array, payload: Payload, ctx: Context) -> Array:
        # Exact, bit for bit: what was not sent stays as it is.
        return ctx.xp.scatter(x, payload[1], 0.0)

    def aggregate(self, payloads: Sequence[Payload], ctx: Context) -> Array:
        total = ctx.xp.zeros(ctx.size)
        for values, indices in payloads:
            total = ctx.xp.scatter_add(total, indices, values)
        return total / len(payloads)


def kept(ratio: float, n: int) -> int:
    """How many of ``n`` elements a ratio keeps: floor(ratio * n), at least one of a tensor that has any."""
    return min(n, max(1, math.floor(ratio * n)))


def check_ratio(ratio: float) -> None:
    """Raise ValueError unless 0 < ratio <= 1."""
    if not 0 < ratio <= 1:
        raise ValueError(f"compress_ratio={ratio!r} must lie in (0, 1]: 0.01 keeps 1% of the elements, 1 keeps all")
