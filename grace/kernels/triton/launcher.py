"""Launches Triton's kernels; also functions and constants that they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from grace.core.errors import Unavailable

Array = Any

LARGE = 8192
"""Maximum size of blocks that one program reads whole."""
TILE = 4096
"""Number of elements per program: a multiple of 8, so that bits fill whole bytes, and less than a noise row."""
INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter."""


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


class Launcher:
    """Launches kernels on device tensors.

    A kernel that cannot be compiled or launched raises `Unavailable`, before writing any output.
    """

    def __init__(self, xp: Any, give_up: Callable[[Exception], None]):
        self._xp, self._give_up = xp, give_up

    def _launch(self, kernel: Any, programs: int, *arguments: Any, **form: Any) -> None:
        # Run on the tensors' device, which may differ from the current one. Silence the interpreter's NumPy warnings.
        device = self._xp.device
        try:
            with torch.cuda.device(device) if device.type == "cuda" else np.errstate(all="ignore"):
                kernel[(programs,)](*arguments, **form, enable_fp_fusion=False)
        except Exception as error:  # the compiler, its tools and the driver raise various classes
            self._give_up(error)
            raise Unavailable(str(error)) from error


def rows_of(block: int) -> tuple[int, int]:
    """Return the number of blocks per program, and the smallest power of two (from 8) that holds a block."""
    width = max(8, triton.next_power_of_2(block))
    return max(1, TILE // width), width
