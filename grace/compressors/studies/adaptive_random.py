"""Random sparsification that prefers large elements."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from grace.compressors.sparse import EXACT, Placed, check_ratio, kept
from grace.core import Array, Compressor, Context, MaybeProgram, Payload, State, Traits
from grace.core.registry import register
from grace.ops.validate import matching


@register("adaptive_random")
@dataclass(frozen=True)
class AdaptiveRandom(Placed):
    """Draw positions with a probability proportional to the element's magnitude, and send these elements.

    Payload: values float32[K], positions int32[K], ascending; K = 0 for a tensor of zeros. k positions are drawn, k =
    floor(compress_ratio * n), at least 1; K <= k of them are distinct. Probabilities are exact up to 2**-21.
    ``compress_ratio``: the number of draws as a share of the elements, in (0, 1]; the paper draws once.
    ``unbiased``: for each time that an element was drawn, send the sum of all magnitudes divided by k, with the
    element's sign, so that the expectation is x.
    Beznosikov, Horvath, Richtarik and Safaryan, "On Biased Compression for Distributed Learning", 2020,
    arXiv:2002.12410, on adaptive random sparsification.
    """

    compress_ratio: float = 0.01
    unbiased: bool = False

    def __post_init__(self) -> None:
        check_ratio(self.compress_ratio)

    @cached_property
    def traits(self) -> Traits:
        if self.unbiased:
            return Traits(
                family="sparsification",
                unbiased=True,
                variable_length=True,
                nonfinite_in_payload=True,
                memory="none",
            )
        return replace(EXACT, variable_length=True)

    def contraction(self, n: int) -> float | None:
        # The bound for one draw: the sum of |x|³ / |x|_1 is at least |x|² / n. Further draws only reduce the error.
        return None if self.unbiased else 1 / max(n, 1)

    def variance(self, n: int) -> float | None:
        return (max(n, 1) - 1) / kept(self.compress_ratio, max(n, 1)) if self.unbiased else None

    def compress(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        xp, n, k = ctx.xp, ctx.size, kept(self.compress_ratio, ctx.size)
        finite = xp.isfinite(x)
        size = xp.where(finite, xp.abs(x), 0.0)
        largest = xp.max(xp.concat([size, xp.zeros(1)]))
        # Integer weights, whose sum has at most 53 bits: every toolkit sums them exactly, in any order.
        unit = 2.0 ** min(30, 52 - n.bit_length())
        weights = xp.floor(xp.cast(size / xp.where(largest > 0, largest, 1.0), "float64") * unit)
        ends = xp.cumsum(weights)
        total = ends[-1:] if n else xp.zeros(1, "float64")
        words = xp.cast(ctx.rng("draw").bits(k), "float64") + 2.0**31
        points = xp.floor(words * 2.0**-32 * total) + 0.5  # in the middle of one of the ``total`` unit intervals
        drawn = xp.minimum(xp.searchsorted(ends, points), max(n - 1, 0))
        times = xp.segment_sum(xp.full(k, 1.0), drawn, n) * xp.cast(weights > 0, "float32")
        # Non-finite elements are always sent, so that every worker sees them.
        positions = xp.nonzero((times > 0) | xp.invert(finite))
        values = xp.take(x, positions)
        if self.unbiased:
            norm = xp.cast(total / unit, "float32") * largest
            share = xp.take(times, positions) * (norm / max(k, 1))
            values = xp.where(xp.isfinite(values), xp.sign(values) * share, values)
        return (values, positions), state

    def parts(self, payload: Payload, ctx: Context) -> tuple[Array, Array]:
        values, positions = payload
        return matching(ctx.xp, values, "float32", positions, "values"), positions

    def residual(self, x: Array, payload: Payload, ctx: Context) -> Array:
        if self.unbiased:
            return Compressor.residual(self, x, payload, ctx)
        return ctx.xp.inplace.scatter(x, payload[1], 0.0)
