"""Adaptive threshold quantisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grace.compressors.sparse import Placed, check_ratio, first, poisoned, signed, unsigned
from grace.core import Array, Context, MaybeProgram, Payload, State, Traits
from grace.core.registry import register
from grace.ops.validate import fitting


@register("adaq", "adaptive_threshold")
@dataclass(frozen=True)
class AdaQ(Placed):
    """Send the positions of the largest positive and the largest negative elements, and the mean of each group.

    Payload: means float32[2], of the positive and the negative group; positions int32[K], ascending, those of negative
    elements as -1 - position. K = ceil(ratio * positives) + ceil(ratio * negatives).
    ``compress_ratio``: the share of the elements of each sign to send, in (0, 1].
    The paper estimates the thresholds from a sample; here they are exact.
    Dryden, Jacobs, Moon and Van Essen, "Communication Quantization for Data-parallel Training of Deep Neural Networks",
    MLHPC 2016, doi:10.1109/MLHPC.2016.4, section III.
    """

    compress_ratio: float = 0.01

    traits = Traits(family="hybrid", variable_length=True, nonfinite_in_payload=True)

    def __post_init__(self) -> None:
        check_ratio(self.compress_ratio)

    def contraction(self, n: int) -> float | None:
        # Of p elements of one sign, those sent, decoded as their mean, hold at least 1 / p of the sum of squares.
        return 1 / max(n, 1)

    def compress(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        xp, n = ctx.xp, ctx.size
        # Append a zero so that even an empty x has an element to rank.
        k, m = self._share(xp, x > 0), self._share(xp, x < 0)
        ranks = [xp.reshape(rank, (1,)) for rank in (xp.maximum(m - 1, 0), xp.minimum(n + 1 - k, n))]
        bounds = xp.ranked(xp.concat([x, xp.zeros(1)]), xp.concat(ranks))
        positive = first(xp, x > bounds[1:], x == bounds[1:], k)
        negative = first(xp, x < bounds[:1], x == bounds[:1], m)
        means = [
            xp.reshape(xp.sum(xp.where(chosen, x, 0.0)) / xp.cast(xp.maximum(count, 1), "float32"), (1,))
            for chosen, count in ((positive, k), (negative, m))
        ]
        # Non-finite elements are always sent, so that every worker sees them.
        positions = xp.nonzero(positive | negative | xp.invert(xp.isfinite(x)))
        sent = signed(xp, positions, xp.take(x, positions) < 0)
        return (poisoned(xp, xp.concat(means), x), sent), state

    def _share(self, xp: Any, mask: Array) -> Array:
        # ceil(ratio * number of true elements), in float64 as in Python.
        found = xp.cast(xp.sum(xp.cast(mask, "int32")), "float64")
        return xp.cast(-xp.floor(-self.compress_ratio * found), "int32")

    def parts(self, payload: Payload, ctx: Context) -> tuple[Array, Array]:
        xp, means = ctx.xp, fitting(ctx.xp, payload[0], "float32", 2, "means")
        positions, negative = unsigned(xp, payload[1])
        return xp.where(negative, means[1:], means[:1]), positions
