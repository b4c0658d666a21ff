"""What Triton's kernels of one tensor and of groups share: codes of a tile, computed, stored and decoded.

Places are int32 offsets from a tile's start, and starts are int64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from grace.kernels.triton.launcher import magnitudes_of, mixed


@triton.jit
def places(ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, EACH: tl.constexpr):
    """Return the column and the place of each element, int32[ROWS, bytes, EACH].

    A row is a block of BLOCK elements, padded to WIDTH, a power of two.
    """
    column = tl.arange(0, WIDTH // EACH)[None, :, None] * EACH + tl.arange(0, EACH)[None, None, :]
    return column, tl.arange(0, ROWS)[:, None, None] * BLOCK + column


@triton.jit
def received(begin, BLOCK: tl.constexpr, TILE: tl.constexpr, EACH: tl.constexpr):
    """Return the byte and the place of each element of a tile, and the place of each byte's scale."""
    byte = tl.arange(0, TILE // EACH)[:, None]
    at = byte * EACH + tl.arange(0, EACH)[None, :]
    if BLOCK == 0:
        place = byte * 0
    else:
        place = begin // BLOCK + ((begin % BLOCK).to(tl.int32) + byte * EACH) // BLOCK
    return byte, at, place


@triton.jit
def packed(codes, BITS: tl.constexpr, EACH: tl.constexpr):
    """Pack codes: int32[rows, bytes, EACH] -> uint8[rows, bytes, 1]."""
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


# -- signs -------------------------------------------------------------------------------------------------------------
@triton.jit
def mean_magnitude(value, count):
    """Return the mean magnitude of each row of ``count`` elements, summed in float64."""
    total = tl.sum(tl.sum(tl.abs(value).to(tl.float64), 2, keep_dims=True), 1, keep_dims=True)
    return tl.div_rn(total.to(tl.float32), count.to(tl.float32))


@triton.jit
def put_signs(value, scale, bits, at, here):
    """Store the signs of values whose places ``at`` begin a byte at multiples of 8; return what is left of them."""
    up = value >= 0
    place = tl.min(at, 2, keep_dims=True)
    some = tl.max(here.to(tl.int32), 2, keep_dims=True) != 0
    tl.store(bits + place // 8, packed((up & here).to(tl.int32), 1, 8), mask=some)
    return value - tl.where(up, scale, -scale)


@triton.jit
def load_signs(bits, scales, begin, left, byte, place):
    """Return what a payload stands for in a tile, float32[bytes, 8]."""
    octet = tl.load(bits + begin // 8 + byte, mask=byte * 8 < left, other=0).to(tl.int32)
    scale = tl.load(scales + place, mask=byte * 8 < left, other=0.0)
    return tl.where(((octet >> tl.arange(0, 8)[None, :]) & 1) != 0, scale, -scale)


# -- integers ----------------------------------------------------------------------------------------------------------
@triton.jit
def largest_magnitude(value):
    """Return the largest magnitude of each row; NaN if there is one."""
    most = tl.max(tl.max(magnitudes_of(value), 2, keep_dims=True), 1, keep_dims=True)
    return most.to(tl.float32, bitcast=True)


@triton.jit
def put_ints(
    value, scale, codes, at, here, start, table0, table1, key0, key1, BITS: tl.constexpr, RANDOM: tl.constexpr
):
    """Store the codes of values in units of a scale; return what is left of them. See `put_signs`."""
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
    tl.store(codes + place // EACH, packed(tl.where(here, code, 0), BITS, EACH), mask=some)
    return value - code.to(tl.float32) * tl.div_rn(scale, tl.full(scale.shape, top, tl.float32))


@triton.jit
def load_ints(codes, scales, begin, left, byte, place, BITS: tl.constexpr):
    """`load_signs`, for integers."""
    EACH: tl.constexpr = 8 // BITS
    half: tl.constexpr = 1 << (BITS - 1)
    octet = tl.load(codes + begin // EACH + byte, mask=byte * EACH < left, other=0).to(tl.int32)
    scale = tl.load(scales + place, mask=byte * EACH < left, other=0.0)
    step = tl.div_rn(scale, tl.full(scale.shape, half - 1, tl.float32))
    code = (((octet >> (tl.arange(0, EACH) * BITS)[None, :]) & ((1 << BITS) - 1)) ^ half) - half
    return code.to(tl.float32) * step
