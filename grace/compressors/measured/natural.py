"""Natural compression: powers of two."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from grace.compressors.blockwise import Blockwise
from grace.core import Array, Context, MaybeProgram, Payload, State, Traits
from grace.core.registry import register
from grace.ops import blocks
from grace.ops.validate import fitting

GRACE_TOP = 127 + 18  # exponent field of 2**18, the value of code 127 in GRACE's first release


@register("natural")
@dataclass(frozen=True)
class Natural(Blockwise):
    """Round each magnitude stochastically to a neighbouring power of two, so that the expectation is x.

    Payload: codes uint8[n], sign in the top bit, then 7 bits for the exponent, 0 for zero; top int32[m], the float32
    exponent field of code 127 in each block.
    ``stochastic``: use stochastic rounding; False: round to the nearer power, which is biased but contracts.
    ``window``: "auto" sets code 127 to the block's largest power; magnitudes reach 126 powers below it. "grace" is
    the window of GRACE's first release, 2**-108 .. 2**18: larger magnitudes are clipped, smaller ones become zero.
    ``block_size``: elements that share a window, a multiple of 8; 0: the whole tensor.
    Horvath et al., "Natural Compression for Distributed Deep Learning", 2019, arXiv:1905.10988, section 2.
    """

    stochastic: bool = True
    window: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window not in ("auto", "grace"):
            raise ValueError(f"window={self.window!r}: choose 'auto' or 'grace'")

    @cached_property
    def traits(self) -> Traits:
        return Traits(
            family="quantisation",
            block_size=self.block_size or None,
            unbiased=self.stochastic and self.window == "auto",
            memory="none" if self.stochastic else "residual",
        )

    def variance(self, n: int) -> float | None:
        return 1 / 8 if self.traits.unbiased else None

    def contraction(self, n: int) -> float | None:
        return 8 / 9 if not self.stochastic and self.window == "auto" else None

    def compress(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        xp, n = ctx.xp, ctx.size
        bits = xp.bitwise_and(xp.bitcast(x, "int32"), 0x7FFFFFFF)
        mantissa = xp.bitwise_and(bits, 0x7FFFFF)
        if self.stochastic:  # round up with probability mantissa / 2**23, exactly
            up = mantissa > xp.bitwise_and(xp.shift_right(ctx.rng("round").bits(n), 9), 0x7FFFFF)
        else:
            up = mantissa >= 0x400000
        zero = xp.zeros(n, "int32")
        field = xp.minimum(xp.shift_right(bits, 23) + xp.cast(up, "int32"), 254)
        field = xp.where(bits >= 0x800000, field, zero)  # subnormal numbers become zero
        fields = blocks.rows(xp, field, self.traits.block_size)
        m = blocks.block_count(n, self.traits.block_size)
        top = xp.max(fields, 1) if self.window == "auto" else xp.full(m, GRACE_TOP, "int32")
        code = xp.where(fields > 0, xp.minimum(xp.maximum(fields - xp.reshape(top, (-1, 1)) + 127, 0), 127), 0)
        code = xp.bitwise_or(blocks.flat(xp, code, n), xp.cast(x < 0, "int32") * 128)
        # Exponent field 255 marks a block with a non-finite element; no power of two uses it.
        largest = xp.max(blocks.rows(xp, bits, self.traits.block_size), 1)
        return (xp.cast(code, "uint8"), xp.where(largest >= 0x7F800000, xp.full(m, 255, "int32"), top)), state

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        xp, n = ctx.xp, ctx.size
        codes = blocks.rows(xp, xp.cast(fitting(xp, payload[0], "uint8", n, "codes"), "int32"), self.traits.block_size)
        top = fitting(xp, payload[1], "int32", blocks.block_count(n, self.traits.block_size), "tops")
        # other values of the exponent field are invalid
        top = xp.reshape(xp.where((top >= 0) & (top < 255), top, 255), (-1, 1))
        magnitude = xp.bitwise_and(codes, 127)
        field = xp.maximum(magnitude + top - 127, 0)
        value = xp.bitcast(xp.reshape(xp.shift_left(field, 23), (-1,)), "float32")
        value = xp.where(magnitude > 0, xp.reshape(value, xp.shape(magnitude)), 0.0)
        value = xp.where(top < 255, xp.where(codes >= 128, -value, value), float("nan"))
        return blocks.flat(xp, value, n)
