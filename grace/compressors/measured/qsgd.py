"""Quantised SGD."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from grace.core import Array, Compressor, Context, MaybeProgram, Payload, State, Traits
from grace.core.registry import register
from grace.ops import blocks
from grace.ops.packing import pack, packed_size, unpack
from grace.ops.validate import fitting


@register("qsgd")
@dataclass(frozen=True)
class QSGD(Compressor):
    """Round |x| / ||x|| stochastically to 0 or one of ``quantum_num`` levels, so that the expectation is x.

    The expectation is exact up to 2**-17 of a level (`grace.core.rng.Rng.noise`): an element below norm / (2**17 *
    quantum_num) always becomes zero.
    Payload: codes uint8[ceil(b * n / 8)], b = 1 + bits of quantum_num, sign in the top bit; norms float32[m].
    ``quantum_num``: levels s, 1 .. 127. ``bucket_size``: elements that share a norm; 0: the whole tensor.
    Alistarh et al., "QSGD", NeurIPS 2017, arXiv:1610.02132, section 3.1.
    """

    quantum_num: int = 127
    bucket_size: int = 512

    def __post_init__(self) -> None:
        if not 1 <= self.quantum_num <= 127:
            raise ValueError(f"quantum_num={self.quantum_num!r} must lie in 1 .. 127 (codes of at most 8 bits)")
        blocks.check_block("bucket_size", self.bucket_size)

    @cached_property
    def traits(self) -> Traits:
        return Traits(
            family="quantisation",
            block_size=self.bucket_size or None,
            unbiased=True,
            nonfinite_in_payload=True,
            memory="none",
        )

    @property
    def bits(self) -> int:
        """Bits of one code, its sign included."""
        return 1 + self.quantum_num.bit_length()

    def variance(self, n: int) -> float | None:
        n = min(n, self.traits.block_size or n)
        return min(n / self.quantum_num**2, n**0.5 / self.quantum_num)

    def compress(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        xp, n = ctx.xp, ctx.size
        table = blocks.rows(xp, x, self.traits.block_size)
        norm = blocks.norms(xp, table)
        level = xp.abs(table) / blocks.divisor(xp, norm) * float(self.quantum_num)
        level = xp.floor(blocks.flat(xp, level, n) + ctx.rng("round").noise(n))
        level = xp.minimum(level, float(self.quantum_num))
        codes = xp.cast(level, "int32") + xp.cast(x < 0, "int32") * (1 << (self.bits - 1))
        return (pack(xp, self.bits, codes), norm), state

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        xp, n = ctx.xp, ctx.size
        if 8 % self.bits:  # codes cross byte boundaries
            codes = unpack(xp, self.bits, payload[0], n)
            level = xp.bits.map_bytes(lambda codes, m: self._levels(xp, codes), codes, n)
        else:
            size = packed_size(self.bits, n)
            packed = fitting(xp, payload[0], "uint8", size, "codes")
            each = 8 // self.bits
            level = xp.bits.map_bytes(
                lambda part, m: self._levels(xp, unpack(xp, self.bits, part, m * each)), packed, size
            )
        return blocks.scaled(xp, level[:n], payload[1], self.traits.block_size)

    def _levels(self, xp: Any, codes: Array) -> Array:
        # Returns the values of codes, relative to the norm.
        codes, top = xp.cast(codes, "int32"), 1 << (self.bits - 1)
        level = xp.cast(xp.bitwise_and(codes, top - 1), "float32") / float(self.quantum_num)
        return xp.where(codes >= top, -level, level)
