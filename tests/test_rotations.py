"""Random rotations, and EDEN's guarantees."""

import math

import numpy as np
import pytest
from methods import alone, backend, context, host, normal

from grace import grace_from_params
from grace.ops.hadamard import hadamard, signs, width_of
from grace.transports.local import LocalTransport


def matrix(d):
    """Walsh-Hadamard by its definition: the sign is the parity of the bits that both numbers have."""
    return np.array([[(-1) ** (i & j).bit_count() for j in range(d)] for i in range(d)])


@pytest.mark.parametrize("d", [1, 2, 8, 64])
@pytest.mark.parametrize("m", [0, 1, 3])
def test_hadamard_is_the_product_with_its_matrix(xp, m, d):
    x = np.random.default_rng(0).integers(-99, 99, (m, d)).astype(np.float32)
    found = hadamard(xp, xp.asarray(x, "float32"))
    assert np.array_equal(xp.to_numpy(found), x @ matrix(d))
    assert np.array_equal(xp.to_numpy(hadamard(xp, found)), d * x)


def test_hadamard_gives_the_same_bits_everywhere():
    x = normal(3, 4096)
    found = [np.array(xp.to_numpy(hadamard(xp, xp.asarray(x, "float32")))) for xp in map(backend, ("numpy", "torch"))]
    assert found[0].tobytes() == found[1].tobytes()


def test_each_bit_of_a_word_is_a_stream_of_signs(xp):
    words = np.array([1, -1, -(2**31), 2**30, 5, 0, 7, -2], np.int32)
    found = xp.to_numpy(signs(xp, xp.asarray(words, "int32"), xp.asarray([0, 31], "uint8"), 4))
    assert found.tolist() == [[1, -1, -1, 1], [-1, 1, -1, 1]]


def eden(**params):
    return grace_from_params({"compressor": "eden", **params}, LocalTransport()).method.compressor


def decoded(compressor, x, rank=0, step=0):
    xp = backend("numpy")
    ctx = context(xp, len(x), rank=rank, step=step)
    payload, _ = alone(lambda ctx: compressor.compress(x, {}, ctx), ctx)
    return compressor.decompress(payload, context(xp, len(x), rank=3, step=step))


