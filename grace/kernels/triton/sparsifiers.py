"""Triton's kernels of sparsifiers: the top-k selection."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from grace.kernels.host import partly
from grace.kernels.sparsifiers import Sparsifiers
from grace.kernels.triton.launcher import TILE, Launcher, load_sum, magnitudes_of

Array = Any


@triton.jit
def topk_magnitudes(x, residual, magnitudes, n, TILE: tl.constexpr, ADD: tl.constexpr):
    """Write the magnitudes of x + residual; infinity for NaN."""
    begin = tl.program_id(0).to(tl.int64) * TILE
    at = tl.arange(0, TILE)
    here = at < tl.minimum(n - begin, TILE).to(tl.int32)
    value = load_sum(x + begin, residual + begin, at, here, ADD)
    found = tl.minimum(magnitudes_of(value), 0x7F800000).to(tl.float32, bitcast=True)
    tl.store(magnitudes + begin + at, found, mask=here)


@triton.jit
def topk_counts(magnitudes, bound, counts, n, tiles, TILE: tl.constexpr):
    """Write to ``counts``, int32[2, tiles], how many of a tile's elements exceed the bound, and how many equal it."""
    pid = tl.program_id(0)
    begin = pid.to(tl.int64) * TILE
    at = tl.arange(0, TILE)
    found = tl.load(magnitudes + begin + at, mask=at < tl.minimum(n - begin, TILE).to(tl.int32), other=-1.0)
    limit = tl.load(bound)
    tl.store(counts + pid, tl.sum((found > limit).to(tl.int32), 0))
    tl.store(counts + tiles + pid, tl.sum((found == limit).to(tl.int32), 0))


@triton.jit
def topk_take(
    x, residual, magnitudes, bound, counts, ends, values, positions, n, k, tiles, TILE: tl.constexpr, ADD: tl.constexpr
):
    """Write the k elements above the bound or first equal to it, their positions, and the new residual.

    ``ends``: int32[2, tiles], the running sums of ``counts``.
    """
    pid = tl.program_id(0)
    begin = pid.to(tl.int64) * TILE
    at = tl.arange(0, TILE)
    here = at < tl.minimum(n - begin, TILE).to(tl.int32)
    found = tl.load(magnitudes + begin + at, mask=here, other=-1.0)
    limit = tl.load(bound)
    room = k - tl.load(ends + tiles - 1)  # for elements equal to the bound
    before = tl.load(ends + pid) - tl.load(counts + pid)
    equal = tl.load(ends + tiles + pid) - tl.load(counts + tiles + pid)
    tie = (found == limit).to(tl.int32)
    chosen = (found > limit) | ((tie != 0) & (equal + tl.cumsum(tie, 0) <= room))
    place = before + tl.minimum(equal, room) + tl.cumsum(chosen.to(tl.int32), 0) - 1
    value = load_sum(x + begin, residual + begin, at, here, ADD)
    tl.store(values + place, value, mask=chosen)
    tl.store(positions + place, (begin + at).to(tl.int32), mask=chosen)
    if ADD:
        tl.store(x + begin + at, tl.where(chosen, 0.0, value), mask=here)


@partly(Sparsifiers)
class TritonSparsifiers(Launcher):
    """Kernels of `Sparsifiers` for device tensors."""

    def topk_encode(self, x: Array, residual: Array | None, k: int) -> tuple[tuple[Array, Array], Array]:
        """float32[n] -> values float32[k] and positions int32[k] of the largest magnitudes; and the new residual."""
        xp, (n,), add = self._xp, x.shape, residual is not None
        values, positions = xp.buffers.empty(k), xp.buffers.empty(k, "int32")
        if k == 0:
            return (values, positions), x
        tiles, v = -(-n // TILE), (x, residual if add else x)
        magnitudes, counts = xp.buffers.empty(n), xp.buffers.empty((2, tiles), "int32")
        self._launch(topk_magnitudes, tiles, *v, magnitudes, n, TILE=TILE, ADD=add)
        bound = torch.topk(magnitudes, k, sorted=False).values.min()
        self._launch(topk_counts, tiles, magnitudes, bound, counts, n, tiles, TILE=TILE)
        ends = torch.cumsum(counts, 1, dtype=torch.int32)
        found = magnitudes, bound, counts, ends, values, positions
        self._launch(topk_take, tiles, *v, *found, n, k, tiles, TILE=TILE, ADD=add)
        return (values, positions), x
