"""Equally populated buckets: SketchML."""

from __future__ import annotations

from dataclasses import dataclass

from grace.core import Array, Compressor, Context, MaybeProgram, Payload, State, Traits
from grace.core.registry import register
from grace.ops.packing import pack, unpack
from grace.ops.validate import fitting


@register("sketch", "sketchml")
@dataclass(frozen=True)
class Sketch(Compressor):
    """Sort the elements into equally populated buckets, and send each element's bucket and each bucket's mean.

    Payload: codes uint8[ceil(b * n / 8)], b bits that number q buckets; means float32[q], q = min(quantiles, n).
    ``quantiles``: number of buckets, 2 .. 256. Equal elements share a bucket, so some may be empty. The sum of all
    elements is preserved.
    Jiang, Fu, Yang and Cui, "SketchML", SIGMOD 2018, doi:10.1145/3183713.3196894, on quantile-bucket
    quantification. Its quantiles are estimates, these are exact; its sketch of sparse gradients is omitted.
    """

    quantiles: int = 64

    traits = Traits(family="hybrid", memory="none")

    def __post_init__(self) -> None:
        if not 2 <= self.quantiles <= 256:
            raise ValueError(f"quantiles={self.quantiles!r} must lie in 2 .. 256 (codes of at most 8 bits)")

    def sizes(self, ctx: Context) -> tuple[int, int]:
        """Number of buckets, and bits per code."""
        q = min(self.quantiles, ctx.size)
        return q, max(1, (q - 1).bit_length())

    def compress(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        xp, n = ctx.xp, ctx.size
        q, bits = self.sizes(ctx)
        # The largest element of each bucket but the last.
        last = xp.asarray([i * n // q - 1 for i in range(1, q)], "int32")
        codes = xp.searchsorted(xp.ranked(x, last), x) if q > 1 else xp.zeros(n, "int32")
        members = xp.segment_sum(xp.full(n, 1.0), codes, q)
        # A non-finite element makes its bucket's mean non-finite.
        means = xp.segment_sum(x, codes, q) / xp.maximum(members, 1.0)
        return (pack(xp, bits, codes), means), state

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        xp, (q, bits) = ctx.xp, self.sizes(ctx)
        means = fitting(xp, payload[1], "float32", q, "means")
        # Codes beyond the buckets are invalid and decode to NaN.
        table = xp.concat([means, xp.full((1 << bits) - q, float("nan"))])
        return xp.take(table, xp.cast(unpack(xp, bits, payload[0], ctx.size), "int32"))
