"""Unbiased sparsification with the fewest elements for a given variance."""

from __future__ import annotations

from dataclasses import dataclass

from grace.compressors.sparse import Scattered, check_ratio, signed, unsigned
from grace.core import Array, Context, MaybeProgram, Payload, State, Traits
from grace.core.registry import register
from grace.ops.validate import fitting, matching


@register("wangni")
@dataclass(frozen=True)
class Wangni(Scattered):
    """Send large elements always, and each other element x as x / p with a probability p proportional to |x|.

    Payload: positions int32[K1] and values float32[K1] of the elements always sent; positions int32[K2] of the drawn
    ones, as -1 - position where x < 0; float32[1], the magnitude |x / p| that all drawn ones share. On average K1 + K2
    is at most compress_ratio * n.
    ``compress_ratio``: the share of elements to send on average, in (0, 1].
    ``iterations``: how often to raise the probabilities after some have reached 1; fewer iterations send fewer
    elements.
    Wangni, Wang, Liu and Zhang, "Gradient Sparsification for Communication-Efficient Distributed Optimization",
    NeurIPS 2018, arXiv:1710.09854, algorithm 3.
    """

    compress_ratio: float = 0.05
    iterations: int = 2

    traits = Traits(family="sparsification", unbiased=True, variable_length=True, memory="none")

    def __post_init__(self) -> None:
        check_ratio(self.compress_ratio)
        if not 0 <= self.iterations <= 100:
            raise ValueError(f"iterations={self.iterations!r} must lie in 0 .. 100")

    def variance(self, n: int) -> float | None:
        # p >= ratio * n * |x| / |x|_1 where p < 1, so the sum of x²/p there is at most |x|_1² / (ratio * n).
        return 1 / self.compress_ratio

    def compress(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        xp, wanted = ctx.xp, self.compress_ratio * ctx.size
        largest = xp.max(xp.concat([xp.abs(x), xp.zeros(1)]))
        # Relative to the largest element, so that sums stay in range.
        relative = xp.abs(x) / xp.where(largest > 0, largest, 1.0)
        unit = xp.maximum(xp.sum(relative) / max(wanted, 1.0e-30), TINY)  # p = 1 at and above this magnitude
        for _ in range(self.iterations):
            free = relative < unit
            missing = wanted - xp.sum(xp.cast(relative >= unit, "float32"))
            chances = xp.sum(xp.where(free, relative / unit, 0.0))
            factor = xp.where(chances > 0, missing / xp.where(chances > 0, chances, 1.0), 1.0)
            unit = xp.maximum(unit / xp.maximum(factor, 1.0), TINY)
        # Non-finite elements are always sent, so that every worker sees them.
        always = (relative >= unit) | xp.invert(xp.isfinite(x))
        sometimes = (relative < unit) & (ctx.rng("keep").uniform(ctx.size) < relative / unit)
        certain, drawn = xp.nonzero(always), xp.nonzero(sometimes)
        drawn = signed(xp, drawn, xp.take(x, drawn) < 0)
        return (certain, xp.take(x, certain), drawn, xp.reshape(largest * unit, (1,))), state

    def _pairs(self, payload: Payload, ctx: Context) -> list[tuple[Array, Array]]:
        xp, (certain, values, drawn, magnitude) = ctx.xp, payload
        magnitude = fitting(xp, magnitude, "float32", 1, "magnitudes")
        drawn, negative = unsigned(xp, drawn)
        values = matching(xp, values, "float32", certain, "values")
        return [(values, certain), (xp.where(negative, -magnitude, magnitude), drawn)]


TINY = 1e-30
"""Lower bound of divisors, to avoid division by zero."""
