"""Base classes of methods that treat a tensor as a low-rank matrix."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cache

from grace.core import Array, Combine, Compressor, Context, Payload, State, Traits
from grace.core.rng import NOISE, Rng
from grace.ops.validate import fitting

STRIDE = 7919
"""Distance between the starting positions of two successive steps in the table of spare directions."""


@cache
def cut(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of the matrix into which a shape is cut: those with the smallest sum."""
    size = math.prod(shape)
    rows = (math.prod(shape[:axis]) for axis in range(1, len(shape)))
    a = min(rows, key=lambda a: a + size // max(a, 1), default=1)
    return a, size // max(a, 1)


class Factored(Compressor):
    """Treats a tensor as a matrix and sends its factors.

    The shape is cut into rows and columns so that their sum is smallest: for PyTorch's convolutions that is shape[0] x
    rest, and it also suits Keras's convolutions, whose output channels come last.
    """

    @abstractmethod
    def sizes(self, ctx: Context) -> tuple[int, int, int]:
        """Rows a, columns b and rank r of the tensor's matrix."""

    def factors(self, payload: Payload, ctx: Context) -> tuple[Array, Array]:
        """P float32[a, r] and Q float32[r, b], the first arrays of a payload. ValueError for other shapes."""
        xp, (a, b, r), dtype = ctx.xp, self.sizes(ctx), ctx.dtype
        return fitting(xp, payload[0], dtype, (a, r), "rows"), fitting(xp, payload[1], dtype, (r, b), "columns")

    def directions(self, ctx: Context, label: str, count: int) -> Array:
        """Return float32[r, count], random directions, equal on all workers."""
        r = self.sizes(ctx)[2]
        return ctx.xp.reshape(ctx.shared_rng(label).normal(r * count), (r, count))

    def revived(self, rows: Array, ctx: Context, label: str) -> Array:
        """Return rows at unit scale; a random row replaces each zero row, which would stay zero forever."""
        scaled, alive = ctx.xp.linalg.unit_rows(rows)
        return ctx.xp.mended(alive, scaled, lambda: self._spare(ctx, label, ctx.xp.shape(rows)[1]))

    def _spare(self, ctx: Context, label: str, count: int) -> Array:
        # As `directions`, but cut from a table that all tensors share, at a different offset in each step: devices and
        # graphs compute directions in every step for every tensor, and a fresh draw takes some forty operations.
        r = self.sizes(ctx)[2]
        if r * count > NOISE // 2:
            return self.directions(ctx, label, count)
        stream = Rng(ctx.xp, ctx.seed, label, "", 0, 0)
        start = ctx.step * STRIDE % (NOISE - r * count)
        table = ctx.xp.random.cached(stream.keys, lambda: stream.normal(NOISE))
        return ctx.xp.reshape(table[start : start + r * count], (r, count))


@dataclass(frozen=True)
class LowRank(Factored):
    """Sends factors of rank ``compress_rank``.

    Tensors that would not shrink by the factor ``min_rate`` go dense, as do vectors.
    """

    compress_rank: int = 4
    min_rate: float = 2.0

    traits = Traits(family="low rank", needs_shape=True)

    def __post_init__(self) -> None:
        if self.compress_rank < 1:
            raise ValueError(f"compress_rank={self.compress_rank!r} must be at least 1")
        if self.min_rate <= 0:
            raise ValueError(f"min_rate={self.min_rate!r} must be positive")

    def sizes(self, ctx: Context) -> tuple[int, int, int]:
        a, b = cut(ctx.shape)
        return a, b, min(self.compress_rank, a, b)

    def applies(self, ctx: Context) -> bool:
        a, b, r = self.sizes(ctx)
        return len(ctx.shape) >= 2 and ctx.size > 0 and r * (a + b) * self.min_rate <= a * b


@dataclass(frozen=True)
class Agreed(LowRank):
    """Agrees on the factors of the mean. Payload: P float32[a, r], Q float32[r, b], and the method's own arrays."""

    traits = replace(LowRank.traits, combine=Combine.AGREED, nonfinite_in_payload=True)

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        p, q = self.factors(payload, ctx)
        return ctx.xp.reshape(p @ q, (-1,))


@dataclass(frozen=True)
class WarmStarted(Agreed):
    """Agrees on both factors in each step, warm-started with the last Q.

    Payload: P float32[a, r], Q float32[r, b]. State: Q.
    """

    def init(self, ctx: Context) -> State:
        return {"q": self.directions(ctx, "q", self.sizes(ctx)[1])}

    def residual(self, x: Array, payload: Payload, ctx: Context) -> Array:
        return ctx.xp.linalg.subtract_product(x, *payload)
