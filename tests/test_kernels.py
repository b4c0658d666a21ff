"""The C++ kernels, each instruction set of this machine, against NumPy and against the plain compressors."""

import ctypes
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import streams
from methods import PLAIN, backend, built
from support.cases import loop
from support.kernels import KINDS, Memory, address, blocks_of, efsignsgd_oracle, equal, ulps, vector

from grace.backends import get_backend
from grace.compressors.measured.blockint import BlockInt
from grace.compressors.measured.eden import Eden
from grace.compressors.measured.efsignsgd import EFSignSGD
from grace.compressors.measured.onebit import OneBit
from grace.compressors.measured.qsgd import QSGD
from grace.compressors.measured.signsgd import SignSGD
from grace.compressors.measured.terngrad import TernGrad
from grace.compressors.measured.topk import TopK
from grace.compressors.selectors import Sampled
from grace.compressors.sparse import kept
from grace.compressors.studies.thc import CUT, THC
from grace.compressors.studies.threelc import ThreeLC
from grace.compressors.studies.threshold import Threshold
from grace.core import Context
from grace.kernels import ISAS, build, library
from grace.kernels.host import HostKernels
from grace.ops import blocks
from grace.ops.hadamard import width_of
from grace.ops.packing import pack, packed_size

XP = get_backend("numpy")
SIZES = (0, 1, 7, 8, 9, 511, 512, 513, 4096 + 5, 70001, 600_011)
BLOCKS = (0, 8, 512, 4096)
BITS = (8, 4, 2)
pytestmark = pytest.mark.usefixtures("streamed")


def cases():
    """(n, kind, threads): normal numbers of every size, and every kind of special numbers at one medium size."""
    for n in SIZES:
        yield n, "normal", 2 if n > 500_000 else 1
    for kind in KINDS[1:]:
        yield 5001, kind, 1


def with_blocks():
    """The same with each block size; small vectors only with small blocks."""
    return [(*case, block) for case in cases() for block in BLOCKS if block in (0, 8) or block < 2 * case[0]]


CASES = loop("n, kind, threads", list(cases()))
BLOCK_CASES = loop("n, kind, threads, block", with_blocks())


def aliases(x, residual, n):
    """Memories (x, residual, out); out is x, the residual or an array of its own."""
    for residual_, way in ((residual, "x"), (residual, "residual"), (residual, "own"), (None, "x"), (None, "own")):
        if n > 10_000 and (residual_ is None or way != ("x" if n > 100_000 else "own")):
            continue  # large vectors: only one of the five combinations
        odd = 4 * (n % 5)
        a = Memory.of(x, odd)
        b = None if residual_ is None else Memory.of(residual_, 8)
        out = {"x": a, "residual": b}.get(way) or Memory(n, np.float32, 4)
        yield a, b, out, x if residual_ is None else x + residual_


