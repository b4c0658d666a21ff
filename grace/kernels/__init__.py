"""Kernels in C++ for the few operations that cost most on a CPU: optional, and the same bits as the plain code's.

Products and cosine transforms add up in another order, which may decide last bits.

``library()`` gives them, or None: where they are not built (``python -m grace.kernels.build``) or the environment says
GRACE_KERNELS=off. GRACE_KERNELS=avx512, avx2, neon or scalar asks for one instruction set; =triton for Triton's kernels
on CUDA devices (`grace.kernels.device`), and here for the best. Nothing is loaded before the first call.
"""

from __future__ import annotations

import ctypes
import os
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

__all__ = ["ISAS", "KINDS", "Codes", "Library", "library"]

ISAS = ("avx512", "avx2", "neon", "scalar")
"""Names of instruction sets; "neon" and "scalar" are the same plain code, compiled for AArch64 and for the others."""

KINDS = ("bfloat16", "fp8", "natural", "dithered", "nearest")
"""Codes that kernels know, in the order of kernels.h."""
LOWEST = (127 - 24) << 7
BUCKETS = (127 << 7) - LOWEST + 1

Address = int | None
_P, _I, _F, _N, _W = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int32, ctypes.c_uint32
_D = ctypes.c_double


class _Noise(ctypes.Structure):
    _fields_ = [("table", _P), ("offsets", _P), ("origin", _I), ("start", _I)]


class _Codec(ctypes.Structure):
    _fields_ = [
        *((name, _N) for name in ("kind", "bits", "first", "second", "top", "random")),
        *(("factor", _F), ("key0", _W), ("key1", _W), ("table", _P), ("buckets", _P), ("noise", _Noise)),
    ]


