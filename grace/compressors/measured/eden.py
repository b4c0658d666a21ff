"""Random rotation, then low-bit codes: DRIVE and EDEN."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from grace.compressors.blockwise import Blockwise
from grace.core import Array, Context, MaybeProgram, Payload, State, Traits
from grace.core.registry import register
from grace.ops import blocks
from grace.ops.hadamard import STREAMS, check_width, hadamard, signs, width_of
from grace.ops.packing import pack, unpack
from grace.ops.validate import fitting

CENTROIDS = {  # positive levels of the best quantiser of a normal distribution (Lloyd and Max)
    1: (1.0,),  # any value would do: the scale compensates
    2: (0.4527800, 1.5104176),
    3: (0.2450942, 0.7560052, 1.3439093, 2.1519457),
    4: (0.1283950, 0.3880482, 0.6567590, 0.9423403, 1.2562309, 1.6180461, 2.0690167, 2.7325888),
}


@register("eden", "drive")
@dataclass(frozen=True)
class Eden(Blockwise):
    """Rotate each block at random, round to the levels that suit a normal distribution, and rotate back.

    Payload: codes uint8[bits * d * m / 8]; scales float32[m]; streams uint8[m], the number of each block's rotation,
    0 .. 31. A block has d elements on the wire, padded with zeros.
    ``bits``: 1 (which is DRIVE) .. 4. The squared error is 0.571, 0.133, 0.036 or 0.0096 of the squared norm of a block
    whose elements are all of about one size; workers' errors are independent.
    ``block_size``: d, a power of two; for tensors of fewer elements d is the next power of two, at least 8. A block's
    error is spread over all its elements; with d no larger than the rows of an embedding (64, for 0.6 bits per element
    more), rows without a gradient stay zero.
    ``biased``: True, only for one bit, uses the scale with the smallest squared error (0.363 of the squared norm), for
    a residual; False uses the unbiased scale.
    Vargaftik et al., "DRIVE", NeurIPS 2021, arXiv:2105.08339, and "EDEN", ICML 2022, arXiv:2108.08842. The methods are
    unbiased for a uniform rotation. One Hadamard transform, as in the authors' code, is nearly so: if one element of a
    block outweighs all others, these are lost more often than they should be, so no variance is declared.
    """

    bits: int = 4
    block_size: int = 4096
    biased: bool = False

    def __post_init__(self) -> None:
        check_width("block_size", self.block_size)
        if self.bits not in CENTROIDS:
            raise ValueError(f"bits={self.bits!r} must lie in 1 .. 4")
        if self.biased and self.bits != 1:
            raise ValueError("biased=True is for bits=1: with more bits the two scales hardly differ")

    @cached_property
    def traits(self) -> Traits:
        return Traits(
            family="quantisation",
            block_size=self.block_size or None,
            nonfinite_in_payload=True,
            memory="residual" if self.biased else "none",
        )

    def contraction(self, n: int) -> float | None:
        # |x - x̂|² = |x|² - |r|₁² / d for the rotated block r, whose norm is |r| = |x|; and |r|₁ >= |r| for any vector.
        return 1 / min(self.block_size, max(8, 1 << max(n - 1, 0).bit_length())) if self.biased else None

    def levels(self) -> list[float]:
        """The value of each code, in standard deviations."""
        return [*(-level for level in reversed(CENTROIDS[self.bits])), *CENTROIDS[self.bits]]

    def middles(self) -> list[float]:
        """Boundaries between neighbouring levels."""
        return [(a + b) / 2 for a, b in pairwise(self.levels())]

    def divisor(self, d: int) -> float:
        """The divisor of the biased scale, which is the sum of the rotated magnitudes over this."""
        return CENTROIDS[self.bits][-1] * d**1.5

    def _signs(self, streams: Array, ctx: Context) -> Any:
        d = width_of(ctx, self.block_size)
        return signs(ctx.xp, ctx.shared_rng("rotation").bits(ctx.xp.shape(streams)[0] * d), streams, d)

    def compress(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        xp, d = ctx.xp, width_of(ctx, self.block_size)
        rows = blocks.rows(xp, x, d)
        m = xp.shape(rows)[0]
        streams = xp.full(m, ctx.rank % STREAMS, "uint8")
        # Divide by the largest element, so that squares stay in float32's range.
        largest = xp.max(xp.abs(rows), 1)
        rows = rows / blocks.divisor(xp, largest)
        square = xp.sum(rows * rows, 1)
        # the norm of rotated rows is sqrt(d) times that of rows
        rotated = hadamard(xp, rows * self._signs(streams, ctx))
        levels = self.levels()
        if self.bits == 1:
            codes = xp.reshape(xp.cast(rotated >= 0, "int32"), (-1,))
        else:
            middles = xp.asarray(self.middles(), "float32")
            normal = rotated / blocks.divisor(xp, xp.sqrt(square))
            codes = xp.searchsorted(middles, xp.reshape(normal, (-1,)))
        chosen = xp.reshape(xp.take(xp.asarray(levels, "float32"), codes), (m, d))
        if self.biased:
            scale = xp.sum(xp.abs(rotated), 1) / self.divisor(d)
        else:
            overlap = xp.sum(rotated * chosen, 1)
            scale = square / xp.where(square == 0, 1.0, overlap) * d**0.5
        return (pack(xp, self.bits, codes), scale * largest, streams), state

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        xp, d = ctx.xp, width_of(ctx, self.block_size)
        codes, scale, streams = payload
        m = blocks.block_count(ctx.size, d)
        scale = fitting(xp, scale, "float32", m, "scales")
        streams = xp.bitwise_and(fitting(xp, streams, "uint8", m, "streams"), STREAMS - 1)
        chosen = xp.take(xp.asarray(self.levels(), "float32"), xp.cast(unpack(xp, self.bits, codes, m * d), "int32"))
        # H·H = d·I. The scale already includes 1/sqrt(d); divide by the other sqrt(d) here.
        rows = hadamard(xp, xp.reshape(chosen, (m, d))) * self._signs(streams, ctx)
        return blocks.flat(xp, rows * xp.reshape(scale / d**0.5, (-1, 1)), ctx.size)
