"""Launches of Triton's kernels, and what the kernels share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from grace.core.errors import Unavailable
from grace.kernels.calls import Pairs

Array = Any

LARGE = 8192
"""Maximum size of blocks that one program reads whole."""
TILE = 4096
"""Number of elements per program: a multiple of 8, so that bits fill whole bytes, and less than a noise row."""
GROUP = 8
"""Number of workers whose payloads a pass adds."""
INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter."""


# Places are int32 offsets from a program's start; starts are int64.


@triton.jit
def load_sum(x, residual, at, here, ADD: tl.constexpr):
    """Return x + residual if ADD, else x."""
    value = tl.load(x + at, mask=here, other=0.0)
    if ADD:
        value += tl.load(residual + at, mask=here, other=0.0)
    return value


@triton.jit
def magnitudes_of(value):
    """Return magnitudes as integers, which have the same order, with NaN as the largest."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def mixed(h):
    """`grace.core.rng.mix` of uint32."""
    h ^= h >> 16
    h *= 0x85EBCA6B
    h ^= h >> 13
    h *= 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def put_mean(out, total, at, left, divisor, DIVIDE: tl.constexpr):
    """Store a sum over workers; if DIVIDE, divide it by ``divisor`` first."""
    if DIVIDE:
        total = tl.div_rn(total, tl.full(total.shape, divisor, tl.float32))
    tl.store(out + at, total, mask=at < left)


class Launcher:
    """Launches kernels on device tensors; x always receives the new residual.

    A kernel that cannot be compiled or launched raises `Unavailable`, before writing any output.
    """

    def __init__(self, xp: Any, give_up: Callable[[Exception], None]):
        self._xp, self._give_up = xp, give_up

    def _launch(self, kernel: Any, programs: int, *arguments: Any, **form: Any) -> None:
        # Run on the tensors' own device, which may not be the current one; the interpreter's NumPy warns of infinity.
        device = self._xp.device
        try:
            with torch.cuda.device(device) if device.type == "cuda" else np.errstate(all="ignore"):
                kernel[(programs,)](*arguments, **form, enable_fp_fusion=False)
        except Exception as error:  # from the compiler, its tools, or the driver, without a common class
            self._give_up(error)
            raise Unavailable(str(error)) from error

    def _mean(
        self,
        kernel: Any,
        programs: int,
        payloads: Pairs,
        out: Array | None,
        n: int,
        *how: Any,
        group: int = GROUP,
        apart: bool = False,
        **form: Any,
    ) -> Array:
        # Returns the mean, float32[n], in ``out`` if given. Each launch adds the payloads of up to ``group`` workers.
        # The kernel takes a tuple over these workers for each array of a payload; with ``apart``, it takes one
        # argument per worker and array, padded to ``group`` workers.
        workers, out = len(payloads), self._xp.buffers.empty(n) if out is None else out
        for first in range(0, workers if n else 0, group):
            sent: list[Any] = list(zip(*payloads[first : first + group], strict=True))
            place = {"WORKERS": len(sent[0]), "FIRST": first == 0, "DIVIDE": 1 < workers <= first + group}
            if apart:
                sent = [array for each in sent for array in (*each, *each[:1] * (group - len(each)))]
            self._launch(kernel, programs, *sent, out, n, float(workers), *how, **form, **place)
        return out


def rows_of(block: int) -> tuple[int, int]:
    """Return the number of blocks per program, and the smallest power of two (from 8) that holds a block."""
    width = max(8, triton.next_power_of_2(block))
    return max(1, TILE // width), width