class Codes:
    """What codes of a few bits stand for, as the compressor of that name has it.

    ``kind``, of `KINDS`: "bfloat16" are the numbers themselves; all others have a scale, 4 bytes, for each block.
    "fp8": ``first`` bits of mantissa, the bias ``second``, codes up to ``top``. "natural": the scale is an exponent's
    field, int32; ``second`` the one of a fixed window, or 0. "dithered": ``first`` levels.
    "nearest": of ``table``, ascending, by float32 ``middles`` between its entries. A scale is the largest magnitude
    times ``factor``. ``bits``: of a code. ``table``: of what each code stands for, unless it is worked out.
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
        """For a kernel. ``keys``: rounds at random, by words of these; "fp8" by noise, which is as of `ints_encode`."""
        noise = _Noise(table or None, offsets or None, start // 65536, start)
        addresses = ctypes.addressof(self._table), ctypes.addressof(self._buckets)
        return _Codec(*self._numbers, keys is not None, self._factor, *(keys or (0, 0)), *addresses, noise)


def _buckets(middles: list[float]) -> list[int]:
    # Of each bucket, all floats of a sign whose upper 16 bits are alike, times 65536 how many middles are below it.
    # Magnitudes below 2**-24 are one bucket, and from 1 on. Added to that: what must be added to the lower 16 bits of a
    # float, those of a negative one upside down, so that it overflows where one more is below; 0 where no middle is in.
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
    """The kernels of an instruction set, by default the best of this machine; None: not built, off, or not for it."""
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
    from grace.kernels import build  # not above: it is run as a program, too

    path = build.find(build.library_name())
    if path is None:
        return None
    shared = ctypes.CDLL(str(path))
    shared.grace_loops.restype, shared.grace_loops.argtypes = _P, [ctypes.c_char_p]
    handle = shared.grace_loops(isa.encode())
    return Library(shared, handle) if handle else None


class Library:
    """The kernels of one instruction set.

    They take raw addresses as integers, None or 0 for what is absent, and check nothing: arrays must be contiguous, of
    the dtypes and sizes given, and not change meanwhile. Any address will do, aligned or not. ``n`` is a number of
    elements, 0 too; ``block`` how many share a scale, a multiple of 8, or 0 for all; m = ceil(n / block), of 0 elements
    none. ``residual`` is added to ``x``, if it is given, and v is their sum; ``out`` takes what the payload does not
    carry of v, if it is given, and may be ``x`` or ``residual``. With ``swap`` it must be the residual, if there is
    one, and x takes what that held, so that it can be had back. Beyond 262,144 elements the work is split over
    ``threads``; the results do not depend on their number. The interpreter's lock is released meanwhile.
    """

    def __init__(self, shared: Any, handle: int):
        def bind(name: str, *types: Any, result: Any = None) -> Any:
            function = shared[f"grace_{name}"]  # an object of its own for each Library
            function.restype, function.argtypes = result, [_P, *types]
            return function

        self.handle = handle
        self.isa: str = bind("name", result=ctypes.c_char_p)(handle).decode()
        self.path: str = shared._name
        self._signs_encode = bind("signs_encode", _P, _P, _P, _P, _P, _I, _I, _I, _I)
        self._signs_mean = bind("signs_mean", _P, _P, _I, _P, _I, _I, _I)
        self._ints_encode = bind("ints_encode", _P, _P, _P, _P, _P, _I, _I, _I, _P, _P, _I, _I, _I)
        self._ints_mean = bind("ints_mean", _P, _P, _I, _P, _I, _I, _I, _I)
        self._topk_encode = bind("topk_encode", _P, _P, _P, _P, _P, _I, _I, _I, _I, result=_I)
        self._threshold_encode = bind("threshold_encode", _P, _P, _P, _F, _P, _P, _I, _I, _I, result=_I)
        self._accumulate = bind("accumulate", _P, _P, _F, _F, _P, _I, _I, result=_I)
        self._topk_rows = bind("topk_rows", _P, _I, _I, _I, _P, _I, result=_I)
        self._beyond = bind("beyond", _P, _F, _P, _P, _I, _I, _I, result=_I)
        self._excess = bind("excess", _P, _F, _P, _I, _I, result=_I)
        self._smallest_words = bind("smallest_words", _I, _I, _I, _I, _I, _P, _I, result=_I)
        sizes = _I, _I, _I, _I, _I, _I
        self._sampled = bind("sampled", _P, *sizes, _P, _P, _I, _I, _I, _I, _P, _P, _I, _I, result=_I)
        self._correct = bind("correct", _P, _P, _P, _P, _P, _P, _F, _I, _I, _I)
        self._sparse_means = bind("sparse_means", _P, _P, _P, _P, _I, _I, _P, _I, _I, result=_I)
        self._positions_write = bind("positions_write", _P, _I, _I, _P, _P, _I, result=_I)
        self._positions_read = bind("positions_read", _P, _P, _I, _I, _I, _P, result=_I)
        self._chunks_encode = bind("chunks_encode", *(_P,) * 7, *(_I,) * 5, result=_I)
        self._chunks_values = bind("chunks_values", *(_P,) * 4, _I, _I, _I, _P, _P, result=_I)
        self._finite = bind("finite", _P, _P, _I, result=_I)
        self._gathered = bind("gathered", _I, result=_I)
        self._words = bind("words", _I, _I, _I, _I, _P, _I)
        self._product = bind("product", _P, _P, _P, _P, _I, _I, _I, _I)
        self._part = bind("part", _P, _P, _P, _P, _P, _P, _I, _I, _I, _I)
        self._left = bind("left", _P, _P, _P, _P, _I, _I, _I, _I)
        self._right = bind("right", _P, _P, _P, _P, _I, _I, _I, _I)
        self._levels_encode = bind("levels_encode", _P, _P, _P, _P, _P, _I, _I, _I, _I, _P, _P, _I, _I, _I, _I, _I)
        self._levels_mean = bind("levels_mean", _P, _P, _I, _P, _I, _I, _I, _I, _I)
        self._votes_encode = bind("votes_encode", _P, _P, _P, _I, _I)
        self._votes_mean = bind("votes_mean", _P, _P, _I, _P, _I, _I)
        self._halves_encode = bind("halves_encode", _P, _P, _P, _P, _P, _I, _I, _I, _I)
        self._halves_mean = bind("halves_mean", _P, _P, _I, _P, _I, _I, _I)
        self._trits_encode = bind("trits_encode", _P, _P, _P, _P, _P, _I, _I, _F, _I, _I, _I, result=_I)
        self._trits_mean = bind("trits_mean", _P, _P, _P, _I, _P, _I, _I, _I, _I, result=_I)
        self._codes_encode = bind("codes_encode", _P, _P, _P, _P, _P, _P, _I, _I, _I, _I, _I)
        self._codes_mean = bind("codes_mean", _P, _P, _P, _I, _P, _I, _I, _I)
        self._noise_table = bind("noise_table", _I, _I, _I, _P, _I)
        where = _I, _I, _I, _I  # in which random words, and the number of threads
        self._normal_encode = bind("normal_encode", *(_P,) * 6, _I, _I, _I, _P, _P, _F, _I, *where, _I)
        self._normal_mean = bind("normal_mean", _P, _P, _P, _I, _P, _I, _I, _I, _P, *where)
        self._norms = bind("norms", _P, _P, _I, _I, _I)
        self._steps_encode = bind("steps_encode", _P, _P, _P, _I, _I, _I, _I, _F, _F, _P, _P, *where)
        self._steps_values = bind("steps_values", *(_P,) * 6, _I, _I, _I, _F, _F, _F, *where)
        self._quantiles_encode = bind("quantiles_encode", _P, _P, _P, _I, _I, _I, result=_I)
        self._quantiles_mean = bind("quantiles_mean", _P, _P, _I, _P, _I, _I, _I, _I)
        self._signs_count = bind("signs_count", _P, _P, _P, _P, _I, _I, _I, result=_I)
        self._largest_of_signs = bind("largest_of_signs", _P, _P, _D, _P, _P, _P, _I, _I, result=_I)
        self._count_sketch = bind("count_sketch", _P, _P, _P, _I, _I, _I, _I, _I, result=_I)
        self._estimate = bind("count_sketch_estimate", _P, _P, _P, _I, _I, _I, _I, _I, result=_I)
        self._tagged_count = bind("tagged_count", _P, _P, _I, _I, _I, _I)
        self._tagged_encode = bind("tagged_encode", _P, _P, _P, _P, _P, _P, _I, _I, _I, _I)
        self._tagged_mean = bind("tagged_mean", _P, _P, _P, _P, _P, _I, _P, _I, _I, _I, _I, result=_I)
        self._bins_encode = bind("bins_encode", _P, _P, _P, _P, _P, _P, _I, _I, _I, result=_I)
        self._bins_mean = bind("bins_mean", _P, _P, _P, _P, _I, _P, _I, _I, _I, result=_I)
        chunks = _I, _I, _I, _I, _I  # sizes of a matrix and of its chunks, and how much is sent of each
        self._cosines_encode = bind("cosines_encode", *(_P,) * 6, *chunks, _I, _I, result=_I)
        self._cosines_left = bind("cosines_left", *(_P,) * 5, *chunks, _I, result=_I)
        self._cosines_mean = bind("cosines_mean", _P, _P, _P, _I, _P, *chunks, _I, _I, _I, result=_I)
        self._shared_encode = bind("shared_encode", _P, _P, _P, _I, _I, _I, _I, _P, _P, _I, _I)
        self._shared_values = bind("shared_values", _P, _P, _P, _P, _I, _I, _I, _I, _I)
        self._signed_sums = bind("signed_sums", _P, _P, _P, _I, _I, _I, _I, result=_I)
        self._largest_sums = bind("largest_sums", _P, _P, _I, _I, _P, _P, _I, _I, result=_I)
        wanted = _D, _I, _I, _I, _I
        self._chances_encode = bind("chances_encode", _P, *wanted, _P, _P, _P, _P, _I, _P, _I, _I, result=_I)

    def signs_encode(
        self,
        x: int,
        residual: Address,
        out: Address,
        bits: int,
        scales: int,
        n: int,
        block: int,
        threads: int = 1,
        swap: bool = False,
    ) -> None:
        """Signs and mean magnitudes, as `grace.compressors.efsignsgd` has them.

        x, residual, out: float32[n]; bits: uint8[ceil(n/8)], v >= 0; scales: float32[m]; out = v - (+-scale).
        """
        self._signs_encode(self.handle, x, residual, out, bits, scales, n, block, swap, threads)

    def signs_mean(
        self,
        bits_ptrs: Sequence[int],
        scales_ptrs: Sequence[int],
        workers: int,
        out: int,
        n: int,
        block: int,
        threads: int = 1,
    ) -> None:
        """out, float32[n]: the mean of what the workers sent, each bits and scales as of `signs_encode`, in order."""
        pointers = _P * workers
        bits, scales = pointers(*bits_ptrs), pointers(*scales_ptrs)
        self._signs_mean(self.handle, bits, scales, workers, out, n, block, threads)

    def ints_encode(
        self,
        x: int,
        residual: Address,
        out: Address,
        codes: int,
        scales: int,
        n: int,
        block: int,
        bits: int,
        table: Address = None,
        offsets: Address = None,
        start: int = 0,
        threads: int = 1,
        swap: bool = False,
    ) -> None:
        """Integers relative to each block's largest magnitude, as `grace.compressors.blockint` has them.

        x, residual, out: float32[n]; codes: uint8[ceil(n * bits / 8)], bits = 8, 4 or 2; scales: float32[m].
        Rounds to nearest without a ``table``, uint16[65536]; with it floor(steps + u), u = (noise + 0.5) / 65536 where
        noise = (table[p % 65536] + offsets[p // 65536 - start // 65536]) % 65536 for the element at p = start + j.
        """
        self._ints_encode(
            self.handle, x, residual, out, codes, scales, n, block, bits, table, offsets, start, swap, threads
        )

    def ints_mean(
        self,
        codes_ptrs: Sequence[int],
        scales_ptrs: Sequence[int],
        workers: int,
        out: int,
        n: int,
        block: int,
        bits: int,
        threads: int = 1,
    ) -> None:
        """out, float32[n]: the mean of what the workers sent, each codes and scales as of `ints_encode`, in order."""
        pointers = _P * workers
        codes, scales = pointers(*codes_ptrs), pointers(*scales_ptrs)
        self._ints_mean(self.handle, codes, scales, workers, out, n, block, bits, threads)

    def levels_encode(
        self,
        x: int,
        residual: Address,
        out: Address,
        codes: int,
        scales: int,
        n: int,
        block: int,
        bits: int,
        levels: int,
        table: Address = None,
        offsets: Address = None,
        start: int = 0,
        keys: tuple[int, int] = (0, 0),
        threads: int = 1,
        swap: bool = False,
    ) -> None:
        """Levels 0 .. ``levels`` of v relative to each block's norm, as `grace.compressors.qsgd` has them.

        Codes of 1 .. 8 bits, the sign in the top one, as `grace.ops.packing` writes them: uint8[packed_size(bits, n)];
        scales: float32[m]. Noise is added before a level is rounded down: table, offsets and start as in `ints_encode`.
        levels = 0, of 2 bits: `grace.compressors.terngrad`'s ternary numbers relative to the largest magnitude, drawn
        by the uniform numbers of ``keys`` from ``start`` on, without a table.
        """
        noise = table, offsets, start, *keys
        self._levels_encode(self.handle, x, residual, out, codes, scales, n, block, bits, levels, *noise, swap, threads)

    def levels_mean(
        self,
        codes_ptrs: Sequence[int],
        scales_ptrs: Sequence[int],
        workers: int,
        out: int,
        n: int,
        block: int,
        bits: int,
        levels: int,
        threads: int = 1,
    ) -> None:
        """out, float32[n]: the mean of what the workers sent, each codes and scales as of `levels_encode`, in order."""
        pointers = _P * workers
        codes, scales = pointers(*codes_ptrs), pointers(*scales_ptrs)
        self._levels_mean(self.handle, codes, scales, workers, out, n, block, bits, levels, threads)

    def votes_encode(self, x: int, bits: int, flags: int, n: int, threads: int = 1) -> None:
        """bits: uint8[ceil(n/8)], x >= 0; flags: uint8[ceil(n/8192)], 1 for blocks that hold NaN or infinity."""
        self._votes_encode(self.handle, x, bits, flags, n, threads)

    def votes_mean(
        self,
        bits_ptrs: Sequence[int],
        flags_ptrs: Sequence[int],
        workers: int,
        out: int,
        n: int,
        threads: int = 1,
    ) -> None:
        """out, float32[n]: the sign that most workers sent, 1 for a tie; NaN in blocks that one of them flagged."""
        pointers = _P * workers
        bits, flags = pointers(*bits_ptrs), pointers(*flags_ptrs)
        self._votes_mean(self.handle, bits, flags, workers, out, n, threads)

    def halves_encode(
        self,
        x: int,
        residual: Address,
        out: Address,
        bits: int,
        means: int,
        n: int,
        block: int,
        threads: int = 1,
        swap: bool = False,
    ) -> None:
        """Signs, and the means of the negative and of the other elements, as `grace.compressors.onebit` has them.

        bits: uint8[ceil(n/8)], v < 0; means: float32[2 m].
        """
        self._halves_encode(self.handle, x, residual, out, bits, means, n, block, swap, threads)

    def halves_mean(
        self,
        bits_ptrs: Sequence[int],
        means_ptrs: Sequence[int],
        workers: int,
        out: int,
        n: int,
        block: int,
        threads: int = 1,
    ) -> None:
        """out, float32[n]: the mean of what the workers sent, each bits and means as of `halves_encode`, in order."""
        pointers = _P * workers
        bits, means = pointers(*bits_ptrs), pointers(*means_ptrs)
        self._halves_mean(self.handle, bits, means, workers, out, n, block, threads)

    def trits_encode(
        self,
        x: int,
        residual: Address,
        out: Address,
        bytes_: int,
        scales: int,
        n: int,
        block: int,
        sparsity: float,
        runs: bool,
        threads: int = 1,
        swap: bool = False,
    ) -> int:
        """Ternary numbers, five in a byte, as `grace.compressors.threelc` has them; returns how many bytes they take.

        bytes_: uint8[ceil(n/5)], of which the first are sent; scales: float32[m]; ``block``: a multiple of 40, or 0;
        ``runs``: runs of zeros are written shortly.
        """
        return int(
            self._trits_encode(self.handle, x, residual, out, bytes_, scales, n, block, sparsity, runs, swap, threads)
        )

    def trits_mean(
        self,
        bytes_ptrs: Sequence[int],
        scales_ptrs: Sequence[int],
        counts: Sequence[int],
        workers: int,
        out: int,
        n: int,
        block: int,
        runs: bool,
        threads: int = 1,
    ) -> None:
        """out, float32[n]: the mean of what the workers sent, each bytes and scales as of `trits_encode`, in order.

        ValueError if a worker's ``counts`` bytes with their runs do not make ceil(n/5); without runs that is not asked.
        """
        pointers = _P * workers
        bytes_, scales = pointers(*bytes_ptrs), pointers(*scales_ptrs)
        sizes = (_I * workers)(*counts)
        wrong = self._trits_mean(self.handle, bytes_, scales, sizes, workers, out, n, block, runs, threads)
        if wrong >= 0:
            raise ValueError(f"the runs of worker {wrong} do not make {-(-n // 5)} bytes")

    def codes_encode(
        self,
        x: int,
        residual: Address,
        out: Address,
        codes: int,
        scales: Address,
        n: int,
        block: int,
        codec: _Codec,
        start: int = 0,
        threads: int = 1,
        swap: bool = False,
    ) -> None:
        """Codes of ``codec.bits``, of `Codes.with_random`; ``start``: the position of x[0] among random words.

        x, residual, out: float32[n]; codes: uint8, as `grace.ops.packing.pack` has them, or little-endian; scales:
        4 bytes [m], absent for those that have none.
        """
        with_codec = self.handle, ctypes.addressof(codec)
        self._codes_encode(*with_codec, x, residual, out, codes, scales, n, block, start, swap, threads)

    def codes_mean(
        self,
        codes_ptrs: Sequence[int],
        scales_ptrs: Sequence[int] | None,
        workers: int,
        out: int,
        n: int,
        block: int,
        codec: _Codec,
        threads: int = 1,
    ) -> None:
        """out, float32[n]: the mean of what the workers sent, each codes and scales as of `codes_encode`, in order."""
        pointers = _P * workers
        codes, scales = pointers(*codes_ptrs), None if scales_ptrs is None else pointers(*scales_ptrs)
        self._codes_mean(self.handle, ctypes.addressof(codec), codes, scales, workers, out, n, block, threads)

    def normal_encode(
        self,
        x: int,
        residual: Address,
        out: Address,
        codes: int,
        scales: int,
        streams: int,
        n: int,
        width: int,
        levels: Sequence[float],
        middles: Sequence[float],
        divisor: float,
        stream: int,
        keys: tuple[int, int],
        start: int = 0,
        threads: int = 1,
        swap: bool = False,
    ) -> None:
        """Blocks rotated at random and rounded to ``levels``, as `grace.compressors.eden` has them.

        ``width``: elements of a block, a power of two, at least 8; the last is filled up with zeros. codes:
        uint8[bits * width * m / 8] for 2**bits levels; scales: float32[m], sums of magnitudes over ``divisor``, or 0
        for those without bias; streams: uint8[m]. Random words are those of ``keys`` from ``start`` on.
        """
        bits = len(levels).bit_length() - 1
        tables = (_F * len(levels))(*levels), (_F * len(middles))(*middles)
        self._normal_encode(
            self.handle, x, residual, out, codes, scales, streams, n, width, bits, *tables, divisor, stream, *keys,
            start, swap, threads,
        )  # fmt: skip

    def normal_mean(
        self,
        codes_ptrs: Sequence[int],
        scales_ptrs: Sequence[int],
        streams_ptrs: Sequence[int],
        workers: int,
        out: int,
        n: int,
        width: int,
        levels: Sequence[float],
        keys: tuple[int, int],
        start: int = 0,
        threads: int = 1,
    ) -> None:
        """out, float32[n]: the mean of what the workers sent, each three arrays as of `normal_encode`, in order."""
        pointers, bits = _P * workers, len(levels).bit_length() - 1
        sent = pointers(*codes_ptrs), pointers(*scales_ptrs), pointers(*streams_ptrs)
        table = (_F * len(levels))(*levels)
        self._normal_mean(self.handle, *sent, workers, out, n, width, bits, table, *keys, start, threads)

    def norms(self, x: int, norms: int, n: int, block: int, threads: int = 1) -> None:
        """norms, float32[m]: `grace.ops.blocks.norms` of blocks of x, float32[n]; ``block`` is not 0."""
        self._norms(self.handle, x, norms, n, block, threads)

    def steps_encode(
        self,
        x: int,
        norms: int,
        codes: int,
        n: int,
        width: int,
        top: int,
        wide: bool,
        cut: float,
        factor: float,
        table: int,
        offsets: int,
        keys: tuple[int, int],
        start: int = 0,
        threads: int = 1,
    ) -> None:
        """Blocks rotated at random and rounded at random to steps 0 .. ``top``, as `grace.compressors.thc` has them.

        ``width``, ``keys`` and ``start`` as in `normal_encode`; table and offsets as in `ints_encode`. x: float32[n];
        norms: float32[m]; codes: uint8[width * m], int32 where they are ``wide``. ``factor``: steps in 1.
        """
        noise = table, offsets
        self._steps_encode(
            self.handle, x, norms, codes, n, width, top, wide, cut, factor, *noise, *keys, start, threads
        )

    def steps_values(
        self,
        sums: Address,
        own: Address,
        norms: int,
        x: Address,
        mean: Address,
        rest: Address,
        n: int,
        width: int,
        wide: bool,
        cut: float,
        factor: float,
        own_factor: float,
        keys: tuple[int, int],
        start: int = 0,
        threads: int = 1,
    ) -> None:
        """rest = x - what ``own`` stands for, if it is given, and then mean = what ``sums`` stand for, if they are.

        sums, own: codes as of `steps_encode`, one of which is ``factor`` or ``own_factor``; x, mean, rest: float32[n],
        of which rest and mean may be x, but not both.
        """
        arrays, factors = (sums, own, norms, x, mean, rest), (cut, factor, own_factor)
        self._steps_values(self.handle, *arrays, n, width, wide, *factors, *keys, start, threads)

    def topk_encode(
        self,
        x: int,
        residual: Address,
        out: Address,
        values: int,
        positions: int,
        n: int,
        k: int,
        threads: int = 1,
        swap: bool = False,
    ) -> None:
        """The k <= n elements of largest magnitude: exactly those of ``xp.topk(xp.abs(v), k)``.

        x, residual, out: float32[n]; values: float32[k]; positions: int32[k], ascending.
        """
        if self._topk_encode(self.handle, x, residual, out, values, positions, n, k, swap, threads):
            raise MemoryError("top-k needs memory for about 2 k elements")

    def threshold_encode(
        self,
        x: int,
        residual: Address,
        out: Address,
        bound: float,
        values: int,
        positions: int,
        capacity: int,
        n: int,
        threads: int = 1,
    ) -> int:
        """How many elements have a magnitude of at least float32(``bound``), or are not finite.

        x, residual, out: float32[n]; values: float32[capacity]; positions: int32[capacity], ascending.
        If there are more than ``capacity``, values and positions hold nothing of use and out, where given, holds all of
        v: call again with out as x, no residual, and more room. (Without out: the same again.)
        """
        return self._threshold_encode(self.handle, x, residual, out, bound, values, positions, capacity, n, threads)

    def accumulate(
        self, x: int, last: int, beta: float, gamma: float, n: int, threads: int = 1, found: Address = None
    ) -> None:
        """last, float32[n], becomes beta * last + gamma * x, and x, float32[n], what last was.

        ``found``, if given: float64[3], `excess` of what last becomes, and 0.
        """
        if self._accumulate(self.handle, x, last, beta, gamma, found, n, threads):
            raise MemoryError("sums of pieces need memory")

    def topk_rows(self, x: int, m: int, n: int, k: int, positions: int, threads: int = 1) -> None:
        """positions, int32[m, k]: ``xp.topk(xp.abs(x), k)`` of x, float32[m, n]; k <= n."""
        if self._topk_rows(self.handle, x, m, n, k, positions, threads):
            raise MemoryError("top-k needs memory for about 2 k elements")

    def beyond(self, x: int, bound: float, values: int, positions: int, capacity: int, n: int, threads: int = 1) -> int:
        """How many elements have a magnitude that is not at or below float32(``bound``); so NaN too.

        x: float32[n]; values: float32[capacity]; positions: int32[capacity], ascending. If there are more than
        ``capacity``, values and positions hold nothing of use.
        """
        return int(self._beyond(self.handle, x, bound, values, positions, capacity, n, threads))

    def excess(self, x: int, bound: float, found: int, n: int, threads: int = 1) -> None:
        """found, float64[3]: `grace.backends.base.Backend.excess` of x, float32[n]."""
        if self._excess(self.handle, x, bound, found, n, threads):
            raise MemoryError("sums of pieces need memory")

    def smallest_words(
        self, key0: int, key1: int, start: int, n: int, k: int, positions: int, threads: int = 1
    ) -> None:
        """positions, int32[k]: `grace.backends.base.Backend.sample`; k <= n <= 2**31."""
        if self._smallest_words(self.handle, key0, key1, start, n, k, positions, threads):
            raise MemoryError("a sample needs memory for about k elements")

    def sampled(
        self,
        x: int,
        n: int,
        keys: tuple[int, int],
        start: int,
        sample: int,
        rank: int,
        factors: int,
        miss: int,
        many: int,
        first: int,
        k: int,
        most: int,
        values: int,
        positions: int,
        capacity: int,
        threads: int = 1,
    ) -> int:
        """How many elements `grace.compressors.selectors.Sampled` chooses; above ``capacity``: room they need.

        x: float32[n], 0 < n < 2**31; values: float32[capacity]; positions: int32[capacity], ascending. The threshold is
        the ``rank``-th largest magnitude of the elements at words start .. start+sample-1, without their signs, modulo
        n; factors, miss: float32[many], ascending factors and what is added to a candidate's distance from k; many <=
        255. With ``first`` low candidates are looked at only if they may be chosen; 0: all are.
        """
        found = self._sampled(
            self.handle, x, n, *keys, start, sample, rank, factors, miss, many, first, k, most, values, positions,
            capacity, threads,
        )  # fmt: skip
        if found == -2:
            raise MemoryError("no memory for a sample")
        return int(found if found >= 0 else -3 - found)

    def correct(
        self,
        x: int,
        u: int,
        v: int,
        next_u: int,
        next_v: int,
        last: Address,
        momentum: float,
        nesterov: bool,
        n: int,
        threads: int = 1,
    ) -> None:
        """Momentum and what it adds, as `grace.memories.dgc` has them; all float32[n].

        next_u = momentum * u + x, next_v = v + next_u; ``nesterov``: next_u = momentum * (u + x), next_v = v +
        (next_u + x). ``last``, if it is given, takes v. Results may be what they are made from.
        """
        self._correct(self.handle, x, u, v, next_u, next_v, last, momentum, nesterov, n, threads)

    def sparse_mean(
        self,
        values_ptrs: Sequence[int],
        positions_ptrs: Sequence[int],
        counts: Sequence[int],
        workers: int,
        out: int,
        n: int,
        threads: int = 1,
        pairs: Sequence[bool] = (False,),
    ) -> None:
        """out, float32[n]: the mean of vectors that have float32 values at int32 positions, zeros elsewhere.

        ``pairs``: a worker sends one vector for each of these, and they add up; those where it is true have but two
        values, and a position p below 0 stands for -1 - p and the second one. ValueError if a worker's positions do not
        ascend or are not in 0 .. n-1; out is then unfinished, and nothing is written outside it.
        """
        each, vectors = len(pairs), len(pairs) * workers
        values, places = (_P * vectors)(*values_ptrs), (_P * vectors)(*positions_ptrs)
        sizes, kinds = (_I * vectors)(*counts), bytes(pairs) * workers if any(pairs) else None
        wrong = self._sparse_means(self.handle, values, places, sizes, kinds, vectors, each, out, n, threads)
        if wrong == -2:
            raise MemoryError("no memory to add up sparse vectors")
        if wrong >= 0:
            raise ValueError(f"worker {wrong // each} sent positions that do not ascend within 0 .. {n - 1}")

    def positions_write(self, positions: int, k: int, lower: int, planes: Sequence[int], upper: int, marks: int) -> int:
        """int32[k], ascending -> what `grace.ops.index_coding` writes as "elias_fano": how many had a place; all, if k.

        planes: uint8 each, of up to 8 of the ``lower`` bits; upper: uint8[ceil(marks/8)].
        """
        return int(self._positions_write(self.handle, positions, k, lower, (_P * len(planes))(*planes), upper, marks))

    def positions_read(self, planes: Sequence[int], upper: int, marks: int, k: int, lower: int, positions: int) -> int:
        """The inverse of `positions_write`: how many marks were found; positions, int32[k], are right if k."""
        return int(self._positions_read(self.handle, (_P * len(planes))(*planes), upper, marks, k, lower, positions))

    def chunks_encode(
        self,
        x: int,
        residual: Address,
        out: Address,
        payload: Sequence[Address],
        n: int,
        chunk: int,
        k: int,
        threads: int = 1,
        swap: bool = False,
    ) -> None:
        """The k largest of each chunk in two bits each, as `grace.compressors.chunktopk` has them.

        x, residual, out: float32[n]; payload: lower bytes of places uint8[K], what is above them packed (None for
        chunks of up to 256), codes uint8[ceil(K/4)], magnitudes float32[2 ceil(n/chunk)]. chunk: a power of two;
        k: a multiple of 8.
        """
        if self._chunks_encode(self.handle, x, residual, out, *payload, n, chunk, k, swap, threads):
            raise MemoryError("the largest of each chunk need memory for about 2 k elements")

    def chunks_values(
        self, payload: Sequence[Address], n: int, chunk: int, k: int, values: int, positions: int
    ) -> bool:
        """The inverse of `chunks_encode`: values, float32[K], and positions, int32[K]. False: places beyond a chunk."""
        return not self._chunks_values(self.handle, *payload, n, chunk, k, values, positions)

    def finite(self, ptrs: Sequence[int], counts: Sequence[int]) -> bool:
        """Whether none of the float32 vectors at ``ptrs``, with so many elements each, has NaN or infinity."""
        vectors = len(ptrs)
        return bool(self._finite(self.handle, (_P * vectors)(*ptrs), (_I * vectors)(*counts), vectors))

    def gathered(self, n: int) -> int:
        """From now on this thread writes results of ``n`` elements in all, one after the other; 0: each by itself.

        What does not stay in a cache is written past it. Returns what was said before.
        """
        return int(self._gathered(self.handle, n))

    def words(self, key0: int, key1: int, start: int, n: int, out: int, threads: int = 1) -> None:
        """out, int32[n]: the random words of `grace.backends.base.Backend.words`."""
        self._words(self.handle, key0, key1, start, n, out, threads)

    def noise_table(self, key0: int, key1: int, n: int, out: int, threads: int = 1) -> None:
        """out, uint16[n]: the upper halves of the words 0 .. n-1."""
        self._noise_table(self.handle, key0, key1, n, out, threads)

    def product(self, x: Address, p: int, q: int, out: int, a: int, b: int, r: int, threads: int = 1) -> None:
        """out, float32[a, b]: x minus the product of p[a, r] and q[r, b]; without x that product. r >= 1."""
        self._product(self.handle, x, p, q, out, a, b, r, threads)

    def part(
        self,
        x: int,
        p: int,
        q: int,
        rest: int,
        a: int,
        b: int,
        r: int,
        threads: int = 1,
        taken: tuple[int, int] | None = None,
    ) -> None:
        """rest, float32[a, b]: x minus the product of p[a, r] and q[r, b]; x becomes that product. r >= 1.

        ``taken``: two others of these shapes, whose product is subtracted instead.
        """
        self._part(self.handle, x, p, q, *(taken or (p, q)), rest, a, b, r, threads)

    def left(self, m: int, residual: Address, q: int, p: int, a: int, b: int, r: int, threads: int = 1) -> None:
        """p, float32[a, r]: m[a, b] times the transpose of q[r, b]; m becomes m + ``residual`` first, where given."""
        self._left(self.handle, m, residual, q, p, a, b, r, threads)

    def right(self, m: int, p: int, q: int, a: int, b: int, r: int, threads: int = 1, residual: Address = None) -> None:
        """q, float32[r, b]: the transpose of p[a, r] times m[a, b]; m becomes m + ``residual`` first, where given."""
        self._right(self.handle, m, residual, p, q, a, b, r, threads)

    def quantiles_encode(self, x: int, codes: int, means: int, n: int, q: int, bits: int) -> None:
        """Buckets of equal population and their means, as `grace.compressors.sketch` has them.

        codes: uint8[packed_size(bits, n)], as `grace.ops.packing` writes them; means: float32[q], q <= min(n, 256).
        """
        if self._quantiles_encode(self.handle, x, codes, means, n, q, bits):
            raise MemoryError("quantiles need memory for about n elements")

    def quantiles_mean(
        self,
        codes_ptrs: Sequence[int],
        means_ptrs: Sequence[int],
        workers: int,
        out: int,
        n: int,
        q: int,
        bits: int,
        threads: int = 1,
    ) -> None:
        """out, float32[n]: the mean of what the workers sent, as of `quantiles_encode`; NaN for a code from q on."""
        pointers = _P * workers
        codes, means = pointers(*codes_ptrs), pointers(*means_ptrs)
        self._quantiles_mean(self.handle, codes, means, workers, out, n, q, bits, threads)

    def signs_count(
        self, x: int, residual: Address, out: Address, n: int, threads: int = 1, swap: bool = False
    ) -> list[int]:
        """How many of v are above zero, and how many below, and the bits of the largest magnitude. out becomes v."""
        signs = (_I * 3)()
        if self._signs_count(self.handle, x, residual, out, signs, n, swap, threads):
            raise MemoryError("counts of pieces need memory")
        return list(signs)

    def largest_of_signs(
        self, x: int, signs: Sequence[int], ratio: float, means: int, sent: int, left: Address, capacity: int, n: int
    ) -> int:
        """How many elements `grace.compressors.adaq` sends; above ``capacity`` they are not written.

        signs: as of `signs_count`; means: float32[2]; sent: int32[capacity], positions with a sign. ``left``, if given,
        which may be x, has x where something is sent, and becomes what is left there.
        """
        counts = (_I * 3)(*signs)
        found = int(self._largest_of_signs(self.handle, x, counts, ratio, means, sent, left, capacity, n))
        if found == -2:
            raise MemoryError("no memory for the largest elements")
        return found

    def count_sketch(
        self, x: int, words: int, table: int, n: int, rows: int, group: int, width: int, threads: int = 1
    ) -> None:
        """table, float32[rows, width]: sums of elements with random signs, as `grace.compressors.sketch_sgd` has them.

        ``words``, int32[rows, group + ceil(n / group)]; group: up to 512, and width: powers of two, group <= width.
        """
        if self._count_sketch(self.handle, x, words, table, n, rows, group, width, threads):
            raise MemoryError("no memory for a count sketch")

    def count_sketch_estimate(
        self, table: int, words: int, out: int, n: int, rows: int, group: int, width: int, threads: int = 1
    ) -> None:
        """out, float32[n]: the medians of what the rows of such a table say of each element."""
        if self._estimate(self.handle, table, words, out, n, rows, group, width, threads):
            raise MemoryError("no memory for the rows of a count sketch")

    def tagged_count(self, x: int, starts: int, n: int, lowest: int, middle: int, threads: int = 1) -> None:
        """starts, int64[ceil(n / 65536) + 1, 3]: how many have 32, 16 and 8 bits before each 65536th, and in all.

        ``lowest``, ``middle``: exponents of the smallest magnitudes that have 8 and 16 bits, -14 .. 0.
        """
        self._tagged_count(self.handle, x, starts, n, lowest, middle, threads)

    def tagged_encode(
        self,
        x: int,
        starts: int,
        payload: Sequence[int],
        n: int,
        lowest: int,
        middle: int,
        threads: int = 1,
    ) -> None:
        """``payload``, four addresses: tags and numbers of 32, 16 and 8 bits, as of `grace.compressors.inceptionn`.

        ``starts``: of `tagged_count`, whose last row says how many of each there are.
        """
        self._tagged_encode(self.handle, x, starts, *payload, n, lowest, middle, threads)

    def tagged_mean(
        self,
        columns: Sequence[Sequence[int]],
        counts: Sequence[int],
        workers: int,
        out: int,
        n: int,
        lowest: int,
        middle: int,
        threads: int = 1,
    ) -> None:
        """out, float32[n]: the mean of what the workers sent. ``columns``: where their tags lie, then their numbers.

        ValueError if a worker's tags ask for others than its ``counts``, three of each: numbers of 32, 16 and 8 bits.
        """
        pointers = ((_P * workers)(*column) for column in columns)
        sizes = (_I * len(counts))(*counts)
        wrong = self._tagged_mean(self.handle, *pointers, sizes, workers, out, n, lowest, middle, threads)
        if wrong >= 0:
            raise ValueError(f"the tags of worker {wrong} do not ask for as many numbers as it sent")

    def bins_encode(
        self, x: int, residual: int, out: int, payload: Sequence[int], n: int, size: int, threads: int = 1
    ) -> int:
        """What `grace.compressors.adacomp` sends of bins of ``size`` elements; returns how many places.

        out, float32[n]: what is left, in memory of its own. ``payload``, three addresses: counts uint8[ceil(n / size)];
        places uint8[n], of which the first are sent; scale float32[1].
        """
        return int(self._bins_encode(self.handle, x, residual, out, *payload, n, size, threads))

    def bins_mean(
        self,
        columns: Sequence[Sequence[int]],
        sizes: Sequence[int],
        workers: int,
        out: int,
        n: int,
        size: int,
        threads: int = 1,
    ) -> None:
        """out, float32[n]: the mean of what the workers sent. ``columns``: where their counts, places and scales lie.

        ValueError if a worker's counts do not add up to its places, ``sizes``, or these do not ascend in their bins.
        """
        pointers = ((_P * workers)(*column) for column in columns)
        wrong = self._bins_mean(self.handle, *pointers, (_I * workers)(*sizes), workers, out, n, size, threads)
        if wrong >= 0:
            raise ValueError(f"the counts and places of worker {wrong} do not fit")

    def chances_encode(
        self,
        x: int,
        wanted: float,
        iterations: int,
        keys: tuple[int, int],
        start: int,
        payload: Sequence[int],
        capacity: int,
        n: int,
        threads: int = 1,
    ) -> tuple[int, int]:
        """How many elements `grace.compressors.wangni` sends always, and how many by chance.

        ``keys``, ``start``: of the words. ``payload``, four addresses: positions int32[capacity] and
        values float32[capacity] of the former; of the others positions with a sign int32[capacity], and their magnitude
        float32[1].
        What exceeds the capacity is not written.
        """
        kept, random = (_I * 2)(), (*keys, start)
        if self._chances_encode(self.handle, x, wanted, iterations, *random, *payload, capacity, kept, n, threads):
            raise MemoryError("no memory for sums")
        return kept[0], kept[1]

    def shared_encode(
        self,
        x: int,
        scales: int,
        codes: int,
        n: int,
        block: int,
        top: int,
        wide: bool,
        table: int,
        offsets: int,
        start: int = 0,
        threads: int = 1,
    ) -> None:
        """Integers -``top`` .. ``top`` relative to given scales, as `grace.compressors.shared_int` has them.

        x: float32[n]; scales: float32[m]; codes: int8[n], int32[n] where they are ``wide``. Noise as in `ints_encode`.
        """
        self._shared_encode(self.handle, x, scales, codes, n, block, top, wide, table, offsets, start, threads)

    def shared_values(
        self,
        x: Address,
        codes: int,
        scales: int,
        out: int,
        n: int,
        block: int,
        steps: int,
        wide: bool,
        threads: int = 1,
    ) -> None:
        """out, float32[n], which may be x: what integers, or sums of them, stand for; with x that is taken from it.

        codes and scales as in `shared_encode`; ``steps`` of them make a scale.
        """
        self._shared_values(self.handle, x, codes, scales, out, n, block, steps, wide, threads)

    def signed_sums(self, x: int, words: int, sums: int, n: int, size: int, many: int, threads: int = 1) -> None:
        """sums, float32[ceil(n / size), many]: of rows of x with random signs, as `grace.compressors.arctopk` has them.

        x: float32[n]; words: int32[many, size], whose top bits are the signs.
        """
        if self._signed_sums(self.handle, x, words, sums, n, size, many, threads):
            raise MemoryError("no memory for signs")

    def largest_sums(
        self,
        values_ptrs: Sequence[int],
        positions_ptrs: Sequence[int],
        vectors: int,
        count: int,
        sums: int,
        positions: int,
        n: int,
        k: int,
    ) -> None:
        """The k <= n elements of largest magnitude of a sum of vectors: those of ``xp.topk(xp.abs(sum), k)``.

        Each vector has ``count`` float32 values at int32 positions, zeros elsewhere. sums: float32[k]; positions:
        int32[k], ascending. ValueError if a vector's positions do not ascend in 0 .. n-1.
        """
        sent = (_P * vectors)(*values_ptrs), (_P * vectors)(*positions_ptrs)
        wrong = self._largest_sums(self.handle, *sent, vectors, count, sums, positions, n, k)
        if wrong == -2:
            raise MemoryError("no memory for sums")
        if wrong >= 0:
            raise ValueError(f"worker {wrong} sent positions that do not ascend within 0 .. {n - 1}")

    def cosines_encode(
        self,
        x: int,
        residual: Address,
        out: Address,
        payload: Sequence[Address],
        sizes: tuple[int, int, int, int],
        k: int,
        threads: int = 1,
        swap: bool = False,
    ) -> None:
        """The largest coefficients of chunks' cosine transforms, as `grace.compressors.demo` has them.

        x, residual, out: float32[a, b]. ``sizes``: a, b, and rows and columns of a chunk, at most 65536 elements of
        which k <= rows * columns are sent. ``payload``, three addresses: values float32[m k]; lower bytes of places
        uint8[m k]; what is above them, packed, None for chunks of at most 256 elements. m: number of chunks. Results
        are those of the plain form but for their last bits, which depend on the instruction set.
        """
        if self._cosines_encode(self.handle, x, residual, out, *payload, *sizes, k, swap, threads):
            raise MemoryError("no memory for chunks")

    def cosines_left(
        self, x: int, payload: Sequence[Address], out: int, sizes: tuple[int, int, int, int], k: int, threads: int = 1
    ) -> None:
        """out, float32[a, b], which may be x: x minus what a payload as of `cosines_encode` stands for.

        ValueError if its places do not ascend in their chunks.
        """
        self._placed(self._cosines_left(self.handle, x, *payload, out, *sizes, k, threads))

    def cosines_mean(
        self,
        columns: Sequence[Sequence[int] | None],
        workers: int,
        out: int,
        sizes: tuple[int, int, int, int],
        k: int,
        senders: bool = False,
        sign: bool = False,
        threads: int = 1,
    ) -> None:
        """out, float32[a, b]: the mean of what the workers sent. ``columns``: where each of their three arrays lies.

        ``senders``: each coefficient is divided by the number of workers that sent it. ``sign``: the signs of all that.
        The same bits on every instruction set. ValueError if places do not ascend in their chunks; out is then as it
        was.
        """
        pointers = (None if column is None else (_P * workers)(*column) for column in columns)
        self._placed(self._cosines_mean(self.handle, *pointers, workers, out, *sizes, k, senders, sign, threads))

    def _placed(self, wrong: int) -> None:
        if wrong == -2:
            raise MemoryError("no memory for chunks")
        if wrong >= 0:
            raise ValueError(f"the places of worker {wrong} do not ascend in their chunks")
