"""Kernels of the cosine transform of chunks, each instruction set of this machine, against method `demo`.

Kernels add in another order, so values may differ in their last bits. Where coefficients are almost equally large,
either one may be sent.
"""

from dataclasses import replace

import numpy as np
import pytest
from methods import compressed, left_of, native_mean, natively
from support.cases import loop
from support.kernels import KINDS, Guarded, Memory, Plain, equal, moved, vector
from table.transforms import dct

from grace.compressors.studies.demo import DeMo
from grace.core import Context
from grace.engine.codecs import TensorCodec
from grace.kernels import ISAS, library
from grace.memories.decoupled import DecoupledMomentum
from grace.ops import index_coding as indices
from grace.ops.packing import packed_size

CASES = [
    *((DeMo(), shape) for shape in ((64, 64), (200, 300), (128, 8, 3, 3), (65, 129), (7, 1000), (1000, 7), (300, 1))),
    *((DeMo(), (n,)) for n in (1, 5, 64, 65, 1000, 64 * 64, 64 * 64 + 17, 20_011)),
    *((DeMo(chunk=32, chunk_k=16), shape) for shape in ((100, 70), (32, 32), (130,), (100, 128))),
    *((DeMo(chunk=10, chunk_k=7), shape) for shape in ((25, 33), (9, 100), (101,))),
    *((DeMo(chunk=2, chunk_k=k), (7, 9)) for k in (1, 3, 9)),
    *((DeMo(chunk=17, chunk_k=5), shape) for shape in ((40, 40), (17, 16))),
    (DeMo(chunk=24, chunk_k=576), (50, 50)),
    (DeMo(chunk=48, chunk_k=100), (100, 200)),
    (DeMo(chunk=128, chunk_k=33), (200, 300)),
    (DeMo(chunk=256, chunk_k=99), (300, 256)),
    (DeMo(chunk=255, chunk_k=3), (256, 300)),
    (DeMo(), (512, 640)),  # large enough for two threads
    (DeMo(), (300_005,)),
]
EACH = loop("compressor, shape", CASES)
QUIET = pytest.mark.filterwarnings("ignore::RuntimeWarning")
pytestmark = pytest.mark.usefixtures("streamed")


def context(xp, shape, **others):
    return Context(xp, "w", shape, **others)


def size_of(shape):
    return int(np.prod(shape))


