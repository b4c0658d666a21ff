"""Top-k rows of an averaged sketch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from grace.compressors.agreed import AgreedSparsifier
from grace.compressors.selectors import Exact
from grace.compressors.sparse import Elements, scattered
from grace.core import Array, Compressor, Context, Payload, Program, State
from grace.core.collectives import Reduce
from grace.core.registry import register
from grace.core.sharding import spans
from grace.ops import blocks
from grace.ops.validate import placed


@register("arctopk")
@dataclass(frozen=True)
class ARCTopK(AgreedSparsifier):
    """Send the rows of the gradient that are largest in the mean, according to a small averaged sketch.

    Two rounds, both averaged on the wire: first the products of each row with a few random sign vectors, equal on all
    workers; then the values of the rows with the largest products. All workers select the same rows.
    Payload: values of the mean float32[k * row_size], rows int32[k], ascending, agreed on by all workers; the last row
    is padded with zeros.
    ``compress_ratio``: the share of rows to send, in (0, 1]. ``row_size``: elements per row, at least 1.
    ``sketch_size``: number of random vectors; the sketch costs 4 sketch_size / row_size bytes per element.
    A row that cancels out over the workers is not selected, and a random product may miss a large row, so no single
    step is guaranteed to contract. Rows are cut from the flattened tensor; the paper's are those of its matrix. The
    paper combines the method with momentum and EF21; here it works with any memory.
    Chen, Ma, Li, He, Dong and Yuan, "An All-Reduce Compatible Top-K Compressor for Communication-Efficient Distributed
    Learning", 2025, arXiv:2510.26709.
    """

    row_size: int = 128
    sketch_size: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.row_size <= blocks.LARGEST:
            raise ValueError(f"row_size={self.row_size!r} must lie in 1 .. {blocks.LARGEST}")
        if not 1 <= self.sketch_size <= min(self.row_size, 256):
            raise ValueError(f"sketch_size={self.sketch_size!r} must lie in 1 .. row_size={self.row_size}, and 256")

    @cached_property
    def elements(self) -> Elements:
        return Rows(Exact(self.compress_ratio), row_size=self.row_size)

    def compress(self, x: Array, state: State, ctx: Context) -> Program[tuple[Payload, State]]:
        xp, own, k = ctx.xp, self._sketch(x, ctx), self.count(ctx.size) // self.row_size
        sound = xp.finite(xp.reshape(own, (-1,)))  # the sketch sums all elements, so it is finite only if x is
        (sketch,) = yield Reduce((own,), "mean")
        # Squares are relative to the largest, so that those of 1e30 or 1e-30 stay in float32's range.
        largest = xp.max(xp.abs(xp.concat([xp.reshape(sketch, (-1,)), xp.zeros(1)])))
        relative = sketch / blocks.divisor(xp, largest)
        chosen = xp.topk(xp.sum(relative * relative, 1), k)
        places = self.elements.read((chosen,), ctx)
        values = xp.where(places < ctx.size, xp.take(x, xp.minimum(places, ctx.size - 1)), 0.0)
        (values,) = yield Reduce((xp.where(sound, values, float("nan")),), "mean")
        return (values, chosen), state

    def _sketch(self, x: Array, ctx: Context) -> Array:
        # Returns float32[m, sketch_size], the products of each row with the sign vectors, which are equal on all
        # workers.
        xp, size, many = ctx.xp, self.row_size, self.sketch_size
        words = ctx.shared_rng("signs").bits(many * size)
        signs = xp.reshape(xp.where(words < 0, -1.0, xp.full(many * size, 1.0)), (many, size))
        # Sums, unlike a matrix product, are equal on every toolkit and device, so ties are resolved equally.
        parts = []
        for start, stop in spans(xp, ctx.size, size):
            rows = blocks.rows(xp, x[start:stop], size)
            parts.append(xp.concat([xp.sum(rows * signs[i : i + 1], 1, keepdims=True) for i in range(many)], 1))
        return xp.concat(parts)

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        whole = blocks.block_count(ctx.size, self.row_size) * self.row_size
        return scattered(ctx.xp, [self.elements.parts(payload, ctx)], whole)[: ctx.size]

    aggregate = Compressor.aggregate  # the default, which calls `decompress`

    def residual(self, x: Array, payload: Payload, ctx: Context) -> Array:
        filled = ctx.xp.reshape(blocks.rows(ctx.xp, x, self.row_size), (-1,))
        return super().residual(filled, payload, ctx)[: ctx.size]


@dataclass(frozen=True)
class Rows(Elements):
    """Selects whole rows; row numbers travel. Positions in the last row may lie beyond the tensor's end."""

    row_size: int = 128

    def count(self, n: int) -> int | None:
        rows = self.selector.count(blocks.block_count(n, self.row_size))
        return None if rows is None else rows * self.row_size

    def read(self, sent: tuple[Array, ...], ctx: Context) -> Array:
        rows = placed(ctx.xp, sent[0], blocks.block_count(ctx.size, self.row_size))
        first = ctx.xp.reshape(rows * self.row_size, (-1, 1))
        return ctx.xp.reshape(first + ctx.xp.arange(self.row_size), (-1,))
