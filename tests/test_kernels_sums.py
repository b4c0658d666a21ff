"""Kernels of methods summed on the wire, each instruction set of this machine, against the plain compressors."""

import numpy as np
import pytest
from methods import alone, compressed, left_of, native_mean, together
from support.cases import loop
from support.kernels import KINDS, Guarded, Memory, Plain, equal, vector

from grace.compressors.arctopk import ARCTopK
from grace.compressors.gtopk import GTopK
from grace.compressors.shared_int import SharedInt
from grace.core import Context

CASES = [*((n, "normal", 0) for n in (1, 7, 8, 9, 513, 70_001)), (5001, "normal", 65_496), (300_005, "normal", 8)]
CASES += [(5001, kind, 0) for kind in KINDS[1:]]
INTEGERS = [
    *(SharedInt(block, dtype) for block in (0, 8, 24, 512) for dtype in ("int8", "int32")),
    *(SharedInt(0, "int8", levels) for levels in (1, 42)),
    SharedInt(40, "int32", 2**24),
]
pytestmark = pytest.mark.usefixtures("streamed")


def contexts(xp, n, offset=0, workers=3):
    return [
        Context(xp, "w", (n,), rank=rank, world_size=workers, step=5, seed=3, offset=offset) for rank in range(workers)
    ]


def exchanged(compressor, xs, xp, offset=0):
    """Each worker's payload."""
    here = contexts(xp, len(xs[0]), offset, len(xs))
    found, _ = together(xp, [compressed(compressor, x, {}, ctx) for x, ctx in zip(xs, here, strict=True)])
    return [payload for payload, _ in found], here


# -- integers ----------------------------------------------------------------------------------------------------------
@loop("n, kind, offset", CASES)
@pytest.mark.parametrize("compressor", INTEGERS, ids=repr)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_integers_are_those_of_the_compressor(lib, compressor, n, kind, offset):
    xs, native = [vector(n, 1, kind), vector(n, 2), vector(n, 3)], Guarded(lib)
    plain, plain_contexts = exchanged(compressor, xs, Plain(), offset)
    given = [Memory.of(x, 4) for x in xs]
    found, native_contexts = exchanged(compressor, [x.array for x in given], native, offset)
    native.check()
    for x, memory, one, other, ctx, here in zip(xs, given, plain, found, plain_contexts, native_contexts, strict=True):
        equal(memory.check(), x)
        equal(other[1], one[1])
        # What is no number has no integer; what its block stands for is none whatever that is.
        sound = np.isfinite(np.repeat(one[1], compressor.block_size or n)[:n])
        for a, b in ((other[0], one[0]), (other[2], one[2])):
            equal(a[sound], b[sound])
        sent = tuple(Memory.of(each, each.itemsize).array for each in one)
        out = Memory(n, np.float32, 4)
        assert native_mean(compressor, [sent], out.array, here) is out.array
        equal(out.check(), compressor.decompress(one, ctx))
        left = Memory.of(x, 8)
        assert left_of(compressor, left.array, sent, here) is left.array
        equal(left.check(), compressor.residual(x.copy(), one, ctx))


def test_sums_of_integers_that_floats_cannot_hold(lib):
    codes, scales = np.int32([2**31 - 1, -(2**31), 2**24 + 1, 0, -1]), np.ones(1, np.float32)
    out = Guarded(lib).kernels.quantisers.shared_mean(codes, scales, None, 0, 127 * 2**24)
    equal(out, codes.astype(np.float32) / np.float32(127 * 2**24))


@loop("wrong", ["sums", "scales", "dtype"])
def test_sums_that_do_not_fit_are_refused(lib, wrong):
    (ctx, *_), i8 = contexts(Guarded(lib), 16), np.int8
    total, scale = np.zeros(15 if wrong == "sums" else 16, np.int32 if wrong == "dtype" else i8), np.ones(2, np.float32)
    payload = total, scale[: 1 if wrong == "scales" else 2], np.zeros(16, i8)
    with pytest.raises(ValueError, match=r"its (sums|scales) are"):
        native_mean(SharedInt(8), [payload], None, ctx)


