"""1-bit SGD."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from grace.compressors.blockwise import Blockwise
from grace.core import Array, Context, MaybeProgram, Payload, State, Traits
from grace.core.registry import register
from grace.ops import blocks
from grace.ops.validate import fitting


@register("onebit")
@dataclass(frozen=True)
class OneBit(Blockwise):
    """Send the signs, and the mean of the negative and of the other elements, which preserves each block's sum.

    Payload: bits uint8[ceil(n/8)], 1 where x < 0; means float32[2m], for each block the mean of its negative elements
    (0 if there are none), then that of the others.
    ``block_size``: elements that share means, a multiple of 8; 0: the whole tensor.
    Seide, Fu, Droppo, Li and Yu, "1-bit stochastic gradient descent", Interspeech 2014, section 3.
    """

    @cached_property
    def traits(self) -> Traits:
        return Traits(family="quantisation", block_size=self.block_size or None, nonfinite_in_payload=True)

    def contraction(self, n: int) -> float | None:
        return 1 / max(1, min(n, self.traits.block_size or n))

    def compress(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        xp, n = ctx.xp, ctx.size
        negative = x < 0
        below = xp.sum(blocks.rows(xp, xp.cast(negative, "float32"), self.traits.block_size), 1)
        parts = (
            (xp.where(negative, x, 0.0), below),
            (xp.where(negative, 0.0, x), blocks.counts(xp, n, self.traits.block_size) - below),
        )
        means = [
            xp.reshape(xp.sum(blocks.rows(xp, part, self.traits.block_size), 1), (-1, 1)) / blocks.divisor(xp, count)
            for part, count in parts
        ]
        return (xp.bits.pack(negative), xp.reshape(xp.concat(means, 1), (-1,))), state

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        xp, n = ctx.xp, ctx.size
        bits = fitting(xp, payload[0], "uint8", -(-n // 8), "bits")
        negative = blocks.rows(xp, xp.bits.unpack(bits, n), self.traits.block_size)
        means = fitting(xp, payload[1], "float32", 2 * blocks.block_count(n, self.traits.block_size), "means")
        means = xp.reshape(means, (-1, 2))
        # A non-finite mean must show in both classes, since one of them may be empty.
        means = means + (means[:, :1] - means[:, :1]) + (means[:, 1:] - means[:, 1:])
        return blocks.flat(xp, xp.where(negative, means[:, :1], means[:, 1:]), n)
