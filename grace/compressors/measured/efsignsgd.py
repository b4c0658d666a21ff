"""Scaled signs with error feedback."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from grace.compressors.blockwise import Blockwise
from grace.core import Array, Context, MaybeProgram, Payload, State, Traits
from grace.core.registry import register
from grace.ops import blocks
from grace.ops.validate import fitting


@register("efsignsgd", "scaled_sign")
@dataclass(frozen=True)
class EFSignSGD(Blockwise):
    """Send the signs and the mean magnitude; the residual recovers the error.

    Payload: bits uint8[ceil(n/8)], 1 where x >= 0; scales float32[m].
    ``block_size``: elements that share a scale, a multiple of 8; 0: the whole tensor, as in the paper.
    Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019, arXiv:1901.09847, algorithm 1.
    """

    @cached_property
    def traits(self) -> Traits:
        return Traits(family="quantisation", block_size=self.block_size or None, nonfinite_in_payload=True)

    def contraction(self, n: int) -> float | None:
        return 1 / max(1, min(n, self.traits.block_size or n))

    def compress(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        xp, n = ctx.xp, ctx.size
        total = xp.sum(xp.abs(blocks.rows(xp, x, self.traits.block_size)), 1)
        return (xp.bits.pack_signs(x), total / blocks.counts(xp, n, self.traits.block_size)), state

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        return blocks.scaled(ctx.xp, self.signs(payload, ctx), payload[1], self.traits.block_size)

    def residual(self, x: Array, payload: Payload, ctx: Context) -> Array:
        return blocks.add_scaled(ctx.xp, x, self.signs(payload, ctx), -payload[1], self.traits.block_size)

    def signs(self, payload: Payload, ctx: Context) -> Array:
        """Return float32[n]: 1 and -1."""
        return ctx.xp.bits.unpack_signs(fitting(ctx.xp, payload[0], "uint8", -(-ctx.size // 8), "bits"), ctx.size)
