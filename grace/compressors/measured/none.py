"""No compression: the baseline."""

from __future__ import annotations

from dataclasses import dataclass

from grace.core import Array, Combine, Compressor, Context, MaybeProgram, Payload, State, Traits
from grace.core.registry import register
from grace.ops.validate import fitting


@register("none", "nocompression")
@dataclass(frozen=True)
class NoCompression(Compressor):
    """Send the gradient uncompressed.

    Payload: float16, bfloat16, float32 or float64[n], the gradient's own dtype; at most float32 with a policy, or with
    a memory that changes the gradient. 16-bit values are divided by the number of workers before they are summed on the
    wire; gathered values are summed in float32.
    """

    traits = Traits(
        family="quantisation",
        combine=Combine.MEAN,
        block_size=1,
        unbiased=True,
        sends_exact_values=True,
        lossless=True,
        memory="none",
    )

    def contraction(self, n: int) -> float | None:
        return 1.0

    def variance(self, n: int) -> float | None:
        return 0.0

    def compress(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        return (ctx.xp.cast(x, ctx.wire),), state

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        return ctx.xp.cast(fitting(ctx.xp, payload[0], ctx.wire, ctx.size, "elements"), ctx.dtype)