# -- signs -------------------------------------------------------------------------------------------------------------
@BLOCK_CASES
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_efsignsgd_encode(lib, n, kind, threads, block):
    for x, residual, out, v in aliases(vector(n, 1, kind), vector(n, 2), n):
        expected_bits, expected_scales = efsignsgd_oracle(v, block)
        bits, scales = Memory(-(-n // 8), np.uint8, 3), Memory(len(expected_scales), np.float32, 4)
        lib.efsignsgd_encode(
            x.address, address(residual), out.address, bits.address, scales.address, n, block, threads=threads
        )
        equal(bits.check(), expected_bits)
        ulps(scales.check(), expected_scales)
        each = np.repeat(scales.array, [len(part) for part in blocks_of(v, block)]) if n else v
        equal(out.check(), v - np.where(v >= 0, each, -each).astype(np.float32))
        x.check()

        compressor, ctx = EFSignSGD(block_size=block), Context(XP, "w", (n,))
        with XP.quiet():
            payload, _ = compressor.compress(v, {}, ctx)
            equal(bits.array, payload[0])
            ulps(scales.array, payload[1])
            equal(out.array, compressor.residual(v, (payload[0], scales.array), ctx))

        again = Memory(-(-n // 8), np.uint8, 1)
        before = None if out is x or out is residual else v.copy()
        if before is not None:  # also call it without out
            lib.efsignsgd_encode(x.address, address(residual), None, again.address, scales.address, n, block, threads)
            equal(again.check(), expected_bits)


@BLOCK_CASES
@loop("workers", [1, 3, 4])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_efsignsgd_mean(lib, n, kind, threads, block, workers):
    compressor, ctx = EFSignSGD(block_size=block), Context(XP, "w", (n,))
    with XP.quiet():
        payloads = [compressor.compress(vector(n, 10 + w, kind), {}, ctx)[0] for w in range(workers)]
        expected = compressor.aggregate(payloads, ctx)
    bits = [Memory.of(payload[0], 1 + w) for w, payload in enumerate(payloads)]
    scales = [Memory.of(payload[1], 4) for payload in payloads]
    out = Memory(n, np.float32, 4)
    lib.efsignsgd_mean([b.address for b in bits], [s.address for s in scales], workers, out.address, n, block, threads)
    equal(out.check(), expected)


# -- integers ----------------------------------------------------------------------------------------------------------
def noise_of(n, start, table, offsets):
    p = start + np.arange(n, dtype=np.int64)
    return table[p % 65536] + offsets[p // 65536 - start // 65536]


def blockint_oracle(v, block, bits, noise):
    top, n = np.float32((1 << (bits - 1)) - 1), len(v)
    scales = np.maximum.reduceat(np.abs(v), np.arange(0, n, block or n)) if n else v
    scale = np.repeat(scales, [len(part) for part in blocks_of(v, block)]) if n else v
    steps = v / np.where(scale == 0, np.float32(1), scale) * top
    if noise is None:
        whole = np.rint(steps)
    else:
        whole = np.floor(steps + (noise.astype(np.float32) + np.float32(0.5)) * np.float32(2**-16))
    kept = v - (whole + np.float32(0)) * (scale / top)  # adding 0 turns -0 into 0, as an integer does
    codes = np.where(np.isfinite(whole), whole, 0).astype(np.int64) & ((1 << bits) - 1)
    each = 8 // bits
    codes = np.concatenate([codes, np.zeros(-n % each, np.int64)]).reshape(-1, each)
    packed = (codes << (bits * np.arange(each))).sum(1).astype(np.uint8)
    return packed, scales, kept


@BLOCK_CASES
@pytest.mark.parametrize("bits", BITS)
@loop("stochastic", [False, True])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_blockint_encode(lib, n, kind, threads, block, bits, stochastic):
    start = (0, 65536, 65529, 123_457)[n % 4]
    rng = np.random.default_rng(3)
    table, offsets = rng.integers(0, 65536, 65536).astype(np.uint16), rng.integers(0, 65536, 16).astype(np.uint16)
    segments = (start + max(n, 1) - 1) // 65536 - start // 65536 + 1
    tables = (Memory.of(table, 2), Memory.of(offsets[:segments], 6)) if stochastic else (None, None)
    noise = noise_of(n, start, table, offsets) if stochastic else None
    for x, residual, out, v in aliases(vector(n, 1, kind), vector(n, 2), n):
        expected = blockint_oracle(v, block, bits, noise)
        codes, scales = Memory(-(-n * bits // 8), np.uint8, 3), Memory(len(expected[1]), np.float32, 4)
        lib.blockint_encode(
            x.address, address(residual), out.address, codes.address, scales.address, n, block, bits,
            *map(address, tables), start, threads,
        )  # fmt: skip
        equal(scales.check(), expected[1])
        codes.check(), out.check(), x.check()
        finite = np.repeat(np.isfinite(expected[1]), [len(part) for part in blocks_of(v, block)])
        if not n or finite.all():
            equal(codes.array, expected[0])
            equal(out.array, expected[2])
        else:
            equal(out.array[finite], expected[2][finite])
            assert not np.isfinite(out.array[~np.isfinite(expected[2])]).any()
        if not stochastic:
            compressor, ctx = BlockInt(bits=bits, block_size=block), Context(XP, "w", (n,))
            with XP.quiet():
                payload, _ = compressor.compress(v, {}, ctx)
                plain = compressor.residual(v, payload, ctx)
            equal(scales.array, payload[1])
            if not n or finite.all():
                equal(codes.array, payload[0])
                equal(out.array, plain)


@BLOCK_CASES
@pytest.mark.parametrize("bits", BITS)
@loop("workers", [1, 3])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_blockint_mean(lib, n, kind, threads, block, bits, workers):
    compressor, ctx = BlockInt(bits=bits, block_size=block), Context(XP, "w", (n,))
    with XP.quiet():
        payloads = [compressor.compress(vector(n, 10 + w, kind), {}, ctx)[0] for w in range(workers)]
        expected = compressor.aggregate(payloads, ctx)
    codes = [Memory.of(payload[0], 1 + w) for w, payload in enumerate(payloads)]
    scales = [Memory.of(payload[1], 4) for payload in payloads]
    out = Memory(n, np.float32, 4)
    lib.blockint_mean(
        [c.address for c in codes], [s.address for s in scales], workers, out.address, n, block, bits, threads
    )
    equal(out.check(), expected)


@loop("bits", BITS)
def test_ratios_are_rounded_as_a_division_is(lib, bits):
    # Random numerators and denominators; and quotients next to the ties of rounding to nearest.
    rng = np.random.default_rng(6)
    n, block, top = 200_000, 8, np.float32((1 << (bits - 1)) - 1)
    v = rng.uniform(0.01, 1, n).astype(np.float32)
    v[::8] = rng.uniform(1, 2, n // 8).astype(np.float32) * np.float32(2) ** rng.integers(-60, 110, n // 8)
    scale = np.repeat(v[::8], 8)
    turn = (rng.integers(0, int(top), n) + np.float32(0.5)) / top * scale
    near = np.nextafter(turn.astype(np.float32), rng.choice([0, np.inf], n).astype(np.float32))
    v = np.where(np.arange(n) % 8 == 0, v, np.where(np.arange(n) % 2, near, turn)).astype(np.float32)
    codes, scales, out = Memory(n * bits // 8, np.uint8), Memory(n // 8, np.float32), Memory(n, np.float32)
    x = Memory.of(v)
    lib.blockint_encode(x.address, None, out.address, codes.address, scales.address, n, block, bits)
    expected = blockint_oracle(v, block, bits, None)
    equal(codes.check(), expected[0])
    equal(out.check(), expected[2])


@loop("bits", BITS)
def test_every_code_is_divided_exactly(lib, bits):
    each, top = 8 // bits, np.float32((1 << (bits - 1)) - 1)
    packed = Memory.of(np.arange(256, dtype=np.uint8))
    codes = (packed.array[:, None] >> (bits * np.arange(each))).ravel() & ((1 << bits) - 1)
    codes = np.where(codes > top, codes - (1 << bits), codes).astype(np.float32)
    for scale in np.float32([1, 0.3, 1e-40]):
        scales, out = Memory.of(np.array([scale])), Memory(256 * each, np.float32)
        lib.blockint_mean([packed.address], [scales.address], 1, out.address, 256 * each, 0, bits)
        equal(out.check(), codes * (scale / top))


# -- codes of a few bits: levels, ternary numbers, votes, two means, five trits in a byte ------------------------------
def plainly(compressor, x, ctx):
    """The payload and residual of the plain functions."""
    with XP.quiet():
        payload, _ = compressor.compress(x, {}, ctx)
        return payload, None if compressor.traits.majority_vote else compressor.residual(x.copy(), payload, ctx)


def finite_blocks(scales, n, block):
    """bool[n]: whether an element's block has a finite scale."""
    return np.repeat(np.isfinite(scales), block or max(n, 1))[:n]


def coded(lib, compressor, ctx, x, residual, out, threads, swap=False):
    """A kernel's payload, in guarded memory."""
    n, keys = ctx.size, ctx.rng("round")
    if isinstance(compressor, OneBit):
        block = compressor.block_size
        sent = Memory(-(-n // 8), np.uint8, 3), Memory(2 * -(-n // (block or max(n, 1))), np.float32, 4)
        lib.onebit_encode(x, residual, out, *map(address, sent), n, block, threads, swap)
        return [each.check() for each in sent]
    if isinstance(compressor, ThreeLC):
        block, runs = compressor.block_size, compressor.zero_run
        sent = Memory(-(-n // 5), np.uint8, 3), Memory(-(-n // (block or max(n, 1))), np.float32, 4)
        size = lib.threelc_encode(x, residual, out, *map(address, sent), n, block, compressor.sparsity, runs, threads)
        return [sent[0].check()[:size], sent[1].check()]
    block, levels, bits = compressor.traits.block_size or 0, 0, 2
    table = offsets = first = None
    if isinstance(compressor, QSGD):
        levels, bits = compressor.quantum_num, compressor.bits
        table, offsets = Memory(65536, np.uint16, 2), Memory((ctx.offset + n) // 65536 + 1, np.uint16, 6)
        lib.noise_table(*keys.table, 65536, table.address)
        lib.noise_table(*keys.keys, len(offsets.array), offsets.address)
        first = offsets.address + 2 * (ctx.offset // 65536)
    sent = Memory(packed_size(bits, n), np.uint8, 3), Memory(-(-n // (block or max(n, 1))), np.float32, 4)
    lib.qsgd_encode(
        x, residual, out, *map(address, sent), n, block, bits, levels, address(table), first, ctx.offset, *keys.keys,
        threads, swap,
    )  # fmt: skip
    return [each.check() for each in sent]


def decoded(lib, compressor, payloads, n, threads):
    """The mean that a kernel makes of payloads."""
    memories = [[Memory.of(array, 1 if array.dtype == np.uint8 else 4) for array in payload] for payload in payloads]
    where = [[each.address for each in column] for column in zip(*memories, strict=True)]
    out, workers = Memory(n, np.float32, 4), len(payloads)
    if isinstance(compressor, SignSGD):
        lib.signsgd_mean(*where, workers, out.address, n, threads)
    elif isinstance(compressor, OneBit):
        lib.onebit_mean(*where, workers, out.address, n, compressor.block_size, threads)
    elif isinstance(compressor, ThreeLC):
        counts = [len(payload[0]) for payload in payloads]
        block, runs = compressor.block_size, compressor.zero_run
        lib.threelc_mean(*where, counts, workers, out.address, n, block, runs, threads)
    else:
        quantum = isinstance(compressor, QSGD)
        kind = (compressor.bits, compressor.quantum_num) if quantum else (2, 0)
        lib.qsgd_mean(*where, workers, out.address, n, compressor.traits.block_size or 0, *kind, threads)
    return out.check()


CODED = [
    QSGD(),
    QSGD(quantum_num=64, bucket_size=0),
    QSGD(quantum_num=1, bucket_size=4096),
    QSGD(quantum_num=2, bucket_size=8),
    QSGD(quantum_num=7, bucket_size=70_000),
    QSGD(quantum_num=20),
    QSGD(quantum_num=33, bucket_size=1000),
    TernGrad(),
    TernGrad(block_size=8),
    TernGrad(block_size=70_000),
    OneBit(),
    OneBit(block_size=40),
    OneBit(block_size=70_000),
    ThreeLC(),
    ThreeLC(sparsity=1.9),
    ThreeLC(zero_run=False),
    ThreeLC(zero_run=False, block_size=40),
    ThreeLC(zero_run=False, block_size=80_000),
]
CODES = pytest.mark.parametrize("compressor", CODED, ids=str)


@CASES
@CODES
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_codes_are_those_of_the_plain_functions(lib, n, kind, threads, compressor):
    ctx = replace(Context(XP, "w", (n,)), offset=(0, 65536, 65529, 123_457)[n % 4])
    for x, residual, out, v in aliases(vector(n, 1, kind), vector(n, 2), n):
        sent, left = plainly(compressor, v, ctx)
        found = coded(lib, compressor, ctx, x.address, address(residual), out.address, threads)
        x.check()
        whole = finite_blocks(
            sent[1][::2] + sent[1][1::2] if isinstance(compressor, OneBit) else sent[1], n, compressor.traits.block_size
        )
        equal(found[1], sent[1])
        if whole.all() or not isinstance(compressor, QSGD):  # QSGD's codes of blocks that are not finite are undefined
            equal(found[0], sent[0])
            equal(out.check(), left)
        else:
            equal(out.check()[whole], left[whole])
            assert not np.isfinite(out.array[~np.isfinite(left)]).any()


@CASES
@CODES
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_residual_changes_places_with_x_also_where_codes_are_small(lib, n, kind, threads, compressor):
    ctx, first, last = Context(XP, "w", (n,)), vector(n, 1, kind), vector(n, 2)
    x, residual, out = Memory.of(first, 4), Memory.of(last, 8), Memory(n, np.float32, 4)
    expected = coded(lib, compressor, ctx, x.address, residual.address, out.address, threads)
    equal(x.check(), first)
    swap = not isinstance(compressor, ThreeLC)
    found = coded(lib, compressor, ctx, x.address, residual.address, residual.address, threads, swap)
    for one, other in zip(found, expected, strict=True):
        equal(one, other)
    equal(residual.check(), out.check())
    equal(x.check(), last if swap else first)
    if kind != "special":  # also call it without a residual
        equal(
            coded(lib, compressor, ctx, out.address, None, None, threads)[0], plainly(compressor, out.array, ctx)[0][0]
        )


@CASES
@pytest.mark.parametrize("compressor", [*CODED, SignSGD()], ids=str)
@loop("workers", [1, 3])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_means_of_codes(lib, n, kind, threads, compressor, workers):
    ctx = Context(XP, "w", (n,))
    with XP.quiet():
        payloads = [compressor.compress(vector(n, 10 + w, kind), {}, ctx)[0] for w in range(workers)]
        expected = compressor.aggregate(payloads, ctx)
    equal(decoded(lib, compressor, payloads, n, threads), expected)


@CASES
def test_signsgd_encode(lib, n, kind, threads):
    x, bits, flags = Memory.of(vector(n, 1, kind), 4), Memory(-(-n // 8), np.uint8, 3), Memory(-(-n // 8192), np.uint8)
    lib.signsgd_encode(x.address, bits.address, flags.address, n, threads)
    (expected, where), _ = SignSGD().compress(x.array, {}, Context(XP, "w", (n,)))
    equal(bits.check(), expected)
    equal(flags.check(), where)
    assert flags.array.any() == (kind == "special")
    x.check()


@loop("place", [0, 15, 16, 8191, 8192, 20_000, 20_006])
@loop("value", [np.nan, np.inf, -np.inf])
def test_votes_flag_the_block_of_one_number_that_is_not_finite(lib, place, value):
    n = 20_007
    v = vector(n, 3)
    v[place] = value
    x, bits, flags = Memory.of(v), Memory(-(-n // 8), np.uint8), Memory(3, np.uint8)
    lib.signsgd_encode(x.address, bits.address, flags.address, n)
    assert flags.check().tolist() == [int(place // 8192 == block) for block in range(3)]
    mean = decoded(lib, SignSGD(), [(bits.array, flags.array)] * 2, n, 1)
    np.testing.assert_array_equal(np.isnan(mean), np.arange(n) // 8192 == place // 8192)


@loop("quantum_num", range(1, 128))
def test_every_level_is_divided_exactly(lib, quantum_num):
    compressor = QSGD(quantum_num=quantum_num, bucket_size=0)
    codes = np.arange(1 << compressor.bits, dtype=np.uint8)
    ctx = Context(XP, "w", (len(codes),))
    for scale in np.float32([1, 0.3, 1e-40]):
        payload = pack(XP, compressor.bits, codes), np.array([scale])
        equal(decoded(lib, compressor, [payload], len(codes), 1), compressor.decompress(payload, ctx))


@loop("threads", [1, 2])
@loop("length", [1, 2, 13, 14, 15, 28, 29, 60_003])
def test_runs_of_zeros(lib, length, threads):
    # Runs of zeros between other bytes, at both ends, and over the whole array.
    n, rng = 600_011, np.random.default_rng(8)
    v = rng.choice(np.float32([-1, 0, 1]), n)
    for begin in rng.integers(0, n // 5 - length, 40):
        v[5 * begin : 5 * (begin + length)] = 0
    for x in (v, np.concatenate([np.zeros(5 * length, np.float32), v]), np.zeros(5 * length, np.float32)):
        compressor, ctx = ThreeLC(), Context(XP, "w", (len(x),))
        sent, left = plainly(compressor, x, ctx)
        out, at = Memory(len(x), np.float32), Memory.of(x)
        found = coded(lib, compressor, ctx, at.address, None, out.address, threads)
        equal(found[0], sent[0])
        equal(out.check(), left)
        equal(decoded(lib, compressor, [sent, sent], len(x), threads), compressor.aggregate([sent, sent], ctx))


@loop("bytes_", [[], [121] * 3, [254, 121], [121], [250]])
def test_runs_that_do_not_fit_are_refused(lib, bytes_):
    good, bad = [(np.array(each, np.uint8), np.ones(1, np.float32)) for each in ([243], bytes_)]
    with pytest.raises(ValueError, match="worker 2 sent runs that do not expand to 2 bytes"):
        decoded(lib, ThreeLC(), [good, good, bad], 10, 1)
    equal(decoded(lib, ThreeLC(), [good], 10, 1), np.zeros(10, np.float32))


# -- blocks that are rotated at random ---------------------------------------------------------------------------------
ROTATED = pytest.mark.parametrize(
    "compressor",
    [
        Eden(bits=1),
        Eden(bits=1, block_size=64, biased=True),
        Eden(bits=1, block_size=8, biased=True),
        Eden(bits=2),
        Eden(bits=2, block_size=8),
        Eden(bits=3, block_size=64),
        Eden(bits=3, block_size=8192),
        Eden(),
        Eden(block_size=16),
    ],
    ids=str,
)
THCS = loop("compressor, workers", [(THC(), 4), (THC(bits=2, block_size=8), 3), (THC(bits=8, block_size=64), 3)])


def rotated(lib, compressor, ctx, x, residual, out, threads, swap=False):
    """The payload that a kernel of Eden makes."""
    n, rng = ctx.size, ctx.shared_rng("rotation")
    d = width_of(ctx, compressor.block_size)
    m, divisor = -(-n // d), compressor.divisor(d) if compressor.biased else 0.0
    sent = Memory(compressor.bits * d * m // 8, np.uint8, 3), Memory(m, np.float32, 4), Memory(m, np.uint8, 1)
    tables = compressor.levels(), compressor.middles()
    lib.eden_encode(
        x, residual, out, *map(address, sent), n, d, compressor.bits, *tables, divisor, ctx.rank % 32, *rng.keys,
        rng.offset, threads, swap,
    )  # fmt: skip
    return [each.check() for each in sent]


@CASES
@ROTATED
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_eden_encode(lib, n, kind, threads, compressor):
    ctx = Context(XP, "w", (n,), rank=(0, 5, 31)[n % 3])
    d = width_of(ctx, compressor.block_size)
    for x, residual, out, v in aliases(vector(n, 1, kind), vector(n, 2), n):
        sent, _ = plainly(compressor, v, ctx)
        codes, scales, streams = rotated(lib, compressor, ctx, x.address, address(residual), out.address, threads)
        x.check()
        equal(streams, sent[2])
        ulps(scales, sent[1])
        whole = np.isfinite(scales)  # codes of blocks that are not finite are undefined
        rows = len(whole), compressor.bits * d // 8
        equal(codes.reshape(rows)[whole], sent[0].reshape(rows)[whole])
        with XP.quiet():
            left = compressor.residual(v.copy(), (sent[0], scales, sent[2]), ctx)
        elements = np.repeat(whole, d)[:n]
        equal(out.check()[elements], left[elements])
        assert not np.isfinite(out.array[~elements]).any()


@CASES
@ROTATED
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_residual_changes_places_with_x_also_where_blocks_are_rotated(lib, n, kind, threads, compressor):
    ctx, first, last = Context(XP, "w", (n,), rank=1), vector(n, 1, kind), vector(n, 2)
    x, residual, out = Memory.of(first, 4), Memory.of(last, 8), Memory(n, np.float32, 4)
    expected = rotated(lib, compressor, ctx, x.address, residual.address, out.address, threads)
    equal(x.check(), first)
    found = rotated(lib, compressor, ctx, x.address, residual.address, residual.address, threads, swap=True)
    for one, other in zip(found, expected, strict=True):
        equal(one, other)
    equal(residual.check(), out.check())
    equal(x.check(), last)
    # Also without a residual; and the codes of a piece equal those of the whole.
    d = width_of(ctx, compressor.block_size)
    whole = rotated(lib, compressor, ctx, out.address, None, None, threads)
    begin = n // d // 2 * d
    part = rotated(lib, compressor, ctx.piece(begin, n - begin), out.address + 4 * begin, None, None, threads)
    for one, other in zip(part, whole, strict=True):
        equal(one, other[len(other) - len(one) :])


@CASES
@ROTATED
@loop("workers", [1, 3])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_eden_mean(lib, n, kind, threads, compressor, workers):
    ctx = Context(XP, "w", (n,))
    with XP.quiet():
        each = [replace(ctx, rank=31 - w // 2) for w in range(workers)]  # two ranks are equal
        payloads = [compressor.compress(vector(n, w, kind), {}, here)[0] for w, here in enumerate(each)]
        expected = compressor.aggregate(payloads, ctx)
    memories = [[Memory.of(array, 4 * (array.dtype == np.float32) + 1) for array in payload] for payload in payloads]
    where = [[each.address for each in column] for column in zip(*memories, strict=True)]
    out, rng, d = Memory(n, np.float32, 4), ctx.shared_rng("rotation"), width_of(ctx, compressor.block_size)
    lib.eden_mean(
        *where, workers, out.address, n, d, compressor.bits, compressor.levels(), *rng.keys, rng.offset, threads
    )
    equal(out.check(), expected)


@CASES
@THCS
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_steps(lib, n, kind, threads, compressor, workers, monkeypatch):
    monkeypatch.setattr(type(XP), "kernels", None)
    ctx = Context(XP, "w", (n,), world_size=workers, offset=65536 if n % 2 and n > 8192 else 0)
    d, rng = width_of(ctx, compressor.block_size), ctx.shared_rng("rotation")
    m, dtype, start = -(-n // d), compressor.dtype(ctx), ctx.offset
    wide = dtype == "int32"
    x, norms = Memory.of(vector(n, 1, kind), 4), Memory(m, np.float32, 4)
    lib.thc_norms(x.address, norms.address, n, d, threads)
    with XP.quiet():
        norm = blocks.norms(XP, blocks.rows(XP, x.array, d))
        ulps(norms.check(), norm)
        norm = norm * np.where(np.arange(m) % 2, np.float32(1), np.float32(3))  # as if another worker had larger ones
        expected = compressor.codes(x.array, norm, ctx)
    whole = np.repeat(np.isfinite(norm), d)

    at, draw = Memory.of(norm, 4), ctx.rng("round")
    table, offsets = Memory(65536, np.uint16, 2), Memory((start + m * d) // 65536 + 1, np.uint16, 6)
    lib.noise_table(*draw.table, 65536, table.address)
    lib.noise_table(*draw.keys, len(offsets.array), offsets.address)
    codes = Memory(m * d, dtype, 4)
    noise = table.address, offsets.address + 2 * (start // 65536)
    factor = compressor.top / (2 * CUT)
    how = compressor.top, wide, CUT, factor
    lib.thc_encode(x.address, at.address, codes.address, n, d, *how, *noise, *rng.keys, start, threads)
    equal(codes.check()[whole], expected[whole])

    sums = np.random.default_rng(5).integers(0, compressor.top * workers + 1, m * d).astype(dtype)
    payload = sums, norm, expected
    with XP.quiet():
        mean = compressor.decompress(payload, ctx)
        left = compressor.residual(x.array, payload, ctx)
    total, own = Memory.of(sums, 4), Memory.of(expected, 4)
    given, out = Memory.of(x.array, 8), Memory(n, np.float32, 4 * (n % 4))
    for v, part, to, factor in ((None, total, out, compressor.step(workers)), (given, own, given, compressor.step(1))):
        arrays = address(v), part.address, at.address, to.address
        lib.thc_values(*arrays, n, d, wide, CUT, factor, *rng.keys, start, threads)
    equal(out.check(), mean)
    equal(given.check(), left)


# -- sparse ------------------------------------------------------------------------------------------------------------
def topk_oracle(v, k):
    magnitude = np.where(np.isnan(v), np.inf, np.abs(v))
    return np.sort(np.lexsort((np.arange(len(v)), -magnitude))[:k]).astype(np.int32)


@CASES
@loop("share", [0.0, 0.01, 0.3, 1.0])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_topk_encode(lib, n, kind, threads, share):
    k = int(n * share)
    for x, residual, out, v in aliases(vector(n, 1, kind), vector(n, 2, "zeros" if kind == "ties" else "normal"), n):
        values, positions = Memory(k, np.float32, 4), Memory(k, np.int32, 8)
        lib.topk_encode(x.address, address(residual), out.address, values.address, positions.address, n, k, threads)
        expected = topk_oracle(v, k)
        equal(positions.check(), expected)
        equal(values.check(), v[expected])
        rest = v.copy()
        rest[expected] = 0
        equal(out.check(), rest)
        equal(positions.array, XP.topk(XP.abs(v), k))
        x.check()
        if share == 0.01 and n >= 100:
            payload, _ = TopK(compress_ratio=k / n).compress(v, {}, Context(XP, "w", (n,)))
            equal(values.array, payload[0])
            equal(positions.array, payload[1])


@loop("order", ["ascending", "descending", "large last", "equal"])
@loop("threads", [1, 2])
def test_topk_of_what_a_sample_misjudges(lib, order, threads):
    n, k = 300_000, 900
    v = np.sort(np.abs(vector(n, 5)))
    if order == "descending":
        v = v[::-1].copy()
    elif order == "large last":  # more candidates than the buffer holds, then a sample without candidates
        v[:] = np.float32(1e-3)
        v[-k - 30_000 :] = np.arange(k + 30_000)
    elif order == "equal":
        v[:] = 1
    x, values, positions = Memory.of(v), Memory(k, np.float32), Memory(k, np.int32)
    lib.topk_encode(x.address, None, x.address, values.address, positions.address, n, k, threads)
    expected = topk_oracle(v, k)
    equal(positions.check(), expected)
    rest = v.copy()
    rest[expected] = 0
    equal(x.check(), rest)


def test_topk_of_what_a_sample_overrates(lib):
    # The sample sees many more large elements than there are, so its first bound lets too few pass.
    n, k = 40_000, 50
    state, seen = 0x9E3779B9, []
    for i in range(1024):
        begin, width = n * i // 1024, n * (i + 1) // 1024 - n * i // 1024
        state = (state * 1664525 + 1013904223) % 2**32
        seen.append(begin + ((state * width) >> 32))
    v = np.arange(n, dtype=np.float32) / n
    v[seen[:45]] = 10
    x, values, positions = Memory.of(v), Memory(k, np.float32), Memory(k, np.int32)
    residual, out = Memory.of(np.ones(n, np.float32)), Memory(n, np.float32)
    lib.topk_encode(x.address, residual.address, out.address, values.address, positions.address, n, k)
    expected = topk_oracle(v + 1, k)
    equal(positions.check(), expected)
    equal(values.check(), (v + 1)[expected])
    equal(np.flatnonzero(out.check() == 0).astype(np.int32), expected)


def encoders(lib, n, threads, stochastic):
    """A function for each encoding kernel: returns the payload, given the addresses of x, residual and out."""
    rng = np.random.default_rng(3)
    table = Memory.of(rng.integers(0, 65536, 65536).astype(np.uint16), 2)
    offsets = Memory.of(rng.integers(0, 65536, 16).astype(np.uint16), 6)
    for block in (0, 512):
        bits, scales = Memory(-(-n // 8), np.uint8, 3), Memory(-(-n // (block or max(n, 1))), np.float32, 4)
        yield (
            (bits, scales),
            lambda *at, sent=(bits, scales), block=block, **swap: lib.efsignsgd_encode(
                *at, *map(address, sent), n, block, threads, **swap
            ),
        )
        codes, scales = Memory(n, np.uint8, 3), Memory(-(-n // (block or max(n, 1))), np.float32, 4)
        noise = (table.address, offsets.address, 65529) if stochastic else (None, None, 0)
        yield (
            (codes, scales),
            lambda *at, sent=(codes, scales), block=block, **swap: lib.blockint_encode(
                *at, *map(address, sent), n, block, 8, *noise, threads, **swap
            ),
        )
    for k in {0, n // 100, n // 3, n}:
        values, positions = Memory(k, np.float32, 4), Memory(k, np.int32, 8)
        yield (
            (values, positions),
            lambda *at, sent=(values, positions), k=k, **swap: lib.topk_encode(
                *at, *map(address, sent), n, k, threads, **swap
            ),
        )


@CASES
@loop("stochastic", [False, True])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_residual_may_change_places_with_x(lib, n, kind, threads, stochastic):
    first, last = vector(n, 1, kind), vector(n, 2)
    if kind == "ties":  # the sample underestimates the threshold, so top-k makes another pass
        first, last = np.sort(first), np.sort(last)
    for sent, encode in encoders(lib, n, threads, stochastic):
        x, residual, out = Memory.of(first, 4), Memory.of(last, 8), Memory(n, np.float32, 4)
        encode(x.address, residual.address, out.address)
        expected, left = [each.check().copy() for each in sent], out.check().copy()
        equal(x.check(), first)
        encode(x.address, residual.address, residual.address, swap=True)
        for each, wanted in zip(sent, expected, strict=True):
            equal(each.check(), wanted)
        equal(residual.check(), left)
        equal(x.check(), last)


def test_topk_changes_places_also_where_a_sample_misjudges(lib):
    n, k, v = 300_000, 900, np.full(300_000, 1e-3, np.float32)
    v[-k - 30_000 :] = np.arange(k + 30_000)
    for threads in (1, 2):
        x, residual = Memory.of(v), Memory.of(np.ones(n, np.float32))
        values, positions = Memory(k, np.float32), Memory(k, np.int32)
        at = (each.address for each in (x, residual, residual, values, positions))
        lib.topk_encode(*at, n, k, threads, swap=True)
        rest, expected = v + 1, topk_oracle(v + 1, k)
        rest[expected] = 0
        equal(positions.check(), expected)
        equal(residual.check(), rest)
        equal(x.check(), np.ones(n, np.float32))


@CASES
@loop("bound", [0.0, 0.5, 3.0, 1e39])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_threshold_encode(lib, n, kind, threads, bound):
    for x, residual, out, v in aliases(vector(n, 1, kind), vector(n, 2), n):
        with np.errstate(over="ignore"):
            chosen = ~(np.abs(v) < np.float32(bound))
        expected = np.flatnonzero(chosen | ~np.isfinite(v)).astype(np.int32)
        rest = v.copy()
        rest[expected] = 0
        where, what, size = x.address, address(residual), len(expected)
        for capacity in sorted({0, size // 2, size - 1, size} - {-1}):
            values, positions = Memory(capacity, np.float32, 4), Memory(capacity, np.int32, 4)
            count = lib.threshold_encode(
                where, what, out.address, bound, values.address, positions.address, capacity, n, threads
            )
            assert count == size
            values.check(), positions.check(), x.check()
            if capacity < size:
                equal(out.check(), v)
                where, what = out.address, None
        equal(positions.array, expected)
        equal(values.array, v[expected])
        equal(out.check(), rest)
        if 0 < bound < 1e38:
            payload, _ = Threshold(threshold=bound).compress(v, {}, Context(XP, "w", (n,)))
            equal(values.array, payload[0])
            equal(positions.array, payload[1])
    if n:
        values, positions = Memory(n, np.float32), Memory(n, np.int32)
        x = Memory.of(v)
        count = lib.threshold_encode(x.address, None, None, bound, values.address, positions.address, n, n, threads)
        equal(positions.check()[:count], expected)
        equal(x.check(), v)


@CASES
@loop("share", [0.001, 0.1, 1.0])
def test_topk_without_what_is_left(lib, n, kind, threads, share):
    x, k = Memory.of(vector(n, 1, kind), 4), int(n * share)
    values, positions = Memory(k, np.float32, 4), Memory(k, np.int32, 8)
    lib.topk_encode(x.address, None, None, values.address, positions.address, n, k, threads)
    expected = topk_oracle(vector(n, 1, kind), k)
    equal(positions.check(), expected)
    equal(values.check(), x.check()[expected])
    equal(x.array, vector(n, 1, kind))


@loop("m, n, k", [(1, 1, 1), (3, 9, 9), (40, 512, 8), (130, 4096, 64), (7, 70001, 700), (9, 500, 499)])
@loop("kind", KINDS)
@loop("threads", [1, 2])
def test_topk_rows(lib, m, n, k, kind, threads):
    rows = vector(m * n, 1, kind).reshape(m, n)
    with np.errstate(over="ignore"):
        rows *= np.exp2(np.arange(m, dtype=np.float32) % 7 * 5)[
            :, None
        ]  # so that the bound of one row is useless for the next
    x, positions = Memory.of(rows.reshape(-1), 4), Memory(m * k, np.int32, 4)
    lib.topk_rows(x.address, m, n, k, positions.address, threads)
    equal(positions.check().reshape(m, k), np.stack([topk_oracle(row, k) for row in rows]))


@CASES
@loop("bound", [-1.0, -0.0, 0.0, 0.5, 3.0, 3.4028234663852886e38, np.inf, np.nan])
def test_beyond(lib, n, kind, threads, bound):
    x = Memory.of(vector(n, 1, kind), 4)
    expected = np.flatnonzero(~(np.abs(x.array) <= np.float32(bound))).astype(np.int32)
    for capacity in sorted({len(expected) // 2, len(expected)}):
        values, positions = Memory(capacity, np.float32, 4), Memory(capacity, np.int32, 8)
        found = lib.beyond(x.address, bound, values.address, positions.address, capacity, n, threads)
        assert found == len(expected)
        values.check(), positions.check()
    equal(positions.array, expected)
    equal(values.array, x.check()[expected])


@CASES
def test_excess(lib, n, kind, threads):
    x = vector(n, 0, kind)
    x, found = Memory.of(np.where(np.isfinite(x), x, np.float32(2)), 4), Memory(3, np.float64, 8)
    for bound in (0.0, 1.0, 3e-41, 1e30):
        lib.excess(x.address, bound, found.address, n, threads)
        # Differences are float32, sums are float64.
        over = np.maximum(np.abs(x.check()) - np.float32(bound), 0).astype(np.float64)
        assert found.check()[0] == np.count_nonzero(over)
        np.testing.assert_allclose(found.array[1:], [over.sum(), (over * over).sum()], rtol=1e-12)
    first = found.array.copy()
    lib.excess(x.address, 1e30, found.address, n, 3)
    equal(found.check(), first)


@loop("n, k", [(1, 1), (7, 3), (9, 9), (5000, 1), (5000, 50), (70_001, 69_000), (600_011, 6000)])
@loop("start", [0, 2**32 - 3000])
@loop("threads", [1, 2])
def test_smallest_words(lib, n, k, start, threads):
    for keys in ((1, 2), (0xDEADBEEF, 0xFFFFFFFF)):
        words, positions = np.empty(n, np.int32), Memory(k, np.int32, 4)
        lib.words(*keys, start, n, words.ctypes.data)
        lib.smallest_words(*keys, start, n, k, positions.address, threads)
        # Beyond 2**32 elements words may repeat: then either position is right.
        chosen = positions.check()
        assert np.all(np.diff(chosen) > 0)
        equal(np.sort(words.view(np.uint32)[chosen]), np.sort(words.view(np.uint32))[:k])


def test_words_that_differ_in_the_last_bit_alone_are_told_apart(lib):
    n, key = 2**18, (5, 7)
    words = np.empty(n, np.int32)
    lib.words(*key, 0, n, words.ctypes.data)
    ordered = np.sort(words.view(np.uint32))
    pairs = np.flatnonzero((ordered[1:] ^ ordered[:-1]) == 1)
    assert len(pairs) > 3
    for place in pairs[:4]:
        for k in (int(place) + 1, int(place) + 2):
            positions = Memory(k, np.int32)
            lib.smallest_words(*key, 0, n, k, positions.address, 1)
            equal(positions.check(), np.flatnonzero(words.view(np.uint32) <= ordered[k - 1]).astype(np.int32))


@loop("kind", [*KINDS, "flat", "heavy"])
@loop("n, ratio", [(40_000, 0.001), (40_000, 0.1), (300_000, 0.01), (300_000, 1.0)])
def test_sampled(lib, n, ratio, kind, monkeypatch):
    if kind == "flat":  # many elements lie between two neighbouring thresholds
        x = np.random.default_rng(1).uniform(0.99, 1.0, n).astype(np.float32)
    elif kind == "heavy":
        x = np.random.default_rng(1).standard_t(0.3, n).astype(np.float32)
    else:
        x = vector(n, 1, kind)
    ctx, selector = Context(XP, "w", (n,), step=3), Sampled(ratio)
    monkeypatch.setattr(type(XP), "kernels", None)
    expected = selector.select(x, kept(ratio, n), ctx)
    monkeypatch.setattr(Sampled, "likely", 0)
    equal(selector.select(x, kept(ratio, n), ctx), expected)
    monkeypatch.undo()
    monkeypatch.setattr(type(XP), "kernels", HostKernels(XP, lib))
    equal(selector.select(x, kept(ratio, n), ctx), expected)


@CASES
@loop("workers", [1, 3])
@loop("share", [0.01, 1.0])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_sparse_mean(lib, n, kind, threads, workers, share):
    rng = np.random.default_rng(4)
    positions, values = [], []
    for w in range(workers):
        positions.append(
            np.sort(rng.choice(n, int(share * n), replace=False)).astype(np.int32) if n else np.zeros(0, "i4")
        )
        values.append(vector(n, 20 + w, kind)[: len(positions[-1])])
    payloads = list(zip(values, positions, strict=True))
    with XP.quiet():
        expected = Threshold().aggregate(payloads, Context(XP, "w", (n,)))  # accepts payloads of any length
    a, b = [Memory.of(v, 4) for v in values], [Memory.of(p, 8) for p in positions]
    out = Memory(n, np.float32, 4)
    lib.sparse_mean(
        [m.address for m in a], [m.address for m in b], [len(p) for p in positions], workers, out.address, n, threads
    )
    equal(out.check(), expected)


@loop("n", [10, 9000, 600_000])
@loop("wrong", ["negative", "n", "huge", "descending", "twice"])
@loop("threads", [1, 2])
def test_corrupt_positions_are_refused(lib, n, wrong, threads):
    for at in range(3):
        good = np.array([1, n // 2, n - 2], np.int32)
        bad = good.copy()
        bad[at] = {
            "negative": -1,
            "n": n,
            "huge": 2**31 - 1,
            "descending": good[(at + 1) % 3] + (1 if at < 2 else -1),
            "twice": good[at - 1],
        }[wrong]
        if np.all(np.diff(bad) > 0) and bad[0] >= 0 and bad[-1] < n:
            continue
        values, out = Memory.of(np.ones(3, np.float32)), Memory(n, np.float32)
        positions = [Memory.of(good), Memory.of(bad)]
        with pytest.raises(ValueError, match="worker 1 sent positions"):
            lib.sparse_mean([values.address] * 2, [p.address for p in positions], [3, 3], 2, out.address, n, threads)
        out.check()


def test_positions_of_an_empty_vector_are_refused(lib):
    values, positions = Memory.of(np.ones(1, np.float32)), Memory.of(np.zeros(1, np.int32))
    with pytest.raises(ValueError, match="worker 0"):
        lib.sparse_mean([values.address], [positions.address], [1], 1, Memory(0, np.float32).address, 0)


# -- products of low rank ----------------------------------------------------------------------------------------------
@loop(
    "a, b, r, threads",
    [(3, 7, 0, 1), (1, 1, 1, 1), (3, 5, 2, 1), (7, 1023, 4, 1), (64, 576, 3, 1), (40, 2050, 9, 1), (900, 1000, 17, 2)],
)
def test_product(lib, a, b, r, threads):
    x, p, q = vector(a * b), vector(a * r, 1), vector(r * b, 2)
    exact = p.reshape(a, r).astype(np.float64) @ q.reshape(r, b)
    room = 1e-6 * r * (abs(p.reshape(a, r)).astype(np.float64) @ abs(q.reshape(r, b)) + abs(x.reshape(a, b)))
    left, right = Memory.of(p, 4), Memory.of(q, 12)
    for given, way in ((True, "x"), (True, "own"), (False, "own")):
        of, own = Memory.of(x, 8), Memory(a * b, np.float32, 4)
        out = of if way == "x" else own
        lib.lowrank_product(of.address if given else None, left.address, right.address, out.address, a, b, r, threads)
        found = out.check().reshape(a, b)
        assert (abs(found - (x.reshape(a, b) - exact if given else exact)) <= room).all()
        equal(left.check(), p)
        equal(right.check(), q)
        if way == "own":
            equal(of.check(), x)


def in_order(x, p, q):
    """x - p q, and p q, with each operation rounded; products of eight factors are summed before the subtraction."""
    rest, whole = x, None
    for k in range(0, p.shape[1], 8):
        total = p[:, k : k + 1] * q[k]
        for j in range(k + 1, min(k + 8, p.shape[1])):
            total = total + p[:, j : j + 1] * q[j]
        rest, whole = rest - total, total if whole is None else whole + total
    return rest.reshape(-1), whole.reshape(-1)


@loop(
    "a, b, r, threads",
    [
        *[(1, 1, 1, 1), (9, 17, 2, 1), (7, 1041, 3, 1), (39, 2050, 4, 1), (6, 33, 5, 1), (5, 600, 6, 1), (3, 16, 7, 1)],
        *[(11, 1024, 8, 1), (30, 2050, 9, 1), (40, 2048, 4, 1), (901, 1008, 4, 2), (301, 1000, 17, 2)],
    ],
)
@loop("odd", [0, 4])
def test_parts_and_products_have_the_same_bits_everywhere(lib, a, b, r, threads, odd):
    x, p, q = vector(a * b), vector(a * r, 1), vector(r * b, 2)
    with np.errstate(all="ignore"):
        left, whole = in_order(x.reshape(a, b), p.reshape(a, r), q.reshape(r, b))
    given, rest, columns, rows = Memory.of(x, odd), Memory(a * b, np.float32, odd), Memory.of(p, 4), Memory.of(q, 12)
    factors = columns.address, rows.address
    lib.lowrank_part(given.address, *factors, rest.address, a, b, r, threads)
    equal(rest.check(), left)
    equal(given.check(), whole)
    lib.lowrank_product(None, *factors, given.address, a, b, r, threads)
    equal(given.check(), whole)
    given = Memory.of(x, odd)
    lib.lowrank_product(given.address, *factors, given.address, a, b, r, threads)
    equal(given.check(), left)


@loop(
    "a, b, r, threads",
    [
        (1, 1, 1, 1),
        (3, 5, 2, 1),
        (7, 1023, 4, 1),
        (10, 40, 5, 1),
        (33, 530, 7, 1),
        (18, 513, 8, 1),
        (65, 577, 3, 1),
        (40, 2050, 9, 1),
        (901, 1000, 6, 2),
    ],
)
def test_factors(lib, a, b, r, threads):
    m, p, q = vector(a * b), vector(a * r, 1), vector(r * b, 2)
    wide = [each.reshape(shape).astype(np.float64) for each, shape in ((m, (a, b)), (p, (a, r)), (q, (r, b)))]
    matrix, left, right = Memory.of(m, 4), Memory.of(p, 8), Memory.of(q, 12)
    found = Memory(a * r, np.float32, 4)
    lib.lowrank_left(matrix.address, None, right.address, found.address, a, b, r, threads)
    equal(matrix.check(), m)
    assert (abs(found.check().reshape(a, r) - wide[0] @ wide[2].T) <= 3e-6 * (abs(wide[0]) @ abs(wide[2].T))).all()
    found = Memory(r * b, np.float32, 4)
    lib.lowrank_right(matrix.address, left.address, found.address, a, b, r, threads)
    assert (abs(found.check().reshape(r, b) - wide[1].T @ wide[0]) <= 3e-6 * (abs(wide[1].T) @ abs(wide[0]))).all()


@loop(
    "a, b, r, threads",
    [(1, 1, 1, 1), (3, 5, 2, 1), (9, 1041, 4, 1), (65, 576, 3, 1), (40, 2050, 17, 1), (901, 1000, 6, 2)],
)
def test_a_residual_is_added_on_the_way(lib, a, b, r, threads):
    m, residual, q = vector(a * b), vector(a * b, 1), vector(r * b, 2)
    matrix, kept, rows = Memory.of(m, 4), Memory.of(residual, 8), Memory.of(q, 12)
    found, plain = Memory(a * r, np.float32, 4), Memory(a * r, np.float32, 4)
    lib.lowrank_left(matrix.address, kept.address, rows.address, found.address, a, b, r, threads)
    equal(matrix.check(), m + residual)
    equal(kept.check(), residual)
    lib.lowrank_left(matrix.address, None, rows.address, plain.address, a, b, r)
    equal(found.check(), plain.check())


# -- random bits -------------------------------------------------------------------------------------------------------
@loop("place, value", [(0, np.nan), (4, np.inf), (1022, -np.inf), (517, -np.nan)])
def test_one_number_that_is_not_finite_is_found(lib, place, value):
    vectors = [Memory.of(np.full(n, 3e38, np.float32), odd) for odd, n in ((1, 5), (0, 0), (4, 1023))]
    counts = [len(each.array) for each in vectors]
    assert lib.finite([each.address for each in vectors], counts, 3)
    assert lib.finite([], [], 0)
    (vectors[0] if place < 5 else vectors[2]).array[place] = value
    assert not lib.finite([each.address for each in vectors], counts, 3)


def test_what_is_written_together_is_the_same(lib):
    n, workers = 70001, 3
    stream_from = ctypes.CDLL(lib.path).grace_stream_from  # the fixture restores the previous bound
    stream_from.argtypes, stream_from.restype = [ctypes.c_int64], ctypes.c_int64
    stream_from(n + 1)
    codes = [Memory.of(np.random.default_rng(w).integers(0, 256, n).astype(np.uint8), 1) for w in range(workers)]
    scales = [Memory.of(np.abs(vector(-(-n // 512), w)), 4) for w in range(workers)]
    found = []
    for odd in (0, 16, 4):
        out = Memory(n, np.float32, odd)
        before = lib.gathered(10**9 if odd else 0)
        lib.blockint_mean([c.address for c in codes], [s.address for s in scales], workers, out.address, n, 512, 8)
        assert lib.gathered(before) == (10**9 if odd else 0)
        found.append(out.check().copy())
    equal(found[0], found[1])
    equal(found[0], found[2])


@loop("n", SIZES)
@loop("start", [0, 12345, 2**32 - 300, 2**33 + 7])
def test_words(lib, n, start):
    out = Memory(n, np.int32, 4)
    lib.words(0xDEADBEEF, 0x12345678, start, n, out.address, 2)
    equal(out.check(), XP.random.words(0xDEADBEEF, 0x12345678, start, n))


@loop("n", [0, 1, 17, 65536])
def test_noise_table(lib, n):
    out = Memory(n, np.uint16, 2)
    lib.noise_table(0xDEADBEEF, 0x12345678, n, out.address)
    equal(out.check(), (XP.random.words(0xDEADBEEF, 0x12345678, 0, n).view(np.uint32) >> 16).astype(np.uint16))


# -- all together ------------------------------------------------------------------------------------------------------
@loop("block", [0, 512])
def test_instruction_sets_and_threads_agree(block):
    built()
    n, v = 600_011, vector(600_011, 7)
    results = set()
    for lib in filter(None, map(library, ISAS)):
        for threads in (1, 2, 3):
            bits, scales = np.zeros(-(-n // 8), np.uint8), np.zeros(-(-n // (block or n)), np.float32)
            out = np.zeros(n, np.float32)
            lib.efsignsgd_encode(
                v.ctypes.data, None, out.ctypes.data, bits.ctypes.data, scales.ctypes.data, n, block, threads
            )
            results.add((bits.tobytes(), scales.tobytes(), out.tobytes()))
    assert len(results) == 1


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_the_environment_chooses():
    built()
    code = "from grace.kernels import library; found = library(); print(found and found.isa)"
    assert run(code, GRACE_KERNELS="off") == "None"
    assert run(code, GRACE_KERNELS="0") == "None"
    assert run(code, GRACE_KERNELS=PLAIN) == PLAIN
    with pytest.raises(ValueError, match="choose one of"):
        library("mmx")


def test_nothing_is_loaded_before_it_is_asked_for():
    built()
    code = "import grace, grace.kernels; print('kernels-' in open('/proc/self/maps').read())"
    if not os.path.exists("/proc/self/maps"):
        pytest.skip("this system does not show what is loaded")
    assert run(code) == "False"
    assert run(code.replace("; print", "; grace.kernels.library(); print")) == "True"


def test_a_machine_without_compiler_is_told_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(build, "compiler", lambda: None)
    monkeypatch.setattr(build, "folders", lambda: [tmp_path])
    assert build.main() == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_compiler_that_fails_is_told_of(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(build, "compiler", lambda: [sys.executable])
    monkeypatch.setattr(build, "folders", lambda: [tmp_path])
    assert not build.build()
    (line,) = capsys.readouterr().out.splitlines()
    assert "avx512" in line or build.MACHINE != "x86_64"
    assert sys.executable in line
    assert list(tmp_path.iterdir()) == []


def test_folders_that_cannot_be_written_to_are_told_of(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(build, "folders", lambda: [tmp_path / "file"])
    assert not build.build("timeline")
    assert "written to" in capsys.readouterr().out


def test_a_library_that_is_missing_is_made_once_and_found(monkeypatch, tmp_path):
    if build.compiler() is None:
        pytest.skip("no C++ compiler on this machine")
    monkeypatch.setattr(build, "folders", lambda: [tmp_path])
    assert build.build("timeline")
    made = build.find("timeline")
    assert [made] == list(tmp_path.iterdir())
    monkeypatch.setattr(build, "compiler", lambda: None)
    assert build.build("timeline")


def test_a_source_or_a_header_that_changes_asks_for_another_file(monkeypatch, tmp_path):
    # Python code and TensorFlow's operations are not part of these libraries, so changes there do not matter.
    shutil.copytree(build.HERE, tmp_path / "kernels", ignore=shutil.ignore_patterns("_lib"))
    monkeypatch.setattr(build, "HERE", tmp_path / "kernels")
    loops = build.libraries().keys() - {"kernels", "timeline"}
    users = {"api.h": {"kernels"} | loops, "cosines-inl.h": loops, "interface-methods-inl.h": {"kernels"}}
    users |= {"timeline.cc": {"timeline"}, "tensorflow_ops.cc": set(), "host.py": set()}
    for source, expected in users.items():
        before = {name: build.file_name.__wrapped__(name) for name in build.libraries()}
        with (tmp_path / "kernels" / source).open("a") as file:
            file.write("\n")
        assert {name for name in before if build.file_name.__wrapped__(name) != before[name]} == expected, source


# -- TensorFlow --------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def tensorflow():
    """The module of TensorFlow operations, and TensorFlow."""
    backend("tensorflow")
    built()
    assert build.build("tensorflow")
    assert build.find("tensorflow")
    import tensorflow as tf

    from grace.kernels import tensorflow as ops

    assert ops.available()
    return ops, tf


@pytest.fixture(params=["eager", "graph"])
def run_op(request, tensorflow):
    """Calls a function of tensors, eagerly or in a graph whose static shapes it checks; returns NumPy arrays."""
    _, tf = tensorflow

    def call(function, *args):
        tensors = [None if arg is None else tf.constant(arg) for arg in args]
        if request.param == "eager":
            results = function(*tensors)
        else:
            traced = tf.function(function)
            results = traced(*tensors)
            shapes = traced.get_concrete_function(*tensors).structured_outputs
            for result, known in zip(tf.nest.flatten(results), tf.nest.flatten(shapes), strict=True):
                assert known.shape == result.shape
        for arg, tensor in zip(args, tensors, strict=True):  # arguments must not be overwritten
            if arg is not None:
                equal(tensor.numpy(), arg)
        return [result.numpy() for result in tf.nest.flatten(results)]

    return call


TF_SIZES = loop("n", [0, 1, 9, 5001, 70001])


@TF_SIZES
@loop("block", [0, 512])
@loop("feedback", [False, True])
def test_tensorflow_signs(tensorflow, run_op, n, block, feedback):
    (ops, _), lib, x = tensorflow, library(), vector(n, 1, "tiny" if n == 5001 else "normal")
    residual = vector(n, 2) * np.float32(1e-30 if n == 5001 else 1) if feedback else None
    m = len(blocks_of(x, block))
    bits, scales, out = np.zeros(-(-n // 8), np.uint8), np.zeros(m, np.float32), np.zeros(n, np.float32)
    lib.efsignsgd_encode(*(pointer(a) for a in (x, residual, out, bits, scales)), n, block)
    got = run_op(
        lambda x, residual=None: ops.efsignsgd_encode(x, residual, block), x, *([residual] if feedback else [])
    )
    for each, expected in zip(got, (bits, scales, out), strict=True):
        equal(each, expected)
    mean = np.zeros(n, np.float32)
    lib.efsignsgd_mean([pointer(bits)] * 3, [pointer(scales)] * 3, 3, pointer(mean), n, block)
    equal(run_op(lambda b, s: ops.efsignsgd_mean([b] * 3, [s] * 3, n, block), bits, scales)[0], mean)


@TF_SIZES
@loop("bits", BITS)
@loop("stochastic", [False, True])
def test_tensorflow_ints(tensorflow, run_op, n, bits, stochastic):
    (ops, _), lib, x, residual = tensorflow, library(), vector(n, 1), vector(n, 2)
    rng, start, block = np.random.default_rng(3), 65000, 512
    tables = [rng.integers(0, 65536, size).astype(np.uint16) for size in (65536, 4)] if stochastic else []
    codes, out = np.zeros(-(-n * bits // 8), np.uint8), np.zeros(n, np.float32)
    scales = np.zeros(len(blocks_of(x, block)), np.float32)
    arrays = (pointer(a) for a in (x, residual, out, codes, scales))
    lib.blockint_encode(*arrays, n, block, bits, *(map(pointer, tables) if tables else (None, None)), start)
    got = run_op(
        lambda x, residual, *tables: ops.blockint_encode(x, residual, block, bits, *(tables or (None, None)), start),
        x, residual, *tables,
    )  # fmt: skip
    for each, expected in zip(got, (codes, scales, out), strict=True):
        equal(each, expected)
    mean = np.zeros(n, np.float32)
    lib.blockint_mean([pointer(codes)] * 2, [pointer(scales)] * 2, 2, pointer(mean), n, block, bits)
    equal(run_op(lambda c, s: ops.blockint_mean([c] * 2, [s] * 2, n, block, bits), codes, scales)[0], mean)


@TF_SIZES
@loop("feedback", [False, True])
def test_tensorflow_topk(tensorflow, run_op, n, feedback):
    (ops, _), x, residual = tensorflow, vector(n, 1), vector(n, 2) if feedback else None
    v, k = x if residual is None else x + residual, n // 100
    values, positions, out = run_op(
        lambda x, residual=None: ops.topk_encode(x, residual, k), x, *([residual] if feedback else [])
    )
    equal(positions, topk_oracle(v, k))
    equal(values, v[positions])
    rest = v.copy()
    rest[positions] = 0
    equal(out, rest)
    mean = run_op(lambda v, p: ops.sparse_mean([v, v], [p, p], n), values, positions)[0]
    with XP.quiet():
        equal(mean, Threshold().aggregate([(values, positions)] * 2, Context(XP, "w", (n,))))


@pytest.mark.parametrize("keys", [(1, 2), (0xFFFFFFFF, 0x80000000)])
def test_tensorflow_noise(tensorflow, run_op, keys):
    ops, _ = tensorflow
    (found,) = run_op(lambda *keys: ops.noise_table(keys, 70001), *map(np.int64, keys))
    equal(found, (streams.words(*keys, 0, 70001) >> 16).astype(np.uint16))


@TF_SIZES
@loop("bits", [1, 3, 4])
@loop("width", [64, 4096])
@loop("feedback", [False, True])
def test_tensorflow_rotated(tensorflow, run_op, n, bits, width, feedback):
    (ops, _), lib, x = tensorflow, library(), vector(n, 1)
    residual, eden = vector(n, 2) if feedback else None, Eden(bits=bits, block_size=width)
    levels, middles, divisor = eden.levels(), eden.middles(), eden.divisor(width) if eden.biased else 0.0
    stream, keys, start = 3, (0xFFFFFFF0, 7), 4096
    m = -(-n // width)
    codes, scales, streams = np.zeros(m * width * bits // 8, np.uint8), np.zeros(m, np.float32), np.zeros(m, np.uint8)
    out = np.zeros(n, np.float32)
    arrays = map(pointer, (x, residual, out if feedback else None, codes, scales, streams))
    lib.eden_encode(*arrays, n, width, bits, levels, middles, divisor, stream, *keys, start)
    transforms, rng = ops.TensorflowTransforms(backend("tensorflow")), SimpleNamespace(keys=keys, offset=start)
    got = run_op(
        lambda x, residual=None: transforms.eden_encode(x, residual, width, levels, middles, divisor, stream, rng),
        x, *([residual] if feedback else []),
    )  # fmt: skip
    for each, expected in zip(got, (codes, scales, streams, *([out] if feedback else [])), strict=feedback):
        equal(each, expected)
    mean, payload = np.zeros(n, np.float32), (codes, scales, streams)
    lib.eden_mean(*([pointer(a)] * 2 for a in payload), 2, pointer(mean), n, width, bits, levels, *keys, start)
    received = run_op(lambda *each: transforms.eden_mean([each] * 2, None, n, width, levels, rng), *payload)
    equal(received[0], mean)


def pointer(array):
    return None if array is None else array.ctypes.data


def test_tensorflow_reuses_memory_that_nobody_else_needs(tensorflow):
    ops, tf = tensorflow

    @tf.function
    def step(x, residual):
        x = tf.identity(x) * 2.0
        return ops.efsignsgd_encode(x, residual, 512)

    x, residual = vector(70001, 1), vector(70001, 2)
    bits, _, out = step(tf.constant(x), tf.constant(residual))
    expected_bits, expected_scales = efsignsgd_oracle(x * 2 + residual, 512)
    equal(bits.numpy(), expected_bits)
    assert np.abs(out.numpy()).max() < np.abs(x * 3).max() + expected_scales.max()


def test_tensorflow_refuses_what_does_not_fit(tensorflow):
    ops, tf = tensorflow
    wrong = tf.errors.InvalidArgumentError
    x, byte, one = tf.ones(1000), tf.zeros(10, tf.uint8), tf.ones(1)
    with pytest.raises(wrong, match="worker 1 sent a payload"):
        ops.efsignsgd_mean([tf.zeros(125, tf.uint8), byte], [one, one], 1000, 0)
    with pytest.raises(wrong, match="worker 0 sent a payload"):
        ops.blockint_mean([byte], [one], 1000, 0, 8)
    with pytest.raises(wrong, match="worker 1 sent positions"):
        ops.sparse_mean([one, one], [tf.constant([999]), tf.constant([1000])], 1000)
    with pytest.raises(wrong, match="worker 0"):
        ops.sparse_mean([one], [tf.constant([1, 2])], 1000)
    with pytest.raises(wrong, match="as long as x"):
        ops.efsignsgd_encode(x, tf.ones(999), 0)
    with pytest.raises(wrong, match="must be a vector"):
        ops.efsignsgd_encode(tf.ones((10, 10)), None, 0)
    with pytest.raises(wrong, match="table of 65536"):
        ops.blockint_encode(x, None, 512, 8, tf.zeros(10, tf.uint16), tf.zeros(1, tf.uint16))
    payload, levels, rng = (byte, one, byte), [-1.0, 1.0], SimpleNamespace(keys=(0, 0), offset=0)
    transforms = ops.TensorflowTransforms(backend("tensorflow"))
    mean = tf.function(lambda *how: transforms.eden_mean([payload], None, 1000, *how, rng))
    with pytest.raises(wrong, match="worker 0 sent a payload"):
        mean(64, levels)
    with pytest.raises(wrong, match="no power of two"):
        mean(72, levels)
    with pytest.raises(wrong, match="3 levels"):
        mean(64, [*levels, 2.0])
    with pytest.raises(wrong, match="do not match"):
        transforms.eden_encode(x, None, 64, levels, levels, 0.0, 0, rng)
    with pytest.raises(wrong, match="k=1001"):
        ops.topk_encode(x, None, 1001)
    with pytest.raises(wrong, match="multiple of 8"):
        ops.efsignsgd_encode(x, None, 12)
