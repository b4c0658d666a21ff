"""Ternary gradients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from grace.compressors.blockwise import Blockwise
from grace.core import Array, Context, MaybeProgram, Payload, State, Traits
from grace.core.registry import register
from grace.ops import blocks
from grace.ops.packing import pack, packed_size, unpack
from grace.ops.validate import fitting


@register("terngrad")
@dataclass(frozen=True)
class TernGrad(Blockwise):
    """Round each element stochastically to -s, 0 or s, with s the largest magnitude, so that the expectation is x.

    Payload: codes uint8[ceil(n/4)], 0, 1, 2 for -s, 0, s; scales float32[m].
    ``clip``: magnitudes above this many root mean squares are clipped first, which adds a bias; 0: no clipping.
    ``block_size``: elements that share a scale, a multiple of 8; 0: the whole tensor, as in the paper.
    Wen et al., "TernGrad", NeurIPS 2017, arXiv:1705.07878, section 3. The paper clips by the standard deviation, which
    is zero for a constant tensor; here by the root mean square about zero, so constants and single elements are exact.
    """

    clip: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.clip == 0 or self.clip >= 1):
            raise ValueError(f"clip={self.clip!r} must be 0 (off) or at least 1 root mean square, such as 2.5")

    @cached_property
    def traits(self) -> Traits:
        return Traits(family="quantisation", block_size=self.block_size or None, unbiased=self.clip == 0, memory="none")

    def variance(self, n: int) -> float | None:
        return (max(1, min(n, self.traits.block_size or n)) ** 0.5 - 1) / 2 if self.traits.unbiased else None

    def compress(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        xp, n = ctx.xp, ctx.size
        table = xp.abs(blocks.rows(xp, x, self.traits.block_size))
        scale = xp.max(table, 1)
        share = table / blocks.divisor(xp, scale)
        if self.clip:
            mean = xp.sum(share * share, 1) / blocks.counts(xp, n, self.traits.block_size)
            limit = xp.minimum(xp.sqrt(mean) * float(self.clip), 1.0)
            scale = scale * limit
            share = share / blocks.divisor(xp, limit)  # above 1 for clipped elements
        sent = xp.cast(ctx.rng("round").uniform(n) < blocks.flat(xp, share, n), "int32")
        codes = 1 + sent * (xp.cast(x > 0, "int32") - xp.cast(x < 0, "int32"))
        return (pack(xp, 2, codes), scale), state

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        xp, n = ctx.xp, ctx.size
        size = packed_size(2, n)
        packed = fitting(xp, payload[0], "uint8", size, "codes")
        signs = xp.bits.map_bytes(lambda part, m: xp.cast(unpack(xp, 2, part, 4 * m), "float32") - 1.0, packed, size)
        return blocks.scaled(xp, signs[:n], payload[1], self.traits.block_size)
