"""Random singular values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grace.checks import matching
from grace.compressors.lowrank import LowRank
from grace.core import Array, Context, Payload, State, Steps
from grace.registry import register


@register("atomo")
@dataclass(frozen=True)
class Atomo(LowRank):
    """Send singular vectors drawn at random, larger ones more often, so that the expectation is x.

    Payload: values float32[K], left vectors float32[K, a], right vectors float32[K, b]; K is random, r on average.
    ``compress_rank``: r. ``min_rate``: tensors that would not shrink by this factor go dense, as do vectors.
    All singular values of every matrix in every step: slow for large layers.
    Wang et al., "ATOMO", NeurIPS 2018, arXiv:1806.04090, section 3 (spectral ATOMO).
    """

    ragged = True
    unbiased = True
    memory = "none"

    def variance(self, n: int) -> float | None:
        # The best probabilities are at least as good as equal ones, r / m, for the m <= sqrt(n) singular values.
        return max(0.0, n**0.5 / self.compress_rank - 1)

    def compress(self, x: Array, state: State, ctx: Context) -> Steps[tuple[Payload, State]]:
        xp, (a, b, r) = ctx.xp, self.sizes(ctx)
        m, finite = min(a, b), xp.isfinite(x)
        # In double precision: near-equal singular values make vectors that differ between toolkits.
        matrix = xp.cast(xp.reshape(xp.where(finite, x, 0.0), (a, b)), "float64")
        matrix = matrix if a <= b else xp.transpose(matrix)
        # Vectors of the shorter side, from the product with itself, take a third of the time of a decomposition. Those
        # of the other side are what they make of the matrix: the expectation is x however exact they are.
        squares, vectors = xp.eigh(matrix @ xp.transpose(matrix))
        size = xp.sqrt(xp.maximum(squares, 0.0))
        s = xp.cast(size, "float32")
        chance = self._chances(xp, s, m, r)
        first = xp.arange(m) < xp.cast(xp.invert(xp.all(finite)), "int32")  # something must say what is wrong
        chosen = xp.nonzero((ctx.rng("draw").uniform(m) < chance) | first)
        values = xp.where(xp.all(finite), s / xp.where(chance > 0, chance, 1.0), float("nan"))
        short = xp.take(xp.transpose(vectors), chosen)
        size = xp.take(size, chosen)
        long = (short @ matrix) / xp.reshape(xp.where(size > 0, size, 1.0), (-1, 1))
        left, right = (xp.cast(part, "float32") for part in ((short, long) if a <= b else (long, short)))
        return (xp.take(values, chosen), left, right), state

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        xp, (values, left, right), (a, b, _) = ctx.xp, payload, self.sizes(ctx)
        values = matching(xp, values, "float32", values, "values")
        left = matching(xp, left, "float32", values, "left vectors", row=(a,))
        right = matching(xp, right, "float32", values, "right vectors", row=(b,))
        return xp.reshape((xp.transpose(left) * values) @ right, (-1,))

    def _chances(self, xp: Any, s: Array, m: int, r: int) -> Array:
        # Proportional to the values; those that would exceed 1 are sent for certain, and leave the rest of r to others.
        place = xp.arange(m)
        rest = xp.sum(s) - xp.cumsum(s) + s  # of this value and all smaller ones
        certain = s * xp.cast(r - place, "float32") > rest * (1 + 1e-6)
        certain = xp.cumsum(xp.cast(xp.invert(certain), "int32")) == 0
        count = xp.sum(xp.cast(certain, "int32"))
        tail = xp.sum(xp.where(certain, 0.0, s))
        chance = s / xp.where(tail > 0, tail, 1.0) * xp.cast(r - count, "float32")
        return xp.where(certain, 1.0, xp.minimum(chance, 1.0))
