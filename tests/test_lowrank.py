"""Methods that compress matrices: powersgd, acpsgd, gradzip, atomo, dion, demo; and slices: gradiveq."""

from itertools import pairwise

import numpy as np
import pytest
from methods import (
    backend,
    context,
    host,
    lockstep,
    method_of,
    receive,
    send,
    spread,
    states,
    together,
    workers,
)
from table.row import blocks
from table.transforms import dct

from grace import grace_from_params
from grace.backends.numpy import NumpyBackend
from grace.compressors.studies.dion import Dion
from grace.core.method import Method
from grace.core.rng import NOISE, Rng
from grace.memories.decoupled import Decoupled
from grace.transports.local import LocalTransport


def product(a, b, rank, seed=0):
    """A matrix of that rank."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((a, rank)) @ rng.standard_normal((rank, b))).astype(np.float32)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_powersgd_is_exact_for_means_of_low_rank(xp, rank):
    # Each worker's matrix has full rank; only their mean has low rank.
    graces = workers({"compressor": "powersgd", "compress_rank": rank}, 2)
    low, full = product(40, 30, rank), spread(40, 30, seed=1)
    gradients = [{"w": xp.asarray(m.astype(np.float32), "float32")} for m in (low + full, low - full)]
    for grace in graces:
        grace.build(gradients[0])
    for worker in lockstep(graces, gradients):
        np.testing.assert_allclose(xp.to_numpy(worker["w"]), low, atol=1e-4 * abs(low).max())


def decaying(a, b):
    """A matrix with singular values 1, 1/2, 1/4, ... and known best approximations."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.standard_normal((m, min(a, b))))[0] for m in (a, b))
    return (left * 0.5 ** np.arange(min(a, b))) @ right.T


def test_powersgd_approaches_the_best_approximation(xp):
    m, rank = decaying(40, 30), 3
    method, ctx = method_of(compressor="powersgd", compress_rank=rank), context(xp, (40, 30))
    state, errors = method.compressor.init(ctx), []
    for step in range(20):
        payload, state = send(method, xp, m.astype(np.float32), context(xp, (40, 30), step=step), state)
        errors.append(np.linalg.norm(receive(method, xp, payload, ctx).reshape(40, 30) - m))
    best = np.sqrt((np.linalg.svd(m, compute_uv=False)[rank:] ** 2).sum())
    assert errors[-1] == pytest.approx(best, rel=1e-3)
    # This needs the warm start: a single step from random numbers is worse.
    assert errors[0] > 1.01 * best
    assert all(after <= before * (1 + 1e-4) for before, after in pairwise(errors))


def test_powersgd_keeps_its_warm_start(xp):
    (grace,) = workers({"compressor": "powersgd", "compress_rank": 2}, 1)
    m = decaying(40, 30).astype(np.float32)
    grace.build({"w": xp.zeros((40, 30))})
    start = states([grace])[0]["w", "compressor/q"]
    assert start.shape == (2, 30)
    grace.step({"w": xp.asarray(m, "float32")})
    q = states([grace])[0]["w", "compressor/q"]
    # The expected Q is Pᵀ M of this exchange, from which the next step starts.
    p = np.linalg.qr(m @ start.T)[0]
    np.testing.assert_allclose(q.T @ q, (p.T @ m).T @ (p.T @ m), atol=1e-4)


def two_rounds(gradients, q):
    """PowerSGD's mean and next Q, by the paper's algorithm 1, from each worker's matrix and the common Q."""
    p = np.linalg.qr(np.mean([m @ q.T for m in gradients], 0))[0]
    q = np.mean([p.T @ m for m in gradients], 0)
    return p @ q, q


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("shape, sides", [((40, 25), (40, 25)), ((4, 3, 3, 8), (12, 24)), ((64, 3, 3, 3), (64, 27))])
def test_powersgd_follows_the_formula(xp, size, shape, sides):
    graces = workers({"compressor": "powersgd", "compress_rank": 2, "min_rate": 1.0}, size)
    for grace in graces:
        grace.build({"w": xp.zeros(shape)})
    q = states(graces)[0]["w", "compressor/q"].astype(np.float64)
    residuals = np.zeros((size, *sides))
    for step in range(3):
        gradients = [spread(*shape, seed=10 * step + rank) for rank in range(size)]
        means = lockstep(graces, [{"w": xp.asarray(g, "float32")} for g in gradients])
        compensated = [g.reshape(sides) + r for g, r in zip(gradients, residuals, strict=True)]
        expected, q = two_rounds(compensated, q)
        residuals = [m - expected for m in compensated]
        for worker in means:
            np.testing.assert_allclose(
                xp.to_numpy(worker["w"]).reshape(sides), expected, atol=2e-4 * abs(expected).max()
            )
    for rank, state in enumerate(states(graces)):
        kept = state["w", "memory/residual"].reshape(sides)
        np.testing.assert_allclose(kept, residuals[rank], atol=2e-4 * abs(residuals[rank]).max())


