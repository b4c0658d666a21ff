"""Kernels of single methods, each instruction set of this machine, against the plain compressors."""

import numpy as np
import pytest
from methods import compressed, left_of, native_mean, natively
from support.cases import loop
from support.kernels import KINDS, Guarded, Memory, Plain, equal, moved, vector

from grace.compressors.sparse import Scattered
from grace.compressors.studies.adaq import AdaQ
from grace.compressors.studies.chunktopk import ChunkTopK
from grace.compressors.studies.inceptionn import Inceptionn
from grace.compressors.studies.randomk import RandomK
from grace.compressors.studies.sketch import Sketch
from grace.core import Context

COMPRESSORS = [
    *(Sketch(q) for q in (2, 3, 16, 64, 100, 256)),
    *(AdaQ(ratio) for ratio in (0.001, 0.01, 0.3, 1.0)),
    *(Inceptionn(bound) for bound in (2**-14, 2**-10, 2**-3, 2**-1)),
    *(RandomK(ratio) for ratio in (0.01, 1.0)),
    *(ChunkTopK(*each) for each in ((8, 8), (64, 16), (256, 24), (512, 8), (4096, 64), (65536, 512))),
]
CASES = [
    *((n, "normal", 0) for n in (1, 7, 8, 9, 50, 51, 513, 2**15 - 1, 2**15, 70_001)),
    (5001, "normal", 2**32 - 300),
]
CASES += [*((n, kind, 0) for n in (5001, 40_001) for kind in (*KINDS[1:], "one value")), (300_005, "normal", 8)]
EACH = pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
pytestmark = pytest.mark.usefixtures("streamed")


def context(xp, n, offset=0):
    return Context(xp, "w", (n,), step=5, seed=3, offset=offset)


def gradient(compressor, n, seed, kind):
    """A vector of which Inceptionn codes elements with every number of bits."""
    if kind == "one value":
        return np.full(n, -0.3, np.float32)
    return vector(n, seed, kind) * np.float32(0.05 if isinstance(compressor, Inceptionn) else 1)


def sent_by(compressor, x, residual, ctx):
    """Payload and residual, computed by kernels if the method has some."""
    if (found := natively(compressor, x, residual, ctx)) is not None:
        return found
    v = x if residual is None else x + residual
    payload, _ = compressed(compressor, v, {}, ctx)
    return payload, x if residual is None else left_of(compressor, v.copy(), payload, ctx)


@loop("n, kind, offset", CASES)
@EACH
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_payloads_are_those_of_the_compressor(lib, compressor, n, kind, offset):
    first, last, native = gradient(compressor, n, 1, kind), vector(n, 2), Guarded(lib)
    for residual in (None, last):
        expected = sent_by(compressor, first.copy(), residual, context(Plain(), n, offset))
        x, rest = Memory.of(first, 4), None if residual is None else Memory.of(last, 8)
        found = sent_by(compressor, x.array, None if rest is None else rest.array, context(native, n, offset))
        native.check(), x.check()
        for one, other in zip((*found[0], found[1]), (*expected[0], expected[1]), strict=True):
            equal(one, other)
        if residual is None:
            equal(x.array, first)
        else:
            equal(rest.check(), last)


@loop("n, kind, offset", CASES)
@EACH
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_means_are_those_of_the_compressor(lib, compressor, n, kind, offset):
    ctx = context(Plain(), n, offset)
    for workers in (1, 3, 4):
        payloads = [sent_by(compressor, gradient(compressor, n, w, kind), None, ctx)[0] for w in range(workers)]
        expected = compressor.aggregate(payloads, ctx)
        if isinstance(compressor, RandomK):  # RandomK computes its positions once, not for each worker
            equal(expected, Scattered.aggregate(compressor, payloads, ctx))
            equal(native_mean(compressor, payloads, vector(n), ctx), expected)
            continue
        out = Memory(n, np.float32, 4)
        assert native_mean(compressor, moved(payloads), out.array, context(Guarded(lib), n, offset)) is out.array
        equal(out.check(), expected)


