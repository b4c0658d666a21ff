"""Half precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grace.checks import fitting
from grace.compressors.coded import coded, coded_mean
from grace.core import Array, Combine, Compressor, Context, Payload, State, Steps
from grace.kernels import Codes
from grace.registry import register

CODES = Codes("float16", 16)


@register("fp16")
@dataclass(frozen=True)
class FP16(Compressor):
    """Round to IEEE half precision.

    Payload: float16[n]. Magnitudes above 65504 become infinite, which loss scalers see as an overflow.
    Sums on the wire are of values already divided by the number of workers.
    """

    family = "quantisation"
    largest = 6e4
    combine = Combine.MEAN
    memory = "none"
    block = 1

    def compress(self, x: Array, state: State, ctx: Context) -> Steps[tuple[Payload, State]]:
        return (ctx.xp.cast(x, "float16"),), state

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        return ctx.xp.cast(fitting(ctx.xp, payload[0], "float16", ctx.size, "elements"), "float32")

    def fused(self, x: Array, residual: Array | None, ctx: Context) -> tuple[Payload, Array] | None:
        return coded(x, residual, CODES, 0, None, ctx)

    def fused_mean(self, payloads: Sequence[Payload], out: Array | None, ctx: Context) -> Array | None:
        return coded_mean(payloads, out, CODES, 0, ctx)
