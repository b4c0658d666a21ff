"""Integers with a scale shared by all workers, so that they can be summed on the wire."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from grace.compressors.blockwise import Blockwise
from grace.core import Array, Combine, Context, Payload, Program, State, Traits
from grace.core.collectives import Reduce
from grace.core.registry import register
from grace.core.sharding import spans
from grace.ops import blocks
from grace.ops.validate import fitting

# default levels in int32: their error is far below the noise of a batch, and the sums of 65 535 workers fit
WIDE = 2**15


@register("shared_int")
@dataclass(frozen=True)
class SharedInt(Blockwise):
    """Round x / s * levels stochastically to integers, s the largest magnitude on any worker; sum these on the wire.

    Two rounds: each block's largest magnitudes float32[m] are gathered, then the integers are summed. The result is
    unbiased.
    The declared variance for ``levels=0`` in int8 assumes 127 workers, each with one level.
    Payload: n sums of ``dtype``; scales float32[m]; this worker's own n integers, which are not sent again.
    ``dtype``: "int8" or "int32".
    ``levels``: integers are -levels .. levels; 1 is TernGrad with a common scale. 0: for int8 127 / N, rounded down, so
    that the sum over N workers fits; for int32 32768.
    ``block_size``: elements that share a scale, a multiple of 8; 0: the whole tensor.
    Xin et al., "Global-QSGD", 2023, arXiv:2305.18627, with linear levels and the largest magnitude as the norm.
    Mishchenko et al., "IntSGD", ICLR 2022, arXiv:2102.08374, derives the scale from the length of the last step
    instead.
    """

    dtype: str = "int8"
    levels: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype not in ("int8", "int32"):
            raise ValueError(f"dtype={self.dtype!r}: choose 'int8' or 'int32'")
        if not 0 <= self.levels <= 2**24:
            raise ValueError(f"levels={self.levels!r} must lie in 1 .. 2**24 (float32 has no more), or be 0")

    @cached_property
    def traits(self) -> Traits:
        return Traits(
            family="quantisation",
            combine=Combine.AGREED,
            block_size=self.block_size or None,
            unbiased=True,
            memory="none",
            wire_sum=(self.dtype, self.levels or (WIDE if self.dtype == "int32" else 1)),
        )

    def top(self, ctx: Context) -> int:
        """The largest integer that a worker sends."""
        return self.levels or (WIDE if self.dtype == "int32" else max(1, 127 // ctx.world_size))

    def variance(self, n: int) -> float | None:
        # The variance of the mean, relative to the mean of the workers' |x|²; the square of the common scale is at most
        # N times that mean. By default, int8 is assumed to have one level (127 workers).
        n, levels = min(n, self.traits.block_size or n), self.levels or (WIDE if self.dtype == "int32" else 1)
        return min(n / (4 * levels**2), n**0.5 / levels)

    def compress(self, x: Array, state: State, ctx: Context) -> Program[tuple[Payload, State]]:
        xp, spans = ctx.xp, self._spans(ctx)
        scale = yield from self.scale(x, ctx)
        if len(spans) == 1:
            own = self._integers(x, scale, ctx)
        else:
            own = xp.buffers.empty(ctx.size, self.dtype)
            for start, stop in spans:
                part = self._integers(x[start:stop], self._scales(scale, start, stop), ctx.piece(start, stop - start))
                xp.buffers.write(own[start:stop], part)
        (total,) = yield Reduce((own,), "sum")
        return (total, scale, own), state

    def scale(self, x: Array, ctx: Context) -> Program[Array]:
        """Return float32[m], each block's largest magnitude on any worker."""
        xp, spans = ctx.xp, self._spans(ctx)
        largest = xp.concat(
            [xp.max_abs(blocks.rows(xp, x[start:stop], self.traits.block_size)) for start, stop in spans]
        )
        if self.traits.block_size is None and len(spans) > 1:
            largest = xp.reshape(xp.max(largest), (1,))
        return (yield from blocks.largest_of_all(xp, largest))

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        if len(self._spans(ctx)) == 1:
            return self._values(payload[0], payload[1], ctx.world_size, ctx)
        out = ctx.xp.buffers.empty(ctx.size)
        for start, stop, values in self.decoded(payload[0], payload[1], ctx.world_size, ctx):
            ctx.xp.buffers.write(out[start:stop], values)
        return out

    def residual(self, x: Array, payload: Payload, ctx: Context) -> Array:
        xp, found = ctx.xp, []
        for start, stop, values in self.decoded(payload[2], payload[1], 1, ctx):
            found.append(xp.inplace.subtract(x[start:stop], values))
        return x if xp.buffers.same_memory(found[0], x) else xp.concat(found)

    def _spans(self, ctx: Context) -> list[tuple[int, int]]:
        return spans(ctx.xp, ctx.size, self.traits.block_size or 8)

    def _scales(self, scale: Array, start: int, stop: int) -> Array:
        # The scales of the blocks that elements ``start .. stop`` belong to.
        return (
            scale
            if self.traits.block_size is None
            else scale[start // self.traits.block_size : -(-stop // self.traits.block_size)]
        )

    def _integers(self, x: Array, scale: Array, ctx: Context) -> Array:
        xp, n = ctx.xp, ctx.size
        rows = blocks.rows(xp, x, self.traits.block_size)
        steps = blocks.flat(xp, rows / blocks.divisor(xp, scale) * float(self.top(ctx)), n)
        return xp.cast(ctx.rng("round").rounded(steps, n), self.dtype)

    def decoded(self, total: Array, scale: Array, workers: int, ctx: Context) -> Iterator[tuple[int, int, Array]]:
        """Decode the sums of ``workers`` workers to their mean, chunk by chunk: yields (start, stop, values)."""
        self.checked(total, scale, ctx)
        for start, stop in self._spans(ctx):
            here = ctx.piece(start, stop - start)
            yield start, stop, self._values(total[start:stop], self._scales(scale, start, stop), workers, here)

    def checked(self, total: Array, scale: Array, ctx: Context) -> tuple[Array, Array]:
        """Return sums and scales; ValueError for wrong dtypes or lengths."""
        scale = fitting(ctx.xp, scale, "float32", blocks.block_count(ctx.size, self.traits.block_size), "scales")
        return fitting(ctx.xp, total, self.dtype, ctx.size, "sums"), scale

    def _values(self, total: Array, scale: Array, workers: int, ctx: Context) -> Array:
        total = fitting(ctx.xp, total, self.dtype, ctx.size, "sums")
        steps = ctx.xp.cast(total, "float32") / float(self.top(ctx) * workers)
        return blocks.scaled(ctx.xp, steps, scale, self.traits.block_size)
