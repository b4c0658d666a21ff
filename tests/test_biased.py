"""Numbers of the literature on biased compression: errors, contractions and classes."""

import math

import numpy as np
import pytest
from methods import alone, backend, context, normal

from grace import grace_from_params
from grace.cli.catalog import classes, describe
from grace.core.registry import compressors
from grace.ops import biased
from grace.transports.local import LocalTransport


def made(**params):
    return grace_from_params(params, LocalTransport()).method.compressor


def decoded(compressor, x, step=0):
    xp = backend("numpy")
    ctx = context(xp, len(x), step=step, world_size=1)
    payload, _ = alone(lambda ctx: compressor.compress(x.copy(), {}, ctx), ctx)
    return compressor.decompress(payload, ctx).astype(np.float64)


def error(compressor, x, step=0):
    """The relative squared error |x - x̂|² / |x|²."""
    y = x.astype(np.float64)
    return np.sum((y - decoded(compressor, x, step)) ** 2) / np.sum(y**2)


# -- adaptive random sparsification --------------------------------------------------------------------------------
def test_one_draw_has_the_error_of_its_formula():
    x, compressor = normal(1600), made(compressor="adaptive_random", compress_ratio=1e-9)
    size = np.abs(x.astype(np.float64))
    formula = 1 - np.sum(size**3) / np.sum(size) / np.sum(size**2)
    assert formula == pytest.approx(0.99875, abs=3e-5)
    measured = [error(compressor, x, step) for step in range(2000)]
    assert np.mean(measured) == pytest.approx(formula, abs=4 * np.std(measured) / math.sqrt(2000))


def test_draws_follow_the_magnitudes():
    x, draws = np.array([1, -2, 0, 5, 8], np.float32), 1500
    for unbiased in (False, True):
        compressor = made(compressor="adaptive_random", compress_ratio=0.2, unbiased=unbiased)
        found = np.array([decoded(compressor, x, step) for step in range(draws)])
        assert ((found != 0).sum(1) == 1).all()
        chances = np.abs(x) / np.abs(x).sum()
        np.testing.assert_allclose((found != 0).mean(0), chances, atol=4 * 0.5 / math.sqrt(draws))
        assert set(np.unique(found)) == ({-16, 0, 16} if unbiased else {-2, 0, 1, 5, 8})


def test_nothing_is_drawn_of_zeros(xp):
    for n in (0, 1, 100):
        ctx = context(xp, n)
        payload, _ = made(compressor="adaptive_random").compress(xp.zeros(n), {}, ctx)
        assert [xp.shape(array) for array in payload] == [(0,), (0,)]


# -- powers of a base ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("beta, worst", [(1.5, 0.0400), (2.0, 0.1111), (4.0, 0.3600)])
def test_the_worst_error_of_geometric_rounding(beta, worst):
    compressor = made(compressor="geometric", beta=beta)
    x = np.geomspace(1, beta**2, 20_001).astype(np.float32)
    found = ((x - decoded(compressor, x)) / x) ** 2
    bound = ((beta - 1) / (beta + 1)) ** 2
    assert bound == pytest.approx(worst, abs=5e-5)
    assert 0.999 * bound < found.max() <= bound * (1 + 1e-5)
    assert compressor.contraction(2**20) == pytest.approx(4 * beta / (beta + 1) ** 2)


@pytest.mark.parametrize("base", [1.5, 2.0, 4.0])
@pytest.mark.parametrize("s", [3, 7])
def test_the_variance_of_exponential_dithering_is_within_the_papers(base, s):
    compressor, n = made(compressor="natural_dithering", base=base, s=s), 512
    below = n**0.5 * base ** (1 - s)
    assert compressor.variance(n) <= (base - 1) ** 2 / (4 * base) + below * min(1, below)
    # At the harmonic mean of two levels, the first term of the bound is the exact error.
    x = np.full(64, 2 * base / (base + 1) / base, np.float32)
    x[0] = 1
    found = np.mean([np.sum((x - decoded(compressor, x, step)) ** 2) for step in range(400)]) / np.sum(x[1:] ** 2)
    assert found == pytest.approx((base - 1) ** 2 / (4 * base), rel=0.1)


def test_top_k_of_powers_of_two():
    x, n = np.random.default_rng(0).standard_t(3, 10_000).astype(np.float32), 10_000
    top = {"sparsifier": "topk", "compress_ratio": 0.01}
    rounded = made(compressor="qsparse", **top, quantizer="natural_dithering", s=7)
    nearest = made(compressor="chain", **top, quantizer="geometric")
    for compressor in (rounded, nearest):
        assert compressor.contraction(n) == pytest.approx(0.01 * 8 / 9)
        assert 1 - compressor.contraction(n) == pytest.approx(0.991, abs=5e-4)
    plain = error(made(compressor="topk", compress_ratio=0.01), x)
    for compressor in (rounded, nearest):
        found = np.mean([error(compressor, x, step) for step in range(20)])
        assert plain < found < plain + (1 - plain) / 9


