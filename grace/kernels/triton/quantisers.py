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
from grace.kernels.triton.launcher import LARGE, TILE, Launcher, load_sum, magnitudes_of, mixed, put_mean, rows_of
from grace.ops.blocks import block_count

Array = Any


# -- kernel helpers ----------------------------------------------------------------------------------------------------
# Places are int32 offsets from a program's start, [rows, bytes, codes per byte]; starts are int64.
@triton.jit
def _places(ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, EACH: tl.constexpr):
    # Returns the column and the place of each element of ROWS rows of BLOCK elements, padded to WIDTH, a power of two.
    column = tl.arange(0, WIDTH // EACH)[None, :, None] * EACH + tl.arange(0, EACH)[None, None, :]
    return column, tl.arange(0, ROWS)[:, None, None] * BLOCK + column


@triton.jit
def _span(n, BLOCK, tiles, TILE: tl.constexpr):
    # Returns, for a tile of a large block, the block, the tile's start, and its number of elements.
    pid = tl.program_id(0).to(tl.int64)
    block = pid // tiles
    begin = block * BLOCK + (pid % tiles) * TILE
    left = tl.minimum((block + 1) * BLOCK, n) - begin
    return block, begin, tl.maximum(tl.minimum(left, TILE), 0).to(tl.int32)


@triton.jit
def _packed(codes, BITS: tl.constexpr, EACH: tl.constexpr):
    # Packs codes: int32[rows, bytes, EACH] -> uint8[rows, bytes, 1].
    shifts = (tl.arange(0, EACH) * BITS)[None, None, :]
    return tl.sum((codes & ((1 << BITS) - 1)) << shifts, 2, keep_dims=True).to(tl.uint8)


@triton.jit
def _upper(j, key0, key1):
    # Returns the upper 16 bits, as uint32, of a stream's word j, for j below 2**32.
    h = mixed(j + key0.to(tl.uint32, bitcast=True))
    return mixed(h ^ key1.to(tl.uint32, bitcast=True)) >> 16


@triton.jit
def _noise(start, at, table0, table1, key0, key1):
    # Returns `grace.core.rng.Rng.noise` of the elements start + at, which lie in at most two rows of 65536.
    place = (start & 65535).to(tl.int32) + at
    row = (start >> 16).to(tl.uint32)
    offset = tl.where(place < 65536, _upper(row, key0, key1), _upper(row + 1, key0, key1))
    whole = (_upper((place & 65535).to(tl.uint32), table0, table1) + offset) & 65535
    return (whole.to(tl.int32).to(tl.float32) + 0.5) * 0.0000152587890625


@triton.jit
def _put_signs(value, scale, x, bits, at, here, KEEP: tl.constexpr):
    # at: the places of elements; multiples of 8 begin a byte.
    up = value >= 0
    place = tl.min(at, 2, keep_dims=True)
    some = tl.max(here.to(tl.int32), 2, keep_dims=True) != 0
    tl.store(bits + place // 8, _packed((up & here).to(tl.int32), 1, 8), mask=some)
    if KEEP:
        tl.store(x + at, value - tl.where(up, scale, -scale), mask=here)


@triton.jit
def _put_ints(
    value, scale, x, codes, at, here, start, table0, table1, key0, key1,
    BITS: tl.constexpr, RANDOM: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    top: tl.constexpr = (1 << (BITS - 1)) - 1
    EACH: tl.constexpr = 8 // BITS
    steps = tl.div_rn(value, tl.where(scale == 0.0, 1.0, scale)) * float(top)
    if RANDOM:
        steps += _noise(start, at, table0, table1, key0, key1)
        steps = tl.where(tl.abs(steps) < 1024.0, steps, 0.0)  # NaN is no integer
        code = steps.to(tl.int32)
        code -= (code.to(tl.float32) > steps).to(tl.int32)  # tl.floor would take the smallest numbers for 0
    else:
        steps = tl.where(tl.abs(steps) < 1024.0, steps, 0.0)
        code = ((steps + 12582912.0) - 12582912.0).to(tl.int32)  # 1.5 * 2**23: the sum is rounded, halves to even
    place = tl.min(at, 2, keep_dims=True)
    some = tl.max(here.to(tl.int32), 2, keep_dims=True) != 0
    tl.store(codes + place // EACH, _packed(tl.where(here, code, 0), BITS, EACH), mask=some)
    if KEEP:
        step = tl.div_rn(scale, tl.full(scale.shape, top, tl.float32))
        tl.store(x + at, value - code.to(tl.float32) * step, mask=here)


@triton.jit
def _received(n, BLOCK: tl.constexpr, TILE: tl.constexpr, EACH: tl.constexpr):
    # Returns a tile's start and size, the byte and offset of each element, and the place of each byte's scale.
    begin = tl.program_id(0).to(tl.int64) * TILE
    left = tl.minimum(n - begin, TILE).to(tl.int32)
    byte = tl.arange(0, TILE // EACH)[:, None]
    at = byte * EACH + tl.arange(0, EACH)[None, :]
    if BLOCK == 0:
        place = byte * 0
    else:
        place = begin // BLOCK + ((begin % BLOCK).to(tl.int32) + byte * EACH) // BLOCK
    return begin, left, byte, at, place


# -- signs -------------------------------------------------------------------------------------------------------------
@triton.jit
def efsignsgd_blocks(
    x, residual, bits, scales, n, BLOCK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr
):
    """`efsignsgd_encode` of ROWS blocks."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    begin = first * BLOCK
    left = tl.minimum(n - begin, ROWS * BLOCK).to(tl.int32)
    column, at = _places(ROWS, BLOCK, WIDTH, 8)
    here = (column < BLOCK) & (at < left)
    value = load_sum(x + begin, residual + begin, at, here, ADD)
    row = tl.arange(0, ROWS)[:, None, None]
    total = tl.sum(tl.sum(tl.abs(value).to(tl.float64), 2, keep_dims=True), 1, keep_dims=True)
    count = tl.maximum(tl.minimum(left - row * BLOCK, BLOCK), 1)
    scale = tl.div_rn(total.to(tl.float32), count.to(tl.float32))
    tl.store(scales + first + row, scale, mask=row * BLOCK < left)
    _put_signs(value, scale, x + begin, bits + begin // 8, at, here, ADD)


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
    _, at = _places(1, TILE, TILE, 8)
    here = at < left
    value = load_sum(x + begin, residual + begin, at, here, ADD)
    scale = tl.load(scales + place + tl.zeros((1, 1, 1), tl.int32))
    _put_signs(value, scale, x + begin, bits + begin // 8, at, here, ADD)


@triton.jit
def efsignsgd_mean(
    bits, scales, out, n, divisor,
    BLOCK: tl.constexpr, WORKERS: tl.constexpr, FIRST: tl.constexpr, DIVIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add some workers' payloads to ``out``. FIRST: they are the first workers; DIVIDE: the last of several."""
    begin, left, byte, at, place = _received(n, BLOCK, TILE, 8)
    shifts = tl.arange(0, 8)[None, :]
    if not FIRST:
        total = tl.load(out + begin + at, mask=at < left, other=0.0)
    for worker in tl.static_range(WORKERS):
        octet = tl.load(bits[worker] + begin // 8 + byte, mask=byte * 8 < left, other=0).to(tl.int32)
        scale = tl.load(scales[worker] + place, mask=byte * 8 < left, other=0.0)
        value = tl.where(((octet >> shifts) & 1) != 0, scale, -scale)
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
    column, at = _places(ROWS, BLOCK, WIDTH, 8 // BITS)
    here = (column < BLOCK) & (at < left)
    value = load_sum(x + begin, residual + begin, at, here, ADD)
    row = tl.arange(0, ROWS)[:, None, None]
    most = tl.max(tl.max(magnitudes_of(value), 2, keep_dims=True), 1, keep_dims=True)
    scale = most.to(tl.float32, bitcast=True)
    tl.store(scales + first + row, scale, mask=row * BLOCK < left)
    _put_ints(
        value, scale, x + begin, codes + begin // (8 // BITS), at, here, start + begin, table0, table1, key0, key1,
        BITS, RANDOM, ADD,
    )  # fmt: skip


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
    _, at = _places(1, TILE, TILE, 8 // BITS)
    here = at < left
    value = load_sum(x + begin, residual + begin, at, here, ADD)
    scale = tl.load(scales + place + tl.zeros((1, 1, 1), tl.int32))
    _put_ints(
        value, scale, x + begin, codes + begin // (8 // BITS), at, here, start + begin, table0, table1, key0, key1,
        BITS, RANDOM, ADD,
    )  # fmt: skip


@triton.jit
def blockint_mean(
    codes, scales, out, n, divisor, BLOCK: tl.constexpr, BITS: tl.constexpr,
    WORKERS: tl.constexpr, FIRST: tl.constexpr, DIVIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """`efsignsgd_mean`, for integers."""
    EACH: tl.constexpr = 8 // BITS
    half: tl.constexpr = 1 << (BITS - 1)
    begin, left, byte, at, place = _received(n, BLOCK, TILE, EACH)
    shifts = (tl.arange(0, EACH) * BITS)[None, :]
    if not FIRST:
        total = tl.load(out + begin + at, mask=at < left, other=0.0)
    for worker in tl.static_range(WORKERS):
        octet = tl.load(codes[worker] + begin // EACH + byte, mask=byte * EACH < left, other=0).to(tl.int32)
        scale = tl.load(scales[worker] + place, mask=byte * EACH < left, other=0.0)
        step = tl.div_rn(scale, tl.full(scale.shape, half - 1, tl.float32))
        code = (((octet >> shifts) & ((1 << BITS) - 1)) ^ half) - half
        value = code.to(tl.float32) * step
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
