"""Half precision."""

from __future__ import annotations

from dataclasses import dataclass

from grace.core import Array, Combine, Compressor, Context, MaybeProgram, Payload, State, Traits
from grace.core.registry import register
from grace.ops.validate import fitting


@register("fp16")
@dataclass(frozen=True)
class FP16(Compressor):
    """Round to IEEE half precision.

    Payload: float16[n]. Magnitudes above 65504 become infinite, which loss scalers see as an overflow.
    Values are divided by the number of workers before they are summed on the wire.
    """

    traits = Traits(family="quantisation", combine=Combine.MEAN, block_size=1, max_magnitude=6e4, memory="none")

    def compress(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        return (ctx.xp.cast(x, "float16"),), state

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        return ctx.xp.cast(fitting(ctx.xp, payload[0], "float16", ctx.size, "elements"), "float32")
