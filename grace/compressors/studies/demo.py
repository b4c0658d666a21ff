"""The largest coefficients of a cosine transform."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from grace.core import Array, Compressor, Context, MaybeProgram, Payload, State, Traits
from grace.core.registry import register
from grace.ops import index_coding as indices
from grace.ops.validate import fitting, placed


@register("demo")
@dataclass(frozen=True)
class DeMo(Compressor):
    """Cut a tensor into square chunks and send the largest cosine transform coefficients of each.

    Payload: values float32[m k], positions in the chunk: lower bytes uint8[m k], the bits above packed.
    ``chunk``: side of a chunk; the matrix shape[0] x rest is padded with zeros to whole chunks, and a vector has
    chunks of one row. ``chunk_k``: number of coefficients to send per chunk, at least 1.
    ``average``: "workers" divides each coefficient by the number of workers, "senders" by the number of workers that
    sent it, as in the paper. ``sign``: True returns the signs of the result, as in the paper, for an optimizer without
    momentum or scale.
    The paper compresses a momentum: memory "decoupled_momentum".
    Peng, Quesnelle and Kingma, "DeMo: Decoupled Momentum Optimization", 2024, arXiv:2411.19870, algorithm 1.
    """

    chunk: int = 64
    chunk_k: int = 32
    average: str = "workers"
    sign: bool = False

    traits = Traits(family="hybrid", needs_shape=True, nonfinite_in_payload=True, memory="decoupled_momentum")

    def __post_init__(self) -> None:
        if not 2 <= self.chunk <= 256:
            raise ValueError(f"chunk={self.chunk!r} must lie in 2 .. 256")
        if self.chunk_k < 1:
            raise ValueError(f"chunk_k={self.chunk_k!r} must be at least 1")
        if self.average not in ("workers", "senders"):
            raise ValueError(f"average={self.average!r}: choose 'workers' or 'senders'")

    def contraction(self, n: int) -> float | None:
        size = max(1, min(n, self.chunk**2))
        return min(self.chunk_k, size) / size

    def sizes(self, ctx: Context) -> tuple[int, int, int, int]:
        """Rows and columns of the matrix, then rows and columns of a chunk."""
        a = ctx.shape[0] if len(ctx.shape) > 1 else 1
        b = ctx.size // max(a, 1)
        return a, b, max(1, min(self.chunk, a)), max(1, min(self.chunk, b))

    def applies(self, ctx: Context) -> bool:
        return 0 < ctx.size < 2**31

    def compress(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        xp, (a, b, rows, columns) = ctx.xp, self.sizes(ctx)
        down, across, width = -(-a // rows), -(-b // columns), rows * columns
        x = xp.reshape(x, (a, b))
        x = xp.concat([x, xp.zeros((a, across * columns - b))], 1)
        x = xp.concat([x, xp.zeros((down * rows - a, across * columns))], 0)
        chunks = xp.transpose(xp.reshape(x, (down, rows, across, columns)), (0, 2, 1, 3))
        chunks = (
            _basis(xp, rows) @ xp.reshape(chunks, (down * across, rows, columns)) @ xp.transpose(_basis(xp, columns))
        )
        flat = xp.reshape(chunks, (down * across, width))
        k = min(self.chunk_k, width)
        places = xp.reshape(xp.topk_abs(flat, k), (-1,))
        values = xp.take(xp.reshape(flat, (-1,)), self._absolute(xp, places, k, width))
        return (values, *indices.narrow(xp, places, width)), state

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        return self._decode(ctx, [payload])

    def aggregate(self, payloads: Sequence[Payload], ctx: Context) -> Array:
        return self._decode(ctx, payloads, final=True)

    def _decode(self, ctx: Context, payloads: Sequence[Payload], final: bool = False) -> Array:
        xp, (a, b, rows, columns) = ctx.xp, self.sizes(ctx)
        down, across, width = -(-a // rows), -(-b // columns), rows * columns
        size, k = down * across * width, min(self.chunk_k, width)
        total, senders = xp.zeros(size), xp.zeros(size)
        many = down * across * k
        for values, *places in payloads:
            where = self._absolute(xp, indices.widen(xp, tuple(places), width, many), k, width)
            where = placed(xp, where, size)
            total = xp.scatter_add(total, where, fitting(xp, values, "float32", many, "values"))
            if final and self.average == "senders":
                senders = xp.scatter_add(senders, where, xp.full(many, 1.0))
        if final:
            total = total / (xp.maximum(senders, 1.0) if self.average == "senders" else len(payloads))
        chunks = (
            xp.transpose(_basis(xp, rows)) @ xp.reshape(total, (down * across, rows, columns)) @ _basis(xp, columns)
        )
        x = xp.transpose(xp.reshape(chunks, (down, across, rows, columns)), (0, 2, 1, 3))
        x = xp.reshape(xp.reshape(x, (down * rows, across * columns))[:a, :b], (-1,))
        return xp.sign(x) if final and self.sign else x

    def _absolute(self, xp: Any, places: Array, k: int, width: int) -> Array:
        # Returns int32[m k]: positions among the coefficients of all chunks.
        return places + xp.arange(xp.shape(places)[0]) // k * width


@cache
def _cosines(size: int) -> list[list[float]]:
    scale = [math.sqrt((1 if i == 0 else 2) / size) for i in range(size)]
    return [[scale[i] * math.cos(math.pi * (2 * j + 1) * i / (2 * size)) for j in range(size)] for i in range(size)]


def _basis(xp: Any, size: int) -> Array:
    # Returns float32[size, size]: the orthonormal cosine transform (DCT-II).
    return xp.asarray(_cosines(size), "float32")
