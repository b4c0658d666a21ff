"""Functions that Triton's kernels of rotations share: they encode and decode the rotated blocks of a tile."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from grace.core.errors import Unavailable
from grace.kernels.triton.launcher import LARGE, magnitudes_of
from grace.kernels.triton.parts import floats, integers, load_codes, not_zero, put_codes

TILE = 2048
"""Number of elements per program, unless a block has more. They stay in registers: 16 to 32 per thread."""


def form_of(width: int, levels: Sequence[float]) -> dict[str, int]:
    """Return the compile-time constants of the kernels.

    A program handles whole blocks, so blocks that are larger than `LARGE` raise Unavailable.
    """
    if width > LARGE:
        raise Unavailable(f"blocks of {width} elements are too large for one program")
    bits, stages = len(levels).bit_length() - 1, width.bit_length() - 1
    each = 8 if bits == 3 else min(width, 32 // bits)
    rows = max(1, (TILE if warps_of(width) > 1 else TILE // 4) // width)
    return {"ROWS": rows, "WIDTH": width, "STAGES": stages, "BITS": bits, "EACH": each}


def warps_of(width: int) -> int:
    """Return the number of warps per program, chosen so that few butterflies cross warps."""
    return 1 if 256 <= width <= 1024 else max(4, width // 1024)


@triton.jit
def row_places(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return row numbers, int32[rows, 1], and each element's offset in the tile, int32[rows, width]."""
    row = tl.arange(0, ROWS)[:, None]
    return row, row * WIDTH + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _transformed(rows, SIZE: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr):
    # Returns `grace.ops.hadamard.hadamard` of SIZE elements in rows of WIDTH = 2**STAGES, with the same butterflies.
    # Each thread gets the other number as the sum of both numbers' bits, minus its own: within a warp, a shuffle.
    second = tl.arange(0, 2)[None, :, None] != 0
    for stage in tl.static_range(STAGES):
        mine = tl.reshape(rows, (SIZE >> (stage + 1), 2, 1 << stage))
        bits = mine.to(tl.int32, bitcast=True)
        other = (tl.sum(bits, 1, keep_dims=True) - bits).to(tl.float32, bitcast=True)
        rows = tl.reshape(tl.where(second, other - mine, mine + other), (SIZE // WIDTH, WIDTH))
    return rows


@triton.jit
def _sums(values):
    # Returns each row's sum, added in float64 and rounded once.
    return tl.sum(values.to(tl.float64), 1, keep_dims=True).to(tl.float32)


@triton.jit
def _load_levels(codes, levels, row, left, ROWS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
                 EACH: tl.constexpr, FAST: tl.constexpr):  # fmt: skip
    # Returns the levels of packed codes, float32[rows, width].
    word, room = _row_words(row, left, WIDTH, EACH)
    code = load_codes(codes, word, room, BITS, EACH, FAST)
    value = tl.where(code == 0, levels[0], levels[1])
    for i in tl.static_range(2, 1 << BITS):
        value = tl.where(code == i, levels[i], value)
    return tl.reshape(value, (ROWS, WIDTH))


@triton.jit
def _row_words(row, left, WIDTH: tl.constexpr, EACH: tl.constexpr):
    # Returns the index of each word, and its number of elements: a row is padded to whole words.
    word = row[:, :, None] * (WIDTH // EACH) + tl.arange(0, WIDTH // EACH)[None, :, None]
    return word, tl.where(row[:, :, None] * WIDTH < left, EACH, 0)


@triton.jit
def put_rotated(
    value, random, codes, scales, streams, row, left, levels, middles, root, divisor, stream,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr, BITS: tl.constexpr,
    EACH: tl.constexpr, BIASED: tl.constexpr, ADD: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Store the codes, scales and streams of ROWS blocks at these addresses; if ADD, return the new residual.

    ``random``: the `words` of the values; ``root``: sqrt(WIDTH).
    """
    largest = tl.max(magnitudes_of(value), 1, keep_dims=True).to(tl.float32, bitcast=True)
    share = tl.div_rn(value, not_zero(largest))
    square = _sums(share * share)
    negative = (random << stream) < 0
    rotated = _transformed(tl.where(negative, -share, share), ROWS * WIDTH, WIDTH, STAGES)
    if BITS == 1:
        above = rotated >= 0
        code, level = above.to(tl.int32), tl.where(above, levels[1], levels[0])
    else:
        normal = tl.div_rn(rotated, not_zero(tl.sqrt_rn(square)))
        above = normal > middles[0]
        code, level = above.to(tl.int32), tl.where(above, levels[1], levels[0])
        for i in tl.static_range(1, (1 << BITS) - 1):
            above = normal > middles[i]
            code += above.to(tl.int32)
            level = tl.where(above, levels[i + 1], level)
    word, room = _row_words(row, left, WIDTH, EACH)
    put_codes(codes, tl.reshape(code, (ROWS, WIDTH // EACH, EACH)), word, room, BITS, EACH, FAST)
    if BIASED:
        scale = tl.div_rn(_sums(tl.abs(rotated)), tl.full((ROWS, 1), divisor, tl.float32))
    else:
        scale = tl.div_rn(square, tl.where(square == 0.0, 1.0, _sums(rotated * level))) * root
    scale *= largest
    tl.store(floats(scales) + row, scale, mask=row * WIDTH < left)
    tl.store(integers(streams, 1) + row, (row * 0 + stream).to(tl.uint8), mask=row * WIDTH < left)
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
    EACH: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Return the decoded values of ROWS blocks of a payload, float32[rows, width]."""
    level = _load_levels(codes, levels, row, left, ROWS, WIDTH, BITS, EACH, FAST)
    decoded = _transformed(level, ROWS * WIDTH, WIDTH, STAGES)
    scale = tl.load(floats(scales) + row, mask=row * WIDTH < left, other=0.0)
    stream = tl.load(integers(streams, 1) + row, mask=row * WIDTH < left, other=0).to(tl.int32) & 31
    step = tl.div_rn(scale, tl.full((ROWS, 1), root, tl.float32))
    return tl.where((random << stream) < 0, -decoded, decoded) * step
