"""No compression: the baseline."""

from __future__ import annotations

from dataclasses import dataclass

from grace.checks import fitting
from grace.core import Array, Combine, Compressor, Context, Payload, State, Steps
from grace.registry import register


@register("none", "nocompression")
@dataclass(frozen=True)
class NoCompression(Compressor):
    """Send the gradient as it is.

    Payload: float32[n].
    """

    family = "quantisation"
    combine = Combine.MEAN
    mask = True
    unbiased = True
    memory = "none"
    block = 1

    def contraction(self, n: int) -> float | None:
        return 1.0

    def variance(self, n: int) -> float | None:
        return 0.0

    def compress(self, x: Array, state: State, ctx: Context) -> Steps[tuple[Payload, State]]:
        return (x,), state

    def residual(self, x: Array, payload: Payload, ctx: Context) -> Array:
        return ctx.xp.zeros(ctx.size)

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        return fitting(ctx.xp, payload[0], "float32", ctx.size, "elements")
