"""What Triton's kernels of rotations share: rotated blocks of a tile, encoded and decoded."""

from __future__ import annotations

import triton
import triton.language as tl

from grace.kernels.triton.launcher import magnitudes_of, mixed


@triton.jit
def row_places(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the row, and the place of each element, int32[rows, width]."""
    row = tl.arange(0, ROWS)[:, None]
    return row, row * WIDTH + tl.arange(0, WIDTH)[None, :]


@triton.jit
def words(start, at, key0, key1):
    """Return `grace.core.rng.Rng.bits` of the elements start + at, as int32."""
    low = (start & 0xFFFFFFFF).to(tl.uint32) + at.to(tl.uint32)
    high = (start >> 32).to(tl.uint32) + (low < at.to(tl.uint32)).to(tl.uint32)
    h = mixed(low + key0.to(tl.uint32, bitcast=True))
    return mixed(h ^ (high + key1.to(tl.uint32, bitcast=True))).to(tl.int32, bitcast=True)


@triton.jit
def _transformed(rows, SIZE: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr):
    # Returns `grace.ops.hadamard.hadamard` of SIZE elements in rows of WIDTH = 2**STAGES, with the same butterflies.
    for stage in tl.static_range(STAGES):
        pairs = tl.reshape(rows, (SIZE >> (stage + 1), 2, 1 << stage))
        a, b = tl.split(tl.permute(pairs, (0, 2, 1)))
        rows = tl.permute(tl.join(a + b, a - b), (0, 2, 1))
    return tl.reshape(rows, (SIZE // WIDTH, WIDTH))


@triton.jit
def _sums(values):
    # Returns each row's sum, added in float64 and rounded once.
    return tl.sum(values.to(tl.float64), 1, keep_dims=True).to(tl.float32)


@triton.jit
def _not_zero(value):
    return tl.where(value == 0.0, 1.0, value)


@triton.jit
def _put_codes(code, codes, row, left, ROWS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr):
    # Eight codes fill BITS bytes, one byte per column; the number of columns is padded to a power of two.
    COLUMNS: tl.constexpr = 4 if BITS == 3 else BITS
    shifts = (tl.arange(0, 8) * BITS)[None, None, :]
    word = tl.sum(tl.reshape(code, (ROWS, WIDTH // 8, 8)) << shifts, 2, keep_dims=True)
    column = tl.arange(0, COLUMNS)[None, None, :]
    place = (row[:, :, None] * (WIDTH // 8) + tl.arange(0, WIDTH // 8)[None, :, None]) * BITS + column
    here = (row[:, :, None] * WIDTH < left) & (column < BITS)
    tl.store(codes + place, ((word >> (column * 8)) & 255).to(tl.uint8), mask=here)


@triton.jit
def _load_levels(codes, levels, row, left, ROWS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr):
    # Returns the levels of packed codes, float32[rows, width].
    group = row[:, :, None] * (WIDTH // 8) + tl.arange(0, WIDTH // 8)[None, :, None]
    here = row[:, :, None] * WIDTH < left
    word = tl.load(codes + group * BITS, mask=here, other=0).to(tl.int32)
    for i in tl.static_range(1, BITS):
        word |= tl.load(codes + group * BITS + i, mask=here, other=0).to(tl.int32) << (8 * i)
    code = (word >> (tl.arange(0, 8) * BITS)[None, None, :]) & ((1 << BITS) - 1)
    value = tl.where(code == 0, levels[0], levels[1])
    for i in tl.static_range(2, 1 << BITS):
        value = tl.where(code == i, levels[i], value)
    return tl.reshape(value, (ROWS, WIDTH))


@triton.jit
def put_rotated(
    value, random, codes, scales, streams, row, left, levels, middles, root, divisor, stream,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr, BITS: tl.constexpr,
    BIASED: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Store the codes, scales and streams of ROWS blocks; return what is left of their values if ADD.

    ``random``: the `words` of the values; ``root``: the root of WIDTH.
    """
    largest = tl.max(magnitudes_of(value), 1, keep_dims=True).to(tl.float32, bitcast=True)
    share = tl.div_rn(value, _not_zero(largest))
    square = _sums(share * share)
    negative = (random << stream) < 0
    rotated = _transformed(tl.where(negative, -share, share), ROWS * WIDTH, WIDTH, STAGES)
    if BITS == 1:
        above = rotated >= 0
        code, level = above.to(tl.int32), tl.where(above, levels[1], levels[0])
    else:
        normal = tl.div_rn(rotated, _not_zero(tl.sqrt_rn(square)))
        above = normal > middles[0]
        code, level = above.to(tl.int32), tl.where(above, levels[1], levels[0])
        for i in tl.static_range(1, (1 << BITS) - 1):
            above = normal > middles[i]
            code += above.to(tl.int32)
            level = tl.where(above, levels[i + 1], level)
    _put_codes(code, codes, row, left, ROWS, WIDTH, BITS)
    if BIASED:
        scale = tl.div_rn(_sums(tl.abs(rotated)), tl.full((ROWS, 1), divisor, tl.float32))
    else:
        scale = tl.div_rn(square, tl.where(square == 0.0, 1.0, _sums(rotated * level))) * root
    scale *= largest
    tl.store(scales + row, scale, mask=row * WIDTH < left)
    tl.store(streams + row, (row * 0 + stream).to(tl.uint8), mask=row * WIDTH < left)
    rest = value
    if ADD:
        decoded = _transformed(level, ROWS * WIDTH, WIDTH, STAGES)
        step = tl.div_rn(scale, tl.full((ROWS, 1), root, tl.float32))
        rest = value - tl.where(negative, -decoded, decoded) * step
    return rest


@triton.jit
def load_rotated(
    random, codes, scales, streams, row, left, levels, root,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Return what a payload stands for in ROWS blocks, float32[rows, width]."""
    level = _load_levels(codes, levels, row, left, ROWS, WIDTH, BITS)
    decoded = _transformed(level, ROWS * WIDTH, WIDTH, STAGES)
    scale = tl.load(scales + row, mask=row * WIDTH < left, other=0.0)
    stream = tl.load(streams + row, mask=row * WIDTH < left, other=0).to(tl.int32) & 31
    step = tl.div_rn(scale, tl.full((ROWS, 1), root, tl.float32))
    return tl.where((random << stream) < 0, -decoded, decoded) * step
