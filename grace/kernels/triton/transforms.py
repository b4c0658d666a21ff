"""Triton's kernels of methods that rotate blocks: levels of a normal distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from grace.core.errors import Unavailable
from grace.core.rng import Rng, signed
from grace.kernels.calls import Pairs, fitted
from grace.kernels.host import partly
from grace.kernels.transforms import Transforms
from grace.kernels.triton.launcher import LARGE, Launcher, load_sum, magnitudes_of, mixed, put_mean
from grace.ops.blocks import block_count

Array = Any

TILE = 2048
"""Number of elements per program, unless a block has more. They stay in registers: 16 to 32 per thread."""
TOGETHER = 4
"""Number of workers whose payloads a pass adds, as parameters of `eden_mean`."""


# -- kernel helpers ----------------------------------------------------------------------------------------------------
@triton.jit
def _places(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    # Returns the row, and the place of each element, int32[rows, width].
    row = tl.arange(0, ROWS)[:, None]
    return row, row * WIDTH + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _words(start, at, key0, key1):
    # Returns `grace.core.rng.Rng.bits` of the elements start + at, as int32.
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


# -- levels of a normal distribution -----------------------------------------------------------------------------------
KEYS = ("start", "key0", "key1")
SENT = tuple(name + str(worker) for name in ("codes", "scales", "streams") for worker in range(TOGETHER))


# Parts of messages have any alignment, and compiling a kernel for each combination would take minutes.
@triton.jit(do_not_specialize=("stream", *KEYS), do_not_specialize_on_alignment=("codes", "scales", "streams"))
def eden_encode(
    x, residual, codes, scales, streams, n, levels, middles, root, divisor, stream, start, key0, key1,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr, BITS: tl.constexpr,
    BIASED: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """`grace.compressors.eden.Eden.compress` of ROWS blocks, and the new residual. ``root``: the root of WIDTH."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    begin = first * WIDTH
    left = tl.minimum(n - begin, ROWS * WIDTH).to(tl.int32)
    row, at = _places(ROWS, WIDTH)
    value = load_sum(x + begin, residual + begin, at, at < left, ADD)
    largest = tl.max(magnitudes_of(value), 1, keep_dims=True).to(tl.float32, bitcast=True)
    share = tl.div_rn(value, _not_zero(largest))
    square = _sums(share * share)
    negative = (_words(start + begin, at, key0, key1) << stream) < 0
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
    _put_codes(code, codes + begin // 8 * BITS, row, left, ROWS, WIDTH, BITS)
    if BIASED:
        scale = tl.div_rn(_sums(tl.abs(rotated)), tl.full((ROWS, 1), divisor, tl.float32))
    else:
        scale = tl.div_rn(square, tl.where(square == 0.0, 1.0, _sums(rotated * level))) * root
    scale *= largest
    tl.store(scales + first + row, scale, mask=row * WIDTH < left)
    tl.store(streams + first + row, (row * 0 + stream).to(tl.uint8), mask=row * WIDTH < left)
    if ADD:
        decoded = _transformed(level, ROWS * WIDTH, WIDTH, STAGES)
        step = tl.div_rn(scale, tl.full((ROWS, 1), root, tl.float32))
        tl.store(x + begin + at, value - tl.where(negative, -decoded, decoded) * step, mask=at < left)


@triton.jit(do_not_specialize=KEYS, do_not_specialize_on_alignment=SENT)
def eden_mean(
    codes0, codes1, codes2, codes3, scales0, scales1, scales2, scales3, streams0, streams1, streams2, streams3,
    out, n, divisor, levels, root, start, key0, key1,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr, BITS: tl.constexpr,
    WORKERS: tl.constexpr, FIRST: tl.constexpr, DIVIDE: tl.constexpr,
):  # fmt: skip
    """Add some workers' payloads to ``out``. FIRST: they are the first workers; DIVIDE: the last of several."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    begin = first * WIDTH
    left = tl.minimum(n - begin, ROWS * WIDTH).to(tl.int32)
    row, at = _places(ROWS, WIDTH)
    words = _words(start + begin, at, key0, key1)
    codes = (codes0, codes1, codes2, codes3)
    scales = (scales0, scales1, scales2, scales3)
    streams = (streams0, streams1, streams2, streams3)
    if not FIRST:
        total = tl.load(out + begin + at, mask=at < left, other=0.0)
    for worker in tl.static_range(WORKERS):
        level = _load_levels(codes[worker] + begin // 8 * BITS, levels, row, left, ROWS, WIDTH, BITS)
        decoded = _transformed(level, ROWS * WIDTH, WIDTH, STAGES)
        scale = tl.load(scales[worker] + first + row, mask=row * WIDTH < left, other=0.0)
        stream = tl.load(streams[worker] + first + row, mask=row * WIDTH < left, other=0).to(tl.int32) & 31
        step = tl.div_rn(scale, tl.full((ROWS, 1), root, tl.float32))
        value = tl.where((words << stream) < 0, -decoded, decoded) * step
        if FIRST and worker == 0:
            total = value
        else:
            total += value
    put_mean(out + begin, total, at, left, divisor, DIVIDE)


# -- on arrays ---------------------------------------------------------------------------------------------------------
@partly(Transforms)
class TritonTransforms(Launcher):
    """Kernels of `Transforms` for device tensors."""

    def eden_encode(
        self,
        x: Array,
        residual: Array | None,
        width: int,
        levels: Sequence[float],
        middles: Sequence[float],
        divisor: float,
        stream: int,
        rng: Rng,
    ) -> tuple[tuple[Array, ...], Array]:
        """float32[n] -> the payload: codes, scales and streams; and the new residual (if there is a residual)."""
        xp, (n,), form = self._xp, x.shape, form_of(width, levels)
        m, empty = block_count(n, width), xp.buffers.empty
        payload = empty(m * width // 8 * form["BITS"], "uint8"), empty(m), empty(m, "uint8")
        if n == 0:
            return payload, x
        v, how = (x, x if residual is None else residual), (width**0.5, divisor, stream, *_random(rng))
        self._launch(
            eden_encode, -(-m // form["ROWS"]), *v, *payload, n, tuple(levels), tuple(middles), *how,
            **form, BIASED=divisor != 0, ADD=residual is not None, num_warps=warps_of(width),
        )  # fmt: skip
        return payload, x

    def eden_mean(
        self, payloads: Pairs, out: Array | None, n: int, width: int, levels: Sequence[float], rng: Rng
    ) -> Array:
        """Each worker's codes, scales and streams -> float32[n], in ``out`` if given."""
        form, m = form_of(width, levels), block_count(n, width)
        sizes = ("uint8", m * width // 8 * form["BITS"]), ("float32", m), ("uint8", m)
        return self._mean(
            eden_mean, -(-m // form["ROWS"]), fitted(self._xp, payloads, *sizes), out, n,
            tuple(levels), width**0.5, *_random(rng), group=TOGETHER, apart=True, **form, num_warps=warps_of(width),
        )  # fmt: skip


def form_of(width: int, levels: Sequence[float]) -> dict[str, int]:
    """The constants that kernels are compiled for.

    A program handles whole blocks, so it takes none that are larger than `LARGE`: raises Unavailable.
    """
    if width > LARGE:
        raise Unavailable(f"blocks of {width} elements are too large for one program")
    bits, stages = len(levels).bit_length() - 1, width.bit_length() - 1
    return {"ROWS": max(1, TILE // width), "WIDTH": width, "STAGES": stages, "BITS": bits}


def warps_of(width: int) -> int:
    """Return the number of warps per program for blocks of this width."""
    return max(4, width // 1024)


def _random(rng: Rng) -> tuple[int, int, int]:
    return rng.offset, signed(rng.keys[0]), signed(rng.keys[1])