@pytest.mark.parametrize("zero_rows", [0, 4, 20])
def test_powersgd_recovers_from_zero(xp, zero_rows):
    # After a zero gradient; also if the first rows (such as padding) stay zero.
    method, shape = method_of(compressor="powersgd", compress_rank=4), (40, 30)
    m = product(40, 30, 4)
    m[:zero_rows] = 0
    state = method.compressor.init(context(xp, shape))
    for step in range(4):
        ctx = context(xp, shape, step=step)
        payload, state = send(method, xp, m if step else 0 * m, ctx, state)
    np.testing.assert_allclose(receive(method, xp, payload, ctx).reshape(shape), m, atol=1e-3 * abs(m).max())


def test_powersgd_regains_a_rank_that_was_not_needed(xp):
    method, shape = method_of(compressor="powersgd", compress_rank=4), (40, 30)
    state = method.compressor.init(context(xp, shape))
    for step in range(6):
        m = product(40, 30, 1 if step < 3 else 4)
        m[:8] = 0
        ctx = context(xp, shape, step=step)
        payload, state = send(method, xp, m, ctx, state)
    np.testing.assert_allclose(receive(method, xp, payload, ctx).reshape(shape), m, atol=1e-3 * abs(m).max())


def revived(xp, shape, rows, rank=4, **about):
    method = method_of(compressor="powersgd", compress_rank=rank)
    found = method.compressor.revived(xp.asarray(rows, "float32"), context(xp, shape, **about), "q")
    return xp.to_numpy(found)


def test_lost_directions_are_replaced(xp):
    rows = spread(4, 30)
    rows[1:3] = 0
    found = [revived(xp, (40, 30), rows, step=step) for step in (0, 0, 1, 10**6)]
    for each in found:
        np.testing.assert_array_equal(each[[0, 3]], rows[[0, 3]] / abs(rows[[0, 3]]).max(1, keepdims=True))
        assert np.linalg.matrix_rank(each) == 4
    np.testing.assert_array_equal(found[0], found[1])
    for one, other in pairwise(found[1:]):  # a failed direction is not tried again
        assert not (one[1:3] == other[1:3]).any()


def test_spare_directions_are_those_of_numpy(xp):
    for step in (0, 3, 10**9):
        for shape in ((40, 30), (20_000, 3000), (20_000, 20_000)):  # the last is too large for the table
            rows = np.zeros((4, shape[1]), np.float32)
            found, expected = (revived(each, shape, rows, step=step) for each in (xp, backend("numpy")))
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
            assert found.std() == pytest.approx(1, abs=0.3)
            assert np.linalg.matrix_rank(found[:, :100]) == 4


def test_spare_directions_are_drawn_once_for_all_tensors(xp, monkeypatch):
    # On devices and in graphs spare directions are made in every step, whether they are needed or not.
    drawn = []
    plain = Rng.normal
    monkeypatch.setattr(Rng, "normal", lambda rng, n: drawn.append(n) or plain(rng, n))
    monkeypatch.setattr(xp.random, "_cached", {})
    for step in range(3):
        for name, columns in (("w", 30), ("v", 50)):
            revived(xp, (60, columns), np.zeros((4, columns), np.float32), step=step, name=name)
    assert drawn == [NOISE]


@pytest.mark.parametrize(
    "shape, rank, applies",
    [
        ((), 4, False),
        ((100,), 4, False),
        ((1, 100), 1, False),
        ((16, 16), 4, True),
        ((16, 15), 4, False),
        ((0, 4), 1, False),
    ],
)
def test_powersgd_leaves_alone_what_would_not_shrink(shape, rank, applies):
    method = method_of(compressor="powersgd", compress_rank=rank)
    assert method.compressor.applies(context(backend("numpy"), shape)) is applies