# -- scaling and classes -------------------------------------------------------------------------------------------
DAMPED = [
    {"method": "qsgd", "quantum_num": 1, "bucket_size": 64},
    {"method": "wangni", "compress_ratio": 0.1},
    {"method": "randomk", "compress_ratio": 0.1, "unbiased_scale": True},
    {"method": "adaptive_random", "compress_ratio": 0.1, "unbiased": True},
    {"method": "kashin", "bits": 1, "block_size": 64},
    {"method": "shared_int", "levels": 1},
]


@pytest.mark.parametrize("params", DAMPED, ids=str)
def test_damping_makes_a_contraction(params):
    x = np.random.default_rng(0).standard_t(2, 256).astype(np.float32)
    plain, compressor = (
        made(compressor=params["method"], **{k: v for k, v in params.items() if k != "method"}),
        made(compressor="damped", **params),
    )
    w = plain.variance(plain.traits.block_size or 256)
    assert compressor.contraction(256) == pytest.approx(1 / (1 + w))
    np.testing.assert_allclose(decoded(compressor, x), decoded(plain, x) / (1 + w), rtol=1e-6)
    assert np.mean([error(compressor, x, step) for step in range(100)]) < (1 - 1 / (1 + w)) * 1.02  # mean of 100 draws
    assert grace_from_params({"compressor": "damped", **params}, LocalTransport()).method.memory.feedback


@pytest.mark.parametrize("method", ["topk", "none", "eden", "signsgd"])
def test_only_what_is_unbiased_is_damped(method):
    with pytest.raises(ValueError, match=f"method='{method}', as it is set, is not an unbiased one .*use 'qsgd'"):
        made(compressor="damped", method=method)


def moments(compressor, x, scale=1.0, draws=200):
    """E|C|², E<C, x> and E|C - x|², relative to |x|²."""
    found = scale * np.array([decoded(compressor, x, step) for step in range(draws)])
    y = x.astype(np.float64)
    return np.array([(found**2).sum(1).mean(), (found @ y).mean(), ((found - y) ** 2).sum(1).mean()]) / (y @ y)


@pytest.mark.parametrize(
    "params",
    [
        {"compressor": "topk", "compress_ratio": 0.1},
        {"compressor": "geometric"},
        {"compressor": "adaptive_random", "compress_ratio": 1e-9},
        {"compressor": "efsignsgd"},
        {"compressor": "qsgd", "quantum_num": 1},
        {"compressor": "natural"},
        {"compressor": "randomk", "compress_ratio": 0.1, "unbiased_scale": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["flat", "heavy"])
def test_methods_are_in_their_classes(params, kind):
    compressor, n = made(**params), 64
    x = np.ones(n) if kind == "flat" else np.random.default_rng(1).standard_t(1.5, n)
    x = x.astype(np.float32)
    d, w = compressor.contraction(n), compressor.variance(n)
    b1, b2, b3 = biased.of_contraction(d) if d is not None else biased.of_variance(w)
    square, product, _ = moments(compressor, x)
    loose = 1 + 1e-5 if not compressor.traits.unbiased else 1.2  # a tolerance for the number of draws
    assert b1.alpha <= square * loose
    assert square <= b1.beta * product * loose
    assert max(b2.gamma, square / b2.beta) <= product * loose
    assert moments(compressor, x, b3.scale)[2] <= (1 - 1 / b3.delta) * loose + 1e-9 + 5e-3 * compressor.traits.unbiased


def test_conversions_hold_for_every_compressor():
    """Any values of E|C|² (s) and E<C, x> (p) that satisfy one class satisfy the others after conversion."""
    rng = np.random.default_rng(0)
    tried = 0
    for _ in range(20_000):
        p, s = rng.uniform(0.01, 3), rng.uniform(0.0001, 9)
        if s < p**2:  # E|C|² is at least the square of the projection on x
            continue
        tried += 1
        alpha, gamma, beta = s * rng.uniform(0.5, 1), p * rng.uniform(0.5, 1), s / p * rng.uniform(1, 2)
        for b2, b3 in (biased.from_b1(alpha, beta), (biased.B2(gamma, beta), biased.from_b2(gamma, beta)[1])):
            assert max(b2.gamma, s / b2.beta) <= p * (1 + 1e-9)
            assert b3.scale**2 * s - 2 * b3.scale * p + 1 <= 1 - 1 / b3.delta + 1e-9
        assert biased.from_b2(gamma, beta)[0].alpha <= s * (1 + 1e-9)
        if s - 2 * p + 1 < 1:
            b1, b2 = biased.from_b3(1 / (2 * p - s))
            assert b1.alpha <= s * (1 + 1e-9)
            assert s <= b1.beta * p
            assert max(b2.gamma, s / b2.beta) <= p * (1 + 1e-9)
    assert tried > 5000
    assert biased.of_variance(3.0) == ((1, 4), (1, 4), (4, 0.25))
    assert biased.of_contraction(0.5) == ((1 / 16, 2), (1 / 4, 2), (2, 1))


def test_grace_methods_knows_the_classes():
    assert classes(describe("topk", compressors)) == "B1(2.5e-05, 2), B2(0.005, 2), B3(100)"
    assert classes(describe("natural", compressors)) == "B1(1, 1.12), B2(1, 1.12), times 0.889 B3(1.12)"
    assert classes(describe("signsgd", compressors)) == ""
