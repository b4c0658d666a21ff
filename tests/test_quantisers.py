"""Properties of single quantisers: signs and votes, levels, powers of two, codebooks."""

import numpy as np
import pytest
from methods import backend, context, lockstep, method_of, receive, send, spread, workers

from grace import grace_from_params
from grace.transports.local import LocalTransport, World


# -- single methods ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("packed", [True, False])
def test_vote_against_brute_force(xp, packed):
    method, n, size = method_of(compressor="signsgd", packed=packed), 1003, 6
    gradients = [np.round(spread(n, seed=rank)) for rank in range(size)]  # with zeros, and an even number of voters
    payloads = [send(method, xp, g, context(xp, n, rank=rank))[0] for rank, g in enumerate(gradients)]
    expected = []
    for votes in zip(*(g.tolist() for g in gradients), strict=True):
        plus = sum(v >= 0 for v in votes)
        expected.append(1.0 if plus >= size - plus else -1.0)
    assert xp.to_numpy(method.compressor.aggregate(payloads, context(xp, n))).tolist() == expected
    assert {1.0, -1.0} == set(expected)


def test_many_voters_do_not_overflow(xp):
    method, ctx = method_of(compressor="signsgd"), context(xp, 20)
    plus, minus = (send(method, xp, np.full(20, value, np.float32), ctx)[0] for value in (1, -1))
    for size, ayes in ((255, 255), (256, 0), (300, 151), (300, 149)):
        payloads = [plus] * ayes + [minus] * (size - ayes)
        mean = xp.to_numpy(method.compressor.aggregate(payloads, context(xp, 20, world_size=size)))
        assert (mean == (1 if 2 * ayes >= size else -1)).all()


def test_votes_summed_in_int8_are_refused_beyond_127_workers():
    xp, params = backend("numpy"), {"compressor": "signsgd", "packed": False, "communicator": "allreduce"}
    with pytest.raises(ValueError, match=r"128 workers times 1 exceed 127.*'allgather'"):
        grace_from_params(params, LocalTransport(World(128), 0))
    graces = workers(params, 127)
    for grace in graces:
        grace.build({"w": xp.zeros(3)})
    for signs in ([1, -1, 1], [-1, -1, 1]):
        gradients = [{"w": np.array(signs, np.float32)} for _ in graces]
        assert [worker["w"].tolist() for worker in lockstep(graces, gradients)] == [signs] * 127


@pytest.mark.parametrize("levels", [1, 3, 127])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_qsgd_gives_a_lone_element_back(xp, levels, scale):
    # Each of 100,000 buckets has one element, whose level is the top one for any random number.
    lone = spread(100_000) * np.float32(scale)
    lone[lone == 0] = scale
    x = np.zeros(800_000, np.float32)
    x[5::8] = lone
    method, ctx = method_of(compressor="qsgd", quantum_num=levels, bucket_size=8), context(xp, 800_000)
    found = receive(method, xp, send(method, xp, x, ctx)[0], ctx)
    assert np.array_equal(np.sign(found), np.sign(x))
    np.testing.assert_allclose(found, x, rtol=1e-6)


def test_qsgd_of_one_element_is_exact(xp):
    method = method_of(compressor="qsgd")
    for value in spread(200).tolist():
        payload, _ = send(method, xp, np.array([value], np.float32), context(xp, 1))
        assert receive(method, xp, payload, context(xp, 1)).tolist() == [value]


def test_efsignsgd_loses_what_the_formula_says(xp):
    # The squared error is |x|² - |x|₁² / n, with one scale for the whole tensor.
    method, x = method_of(compressor="efsignsgd"), spread(5000)
    ctx = context(xp, 5000)
    error = x - receive(method, xp, send(method, xp, x, ctx)[0], ctx)
    wide = x.astype(np.float64)
    assert (error.astype(np.float64) ** 2).sum() == pytest.approx(
        (wide**2).sum() - abs(wide).sum() ** 2 / 5000, rel=1e-5
    )


def test_bf16_never_rounds_a_finite_number_to_infinity(xp):
    for rounding in ("nearest", "stochastic"):
        method, x = method_of(compressor="bf16", rounding=rounding), np.full(1003, 3.39e38, np.float32)
        x[::2] *= -1
        ctx = context(xp, 1003)
        found = receive(method, xp, send(method, xp, x, ctx)[0], ctx)
        assert np.isfinite(found).all()
        assert (abs(found / x - 1) < 2**-7).all()


# -- 1-bit, ternary, powers of two, momentum -----------------------------------------------------------------------
@pytest.mark.parametrize("clip", [0.0, 1.0, 2.5])
def test_terngrad_gives_constants_and_lone_elements_back(xp, clip):
    method = method_of(compressor="terngrad", clip=clip)
    for x in (np.full(1000, -0.3, np.float32), np.array([7e-4], np.float32), np.array([-2e5], np.float32)):
        ctx = context(xp, len(x))
        payload, _ = send(method, xp, x, ctx)
        np.testing.assert_allclose(receive(method, xp, payload, ctx), x, rtol=1e-6)


def test_onebit_keeps_the_sum(xp):
    method, x = method_of(compressor="onebit"), spread(5000) + np.float32(0.1)
    payload, _ = send(method, xp, x, context(xp, 5000))
    found = receive(method, xp, payload, context(xp, 5000))
    assert len(np.unique(found)) == 2
    assert found.sum(dtype=np.float64) == pytest.approx(x.sum(dtype=np.float64), rel=1e-5)


def test_natural_finds_powers_of_two_next_to_each_number(xp):
    for settings in ({}, {"stochastic": False}):
        method, x = method_of(compressor="natural", **settings), spread(5000)
        payload, _ = send(method, xp, x, context(xp, 5000))
        found = receive(method, xp, payload, context(xp, 5000)).astype(np.float64)
        assert (np.frexp(found)[0] == np.copysign(0.5, x)).all()
        assert (abs(found) > abs(x) / 2).all()
        assert (abs(found) < abs(x) * 2).all()
        if settings:
            assert (abs(found - x) <= abs(x) * (1 / 3 + 1e-6)).all()