# -- the others ----------------------------------------------------------------------------------------------------
def alternating(gradients, p, q, step):
    """ACP-SGD's mean, the part of it that each worker sent, and the next factors."""
    if step % 2 == 0:
        q = np.linalg.qr(q.T)[0].T
        own = [m @ q.T for m in gradients]
        p = np.mean(own, 0)
        return p @ q, [each @ q for each in own], p, q
    p = np.linalg.qr(p)[0]
    own = [p.T @ m for m in gradients]
    q = np.mean(own, 0)
    return p @ q, [p @ each for each in own], p, q


@pytest.mark.parametrize("shape", [(40, 25), (12, 30)])
def test_acpsgd_follows_the_formula(xp, shape):
    graces = workers({"compressor": "acpsgd", "compress_rank": 2, "min_rate": 1.0}, 3)
    for grace in graces:
        grace.build({"w": xp.zeros(shape)})
    start = states(graces)[0]
    p, q = (start["w", f"compressor/{key}"].astype(np.float64) for key in "pq")
    residuals = np.zeros((3, *shape))
    for step in range(5):
        before = graces[0].report().bytes_sent
        gradients = [spread(*shape, seed=10 * step + rank) for rank in range(3)]
        means = lockstep(graces, [{"w": xp.asarray(g, "float32")} for g in gradients])
        compensated = [g + r for g, r in zip(gradients, residuals, strict=True)]
        expected, own, p, q = alternating(compensated, p, q, step)
        residuals = [m - each for m, each in zip(compensated, own, strict=True)]
        for worker in means:
            np.testing.assert_allclose(xp.to_numpy(worker["w"]), expected, atol=2e-4 * abs(expected).max())
        assert graces[0].report().bytes_sent - before == 4 * 2 * shape[step % 2]
    for rank, state in enumerate(states(graces)):
        kept = state["w", "memory/residual"].reshape(shape)
        np.testing.assert_allclose(kept, residuals[rank], atol=2e-4 * abs(residuals[rank]).max())


def test_acpsgd_in_a_graph_sends_one_factor_in_each_step():
    xp = backend("tensorflow")
    import tensorflow as tf

    inside, outside = (workers({"compressor": "acpsgd", "min_rate": 1.0}, 1)[0] for _ in range(2))
    for grace in (inside, outside):
        grace.build({"w": xp.zeros((40, 25))})
    graph = tf.function(lambda g: inside.step({"w": g})["w"], autograph=False)
    for step in range(4):
        g = tf.constant(spread(40, 25, seed=step))
        np.testing.assert_allclose(graph(g), outside.step({"w": g})["w"], rtol=1e-3, atol=1e-4)
        assert inside.report().bytes_sent == outside.report().bytes_sent == sum([640, 400, 640, 400][: step + 1])


@pytest.mark.parametrize("name", ["acpsgd", "gradzip"])
def test_warm_starts_approach_the_best_approximation(xp, name):
    m, rank = decaying(40, 30), 3
    method, state = method_of(compressor=name, compress_rank=rank), None
    for step in range(30):
        ctx = context(xp, (40, 30), step=step)
        payload, state = send(method, xp, m.astype(np.float32), ctx, state)
    error = np.linalg.norm(receive(method, xp, payload, ctx).reshape(40, 30) - m)
    best = np.sqrt((np.linalg.svd(m, compute_uv=False)[rank:] ** 2).sum())
    assert best * (1 - 1e-6) <= error <= best * 1.005


@pytest.mark.parametrize("name", ["acpsgd", "gradzip"])
def test_other_factors_recover_from_zero(xp, name):
    method, shape, state = method_of(compressor=name, compress_rank=4), (40, 30), None
    m = product(40, 30, 4)
    m[:20] = 0
    for step in range(8):
        ctx = context(xp, shape, step=step)
        payload, state = send(method, xp, m if step > 1 else 0 * m, ctx, state)
    np.testing.assert_allclose(receive(method, xp, payload, ctx).reshape(shape), m, atol=2e-2 * abs(m).max())


