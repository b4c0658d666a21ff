"""Kernels of methods summed on the wire, each instruction set of this machine, against the plain compressors."""

import numpy as np
import pytest
from methods import compressed, left_of, native_mean, together
from support.cases import loop
from support.kernels import KINDS, Guarded, Memory, Plain, equal, vector

from grace.compressors.studies.shared_int import SharedInt
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
        # NaN and infinity have no integer, so codes of their blocks are undefined.
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
    out = Guarded(lib).kernels.quantisers.shared_int_mean(codes, scales, None, 0, 127 * 2**24)
    equal(out, codes.astype(np.float32) / np.float32(127 * 2**24))


@loop("wrong", ["sums", "scales", "dtype"])
def test_sums_that_do_not_fit_are_refused(lib, wrong):
    (ctx, *_), i8 = contexts(Guarded(lib), 16), np.int8
    total, scale = np.zeros(15 if wrong == "sums" else 16, np.int32 if wrong == "dtype" else i8), np.ones(2, np.float32)
    payload = total, scale[: 1 if wrong == "scales" else 2], np.zeros(16, i8)
    with pytest.raises(ValueError, match=r"its (sums|scales) are"):
        native_mean(SharedInt(8), [payload], None, ctx)