def near(found, expected, scale, factor=1e-5):
    """Assert equality up to rounding, and that the same elements are finite."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.dtype == expected.dtype == np.float32
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.isfinite(found), finite)
    np.testing.assert_allclose(found[finite], expected[finite], rtol=0, atol=factor * scale)


def coefficients(compressor, v, ctx):
    """float64[m, width], the coefficients of each chunk; and their largest magnitude, at least 1e-37."""
    a, b, rows, columns = compressor.sizes(ctx)
    down, across = -(-a // rows), -(-b // columns)
    wide = np.zeros((down * rows, across * columns))
    wide[:a, :b] = v.reshape(a, b)
    chunks = wide.reshape(down, rows, across, columns).transpose(0, 2, 1, 3)
    found = dct(rows) @ chunks @ dct(columns).T
    return found.reshape(down * across, rows * columns), float(abs(found).max(initial=1e-37))


def check_payload(compressor, payload, v, ctx):
    """Check lengths, dtypes, ascending positions and values, and that no clearly larger coefficient was left out."""
    exact, largest = coefficients(compressor, v, ctx)
    m, width = exact.shape
    k, above = min(compressor.chunk_k, width), max(0, (width - 1).bit_length() - 8)
    assert [(each.dtype.name, each.shape) for each in payload] == [
        ("float32", (m * k,)),
        ("uint8", (m * k,)),
        *([("uint8", (packed_size(above, m * k),))] if above else []),
    ]
    places = indices.widen(Plain(), tuple(np.array(each) for each in payload[1:]), width, m * k).reshape(m, k)
    for mine, again in zip(payload[1:], indices.narrow(Plain(), places.reshape(-1), width), strict=True):
        equal(mine, again)  # also checks that padding bits are zero
    assert (np.diff(places, axis=1) > 0).all()
    sent = np.take_along_axis(exact, places, 1)
    values = np.asarray(payload[0], np.float64).reshape(m, k)
    np.testing.assert_allclose(values, sent, rtol=0, atol=1e-5 * largest)
    rest = abs(exact)
    np.put_along_axis(rest, places, 0, 1)
    assert (abs(sent).min(1) >= rest.max(1) - 1e-5 * largest).all()
    return largest


# -- what is sent and what is left -------------------------------------------------------------------------------------
@loop("kind", [kind for kind in KINDS if kind != "special"])
@EACH
@QUIET
def test_payloads_are_those_of_the_compressor_but_for_rounding(lib, compressor, shape, kind):
    n = size_of(shape)
    if kind != "normal" and n > 100_000:
        pytest.skip("long, and nothing new")
    first, last, plain = vector(n, 1, kind), vector(n, 2, kind), context(Plain(), shape)
    for residual in (None, last):
        v = first if residual is None else first + last
        native = Guarded(lib)
        x, rest = Memory.of(first, 4), None if residual is None else Memory.of(last, 8)
        ctx = context(native, shape)
        payload, left = natively(compressor, x.array, None if rest is None else rest.array, ctx)
        native.check()
        scale = check_payload(compressor, payload, v, plain)
        expected, _ = compressor.compress(v.copy(), {}, plain)
        kept, other = (np.linalg.norm(each[0].astype(np.float64)) for each in (payload, expected))
        assert kept == pytest.approx(other, rel=1e-5, abs=1e-6 * scale)
        if residual is None:
            equal(x.check(), first)
            again, _ = compressed(compressor, first.copy(), {}, context(native, shape))
            for one, same in zip(again, payload, strict=True):
                equal(one, same)
            continue
        assert left is x.array
        equal(rest.check(), last)
        near(x.check(), compressor.residual(v.copy(), payload, plain), scale)


@EACH
@QUIET
def test_means_are_those_of_the_compressor_but_for_rounding(lib, compressor, shape):
    n, plain = size_of(shape), context(Plain(), shape)
    for workers in (1, 3, 4):
        # Some workers send the same positions, which may be few or all of them.
        vectors = [vector(n, w // 2, "normal") * np.float32(1 + w) for w in range(workers)]
        payloads = [compressor.compress(each, {}, plain)[0] for each in vectors]
        scale = max(coefficients(compressor, each, plain)[1] for each in vectors)
        for each in (compressor, replace(compressor, average="senders"), replace(compressor, sign=True)):
            expected = each.aggregate(payloads, plain)
            out = Memory(n, np.float32, 0 if workers == 3 else 4)  # aligned results are written with streaming stores
            found = native_mean(each, moved(payloads), out.array, context(Guarded(lib), shape))
            if each.sign and workers == 1:
                assert found is None
                continue
            assert found is out.array
            if each.sign:
                clear = abs(compressor.aggregate(payloads, plain)) > 1e-5 * scale
                equal(out.check()[clear], expected[clear])
                assert np.isin(out.array, (-1, 0, 1)).all()
            else:
                near(out.check(), expected, scale)


@EACH
@QUIET
def test_a_residual_is_what_a_payload_does_not_carry(lib, compressor, shape):
    n, plain = size_of(shape), context(Plain(), shape)
    v = vector(n, 3)
    payload, _ = compressor.compress(v, {}, plain)
    x, native = Memory.of(v, 4), Guarded(lib)
    found = compressor.residual(x.array, *moved([payload]), context(native, shape))
    assert found is x.array
    near(x.check(), compressor.residual(v.copy(), payload, plain), coefficients(compressor, v, plain)[1])


def sent(lib, shape, x, residual, out, threads=1):
    """The library's own payload, with 32 coefficients of each chunk of 64 x 64."""
    a, b = shape
    m = -(-a // 64) * -(-b // 64) * 32
    payload = Memory(m, np.float32, 4), Memory(m, np.uint8, 1), Memory(packed_size(4, m), np.uint8, 3)
    where = x.address, residual and residual.address, out and out.address, [each.address for each in payload]
    lib.demo_encode(*where, (a, b, 64, 64), 32, threads)
    return [each.check() for each in payload]


@loop("odd", [0, 4, 16])
@loop("shape", [(200, 320), (200, 300)])
def test_what_is_left_may_lie_anywhere(lib, shape, odd):
    n, found = size_of(shape), []
    for way in ("own", "x", "residual", "none"):
        x, residual, own = Memory.of(vector(n), odd), Memory.of(vector(n, 1), 8), Memory(n, np.float32, odd)
        out = {"own": own, "x": x, "residual": residual, "none": None}[way]
        payload = sent(lib, shape, x, residual, out)
        found.append([*payload, *([] if out is None else [out.check().copy()])])
        if way != "residual":
            equal(residual.check(), vector(n, 1))
        if way != "x":
            equal(x.check(), vector(n))
        own.check()
    for others in found[1:]:
        for one, other in zip(others, found[0], strict=False):
            equal(one, other)
    # The residual of x alone, too.
    x, own = Memory.of(vector(n), 4), Memory(n, np.float32, odd)
    payload = [Memory.of(each, 4 if each.dtype == np.float32 else 1) for each in found[0][:3]]
    for out in (own, x):
        lib.demo_left(x.address, [each.address for each in payload], out.address, (*shape, 64, 64), 32)
        out.check()
    equal(x.array, own.array)


# -- the same bits -----------------------------------------------------------------------------------------------------
class Threads(Guarded):
    def __init__(self, lib, threads):
        super().__init__(lib)
        self.many = threads

    @property
    def threads(self):
        return self.many


@loop("shape", [(700, 500), (300_001,), (1, 300_001)])
def test_the_number_of_threads_changes_nothing(lib, shape):
    n, compressor, found = size_of(shape), DeMo(chunk_k=11), []
    for threads in (1, 2, 5):
        ctx = context(Threads(lib, threads), shape)
        payloads, left = zip(*(natively(compressor, vector(n, w), vector(n, 9), ctx) for w in range(3)), strict=True)
        mean = native_mean(compressor, payloads, None, ctx)
        rest = compressor.residual(vector(n, 5), payloads[0], ctx)
        found.append([*(each for payload in payloads for each in payload), *left, mean, rest])
        ctx.xp.check()
    for others in found[1:]:
        for one, other in zip(others, found[0], strict=True):
            equal(one, other)


@EACH
def test_every_instruction_set_decodes_to_the_same_bits(lib, compressor, shape):
    plain, n, found = context(Plain(), shape), size_of(shape), []
    payloads = [compressor.compress(vector(n, w), {}, plain)[0] for w in range(3)]
    for each in filter(None, map(library, ISAS)):
        ctx = context(Guarded(each), shape)
        mean = native_mean(compressor, payloads, None, ctx)
        found.append((mean, compressor.residual(vector(n, 5), payloads[0], ctx)))
    for mean, rest in found[1:]:
        equal(mean, found[0][0])
        equal(rest, found[0][1])


# -- which are the largest ---------------------------------------------------------------------------------------------
@loop("shape", [(128, 192), (130, 70), (1000,)])
def test_of_equal_coefficients_the_first_are_sent(lib, shape):
    compressor, n = DeMo(chunk_k=5), size_of(shape)
    payload, left = natively(compressor, np.zeros(n, np.float32), np.zeros(n, np.float32), context(Guarded(lib), shape))
    m = len(payload[0]) // 5
    assert payload[1].tolist() == [0, 1, 2, 3, 4] * m
    assert not any(each.any() for each in (payload[0], *payload[2:], left))


@loop("kind", ["one row", "one column", "one group", "few", "alike", "ascending", "spikes"])
@loop("k", [1, 32, 200, 3000])
@QUIET
def test_coefficients_that_lie_unevenly(lib, kind, k):
    # Chunks with given coefficients; the next chunk's are far larger, or far smaller.
    rng, chosen = np.random.default_rng(2), np.zeros((6, 64, 64))
    if kind == "one row":
        chosen[:, 3] = rng.normal(size=(6, 64))
    if kind == "one column":
        chosen[:, :, 5] = rng.normal(size=(6, 64))
    if kind == "one group":
        chosen.reshape(6, -1)[:, 7::64] = rng.uniform(1, 2, (6, 64))
        chosen += rng.normal(size=chosen.shape) * 1e-2
    if kind == "few":
        chosen[:, 9, 11] = 1
    if kind == "alike":
        chosen[:] = rng.choice([-1, 1], chosen.shape) * (1 + rng.uniform(0, 1e-3, chosen.shape))
    if kind == "ascending":
        chosen[:] = np.arange(4096).reshape(64, 64)
    if kind == "spikes":
        chosen[:] = rng.normal(size=chosen.shape) * np.exp(4 * rng.normal(size=chosen.shape))
    x = dct(64).T @ chosen @ dct(64)
    x = (x * np.array([1, 1e3, 1e-3, 1e3, 1, 1e-3])[:, None, None]).transpose(1, 0, 2).reshape(-1).astype(np.float32)
    compressor, ctx = DeMo(chunk_k=k), context(Guarded(lib), (64, 384))
    payload, _ = natively(compressor, x, None, ctx)
    exact, _ = coefficients(compressor, x, ctx)
    values = np.asarray(payload[0], np.float64).reshape(6, k)
    best, unit = -np.sort(-abs(exact), 1)[:, :k], abs(exact).max(1, keepdims=True)
    np.testing.assert_allclose(-np.sort(-abs(values), 1) / unit, best / unit, rtol=0, atol=1e-5)


# -- what is not finite ------------------------------------------------------------------------------------------------
@loop("wrong", [np.nan, np.inf, -np.inf, -np.nan])
@loop("compressor, shape", [c for c in CASES if c[1] in ((200, 300), (100, 70), (25, 33), (1000,))])
@QUIET
def test_what_is_not_finite_poisons_its_chunk_and_no_other(lib, compressor, shape, wrong):
    n, plain = size_of(shape), context(Plain(), shape)
    x = vector(n, 1)
    x[n // 2] = wrong
    expected, _ = compressor.compress(x.copy(), {}, plain)
    rest = compressor.residual(x.copy(), expected, plain)
    payload, left = natively(compressor, x.copy(), np.zeros(n, np.float32), context(Guarded(lib), shape))
    assert not np.isfinite(payload[0]).all()
    bad, finite = ~np.isfinite(rest), x[np.isfinite(x)]
    assert bad.any()
    assert not bad.all()
    near(left, rest, abs(finite).max() * 64)
    for sent in (payload, expected):
        mean = native_mean(compressor, [sent, expected], None, context(Guarded(lib), shape))
        np.testing.assert_array_equal(np.isfinite(mean), ~bad)
        signs = native_mean(replace(compressor, sign=True), [sent, expected], None, context(Guarded(lib), shape))
        np.testing.assert_array_equal(np.isnan(signs), np.isnan(mean))


# -- received payloads--------------------------------------------------------------------------------------------------
@loop("chunk", [64, 20])
@loop("wrong", ["order", "twice", "of another chunk", "beyond", "short", "long", "dtype", "high", "values"])
def test_payloads_that_do_not_fit_are_refused(lib, wrong, chunk):
    shape, compressor = (100, 90), DeMo(chunk=chunk, chunk_k=3)
    plain, n = context(Plain(), shape), 9000
    good, _ = compressor.compress(vector(n), {}, plain)
    if wrong == "beyond" and chunk == 64:
        pytest.skip("every place of 12 bits is one")
    values, low, high = (each.copy() for each in good)
    width = chunk**2
    places = indices.widen(Plain(), (low, high), width, len(low))
    at = len(places) // 3 // 2 * 3  # at the start of a chunk in the middle
    if wrong == "order":
        places[at : at + 2] = places[at + 1], places[at]
    if wrong == "twice":
        places[at + 1] = places[at]
    if wrong == "of another chunk":
        places[at : at + 3] = places[at : at + 3][::-1]
    if wrong == "beyond":
        places[at + 2] = width
    low, high = indices.narrow(Plain(), places, width)
    if wrong == "short":
        low = low[:-1]
    if wrong == "long":
        values = np.append(values, np.float32(1))
    if wrong == "dtype":
        low = low.astype(np.int32)
    if wrong == "high":
        high = high[:-1]
    if wrong == "values":
        values = values.astype(np.float64)
    bad, before = (values, low, high), vector(n, 8)
    out, native = Memory.of(before, 4), context(Guarded(lib), shape)
    with pytest.raises(ValueError):
        compressor.decompress(bad, plain)
    for payloads in ([good, bad], [bad, good]):
        with pytest.raises(ValueError):
            native_mean(compressor, payloads, out.array, native)
        equal(out.check(), before)
    with pytest.raises(ValueError):
        left_of(compressor, out.array, bad, native)
    equal(out.check(), before)
    native_mean(compressor, moved([good, good]), out.array, native)
    out.check()


# -- with a memory -----------------------------------------------------------------------------------------------------
@loop("shape", [(200, 300), (1000,)])
def test_a_momentum_that_decays_goes_by_kernels_too(lib, shape):
    method, n, found = TensorCodec(DeMo(), DecoupledMomentum()), size_of(shape), []
    for xp in (Plain(), Guarded(lib)):
        state, steps = method.init(context(xp, shape)), []
        for step in range(3):
            program = method.encode(vector(n, step), state, context(xp, shape, step=step))
            with pytest.raises(StopIteration) as stop:
                next(program)
            payload, state = stop.value.value
            steps.append((method.compressor.decompress(payload, context(Plain(), shape)), *state.values()))
        found.append(steps)
    for mine, plain in zip(*found, strict=True):
        for one, other in zip(mine, plain, strict=True):
            near(one, other, 64 * abs(vector(n)).max())