def test_gradzip_solves_least_squares(xp):
    params = {"compressor": "gradzip", "compress_rank": 2, "min_rate": 1.0, "ridge": 0.1}
    graces = workers(params, 3)
    for grace in graces:
        grace.build({"w": xp.zeros((20, 30))})
    q = states(graces)[0]["w", "compressor/q"].astype(np.float64)
    q = q / abs(q).max(1, keepdims=True)
    gradients = [spread(20, 30, seed=rank) for rank in range(3)]

    def fit(m, rows):
        # argmin |M - X rows|² + c |X|², as a least-squares problem: c adds rows.
        c = 0.1 * (rows**2).sum() / len(rows)
        a = np.vstack([rows.T, np.sqrt(c) * np.eye(len(rows))])
        b = np.vstack([m.T, np.zeros((len(rows), len(m)))])
        return np.linalg.lstsq(a, b, rcond=None)[0]

    p = np.mean([fit(m, q) for m in gradients], 0)
    q = np.mean([fit(m.T, p) for m in gradients], 0)
    for worker in lockstep(graces, [{"w": xp.asarray(g, "float32")} for g in gradients]):
        np.testing.assert_allclose(xp.to_numpy(worker["w"]), p.T @ q, rtol=1e-3, atol=1e-4)


class Slices:
    """Workers of GradiVeQ: slices of 16 elements, four directions, cycles of three steps and two compressed ones."""

    def __init__(self, size, n):
        self.residuals, self.samples = np.zeros((size, n)), []

    def step(self, gradients, step):
        x = gradients + self.residuals
        if step % 5 < 3:
            self.residuals[:], mean = 0, x.mean(0)
            whole = mean[: len(mean) // 16 * 16].reshape(-1, 16)
            if step % 5 < 2:  # the third step sends what was learnt from two
                self.samples = [*(self.samples if step % 5 else []), *whole]
            return mean
        middle = np.mean(self.samples, 0)
        directions = np.linalg.svd(self.samples - middle)[2][:4]
        sent = [np.concatenate([self.projected(s, middle, directions) for s in blocks(each, 16)]) for each in x]
        self.residuals = x - sent
        return np.mean(sent, 0)

    def projected(self, part, middle, directions):
        middle, directions = middle[: len(part)], directions[:, : len(part)]
        return middle + (part - middle) @ directions.T @ directions


GRADIVEQ = {
    "compressor": "gradiveq",
    "slice_size": 16,
    "compress_ratio": 0.25,
    "train_steps": 3,
    "compressed_steps": 2,
}
SENT = [4 * 1003, 4 * 1003, 4 * (1003 + 16 + 4 * 16), 4 * 4 * 63, 4 * 4 * 63]
"""Bytes of a cycle for 1003 elements: all; also a mean slice and four directions; four coordinates of 63 slices."""


def correlated(n, seed):
    """Slices of 16 elements, as sums of directions with weights 1, 1/2, 1/4, ... around a mean."""
    directions = np.random.default_rng(0).standard_normal((17, 16)) * 0.5 ** np.arange(-1, 16)[:, None]
    rng, count = np.random.default_rng([1, seed]), -(-n // 16)
    weights = np.concatenate([np.ones((count, 1)), rng.standard_normal((count, 16))], 1)
    return (weights @ directions).reshape(-1)[:n].astype(np.float32)


def test_gradiveq_follows_the_formula(xp):
    graces, expected = workers(GRADIVEQ, 3), Slices(3, 1003)
    for grace in graces:
        grace.build({"w": xp.zeros(1003)})
    for step in range(9):
        before = graces[0].report().bytes_sent
        gradients = [correlated(1003, 10 * step + rank) for rank in range(3)]
        means = lockstep(graces, [{"w": xp.asarray(g, "float32")} for g in gradients])
        wanted = expected.step(np.array(gradients), step)
        for worker in means:
            np.testing.assert_allclose(xp.to_numpy(worker["w"]), wanted, atol=1e-4 * abs(wanted).max())
        assert graces[0].report().bytes_sent - before == SENT[step % 5]
    for rank, state in enumerate(states(graces)):
        np.testing.assert_allclose(
            state["w", "memory/residual"], expected.residuals[rank], atol=1e-4 * abs(gradients[0]).max()
        )


def test_gradiveq_in_a_graph_has_two_kinds_of_steps():
    xp = backend("tensorflow")
    import tensorflow as tf

    inside, outside = (workers(GRADIVEQ, 1)[0] for _ in range(2))
    for grace in (inside, outside):
        grace.build({"w": xp.zeros(1003)})
    graph = tf.function(lambda g: inside.step({"w": g})["w"], autograph=False)
    for step in range(7):
        g = tf.constant(correlated(1003, step))
        np.testing.assert_allclose(graph(g), outside.step({"w": g})["w"], rtol=1e-4, atol=1e-4)
        assert inside.report().bytes_sent == outside.report().bytes_sent
    assert outside.report().bytes_sent == sum(SENT) + sum(SENT[:2])


def test_gradiveq_uses_only_directions_that_it_has_seen(xp):
    # One slice in each of two steps: a mean, and one direction.
    grace = workers(GRADIVEQ, 1)[0]
    grace.build({"w": xp.zeros(16)})
    one, two = spread(16, seed=1), spread(16, seed=2)
    for step, g in enumerate((one, two, spread(16, seed=4), 3 * one - 2 * two, spread(16, seed=3))):
        found = xp.to_numpy(grace.step({"w": xp.asarray(g, "float32")})["w"])
        if step > 2:
            change, rest = (one - two).astype(np.float64), found - (one + two) / 2.0
            np.testing.assert_allclose(rest, (rest @ change / (change @ change)) * change, atol=1e-5 * abs(g).max())
    kept = states([grace])[0]["w", "compressor/frame"]
    assert np.count_nonzero(abs(kept).max(1)) == 2
    np.testing.assert_allclose(kept[0], (one + two) / 2, rtol=1e-5, atol=1e-6)


def water(s, r):
    """ATOMO's probabilities, computed one by one."""
    found, rest = np.zeros(len(s)), float(r)
    for i in range(len(s)):
        if rest * s[i] > s[i:].sum() * (1 + 1e-6):
            found[i], rest = 1, rest - 1
        else:
            found[i:] = rest * s[i:] / s[i:].sum()
            break
    return found


@pytest.mark.parametrize("kind", ["flat", "steep"])
def test_atomo_sends_singular_vectors_by_their_chances(xp, kind):
    m = spread(20, 15) if kind == "flat" else decaying(20, 15).astype(np.float32)
    method, r = method_of(compressor="atomo", compress_rank=3), 3
    u, s, vt = np.linalg.svd(m.astype(np.float64), full_matrices=False)
    chance = water(s, r)
    assert chance.sum() == pytest.approx(r)
    for step in range(10 if xp.name != "numpy" else 200):
        ctx = context(xp, (20, 15), step=step)
        payload, _ = send(method, xp, m, ctx)
        chosen = np.asarray(xp.to_numpy(ctx.rng("draw").uniform(15))) < chance
        values, left, right = host(xp, payload)
        assert [array.shape for array in (left, right)] == [(chosen.sum(), 20), (chosen.sum(), 15)]
        np.testing.assert_allclose(values, (s / np.maximum(chance, 1e-9))[chosen], rtol=1e-4)
        expected = (u[:, chosen] * values) @ vt[chosen]
        found = receive(method, xp, payload, ctx).reshape(20, 15)
        np.testing.assert_allclose(found, expected, atol=1e-4 * abs(m).max() * max(values, default=1))


@pytest.mark.parametrize("shape", [(20, 15), (15, 20)])
def test_atomo_finds_the_few_values_that_there_are(xp, shape):
    # The matrix has rank 3, so the 5 computed singular values are all; the remaining rows hold only rounding errors.
    m = (spread(shape[0], 3, seed=1) @ spread(3, shape[1], seed=2)).astype(np.float32)
    u, s, vt = np.linalg.svd(m.astype(np.float64), full_matrices=False)
    chance, method = water(s[:3], 2), method_of(compressor="atomo", compress_rank=2, leading=5)
    for step in range(10 if xp.name != "numpy" else 200):
        ctx = context(xp, shape, step=step)
        payload, _ = send(method, xp, m, ctx)
        draws = np.asarray(xp.to_numpy(ctx.rng("draw").uniform(20)))[:3]
        if (abs(draws - chance) < 2e-3).any():  # too close: a rounding error may be drawn instead
            continue
        chosen = draws < chance
        expected = (u[:, :3][:, chosen] * (s[:3] / chance)[chosen]) @ vt[:3][chosen]
        found = receive(method, xp, payload, ctx).reshape(shape)
        np.testing.assert_allclose(found, expected, atol=0.05 * abs(m).max())  # a rounding error may be drawn


@pytest.mark.parametrize("shape", [(20, 15), (15, 20)])
@pytest.mark.parametrize("kind", ["flat", "steep"])
def test_atomo_draws_rows_of_what_the_largest_values_leave(kind, shape):
    # The errors agree with the probabilities of the parts, and are close to the optimal ones.
    xp, (a, b), steps = NumpyBackend(), shape, 2000
    m = (spread(a, b) if kind == "flat" else decaying(a, b)).astype(np.float32)
    s = np.linalg.svd(m.astype(np.float64), compute_uv=False)
    method, errors, sent = method_of(compressor="atomo", compress_rank=3, leading=5), [], 0
    for step in range(steps):
        ctx = context(xp, shape, step=step)
        payload, _ = send(method, xp, m, ctx)
        values, left, right = payload
        short = left if a <= b else right
        rows = (short != 0).sum(1) == 1
        assert (short[rows].max(1) == 1).all()
        sent += len(values)
        errors.append(receive(method, xp, payload, ctx).reshape(shape) - m.astype(np.float64))
    errors = np.array(errors)
    square = (errors**2).sum((1, 2)).mean()
    assert sent / steps == pytest.approx(3, abs=0.15)
    assert (errors.mean(0) ** 2).sum() < 1.5 * square / steps
    chance = water(s, 3)
    best = (s**2 * (1 / np.maximum(chance, 1e-9) - 1)).sum()
    assert best * 0.9 < square < 3 * best


# -- dion -----------------------------------------------------------------------------------------------------------
def ortho(gradient, m, q, mu=0.95):
    """Dion's update, momentum and Q[r, b], by the paper, for a single worker with the mean gradient."""
    m = m + gradient
    p = np.linalg.qr(m @ q.T)[0]
    r = p.T @ m
    q = r / (np.linalg.norm(r, axis=1, keepdims=True) + 1e-8)
    return np.sqrt(m.shape[0] / m.shape[1]) * p @ q, m - (1 - mu) * p @ r, q


def test_dion_of_many_workers_is_that_of_one():
    """Decoupled momenta change nothing: the same parameters, and the momenta's mean is the one worker's momentum."""
    xp, size, shape, method = backend("numpy"), 4, (12, 8), Method(Dion(rank_fraction=3 / 8), Decoupled())
    contexts = [context(xp, shape, dtype="float64", rank=rank, world_size=size) for rank in range(size)]
    rng, kept = np.random.default_rng(0), [method.init(ctx) for ctx in contexts]
    q = rng.standard_normal((3, 8))
    kept = [{**state, "compressor/q": q} for state in kept]
    target, many, one = rng.standard_normal(shape), np.zeros(shape), np.zeros(shape)
    momentum = np.zeros(shape)
    for step in range(30):
        noise = 10 * rng.standard_normal((size, *shape))
        mine = [many - target + each for each in noise]
        programs = [
            method.encode(g.reshape(-1).copy(), state, context(xp, shape, dtype="float64", rank=rank, step=step))
            for rank, (g, state) in enumerate(zip(mine, kept, strict=True))
        ]
        found, _ = together(xp, programs)
        kept = [state for _, state in found]
        update, momentum, q = ortho(one - target + noise.mean(0), momentum, q)
        many = many - 0.05 * method.compressor.decompress(found[0][0], contexts[0]).reshape(shape)
        one = one - 0.05 * update
        np.testing.assert_allclose(many, one, rtol=0, atol=1e-14 * (1 + step))
    momenta = [state["memory/momentum"].reshape(shape) for state in kept]
    assert momenta[0].dtype == np.float64
    np.testing.assert_allclose(np.mean(momenta, 0), momentum, rtol=0, atol=1e-12)
    assert min(np.linalg.norm(a - b) for a, b in pairwise(momenta)) > 20


@pytest.mark.parametrize("shape, sides, axis", [((40, 25), (40, 25), 0), ((4, 3, 3, 8), (12, 24), -1)])
def test_dion_follows_the_formula(xp, shape, sides, axis):
    graces = workers({"compressor": "dion", "rank_fraction": 0.1, "output_axis": axis, "mu": 0.9}, 3)
    for grace in graces:
        grace.build({"w": xp.zeros(shape)})
    q = states(graces)[0]["w", "compressor/q"].astype(np.float64)
    momentum = np.zeros(sides)
    fan_out = shape[axis]
    for step in range(4):
        gradients = [spread(*shape, seed=10 * step + rank) for rank in range(3)]
        means = lockstep(graces, [{"w": xp.asarray(g, "float32")} for g in gradients])
        wanted, momentum, q = ortho(np.mean(gradients, 0, dtype=np.float64).reshape(sides), momentum, q, 0.9)
        wanted = wanted / np.sqrt(sides[0] / sides[1]) * np.sqrt(fan_out / (wanted.size / fan_out))
        for worker in means:
            np.testing.assert_allclose(xp.to_numpy(worker["w"]).reshape(sides), wanted, atol=2e-4 * abs(wanted).max())
    mean = np.mean([state["w", "memory/momentum"].reshape(sides) for state in states(graces)], 0)
    np.testing.assert_allclose(mean, momentum, atol=2e-4 * abs(momentum).max())


def test_dion_without_gradients_moves_nothing(xp):
    (grace,) = workers({"compressor": "dion"}, 1)
    grace.build({"w": xp.zeros((20, 16))})
    for bad in (0.0, np.nan):
        before = states([grace])[0]
        found = lockstep([grace], [{"w": xp.full((20, 16), bad)}])[0]["w"]
        after = states([grace])[0]
        assert np.array_equal(xp.to_numpy(found), np.full((20, 16), bad), equal_nan=True) or np.isnan(bad)
        for key, array in before.items():
            np.testing.assert_array_equal(after[key], array)
    zeroed = grace_from_params({"compressor": "dion", "nonfinite": "zero", "min_numel": 0}, LocalTransport())
    zeroed.build({"w": xp.zeros((20, 16))})
    assert not xp.to_numpy(lockstep([zeroed], [{"w": xp.full((20, 16), np.nan)}])[0]["w"]).any()


def test_dion_of_a_momentum_outside_q_moves_nothing(xp):
    # P is zero, though the momentum is not: the update must not follow the basis with which QR replaces P.
    method, ctx = method_of(compressor="dion", rank_fraction=0.25), context(xp, (20, 16))
    m, q = spread(20, 16), np.eye(4, 16, dtype=np.float32)
    m[:, :4] = 0
    payload, state = send(method, xp, m, ctx, {"q": xp.asarray(q, "float32")})
    assert not receive(method, xp, payload, ctx).any()
    np.testing.assert_array_equal(host(xp, state.values())[0], q)


def test_dion_leaves_what_would_not_shrink_exact(xp):
    (grace,) = workers({"compressor": "dion", "rank_fraction": 0.5}, 1)
    tensors = {"vector": spread(40), "square": spread(8, 8), "wide": spread(8, 9)}  # 4 (8 + 8) = 64; 4 (8 + 9) < 72
    grace.build({name: xp.asarray(x, "float32") for name, x in tensors.items()})
    (means,) = lockstep([grace], [{name: xp.asarray(x, "float32") for name, x in tensors.items()}])
    same = {name: np.array_equal(xp.to_numpy(means[name]), x) for name, x in tensors.items()}
    assert same == {"vector": True, "square": True, "wide": False}


def test_dions_momentum_belongs_to_dion():
    for params, message in (
        ({"compressor": "powersgd", "memory": "decoupled"}, "not of 'powersgd': use memory 'residual'"),
        (
            {"compressor": "dion", "memory": "residual"},
            "cannot feed back what 'dion' leaves out.* Use memory 'decoupled'",
        ),
        ({"compressor": "dion", "memory": "ef21"}, "Use memory 'decoupled'"),
        ({"compressor": "dion", "rank_fraction": 0.0}, r"rank_fraction=0.0 must lie in \(0, 1\]"),
        ({"compressor": "dion", "rank_fraction": 1.5}, "rank_fraction=1.5"),
        ({"compressor": "dion", "output_axis": 1}, "output_axis=1: choose 0"),
        ({"compressor": "dion", "epsilon": 0.0}, "epsilon=0.0 must be positive"),
        ({"compressor": "dion", "mu": 1.0}, "mu=1.0 must lie in"),
    ):
        with pytest.raises(ValueError, match=message):
            grace_from_params(params, "local")


@pytest.mark.parametrize("toolkit", ["torch", "tensorflow"])
def test_dion_refuses_optimizers_with_momentum(toolkit):
    backend(toolkit)
    import grace

    def wrapped(kind, **key):
        grc = grace_from_params({"compressor": "dion"}, LocalTransport())
        if toolkit == "torch":
            import torch

            matrix, vector = (torch.nn.Parameter(torch.ones(shape)) for shape in ((4, 4), (4,)))
            groups = (
                [{"params": [matrix], "momentum": 0.0}, {"params": [vector]}] if kind == "groups" else [matrix, vector]
            )
            kind = "SGD" if kind == "groups" else kind
            return grace.torch.DistributedOptimizer(getattr(torch.optim, kind)(groups, lr=0.1, **key), grace=grc)
        import keras

        return grace.tensorflow.DistributedOptimizer(getattr(keras.optimizers, kind)(0.1, **key), grace=grc)

    refused = [("SGD", {"momentum": 0.9}), ("Adam", {})]
    refused += [("Adam", {"betas": (0.0, 0.9)})] if toolkit == "torch" else [("Adam", {"beta_1": 0.0})]
    for kind, key in refused:
        with pytest.raises(ValueError, match=f"'dion' returns updates.*SGD with momentum 0, not {kind}"):
            wrapped(kind, **key)
    wrapped("SGD")
    if toolkit == "torch":
        wrapped("groups", momentum=0.9)


@pytest.mark.parametrize("shape", [(128, 128), (100, 70), (16, 8, 3, 3), (130,)])
def test_demo_keeps_the_largest_coefficients_of_each_chunk(xp, shape):
    method, x, k = method_of(compressor="demo", chunk=32, chunk_k=16), spread(*shape), 16
    ctx = context(xp, shape)
    payload, _ = send(method, xp, x, ctx)
    a, b = (shape[0], x.size // shape[0]) if len(shape) > 1 else (1, shape[0])
    rows, columns = min(32, a), min(32, b)
    wide = np.zeros((-(-a // rows) * rows, -(-b // columns) * columns))
    wide[:a, :b] = x.reshape(a, b)
    for i in range(0, len(wide), rows):
        for j in range(0, wide.shape[1], columns):
            chunk = dct(rows) @ wide[i : i + rows, j : j + columns] @ dct(columns).T
            kept = np.zeros(chunk.size)
            best = np.argsort(-abs(chunk.reshape(-1)), kind="stable")[:k]
            kept[best] = chunk.reshape(-1)[best]
            wide[i : i + rows, j : j + columns] = dct(rows).T @ kept.reshape(chunk.shape) @ dct(columns)
    found = receive(method, xp, payload, ctx).reshape(a, b)
    np.testing.assert_allclose(found, wide[:a, :b], atol=1e-5 * abs(x).max())


def test_demo_averages_over_senders_and_takes_signs(xp):
    # Of three workers, two send the first coefficient and one the second; none sends the others.
    method = method_of(compressor="demo", chunk=4, chunk_k=1, average="senders")
    basis, ctx = dct(4), context(xp, 4, world_size=3)
    sent = [3 * basis[0], basis[0], -8 * basis[1]]
    payloads = [send(method, xp, x.astype(np.float32), ctx)[0] for x in sent]
    expected = 2 * basis[0] - 8 * basis[1]
    np.testing.assert_allclose(xp.to_numpy(method.compressor.aggregate(payloads, ctx)), expected, atol=1e-5)
    signs = method_of(compressor="demo", chunk=4, chunk_k=1, average="senders", sign=True)
    assert xp.to_numpy(signs.compressor.aggregate(payloads, ctx)).tolist() == np.sign(expected).tolist()
    mean = method_of(compressor="demo", chunk=4, chunk_k=1)
    np.testing.assert_allclose(
        xp.to_numpy(mean.compressor.aggregate(payloads, ctx)), (4 * basis[0] - 8 * basis[1]) / 3, atol=1e-5
    )
