"""Kernels of minifloats, each instruction set of this machine, against the plain compressors."""

import numpy as np
import pytest
from methods import native_mean, natively
from support.cases import loop
from support.kernels import KINDS, Memory, Native, Plain, equal, vector

from grace.backends import get_backend
from grace.compressors.measured.bf16 import BF16
from grace.compressors.measured.natural import Natural
from grace.compressors.studies.dettmers8 import TABLES, Dettmers8
from grace.compressors.studies.fp8 import FP8
from grace.compressors.studies.natural_dithering import NaturalDithering
from grace.core import Context
from grace.kernels import Codes

XP = get_backend("numpy")
ROUNDINGS = ("nearest", "stochastic")
COMPRESSORS = [
    *(BF16(rounding) for rounding in ROUNDINGS),
    *(FP8(format=f, rounding=r, block_size=b) for f in ("e4m3", "e5m2") for r in ROUNDINGS for b in (0, 8, 128)),
    *(
        Natural(stochastic=s, window=w, block_size=b)
        for s in (True, False)
        for w in ("auto", "grace")
        for b in (0, 512)
    ),
    *(NaturalDithering(s=s, block_size=b) for s in (1, 2, 7, 15, 20, 127) for b in (0, 8, 512)),
    *(Dettmers8(table=table, block_size=b) for table in TABLES for b in (0, 8, 4096)),
]
CASES = [*((n, "normal", 0) for n in (1, 7, 8, 513, 70_001)), (5001, "normal", 65_496), (300_005, "normal", 8)]
CASES += [(5001, kind, 0) for kind in KINDS[1:]]


def contexts(lib, n, offset):
    return [Context(xp, "w", (n,), step=5, seed=3, offset=offset) for xp in (Plain(), Native(lib))]


@loop("n, kind, offset", CASES)
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_codes_are_those_of_the_compressor(lib, compressor, n, kind, offset):
    ctx, native = contexts(lib, n, offset)
    first, last = vector(n, 1, kind), vector(n, 2)
    for residual in (None, last):
        v = first if residual is None else first + last
        payload, _ = compressor.compress(v, {}, ctx)
        decoded = compressor.decompress(payload, ctx)
        x, rest = Memory.of(first, 4), None if residual is None else Memory.of(last, 8)
        sent, left = natively(compressor, x.array, None if rest is None else rest.array, native)
        if residual is None:
            equal(x.check(), first)
        else:
            assert left is x.array
            equal(rest.check(), last)
        finite = np.isfinite(decoded)
        if kind == "special":
            for one, other in zip(sent[1:], payload[1:], strict=True):
                equal(one, other)
            again = compressor.decompress(sent, ctx)
            equal(np.isfinite(again), finite)
            equal(again[finite], decoded[finite])
        else:
            for one, other in zip(sent, payload, strict=True):
                equal(one, other)
        if residual is not None:
            left = left.copy()
            x.check()
            equal(left[finite], (v - decoded)[finite])


@loop("n, kind, offset", CASES)
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_means_are_those_of_the_compressor(lib, compressor, n, kind, offset):
    ctx, native = contexts(lib, n, offset)
    for workers in (1, 3, 4):
        payloads = [compressor.compress(vector(n, 10 + w, kind), {}, ctx)[0] for w in range(workers)]
        expected = compressor.aggregate([tuple(each.copy() for each in payload) for payload in payloads], ctx)
        moved = [
            tuple(Memory.of(each, 1 if each.dtype == np.uint8 else 4).array for each in payload) for payload in payloads
        ]
        out = Memory(n, np.float32, 4)
        assert native_mean(compressor, moved, out.array, native) is out.array
        equal(out.check(), expected)


@loop(
    "compressor",
    [BF16(), FP8(), FP8(format="e5m2"), Natural(), NaturalDithering(s=20), Dettmers8(), Dettmers8(table="nf4")],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_code_is_decoded_as_it_is_by_the_compressor(lib, compressor):
    # Includes codes that no worker sends.
    native = Native(lib)
    wide = isinstance(compressor, BF16)
    every = np.arange(65536, dtype=np.uint16) if wide else np.arange(256, dtype=np.uint8)
    codes = every.view(np.uint8)
    bits = getattr(compressor, "bits", 8)
    for scale in (1.5, 1e-44, np.inf, np.nan) if not wide else (1.0,):
        n = len(every) if wide else 256 // bits * 8
        ctx = Context(XP, "w", (n,))
        count = -(-n // (compressor.traits.block_size or n))
        scales = np.full(count, 200 if scale == 1.5 else scale, np.float32)
        if isinstance(compressor, Natural):
            scales = np.full(1, {1.5: 100, 1e-44: 254}.get(scale, -3), np.int32)
        payload = (codes,) if wide else (codes[: n * bits // 8], scales)
        expected = compressor.decompress(payload, ctx)
        equal(native_mean(compressor, [payload], None, Context(native, "w", (n,))), expected)


def test_a_payload_of_another_size_is_refused(lib):
    native = Context(Native(lib), "w", (1000,))
    payload, _ = FP8().compress(vector(1000), {}, Context(XP, "w", (1000,)))
    with pytest.raises(ValueError, match=r"uint8\[1000\]"):
        native_mean(FP8(), [payload, (payload[0][:-1], payload[1])], None, native)


def test_entries_of_a_table_may_not_be_too_close():
    middles = [0.5, 0.5001]
    with pytest.raises(ValueError, match="too close"):
        Codes("nearest", 4, table=[0.4, 0.50005, 0.6], middles=middles)
    for middle in (0.0, -1e-8, 1.5):
        with pytest.raises(ValueError, match="too close to 0"):
            Codes("nearest", 4, table=[middle - 0.1, middle + 0.1], middles=[middle])
