"""General biased rounding, to the powers of any base."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from grace.compressors.blockwise import Blockwise
from grace.core import Array, Context, MaybeProgram, Payload, State, Traits
from grace.core.registry import register
from grace.ops import blocks
from grace.ops.validate import fitting

SMALLEST = 2.0**-126
"""The smallest normal float32; smaller magnitudes become zero."""
POWERS = 127
"""Number of powers that the codes of one block can express."""


@register("geometric")
@dataclass(frozen=True)
class Geometric(Blockwise):
    """Round each element to the nearest power of a base, with its sign, or to zero.

    Payload: codes uint8[n], sign in the top bit, then 7 bits for the power, 0 for zero; top int32[m], the exponent that
    code 127 stands for in each block, which is that of its largest element.
    ``beta``: the base, 1.1 .. 16. No error exceeds (beta - 1) / (beta + 1) times its element; only elements more than
    126 powers below the largest of their block become zero.
    ``block_size``: elements that share a top, a multiple of 8; 0: the whole tensor.
    Beznosikov, Horvath, Richtarik and Safaryan, "On Biased Compression for Distributed Learning", 2020,
    arXiv:2002.12410, on general biased rounding. Its stochastic counterpart for base 2 is ``natural``.
    """

    beta: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1.1 <= self.beta <= 16:
            raise ValueError(f"beta={self.beta!r} must lie in 1.1 .. 16")

    @cached_property
    def traits(self) -> Traits:
        return Traits(family="quantisation", block_size=self.block_size or None)

    def contraction(self, n: int) -> float | None:
        # Elements that become zero are at most beta**-126 times the largest.
        n = max(1, min(n, self.block_size or n))
        beyond = (n - 1) * self.beta**-252
        return 4 * self.beta / (self.beta + 1) ** 2 - beyond

    @cached_property
    def powers(self) -> tuple[int, list[float]]:
        """The lowest exponent whose power is a normal float32, and all powers from there to the largest float32."""
        step = math.log2(self.beta)
        low, high = math.ceil(-126 / step), math.floor(127.999999 / step)
        return low, [self.beta**i for i in range(low, high + 1)]

    def compress(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        xp, n, block = ctx.xp, ctx.size, self.block_size or None
        low, powers = self.powers
        # ``places``: 0 stands for zero, i for the power with exponent low + i - 1.
        bounds = [SMALLEST, *((a + b) / 2 for a, b in pairwise(powers))]
        size = xp.where(xp.isfinite(x), xp.abs(x), 0.0)
        places = blocks.rows(xp, xp.searchsorted(xp.asarray(bounds, "float32"), size), block)
        top = xp.max(places, 1)
        codes = xp.where(places > 0, xp.maximum(places - xp.reshape(top, (-1, 1)) + POWERS, 0), 0)
        codes = xp.bitwise_or(blocks.flat(xp, codes, n), xp.cast(x < 0, "int32") * 128)
        # A top above the last power marks a block with a non-finite element.
        bad = xp.max(blocks.rows(xp, xp.cast(xp.invert(xp.isfinite(x)), "int32"), block), 1)
        top = xp.where(bad > 0, xp.full(blocks.block_count(n, block), len(bounds) + 1, "int32"), top)
        return (xp.cast(codes, "uint8"), top + (low - 1)), state

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        xp, n, block = ctx.xp, ctx.size, self.block_size or None
        low, powers = self.powers
        codes = blocks.rows(xp, xp.cast(fitting(xp, payload[0], "uint8", n, "codes"), "int32"), block)
        top = fitting(xp, payload[1], "int32", blocks.block_count(n, block), "tops") - (low - 1)
        valid = (top >= 0) & (top <= len(powers))
        magnitude = xp.bitwise_and(codes, 127)
        places = magnitude + xp.reshape(xp.where(valid, top, 0), (-1, 1)) - POWERS
        places = xp.where(magnitude > 0, xp.maximum(places, 0), 0)
        value = xp.take(xp.asarray([0.0, *powers], "float32"), xp.reshape(places, (-1,)))
        value = xp.reshape(value, xp.shape(places))
        value = xp.where(xp.reshape(valid, (-1, 1)), xp.where(codes >= 128, -value, value), float("nan"))
        return blocks.flat(xp, value, n)
