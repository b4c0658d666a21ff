"""Four bits per element: the nearest of 15 levels."""

from dataclasses import dataclass
from functools import cached_property

from grace import Compressor, Traits, blocks, register
from grace.ops.packing import pack, unpack


@register("nearest4")
@dataclass(frozen=True)
class Nearest4(Compressor):
    """Round to the nearest of 15 levels between plus and minus the largest magnitude of the block.

    Payload: codes uint8[ceil(n/2)], 0 .. 14; scales float32[m].
    ``block_size``: elements that share a scale, a multiple of 8.
    """

    block_size: int = 64

    def __post_init__(self):
        if self.block_size < 8 or self.block_size % 8:
            raise ValueError(f"block_size={self.block_size!r} must be a multiple of 8")

    @cached_property
    def traits(self):
        return Traits(family="quantisation", block_size=self.block_size)

    def contraction(self, n):
        # No error exceeds half a step (scale / 14) or the element itself, and the largest element has none.
        return 1 / (1 + (min(n, self.block_size) - 1) / 14**2)

    def compress(self, x, state, ctx):
        xp = ctx.xp
        table = blocks.rows(xp, x, self.block_size)  # [n] -> [m, block], the tail filled with zeros
        scale = xp.max(xp.abs(table), 1)
        levels = blocks.flat(xp, xp.round(table / blocks.divisor(xp, scale) * 7.0), ctx.size)
        return (pack(xp, 4, xp.cast(levels, "int32") + 7), scale), state

    def decompress(self, payload, ctx):
        xp, (codes, scale) = ctx.xp, payload
        levels = xp.cast(unpack(xp, 4, codes, ctx.size), "float32") - 7.0
        return blocks.scaled(xp, levels, scale / 7.0, self.block_size)