@pytest.mark.parametrize(
    "params, error",
    [
        ({"bits": 1}, math.pi / 2 - 1),
        ({"bits": 2}, 0.1333),
        ({"bits": 3}, 0.0358),
        ({"bits": 4}, 0.0096),
        ({"bits": 1, "biased": True}, 1 - 2 / math.pi),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["normal", "one-sided", "smooth"])
def test_eden_has_the_error_of_the_papers(params, error, kind):
    x = normal(4096)
    x = {"normal": x, "one-sided": abs(x), "smooth": np.sin(np.arange(4096, dtype=np.float32))}[kind]
    errors = [((decoded(eden(**params), x, step=step) - x) ** 2).sum() / (x**2).sum() for step in range(10)]
    assert np.mean(errors) == pytest.approx(error, rel=0.05)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_eden_is_right_on_average_and_along_the_gradient(bits):
    # Unbiased for elements of similar size. The scale makes the component along x exact for any x and any draw.
    x, draws = normal(64), 2000
    found = np.array([decoded(eden(bits=bits), x, step=step) for step in range(draws)], np.float64)
    square = (x.astype(np.float64) ** 2).sum()
    np.testing.assert_allclose(found @ x, square, rtol=1e-5)
    variance = ((found - x) ** 2).sum(1).mean()
    assert ((found.mean(0) - x) ** 2).sum() <= 3 * variance / draws


def test_eden_gives_lone_elements_back(xp):
    # Rotated, one spike has elements of equal magnitude, which one bit per element encodes exactly.
    x = np.zeros(1000, np.float32)
    x[77] = -3
    compressor, ctx = eden(bits=1), context(xp, 1000)
    payload, _ = compressor.compress(xp.asarray(x, "float32"), {}, ctx)
    np.testing.assert_allclose(xp.to_numpy(compressor.decompress(payload, ctx)), x, atol=1e-5)


def test_workers_rotate_independently(xp):
    # The mean of N workers with equal gradients has an N-th of the error, up to 32 workers: then the signs repeat.
    x, compressor = normal(4096), eden(bits=2)
    payloads = [
        compressor.compress(xp.asarray(x, "float32"), {}, context(xp, 4096, rank=rank))[0] for rank in range(33)
    ]
    assert host(xp, payloads[0])[0].tobytes() == host(xp, payloads[32])[0].tobytes()
    mean = xp.to_numpy(compressor.aggregate(payloads[:32], context(xp, 4096)))
    assert ((mean - x) ** 2).sum() / (x**2).sum() == pytest.approx(0.1333 / 32, rel=0.1)


def test_only_a_tensor_of_its_own_has_a_narrow_block():
    # The last piece of a longer tensor, owned by another worker, is sent as a whole block.
    ctx = context(backend("numpy"), 4096 + 20)
    widths = [width_of(part, 4096) for part in (ctx, ctx.piece(0, 4096), ctx.piece(4096, 20), ctx.piece(4116, 0))]
    assert widths == [4096] * 4
    assert [width_of(context(backend("numpy"), n), 4096) for n in (1, 8, 9, 20, 4095)] == [8, 8, 16, 32, 4096]


@pytest.mark.parametrize(
    "params, message",
    [
        ({"bits": 5}, "bits=5 must lie in 1 .. 4"),
        ({"bits": 2, "biased": True}, "biased=True is for bits=1"),
        ({"block_size": 0}, "block_size=0 must be a power of two"),
        ({"block_size": 4}, "block_size=4 must be a power of two"),
        ({"block_size": 96}, "block_size=96 must be a power of two"),
    ],
    ids=str,
)
def test_eden_refuses(params, message):
    with pytest.raises(ValueError, match=message):
        eden(**params)


# -- Kashin representations --------------------------------------------------------------------------------------------
def kashin(**params):
    return grace_from_params({"compressor": "kashin", **params}, LocalTransport()).method.compressor


def rows_of(n, d, seed):
    return np.sort(np.random.default_rng(seed).permutation(d)[:n])


def represented(x, rows, d, **params):
    """The compressor's coefficients of x, in float64."""
    row, mask = np.zeros((1, d)), np.zeros((1, d))
    row[0, rows], mask[0, rows] = x, 1
    return kashin(**params).represent(backend("numpy"), row, mask)[0]


@pytest.mark.parametrize("n, d", [(512, 1024), (256, 1024), (1004, 1024), (8, 16)])
def test_a_kashin_representation_is_exact(n, d):
    rows = rows_of(n, d, 1)
    u = matrix(d)[rows] / math.sqrt(d)
    assert np.abs(u @ u.T - np.eye(n)).max() < 1e-13
    np.testing.assert_allclose((u**2).sum(0), n / d, rtol=1e-12)
    x = np.random.default_rng(0).standard_t(3, n)
    for params in ({}, {"iterations": 1}, {"iterations": 2, "eta": 0.9}):
        assert np.abs(u @ represented(x, rows, d, **params) - x).max() < 1e-13 * np.abs(x).max() * 4


@pytest.mark.parametrize(
    "n, d, params, level",
    [
        (512, 1024, {"iterations": 1}, 3.38),
        (512, 1024, {"iterations": 2, "eta": 0.9}, 2.74),
        (512, 1024, {}, 2.26),
        (512, 2048, {"iterations": 1}, 3.68),
        (512, 2048, {"iterations": 2, "eta": 0.9}, 2.58),
        (512, 2048, {}, 2.02),
        (1004, 1024, {"iterations": 1}, 3.37),
        (1004, 1024, {"iterations": 2, "eta": 0.9}, 3.31),
    ],
    ids=str,
)
def test_the_level_of_kashin_representations(n, d, params, level):
    found = []
    for seed in range(12):
        rows = rows_of(n, d, seed)
        x = np.random.default_rng(100 + seed).standard_normal(n)
        found.append(np.abs(represented(x, rows, d, **params)).max() * math.sqrt(d) / np.linalg.norm(x))
    assert np.mean(found) == pytest.approx(level, rel=0.06)


def test_a_lone_element_has_the_lowest_level():
    rows = rows_of(512, 1024, 0)
    for params in ({"iterations": 1}, {}):
        a = represented(np.eye(512)[7], rows, 1024, **params)
        assert np.abs(a).max() * 32 == pytest.approx(1)


@pytest.mark.parametrize("bits, error", [(1, 2.16), (4, 0.0077)])
def test_the_variance_of_kashin_is_that_of_its_codes(bits, error):
    compressor, xp, draws = kashin(bits=bits), backend("numpy"), 100
    x, measured, formula = normal(512), [], []
    for step in range(draws):
        measured.append(np.sum((decoded(compressor, x, step=step) - x.astype(np.float64)) ** 2))
        rows = xp.to_numpy(context(xp, 512, step=step).shared_rng("rows").sample(1024, 512))
        signs_ = 1.0 - 2.0 * (context(xp, 512, step=step).shared_rng("signs").bits(512) < 0)
        a = represented(x.astype(np.float64) * signs_, rows, 1024)
        m, unit = np.abs(a).max(), 2 * np.abs(a).max() / (2**bits - 1)
        part = (a + m) / unit % 1
        formula.append(512 / 1024 * np.sum(part * (1 - part)) * unit**2)
        if bits == 1:
            assert formula[-1] == pytest.approx(512 / 1024 * np.sum(m**2 - a**2))
    norm = np.sum(x.astype(np.float64) ** 2)
    assert np.mean(measured) == pytest.approx(np.mean(formula), rel=0.01)
    assert np.mean(formula) / norm == pytest.approx(error, rel=0.05)
    assert np.mean(formula) / norm < compressor.variance(512)


def test_the_variance_of_kashin_holds_for_every_vector():
    # Worst cases of a rotation without random signs: constants, and rows of the transform.
    for x in (np.ones(512), matrix(512)[77], np.eye(512)[3], np.random.default_rng(0).standard_t(1.5, 512)):
        x = x.astype(np.float32)
        errors = [np.sum((decoded(kashin(bits=1), x, step=step) - x.astype(np.float64)) ** 2) for step in range(20)]
        assert np.mean(errors) < kashin(bits=1).variance(512) * np.sum(x.astype(np.float64) ** 2)


@pytest.mark.parametrize(
    "params, message",
    [
        ({"block_size": 0}, "block_size=0: a frame needs a size; use a multiple of 8"),
        ({"bits": 9}, r"bits=9 must lie in 1 .. 8"),
        ({"redundancy": 0.5}, "redundancy=0.5 must lie in 1 .. 64"),
        ({"iterations": 0}, "iterations=0 must lie in 1 .. 100"),
        ({"eta": 1.0}, r"eta=1.0 must lie in \(0, 1\)"),
        ({"delta": 0.0}, "delta=0.0 must be positive"),
    ],
    ids=str,
)
def test_kashin_refuses_with_the_remedy(params, message):
    with pytest.raises(ValueError, match=message):
        kashin(**params)