@loop("size, k", [(64, 16), (1024, 16)])
def test_chunks_that_do_not_fit_are_refused(lib, size, k):
    n, compressor, native = 5001, ChunkTopK(size, k), Guarded(lib)
    good, _ = compressor.compress(vector(n), {}, context(Plain(), n))
    low = good[0].copy()
    low[0], low[1] = low[1], low[0]
    beyond = np.full_like(low, 255)
    wrong = [(low, *good[1:]), (good[0][1:], *good[1:]), (*good[:-1], good[-1][1:]), (beyond, *good[1:])]
    for payload in wrong:
        out = Memory.of(vector(n, 8), 4)
        with pytest.raises(ValueError, match=r"its |do not ascend"):
            native_mean(compressor, [good, payload], out.array, context(native, n))
        out.check(), native.check()


# -- orders that are hard ----------------------------------------------------------------------------------------------
@loop("kind", ["few values", "one bin", "ascending", "sparse", "far apart", "large"])
@loop("compressor", [Sketch(), Sketch(256), AdaQ(), AdaQ(0.9)])
def test_distributions_that_are_hard(lib, compressor, kind):
    n, rng = 70_001, np.random.default_rng(4)
    x = {
        "few values": rng.choice(np.float32([-2, -1, -0.0, 0, 1e-40, 3]), n),
        "one bin": rng.uniform(1, 1.001, n).astype(np.float32),  # equal in their upper 16 bits
        "ascending": np.sort(vector(n)),
        "sparse": np.where(rng.random(n) < 0.001, vector(n), np.float32(0)),
        "far apart": vector(n) * np.float32(2) ** rng.integers(-130, 4, n).astype(np.float32),
        "large": vector(n) * np.float32(1e25),
    }[kind]
    for one, other in zip(
        *(sent_by(compressor, x, None, context(xp, n))[0] for xp in (Plain(), Guarded(lib))), strict=True
    ):
        equal(other, one)


def test_adaq_looks_again_where_a_sample_overrates(lib):
    # The sample sees only large elements, so its threshold lets too few of the other sign pass.
    n, compressor = 70_001, AdaQ(0.01)
    x = np.where(np.arange(n) % 2, np.float32(1), np.float32(-1e-3))
    x *= np.random.default_rng(1).uniform(0.9, 1, n).astype(np.float32)
    for one, other in zip(
        *(sent_by(compressor, x, None, context(xp, n))[0] for xp in (Plain(), Guarded(lib))), strict=True
    ):
        equal(other, one)


# -- received payloads--------------------------------------------------------------------------------------------------
def refused(lib, compressor, n, good, bad, match):
    payloads = [tuple(np.asarray(each) for each in payload) for payload in (good, bad)]
    out, xp = Memory(n, np.float32, 4), Guarded(lib)
    native_mean(compressor, moved(payloads[:1] * 2), out.array, context(xp, n))
    with pytest.raises(ValueError, match=match):
        native_mean(compressor, moved(payloads), out.array, context(xp, n))
    out.check()
    with pytest.raises(ValueError):
        compressor.decompress(payloads[1], context(Plain(), n))


@loop("wrong", ["magnitudes", "16 bits", "8 bits", "half"])
def test_numbers_that_tags_do_not_ask_for_are_refused(lib, wrong):
    tags, f32, u8 = np.array([0b00011011, 3], np.uint8), np.float32, np.uint8
    good = tags, np.ones(2, f32), np.zeros(2, u8), np.zeros(1, u8)
    bad = {
        "magnitudes": (tags, np.ones(3, f32), *good[2:]),
        "16 bits": (*good[:2], np.zeros(4, u8), good[3]),
        "8 bits": (*good[:3], np.zeros(0, u8)),
        "half": (*good[:2], np.zeros(3, u8), good[3]),
    }[wrong]
    refused(lib, Inceptionn(), 5, good, bad, "worker 1|half")


@loop("which", range(7))
@loop("n", [10, 300_000])
def test_signed_positions_that_do_not_ascend_are_refused(lib, which, n):
    wrong = np.array([[3, 2], [-3, 2], [0, -1], [n], [-1 - n], [2**31 - 1], [-(2**31)]][which], np.int32)
    right, f32 = np.array([0, -3, 9], np.int32), np.float32
    means = np.array([1, -2], f32)
    refused(lib, AdaQ(), n, (means, right), (means, wrong), "worker 1 sent positions")


def test_codes_beyond_the_buckets_are_no_numbers(lib):
    compressor, codes = Sketch(3), np.array([0b11100100], np.uint8)
    out = native_mean(compressor, [(codes, np.float32([1, 2, 4]))], None, context(Guarded(lib), 4))
    equal(out, np.float32([1, 2, 4, np.nan]))
