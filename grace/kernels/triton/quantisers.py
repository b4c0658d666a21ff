"""Triton's kernels of quantisers: signs and integers."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from grace.core.rng import Rng, signed
from grace.kernels.calls import Pairs, fitted
from grace.kernels.host import partly
from grace.kernels.quantisers import Quantisers
from grace.kernels.triton.launcher import LARGE, TILE, Launcher, load_sum, magnitudes_of, put_mean, rows_of
from grace.kernels.triton.parts import (
    largest_magnitude,
    load_ints,
    load_signs,
    mean_magnitude,
    places,
    put_ints,
    put_signs,
    received,
)
from grace.ops.blocks import block_count

Array = Any


# Places are int32 offsets from a program's start, [rows, bytes, codes per byte]; starts are int64.
@triton.jit
def _span(n, BLOCK, tiles, TILE: tl.constexpr):
    # Returns, for a tile of a large block, the block, the tile's start, and its number of elements.
    pid = tl.program_id(0).to(tl.int64)
    block = pid // tiles
    begin = block * BLOCK + (pid % tiles) * TILE
    left = tl.minimum((block + 1) * BLOCK, n) - begin
    return block, begin, tl.maximum(tl.minimum(left, TILE), 0).to(tl.int32)


# -- signs -------------------------------------------------------------------------------------------------------------
@triton.jit
def efsignsgd_blocks(
    x, residual, bits, scales, n, BLOCK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr
):
    """`efsignsgd_encode` of ROWS blocks."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    begin = first * BLOCK
    left = tl.minimum(n - begin, ROWS * BLOCK).to(tl.int32)
    column, at = places(ROWS, BLOCK, WIDTH, 8)
    here = (column < BLOCK) & (at < left)
    value = load_sum(x + begin, residual + begin, at, here, ADD)
    row = tl.arange(0, ROWS)[:, None, None]
    scale = mean_magnitude(value, tl.maximum(tl.minimum(left - row * BLOCK, BLOCK), 1))
    tl.store(scales + first + row, scale, mask=row * BLOCK < left)
    rest = put_signs(value, scale, bits + begin // 8, at, here)
    if ADD:
        tl.store(x + begin + at, rest, mask=here)


@triton.jit
def efsignsgd_sums(x, residual, sums, n, block, tiles, TILE: tl.constexpr, ADD: tl.constexpr):
    """Write the sum of magnitudes of a tile of a large block to ``sums``, float64[blocks * tiles]."""
    _, begin, left = _span(n, block, tiles, TILE)
    at = tl.arange(0, TILE)
    value = load_sum(x + begin, residual + begin, at, at < left, ADD)
    tl.store(sums + tl.program_id(0).to(tl.int64), tl.sum(tl.abs(value).to(tl.float64), 0))


@triton.jit
def efsignsgd_scales(sums, scales, n, block, tiles, TILE: tl.constexpr):
    """Write the scale of a large block, from the result of `efsignsgd_sums`."""
    place = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, TILE)
    parts = tl.zeros((TILE,), tl.float64)
    for first in range(0, tiles, TILE):
        parts += tl.load(sums + place * tiles + first + at, mask=at < tiles - first, other=0.0)
    count = tl.minimum(n - place * block, block)
    tl.store(scales + place, tl.div_rn(tl.sum(parts, 0).to(tl.float32), count.to(tl.float32)))