# -- rows with random signs --------------------------------------------------------------------------------------------
@loop("n, kind", [(n, kind) for n, kind, _ in CASES])
@loop("size, many", [(1, 1), (8, 3), (96, 4), (128, 4), (100, 9), (70_000, 2)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_sums_of_rows(lib, n, kind, size, many):
    x, native = vector(n, 1, kind), Guarded(lib)
    words = np.random.default_rng(2).integers(-(2**31), 2**31, many * size).astype(np.int32)
    found = native.kernels.sparsifiers.signed_sums(Memory.of(x, 4).array, Memory.of(words, 4).array, size)
    rows = np.pad(x, (0, -n % size)).reshape(-1, size).astype(np.float64)
    signs = np.where(words < 0, -1.0, 1.0).reshape(many, size)
    expected = np.stack([(rows * each).sum(1) for each in signs], 1)
    assert found.shape == expected.shape
    assert np.array_equal(np.isfinite(found), np.isfinite(expected.astype(np.float32)))
    bound = np.stack([np.abs(rows).sum(1)] * many, 1) * 2.0**-40 + 2.0**-23 * np.abs(expected) + 2.0**-149
    sound = np.isfinite(found)
    assert np.all(np.abs(found - expected)[sound] <= bound[sound])
    threads, alone_ = Memory(found.size, np.float32), Memory(found.size, np.float32)
    for count, out in ((3, threads), (1, alone_)):
        lib.signed_sums(x.ctypes.data, words.ctypes.data, out.address, n, size, many, count)
    equal(threads.check(), found.reshape(-1))
    equal(alone_.check(), found.reshape(-1))


@loop("n, kind, offset", CASES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_rows_are_those_of_the_compressor(lib, n, kind, offset):
    x, compressor = vector(n, 1, kind), ARCTopK(0.2, row_size=48, sketch_size=5)
    one, other = (
        alone(lambda ctx: compressed(compressor, x.copy(), {}, ctx), contexts(xp, n, offset, 1)[0])[0]
        for xp in (Plain(), Guarded(lib))
    )
    for array, expected in zip(other, one, strict=True):
        equal(array, expected)


# -- the largest of sums -----------------------------------------------------------------------------------------------
def sent(n, k, seed, kind):
    """Of a worker: k values at some positions."""
    rng = np.random.default_rng(seed)
    positions = np.sort(rng.choice(n, k, replace=False)).astype(np.int32)
    if kind == "cancelling":
        positions = np.arange(n - k, n, dtype=np.int32)
        return np.float32([1, -1])[seed % 2] * (np.arange(k) % 3 + np.arange(k) % 2 * (seed == 2)).astype(
            np.float32
        ), positions
    if kind == "few":
        return np.where(rng.random(k) < 0.3, vector(k, seed), np.float32(0)), positions
    return vector(k, seed, kind), positions


@loop("kind", [*KINDS, "cancelling", "few"])
@loop("n, k", [(1, 1), (9, 4), (9, 9), (4096, 40), (70_001, 700), (70_001, 1), (5000, 4999)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_largest_of_sums(lib, n, k, kind):
    for workers in (1, 2, 5):
        payloads = [sent(n, k, seed, kind) for seed in range(workers)]
        total = np.zeros(n, np.float32)
        for values, positions in payloads:
            total[positions] += values
        native = Guarded(lib)
        moved = [tuple(Memory.of(each, 4).array for each in payload) for payload in payloads]
        sums, positions = native.kernels.sparsifiers.largest_sums(moved, n, k)
        native.check()
        magnitudes = np.where(np.isnan(total), np.inf, np.abs(total))
        equal(positions, np.sort(np.argsort(-magnitudes, kind="stable")[:k]).astype(np.int32))
        equal(sums, total[positions])


@loop("wrong", [[3, 2], [2, 2], [-1, 2], [2, 100], [2, 2**31 - 1]])
def test_positions_that_do_not_ascend_name_their_worker(lib, wrong):
    compressor, xp, values = GTopK(0.02), Guarded(lib), np.ones(2, np.float32)
    good, bad = (values, np.int32([0, 99])), (values, np.int32(wrong))
    ctx = contexts(xp, 100)[0]
    program = compressed(compressor, vector(100), {}, ctx)
    next(program)
    with pytest.raises(ValueError, match="worker 1 of 3 sent a payload"):
        program.send([good, bad, good])


@loop("n, kind, offset", CASES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_largest_are_those_of_the_compressor(lib, n, kind, offset):
    xs, compressor = [vector(n, 1, kind), vector(n, 2), vector(n, 3, kind)], GTopK(0.05)
    plain, native = (exchanged(compressor, [x.copy() for x in xs], xp, offset)[0] for xp in (Plain(), Guarded(lib)))
    for one, other in zip(plain, native, strict=True):
        for array, expected in zip(other, one, strict=True):
            equal(array, expected)
