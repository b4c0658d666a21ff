"""Top-k per chunk, two bits per value."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from grace.compressors.sparse import Placed
from grace.core import Array, Context, MaybeProgram, Payload, State, Traits
from grace.core.registry import register
from grace.ops import blocks, index_coding
from grace.ops.packing import pack, unpack
from grace.ops.validate import fitting


@register("chunktopk")
@dataclass(frozen=True)
class ChunkTopK(Placed):
    """Send the largest elements of each chunk, as signs and one of two magnitudes.

    Payload: places in the chunk, ascending: the low eight bits uint8[K] and, for chunks of more than 256, the other
    bits packed; codes uint8[ceil(K/4)], two bits each: bit 0 is set for the larger magnitude, bit 1 for negative
    elements; magnitudes float32[2 m].
    The two magnitudes of a chunk are means: of its selected elements below their mean magnitude, and of the selected
    elements at or above it.
    K is chunk_k times the number of chunks; a short last chunk sends at most all its elements. Chunks are compressed
    independently, so the method works in two stages.
    ``chunk_size``: elements per chunk, a power of two, 8 .. 65536. ``chunk_k``: number of elements to send per chunk, a
    multiple of 8.
    Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025, arXiv:2508.15706, after which this
    method is modelled; its outer optimizer, error decay and quantiser differ.
    """

    chunk_size: int = 4096
    chunk_k: int = 64

    def __post_init__(self) -> None:
        if not 8 <= self.chunk_size <= 65536 or self.chunk_size & (self.chunk_size - 1):
            raise ValueError(f"chunk_size={self.chunk_size!r} must be a power of two in 8 .. 65536")
        if not 8 <= self.chunk_k <= self.chunk_size or self.chunk_k % 8:
            raise ValueError(f"chunk_k={self.chunk_k!r} must be a multiple of 8 in 8 .. chunk_size={self.chunk_size}")

    @cached_property
    def traits(self) -> Traits:
        return Traits(family="hybrid", block_size=self.chunk_size, nonfinite_in_payload=True)

    def contraction(self, n: int) -> float | None:
        # The k sent elements of a chunk of s hold at least k / s of its sum of squares, and even a single mean
        # magnitude keeps 1 / k of that.
        return 1 / max(1, min(n, self.chunk_size))

    def count(self, n: int) -> int:
        """K for n elements."""
        full, rest = divmod(n, self.chunk_size)
        return full * self.chunk_k + min(rest, self.chunk_k)

    def compress(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        xp, k = ctx.xp, self.count(ctx.size)
        # Zeros that pad the last chunk come last among ties: they have the highest places and are cut off.
        table = blocks.rows(xp, x, self.chunk_size)
        places = xp.reshape(xp.topk_abs(table, self.chunk_k), (-1,))[:k]
        values = xp.take(x, self._positions(places, ctx))
        sizes = blocks.rows(xp, xp.abs(values), self.chunk_k)
        mean = xp.sum(sizes, 1) / blocks.counts(xp, k, self.chunk_k)
        high = sizes >= xp.reshape(mean, (-1, 1))
        many = xp.sum(xp.cast(blocks.rows(xp, blocks.flat(xp, high, k), self.chunk_k), "float32"), 1)
        few = blocks.counts(xp, k, self.chunk_k) - many
        above = xp.sum(xp.where(high, sizes, 0.0), 1) / xp.maximum(many, 1.0)
        below = xp.sum(xp.where(high, 0.0, sizes), 1) / xp.maximum(few, 1.0)
        magnitudes = xp.reshape(xp.concat([xp.reshape(below, (-1, 1)), xp.reshape(above, (-1, 1))], 1), (-1,))
        codes = xp.cast(blocks.flat(xp, high, k), "int32") + 2 * xp.cast(values < 0, "int32")
        return (*index_coding.narrow(xp, places, self.chunk_size), pack(xp, 2, codes), magnitudes), state

    def parts(self, payload: Payload, ctx: Context) -> tuple[Array, Array]:
        xp, k = ctx.xp, self.count(ctx.size)
        *sent, codes, magnitudes = payload
        places = index_coding.widen(xp, tuple(sent), self.chunk_size, k)
        codes = xp.cast(unpack(xp, 2, codes, k), "int32")
        magnitudes = fitting(xp, magnitudes, "float32", 2 * blocks.block_count(k, self.chunk_k), "magnitudes")
        low, high = magnitudes[0::2], magnitudes[1::2]
        larger = blocks.rows(xp, xp.bitwise_and(codes, 1), self.chunk_k) != 0
        size = xp.where(larger, xp.reshape(high, (-1, 1)), xp.reshape(low, (-1, 1)))
        size = blocks.flat(xp, size, k)
        return xp.where(codes >= 2, -size, size), self._positions(places, ctx)

    def _positions(self, places: Array, ctx: Context) -> Array:
        # Converts positions in chunks to positions in the tensor.
        xp, k = ctx.xp, self.count(ctx.size)
        starts = xp.arange(blocks.block_count(k, self.chunk_k)) * self.chunk_size
        return blocks.flat(xp, blocks.rows(xp, places, self.chunk_k) + xp.reshape(starts, (-1, 1)), k)
