"""C++ kernels for the operations that cost most on a CPU: optional, with the same bits as the plain functions.

Only products, cosine transforms and thc's norms add in a different order, so their last bits may differ.

``library()`` returns them, or None if they are not built (``python -m grace.kernels.build``) or the environment sets
GRACE_KERNELS=off. GRACE_KERNELS=avx512, avx2, neon or scalar selects an instruction set. On CUDA devices, Triton's
kernels run instead (`grace.kernels.device`), unless GRACE_KERNELS=off; GRACE_KERNELS=triton warns if Triton is missing.
Nothing is loaded before the first call.
"""

from __future__ import annotations

import ctypes
import os
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grace.kernels.native import Library

__all__ = ["ISAS", "KINDS", "Codes", "Library", "library"]

ISAS = ("avx512", "avx2", "neon", "scalar")
"""Names of instruction sets; "neon" and "scalar" are the same portable code, for AArch64 and for other CPUs."""

KINDS = ("bfloat16", "fp8", "natural", "dithered", "nearest")
"""Kinds of codes, in the order of kernels.h."""
LOWEST = (127 - 24) << 7
"""The upper 16 bits of the float 2**-24."""
BUCKETS = (127 << 7) - LOWEST + 1
"""Number of buckets of one sign in a table of codes: see `_buckets`."""

Address = int | None
_P, _I, _F, _N, _W = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int32, ctypes.c_uint32


class _Noise(ctypes.Structure):
    _fields_ = [("table", _P), ("offsets", _P), ("origin", _I), ("start", _I)]


class _Codec(ctypes.Structure):
    _fields_ = [
        *((name, _N) for name in ("kind", "bits", "first", "second", "top", "random")),
        *(("factor", _F), ("key0", _W), ("key1", _W), ("table", _P), ("buckets", _P), ("noise", _Noise)),
    ]


class Codes:
    """The values of low-bit codes, as their compressor defines them.

    ``kind``: one of `KINDS`. "bfloat16": the codes are numbers without scales; all other kinds have a 4-byte scale per
    block. "fp8": the codes are floats with ``first`` mantissa bits, exponent bias ``second`` and the largest code
    ``top``. "natural": a block's scale is the largest exponent field, int32; ``second`` fixes it for all blocks, or is
    0. "dithered": the codes have ``first`` levels. "nearest": the values are the entries of ``table``, ascending, with
    float32 ``middles`` between them. The scale of "fp8", "dithered" and "nearest" is the block's largest magnitude
    times ``factor``. ``bits``: bits per code. ``table``: the value of each code; empty if a formula gives it.
    """

    def __init__(
        self,
        kind: str,
        bits: int,
        first: int = 0,
        second: int = 0,
        top: int = 0,
        factor: float = 1.0,
        table: Sequence[float] = (),
        middles: Sequence[float] = (),
    ):
        self.kind, self.bits = kind, bits
        self._numbers = KINDS.index(kind), bits, first, second, top
        self._factor = factor
        self._table = (_F * len(table))(*table)
        buckets = _buckets(list((_F * len(middles))(*middles))) if middles else []
        self._buckets = (_W * len(buckets))(*buckets)

    def with_random(
        self,
        keys: tuple[int, int] | None = None,
        table: Address = None,
        offsets: Address = None,
        start: int = 0,
    ) -> _Codec:
        """Return the C structure for a kernel. ``keys``: for stochastic rounding ("fp8" uses noise instead)."""
        noise = _Noise(table or None, offsets or None, start // 65536, start)
        addresses = ctypes.addressof(self._table), ctypes.addressof(self._buckets)
        return _Codec(*self._numbers, keys is not None, self._factor, *(keys or (0, 0)), *addresses, noise)


def _buckets(middles: list[float]) -> list[int]:
    # A bucket holds all floats of one sign with equal upper 16 bits. Magnitudes below 2**-24 share a bucket, and so do
    # those from 1 on. The upper 16 bits of an entry count the middles below the bucket. If the bucket contains a
    # middle, adding a float's lower 16 bits (inverted if negative) to the entry carries into this count exactly if the
    # float lies above the middle.
    edges = [0.0, *(_float(LOWEST + place << 16) for place in range(1, BUCKETS + 1))]
    if any(not edges[1] <= abs(middle) < 1 for middle in middles):
        raise ValueError("entries of a table are too close to 0 to be found by their upper bits, or beyond 1")
    found = []
    for negative in (False, True):
        for low, high in pairwise(edges):
            begin = bisect_right(middles, -high) if negative else bisect_left(middles, low)
            end = bisect_left(middles, -low) if negative else bisect_left(middles, high)
            if end - begin > 1:
                raise ValueError("entries of a table are too close to each other to be found by their upper bits")
            lower = _bits(middles[begin]) & 0xFFFF if end > begin else 0
            found.append((begin << 16) + (0xFFFF - lower if end > begin and not negative else lower))
    return found


def _float(bits: int) -> float:
    return float(struct.unpack("f", struct.pack("i", bits))[0])


def _bits(x: float) -> int:
    return int(struct.unpack("I", struct.pack("f", x))[0])


def library(isa: str | None = None) -> Library | None:
    """Return the kernels of an instruction set, by default the best; None if not built, off or unsupported."""
    if isa is None:
        isa = os.environ.get("GRACE_KERNELS", "").lower()
        if isa in ("off", "0"):
            return None
        isa = "" if isa in ("on", "1", "triton") else isa
    if isa and isa not in ISAS:
        raise ValueError(f"GRACE_KERNELS={isa!r}: choose one of {', '.join(ISAS)}, triton or off")
    return _library(isa)


@cache
def _library(isa: str) -> Library | None:
    from grace.kernels import native

    shared = load("kernels")
    if shared is None:
        return None
    shared.grace_supports.argtypes = [ctypes.c_char_p]
    for name in (isa,) if isa else ISAS:
        loops = load("scalar" if name == "neon" else name) if shared.grace_supports(name.encode()) else None
        if loops is not None:
            loops.grace_loops.restype = _P
            return native.Library(shared, loops.grace_loops())
    return None


def load(name: str) -> ctypes.CDLL | None:
    """Load a library of `grace.kernels.build`; returns None if it is not built."""
    from grace.kernels import build  # not at the top: the module also runs as a program

    path = build.find(name)
    return ctypes.CDLL(str(path)) if path else None


def __getattr__(name: str) -> Any:
    if name == "Library":
        from grace.kernels.native import Library

        return Library
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
