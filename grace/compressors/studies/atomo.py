"""Random singular values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grace.compressors.lowrank import LowRank
from grace.core import Array, Context, MaybeProgram, Payload, State
from grace.core.registry import register
from grace.ops.validate import matching

TINY = 1e-37
"""Lower bound of divisors (avoids division by zero)."""

PROBES = 8
"""Number of random projections that estimate the length of each row."""

Parts = tuple[Array, Array, Callable[[Array], tuple[Array, Array]]]
"""Lengths of the rank-one parts of a matrix, whether it is finite, and a function that returns the chosen parts."""


@register("atomo")
@dataclass(frozen=True)
class Atomo(LowRank):
    """Send random matrices of rank one, larger ones with a higher probability, so that the expectation is x.

    Payload: values float32[K], left vectors float32[K, a], right vectors float32[K, b]; K is random, r on average.
    ``compress_rank``: r, at least 1. ``min_rate``: tensors that do not shrink by this positive factor go dense, as do
    vectors.
    ``leading``: if both sides of the matrix are longer than this, only about this many of the largest singular values
    are computed, by a random projection, and the remainder is sampled row by row, along the shorter side. The variance
    is then up to four times as large if singular values decay slowly, and the time is far shorter. 0: all singular
    values of every matrix in every step, which takes seconds for large layers.
    Wang et al., "ATOMO", NeurIPS 2018, arXiv:1806.04090: section 3 (spectral ATOMO) if all are computed, and otherwise
    section 2, which covers any way to write x as a sum.
    Halko, Martinsson and Tropp, "Finding structure with randomness: Probabilistic algorithms for constructing
    approximate matrix decompositions", SIAM Review 2011, arXiv:0909.4061, algorithm 4.1.
    """

    leading: int = 32

    traits = replace(LowRank.traits, unbiased=True, variable_length=True, memory="none")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.leading < 0:
            raise ValueError(f"leading={self.leading!r} must not be negative; 0 finds all singular values")

    def variance(self, n: int) -> float | None:
        # The optimal probabilities are at least as good as equal ones, r / parts, whose variance relative to |x|² is
        # parts / r - 1, since the squares of the parts sum to |x|². There are at most sqrt(n) parts (singular values);
        # with ``leading``, at most ``leading`` singular values and sqrt(n) rows of the remainder.
        extra = self.leading if self.leading < n**0.5 else 0
        return max(0.0, (n**0.5 + extra) / self.compress_rank - 1)

    def compress(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        xp, (a, b, r) = ctx.xp, self.sizes(ctx)
        s, ok, vectors = self._some(x, ctx) if 0 < self.leading < min(a, b) else self._all(x, ctx)
        n = xp.shape(s)[0]
        chance = xp.where(ok, self._chances(xp, s, r), 0.0)
        first = xp.arange(n) < xp.cast(xp.invert(ok), "int32")  # send one element anyway, so that NaN is sent
        chosen = xp.nonzero((ctx.rng("draw").uniform(n) < chance) | first)
        values = xp.where(ok, s / xp.where(chance > 0, chance, 1.0), float("nan"))
        short, long = vectors(chosen)
        long = long / xp.reshape(xp.maximum(xp.take(s, chosen), TINY), (-1, 1))
        return (xp.take(values, chosen), *((short, long) if a <= b else (long, short))), state

    def _all(self, x: Array, ctx: Context) -> Parts:
        # Returns singular values float32[m], with m the shorter side; whether x is finite; and a function that returns
        # for the chosen values their unit vectors of length m, and the products of these vectors with the matrix.
        xp, (a, b, _) = ctx.xp, self.sizes(ctx)
        ok = xp.finite(x)
        # Double precision: in single precision, near-equal singular values give different vectors on each toolkit.
        matrix = xp.cast(xp.reshape(xp.where(ok, x, 0.0), (a, b)), "float64")
        matrix = matrix if a <= b else xp.transpose(matrix)
        # The eigenvectors of the shorter side's Gram matrix take a third of the time of an SVD. The vectors of the
        # other side are their products with the matrix: the expectation is x even if the eigenvectors are inexact.
        squares, vectors = xp.linalg.eigh(matrix @ xp.transpose(matrix))

        def of(chosen: Array) -> tuple[Array, Array]:
            short = xp.take(xp.transpose(vectors), chosen)
            return xp.cast(short, "float32"), xp.cast(short @ matrix, "float32")

        return xp.cast(xp.sqrt(xp.maximum(squares, 0.0)), "float32"), ok, of

    def _some(self, x: Array, ctx: Context) -> Parts:
        # As `_all`, but the parts are the largest singular values first, then the rows of the remainder.
        xp, (a, b, _), count = ctx.xp, self.sizes(ctx), self.leading
        m, matrix = min(a, b), xp.reshape(x, (a, b))
        matrix = matrix if a <= b else xp.transpose(matrix)
        random = ctx.rng("sketch").uniform((count + PROBES) * max(a, b)) - 0.5
        sketch = matrix @ xp.transpose(xp.reshape(random, (count + PROBES, max(a, b))))
        ok = xp.finite(sketch)  # the sketch sums all elements, so it is finite only if the matrix is
        sketch = xp.where(ok, sketch, 0.0)
        basis = xp.linalg.qr(sketch[:, :count])
        inside = xp.where(ok, xp.transpose(basis) @ matrix, 0.0)
        # Rotate basis and coordinates so that the parts are as unequal as possible, in double precision.
        turn, wide = xp.cast(basis, "float64"), xp.cast(inside, "float64")
        squares, turned = xp.linalg.eigh(wide @ xp.transpose(wide))
        basis, inside = xp.cast(turn @ turned, "float32"), xp.cast(xp.transpose(turned) @ wide, "float32")
        # Estimate the lengths of the remaining rows with random numbers independent of the basis. The estimate need not
        # be exact: it only changes how often a row is sampled, not the row itself. A nonzero row must not get a zero or
        # tiny estimate, by which it would be divided.
        probes = xp.cast(sketch[:, count:], "float64")
        rest = probes - turn @ (xp.transpose(turn) @ probes)
        left = xp.maximum(xp.sum(rest * rest, 1), 1e-8 * xp.sum(probes * probes, 1)) * (12 / PROBES)
        sizes = xp.cast(xp.sqrt(xp.concat([xp.maximum(squares, 0.0), left])), "float32")

        def of(chosen: Array) -> tuple[Array, Array]:
            found, row = xp.reshape(chosen < count, (-1, 1)), xp.maximum(chosen - count, 0)
            part = xp.minimum(chosen, count - 1)
            unit = xp.cast(xp.reshape(row, (-1, 1)) == xp.arange(m), "float32")
            short = xp.where(found, xp.take(xp.transpose(basis), part), unit)
            rest = xp.take(matrix, row) - xp.take(basis, row) @ inside
            return short, xp.where(found, xp.take(inside, part), rest)

        return sizes, ok, of

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        return self.aggregate([payload], ctx)

    def aggregate(self, payloads: Sequence[Payload], ctx: Context) -> Array:
        left, right = self.side_by_side(payloads, ctx)
        return ctx.xp.reshape(left @ right, (-1,))

    def side_by_side(self, payloads: Sequence[Payload], ctx: Context) -> tuple[Array, Array]:
        """Two matrices whose product is the mean: all workers' vectors, concatenated."""
        xp, (a, b, _), lefts, rights = ctx.xp, self.sizes(ctx), [], []
        for values, left, right in payloads:
            values = matching(xp, values, "float32", values, "values") / len(payloads)
            lefts.append(matching(xp, left, "float32", values, "left vectors", row=(a,)) * xp.reshape(values, (-1, 1)))
            rights.append(matching(xp, right, "float32", values, "right vectors", row=(b,)))
        return xp.transpose(xp.concat(lefts)), xp.concat(rights)

    def _chances(self, xp: Any, s: Array, r: int) -> Array:
        # Probabilities proportional to the values s, capped at 1, with sum r: values with probability 1 are always
        # sent, the others share the rest of r.
        n, s = xp.shape(s)[0], s / xp.maximum(xp.max(s), TINY)
        falling = xp.take(xp.sort(s), n - 1 - xp.arange(n))
        rest = xp.sum(falling) - xp.cumsum(falling) + falling  # sum of this value and all smaller ones
        certain = falling * xp.cast(r - xp.arange(n), "float32") > rest * (1 + 1e-6)
        certain = xp.cumsum(xp.cast(xp.invert(certain), "int32")) == 0
        count = xp.sum(xp.cast(certain, "int32"))
        tail = xp.sum(xp.where(certain, 0.0, falling))
        share = xp.cast(r - count, "float32") / xp.maximum(tail, 1e-30)
        return xp.minimum(s * share, 1.0)
