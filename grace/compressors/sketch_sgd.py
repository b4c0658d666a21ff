"""Heavy hitters found by an averaged count sketch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grace.collectives import Reduce
from grace.compressors.sparse import AgreedSparsifier, kept, poisoned
from grace.core import Array, Context, Payload, Program, State
from grace.registry import register
from grace.rng import Rng


@register("sketch_sgd", "countsketch")
@dataclass(frozen=True)
class SketchSGD(AgreedSparsifier):
    """Send the elements that are largest in the mean, which a small table of hashed sums tells to all workers.

    Two rounds, both averaged on the wire: the count sketch float32[rows * columns], which is linear in the gradient;
    and the values float32[candidates * k] of the elements that it estimates to be the largest, of which the k largest
    are used.
    Payload: values of the mean float32[k], positions int32[k], ascending, agreed on by all workers.
    ``compress_ratio``: the share of elements to use, in (0, 1]. ``rows``: of the table, an odd number; an estimate is
    the median over them. ``columns``: a power of two; 0: the smallest one that is at least 10 k. ``candidates``: how
    many times k elements are sent exactly.
    The table has 4 rows * columns bytes: with its defaults it is no smaller than the gradient for ratios above 0.01.
    Ivkin et al., "Communication-efficient Distributed SGD with Sketching", NeurIPS 2019, arXiv:1903.04488, algorithm 2.
    """

    compress_ratio: float = 0.001
    rows: int = 5
    columns: int = 0
    candidates: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.rows <= 99 or self.rows % 2 == 0:
            raise ValueError(f"rows={self.rows!r} must be odd, 1 .. 99: an estimate is the middle one of so many")
        if not 0 <= self.columns <= 2**28 or self.columns & (self.columns - 1):
            raise ValueError(f"columns={self.columns!r} must be a power of two up to 2**28, or 0 to fit compress_ratio")
        if self.candidates < 1:
            raise ValueError(f"candidates={self.candidates!r} must be at least 1")

    def width(self, n: int) -> int:
        """Columns of the table for n elements."""
        return self.columns or 1 << max(0, 10 * kept(self.compress_ratio, n) - 1).bit_length()

    def streams(self, ctx: Context) -> list[Rng]:
        """Of each row: words, the same on every worker, whose low bits are the column and whose top bit is the sign."""
        return [ctx.shared_rng(f"hash{row}") for row in range(self.rows)]

    def hashes(self, ctx: Context) -> list[Array]:
        """int32[n] for each row: its words."""
        return [stream.bits(ctx.size) for stream in self.streams(ctx)]

    def sketch(self, x: Array, hashes: list[Array], ctx: Context) -> Array:
        """float32[rows * columns]: each row holds sums of the elements, with random signs, of random groups."""
        xp, width = ctx.xp, self.width(ctx.size)
        table = [xp.segment_sum(_signed(xp, x, word), xp.bitwise_and(word, width - 1), width) for word in hashes]
        return xp.concat(table)

    def estimate(self, table: Array, hashes: list[Array], ctx: Context) -> Array:
        """float32[n]: the elements, as far as the table tells."""
        xp, width = ctx.xp, self.width(ctx.size)
        found = [
            _signed(xp, xp.take(table, xp.bitwise_and(word, width - 1) + row * width), word)
            for row, word in enumerate(hashes)
        ]
        # The median, elementwise: the largest of those left goes to the end, until the middle one is there. This is
        # much faster than to sort n times a few.
        for end in range(self.rows - 1, self.rows // 2 - 1, -1):
            for i in range(end):
                found[i], found[i + 1] = xp.minimum(found[i], found[i + 1]), xp.maximum(found[i], found[i + 1])
        return found[self.rows // 2]

    def compress(self, x: Array, state: State, ctx: Context) -> Program[tuple[Payload, State]]:
        xp, n, k, streams = ctx.xp, ctx.size, self.count(ctx.size), self.streams(ctx)
        kernels: Any = ctx.kernels if ctx.kernels and ctx.kernels.count_sketch else None
        hashes = [] if kernels else self.hashes(ctx)
        width = self.width(n)
        sums = kernels.count_sketch(x, streams, width) if kernels else self.sketch(x, hashes, ctx)
        (table,) = yield Reduce((sums,), "mean")
        if kernels:
            found = kernels.count_sketch_estimate(table, streams, n, width)
        else:
            found = self.estimate(table, hashes, ctx)
        candidates = xp.topk_abs(found, min(n, self.candidates * k))
        (values,) = yield Reduce((poisoned(xp, xp.take(x, candidates), x),), "mean")
        chosen = xp.topk(xp.abs(values), k)
        return (xp.take(values, chosen), xp.take(candidates, chosen)), state


def _signed(xp: Any, x: Array, word: Array) -> Array:
    return xp.where(word < 0, -x, x)
