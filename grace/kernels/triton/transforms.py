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
from grace.kernels.triton.launcher import LARGE, Launcher, load_sum, put_mean
from grace.kernels.triton.rotations import load_rotated, put_rotated, row_places, words
from grace.ops.blocks import block_count

Array = Any

TILE = 2048
"""Number of elements per program, unless a block has more. They stay in registers: 16 to 32 per thread."""
TOGETHER = 4
"""Number of workers whose payloads a pass adds, as parameters of `eden_mean`."""


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
    row, at = row_places(ROWS, WIDTH)
    value = load_sum(x + begin, residual + begin, at, at < left, ADD)
    rest = put_rotated(
        value, words(start + begin, at, key0, key1), codes + begin // 8 * BITS, scales + first, streams + first, row,
        left, levels, middles, root, divisor, stream, ROWS, WIDTH, STAGES, BITS, BIASED, ADD,
    )  # fmt: skip
    if ADD:
        tl.store(x + begin + at, rest, mask=at < left)


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
    row, at = row_places(ROWS, WIDTH)
    random = words(start + begin, at, key0, key1)
    codes = (codes0, codes1, codes2, codes3)
    scales = (scales0, scales1, scales2, scales3)
    streams = (streams0, streams1, streams2, streams3)
    if not FIRST:
        total = tl.load(out + begin + at, mask=at < left, other=0.0)
    for worker in tl.static_range(WORKERS):
        value = load_rotated(
            random, codes[worker] + begin // 8 * BITS, scales[worker] + first, streams[worker] + first, row, left,
            levels, root, ROWS, WIDTH, STAGES, BITS,
        )  # fmt: skip
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