@triton.jit
def efsignsgd_rest(x, residual, bits, scales, n, block, tiles, TILE: tl.constexpr, ADD: tl.constexpr):
    """Write the bits of a tile of a large block, and its new residual."""
    place, begin, left = _span(n, block, tiles, TILE)
    _, at = places(1, TILE, TILE, 8)
    here = at < left
    value = load_sum(x + begin, residual + begin, at, here, ADD)
    scale = tl.load(scales + place + tl.zeros((1, 1, 1), tl.int32))
    rest = put_signs(value, scale, bits + begin // 8, at, here)
    if ADD:
        tl.store(x + begin + at, rest, mask=here)


@triton.jit
def efsignsgd_mean(
    bits, scales, out, n, divisor,
    BLOCK: tl.constexpr, WORKERS: tl.constexpr, FIRST: tl.constexpr, DIVIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add some workers' payloads to ``out``. FIRST: they are the first workers; DIVIDE: the last of several."""
    begin = tl.program_id(0).to(tl.int64) * TILE
    left = tl.minimum(n - begin, TILE).to(tl.int32)
    byte, at, place = received(begin, BLOCK, TILE, 8)
    if not FIRST:
        total = tl.load(out + begin + at, mask=at < left, other=0.0)
    for worker in tl.static_range(WORKERS):
        value = load_signs(bits[worker], scales[worker], begin, left, byte, place)
        if FIRST and worker == 0:
            total = value
        else:
            total += value
    put_mean(out + begin, total, at, left, divisor, DIVIDE)


# -- integers ----------------------------------------------------------------------------------------------------------
KEYS = ("table0", "table1", "key0", "key1")


@triton.jit(do_not_specialize=KEYS)
def blockint_blocks(
    x, residual, codes, scales, n, start, table0, table1, key0, key1, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, BITS: tl.constexpr, RANDOM: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """`blockint_encode` of ROWS blocks."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    begin = first * BLOCK
    left = tl.minimum(n - begin, ROWS * BLOCK).to(tl.int32)
    column, at = places(ROWS, BLOCK, WIDTH, 8 // BITS)
    here = (column < BLOCK) & (at < left)
    value = load_sum(x + begin, residual + begin, at, here, ADD)
    row = tl.arange(0, ROWS)[:, None, None]
    scale = largest_magnitude(value)
    tl.store(scales + first + row, scale, mask=row * BLOCK < left)
    rest = put_ints(
        value, scale, codes + begin // (8 // BITS), at, here, start + begin, table0, table1, key0, key1, BITS, RANDOM
    )
    if ADD:
        tl.store(x + begin + at, rest, mask=here)


@triton.jit
def blockint_largest(x, residual, scales, n, block, tiles, TILE: tl.constexpr, ADD: tl.constexpr):
    """Raise a large block's scale, stored as int32 bits, to a tile's largest magnitude if that is larger."""
    place, begin, left = _span(n, block, tiles, TILE)
    at = tl.arange(0, TILE)
    value = load_sum(x + begin, residual + begin, at, at < left, ADD)
    tl.atomic_max(scales + place, tl.max(magnitudes_of(value), 0))


@triton.jit(do_not_specialize=KEYS)
def blockint_rest(
    x, residual, codes, scales, n, block, tiles, start, table0, table1, key0, key1, TILE: tl.constexpr,
    BITS: tl.constexpr, RANDOM: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Write the codes of a tile of a large block, and its new residual."""
    place, begin, left = _span(n, block, tiles, TILE)
    _, at = places(1, TILE, TILE, 8 // BITS)
    here = at < left
    value = load_sum(x + begin, residual + begin, at, here, ADD)
    scale = tl.load(scales + place + tl.zeros((1, 1, 1), tl.int32))
    rest = put_ints(
        value, scale, codes + begin // (8 // BITS), at, here, start + begin, table0, table1, key0, key1, BITS, RANDOM
    )
    if ADD:
        tl.store(x + begin + at, rest, mask=here)


@triton.jit
def blockint_mean(
    codes, scales, out, n, divisor, BLOCK: tl.constexpr, BITS: tl.constexpr,
    WORKERS: tl.constexpr, FIRST: tl.constexpr, DIVIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """`efsignsgd_mean`, for integers."""
    begin = tl.program_id(0).to(tl.int64) * TILE
    left = tl.minimum(n - begin, TILE).to(tl.int32)
    byte, at, place = received(begin, BLOCK, TILE, 8 // BITS)
    if not FIRST:
        total = tl.load(out + begin + at, mask=at < left, other=0.0)
    for worker in tl.static_range(WORKERS):
        value = load_ints(codes[worker], scales[worker], begin, left, byte, place, BITS)
        if FIRST and worker == 0:
            total = value
        else:
            total += value
    put_mean(out + begin, total, at, left, divisor, DIVIDE)


# -- on arrays ---------------------------------------------------------------------------------------------------------
@partly(Quantisers)
class TritonQuantisers(Launcher):
    """Kernels of `Quantisers` for device tensors."""

    def efsignsgd_encode(self, x: Array, residual: Array | None, block: int) -> tuple[tuple[Array, Array], Array]:
        """float32[n] -> bits uint8[ceil(n/8)], scales float32[m]; new residual (if there is a residual)."""
        xp, (n,), add = self._xp, x.shape, residual is not None
        m = block_count(n, block or None)
        bits, scales = xp.buffers.empty(-(-n // 8), "uint8"), xp.buffers.empty(m)
        if n == 0:
            return (bits, scales), x
        v = x, x if residual is None else residual
        if 0 < block <= LARGE:
            rows, width = rows_of(block)
            self._launch(
                efsignsgd_blocks, -(-m // rows), *v, bits, scales, n, BLOCK=block, ROWS=rows, WIDTH=width, ADD=add
            )
            return (bits, scales), x
        tiles, size = _tiles(n, block)
        sums = xp.buffers.empty(m * tiles, "float64")
        self._launch(efsignsgd_sums, m * tiles, *v, sums, n, size, tiles, TILE=TILE, ADD=add)
        self._launch(efsignsgd_scales, m, sums, scales, n, size, tiles, TILE=1024)
        self._launch(efsignsgd_rest, m * tiles, *v, bits, scales, n, size, tiles, TILE=TILE, ADD=add)
        return (bits, scales), x

    def efsignsgd_mean(self, payloads: Pairs, out: Array | None, n: int, block: int) -> Array:
        """Each worker's bits and scales -> float32[n], in ``out`` if given."""
        sizes = ("uint8", -(-n // 8)), ("float32", block_count(n, block or None))
        payloads = fitted(self._xp, payloads, *sizes)
        return self._mean(efsignsgd_mean, -(-n // TILE), payloads, out, n, BLOCK=block, TILE=TILE)

    def blockint_encode(
        self, x: Array, residual: Array | None, block: int, bits: int, rng: Rng | None
    ) -> tuple[tuple[Array, Array], Array]:
        """float32[n] -> codes uint8[ceil(n * bits / 8)], scales float32[m]; new residual. ``rng``: round at random."""
        xp, (n,) = self._xp, x.shape
        m = block_count(n, block or None)
        codes, scales = xp.buffers.empty(-(-n * bits // 8), "uint8"), xp.buffers.empty(m)
        if n == 0:
            return (codes, scales), x
        v = x, x if residual is None else residual
        noise = (0,) * 5 if rng is None else (rng.offset, *(signed(key) for key in (*rng.table, *rng.keys)))
        form = {"BITS": bits, "RANDOM": rng is not None, "ADD": residual is not None}
        if 0 < block <= LARGE:
            rows, width = rows_of(block)
            form |= {"BLOCK": block, "ROWS": rows, "WIDTH": width}
            self._launch(blockint_blocks, -(-m // rows), *v, codes, scales, n, *noise, **form)
            return (codes, scales), x
        tiles, size = _tiles(n, block)
        most = scales.view(torch.int32).zero_()
        self._launch(blockint_largest, m * tiles, *v, most, n, size, tiles, TILE=TILE, ADD=form["ADD"])
        self._launch(blockint_rest, m * tiles, *v, codes, scales, n, size, tiles, *noise, TILE=TILE, **form)
        return (codes, scales), x

    def blockint_mean(self, payloads: Pairs, out: Array | None, n: int, block: int, bits: int) -> Array:
        """Each worker's codes and scales -> float32[n], in ``out`` if given."""
        sizes = ("uint8", -(-n * bits // 8)), ("float32", block_count(n, block or None))
        payloads = fitted(self._xp, payloads, *sizes)
        return self._mean(blockint_mean, -(-n // TILE), payloads, out, n, BLOCK=block, BITS=bits, TILE=TILE)


def _tiles(n: int, block: int) -> tuple[int, int]:
    # Returns the number of tiles per large block, and the block's size.
    size = block or n
    return -(-size // TILE), size
