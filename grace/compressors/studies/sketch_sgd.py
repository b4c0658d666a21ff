"""Heavy hitters found by an averaged count sketch."""

from __future__ import annotations

from dataclasses import dataclass

from grace.compressors.agreed import AgreedSparsifier
from grace.compressors.sparse import kept
from grace.core import Array, Context, Payload, Program, State
from grace.core.collectives import Reduce
from grace.core.registry import register
from grace.ops import blocks

GROUP = 256
"""Number of neighbours that are hashed together, or the number of columns if that is smaller: a group is added to the
table in one vectorised addition."""


@register("sketch_sgd", "countsketch")
@dataclass(frozen=True)
class SketchSGD(AgreedSparsifier):
    """Send the elements that are largest in the mean, which an averaged count sketch identifies on all workers.

    Two rounds, both averaged on the wire: the count sketch float32[rows * columns], which is linear in the gradient;
    then the values float32[candidates * k] of the elements that it estimates to be the largest, of which the k largest
    are used.
    Payload: values of the mean float32[k], positions int32[k], ascending, agreed on by all workers.
    ``compress_ratio``: the share of elements to use, in (0, 1]. ``rows``: rows of the table, an odd number; an estimate
    is the median over the rows. ``columns``: columns of the table, a power of two; 0: the smallest one that is at least
    10 k. ``candidates``: send this many times k elements exactly; at least 1.
    The table has 4 rows * columns bytes: with the defaults it is no smaller than the gradient for ratios from 0.02 on,
    and for some tensor sizes from 0.01 on.
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

    def hashes(self, ctx: Context) -> list[Array]:
        """int32[group + groups] for each row: random words, equal on all workers.

        Elements are hashed in groups of neighbours, of which no two share a column: the low bits of a group's word are
        the column of its first element, and the others follow, modulo the number of columns. An element's sign is the
        product of two signs: the top bits of its group's word and of the word of its place in the group. So any two
        elements of different groups collide with probability 1 / columns and have independent signs, and at most one
        element of a group collides with a given element: everything that the variance of an estimate depends on is the
        same as if each element were hashed separately.
        """
        group = self.group(ctx.size)
        count = group + blocks.block_count(ctx.size, group)
        return [ctx.shared_rng(f"hash{row}").bits(count) for row in range(self.rows)]

    def group(self, n: int) -> int:
        """Number of neighbours that are hashed together."""
        return min(GROUP, self.width(n))

    def _places(self, word: Array, ctx: Context) -> tuple[Array, Array]:
        # For all elements, in one row of the table: columns int32[n], and bool[n], whether the sign is negative.
        xp, width, group = ctx.xp, self.width(ctx.size), self.group(ctx.size)
        place, own = xp.arange(group), xp.reshape(word[group:], (-1, 1))
        columns = xp.bitwise_and(xp.bitwise_and(own, width - 1) + place, width - 1)
        negative = xp.bitwise_xor(own, word[:group]) < 0
        return xp.reshape(columns, (-1,))[: ctx.size], xp.reshape(negative, (-1,))[: ctx.size]

    def sketch(self, x: Array, hashes: list[Array], ctx: Context) -> Array:
        """Return the table, float32[rows * columns]; entries are sums of elements hashed to them, with random signs."""
        xp, width, table = ctx.xp, self.width(ctx.size), []
        for word in hashes:
            columns, negative = self._places(word, ctx)
            table.append(xp.segment_sum(xp.where(negative, -x, x), columns, width))
        return xp.concat(table)

    def estimate(self, table: Array, hashes: list[Array], ctx: Context) -> Array:
        """Return float32[n], the elements as estimated from the table."""
        xp, width = ctx.xp, self.width(ctx.size)
        found = []
        for row, word in enumerate(hashes):
            columns, negative = self._places(word, ctx)
            value = xp.take(table, columns + row * width)
            found.append(xp.where(negative, -value, value))
        # The elementwise median: bubble the largest remaining value to the end until the middle one is in place. This
        # is much faster than n small sorts.
        for end in range(self.rows - 1, self.rows // 2 - 1, -1):
            for i in range(end):
                found[i], found[i + 1] = xp.minimum(found[i], found[i + 1]), xp.maximum(found[i], found[i + 1])
        return found[self.rows // 2]

    def compress(self, x: Array, state: State, ctx: Context) -> Program[tuple[Payload, State]]:
        xp, k, hashes = ctx.xp, self.count(ctx.size), self.hashes(ctx)
        sums = self.sketch(x, hashes, ctx)
        sound = xp.finite(sums)  # the sketch is finite only if x is: it sums all elements
        (table,) = yield Reduce((sums,), "mean")
        candidates = xp.topk_abs(self.estimate(table, hashes, ctx), min(ctx.size, self.candidates * k))
        (values,) = yield Reduce((xp.where(sound, xp.take(x, candidates), float("nan")),), "mean")
        chosen = xp.topk(xp.abs(values), k)
        return (xp.take(values, chosen), xp.take(candidates, chosen)), state
