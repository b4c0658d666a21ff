"""Properties of single sparsifiers and chains."""

import math
import weakref

import numpy as np
import pytest
from methods import (
    alone,
    backend,
    context,
    host,
    lockstep,
    method_of,
    normal,
    receive,
    send,
    spread,
    states,
    workers,
)
from table.agreements import OkTopK
from table.row import Where

from grace.backends.numpy import NumpyBackend
from grace.compressors.measured.qsgd import QSGD
from grace.compressors.measured.topk import TopK
from grace.compressors.studies.chain import Chain
from grace.compressors.studies.randomk import RandomK
from grace.core.collectives import AllToAll, Gather
from grace.core.method import Method
from grace.engine.scheduler import RoundScheduler
from grace.engine.trace import Trace
from grace.memories.none import NoMemory
from grace.transports.local import LocalTransport, World


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.3, 0.9])
def test_topk_loses_the_smallest_squares(xp, ratio):
    x, n = spread(5000).astype(np.float32), 5000
    method, ctx = method_of(compressor="topk", compress_ratio=ratio), context(xp, n)
    error = x - receive(method, xp, send(method, xp, x, ctx)[0], ctx)
    squares = sorted(v * v for v in x.tolist())
    assert (error.astype(np.float64) ** 2).sum() == pytest.approx(math.fsum(squares[: n - int(ratio * n)]), rel=1e-9)


def test_topk_takes_the_first_of_equal_elements(xp):
    method = method_of(compressor="topk", compress_ratio=0.01)
    x = np.where(np.arange(1003) % 3 == 1, np.float32(-2), np.float32(1))
    payload, _ = send(method, xp, x, context(xp, 1003))
    values, indices = host(xp, payload)
    assert indices.tolist() == [1 + 3 * i for i in range(10)]
    assert values.tolist() == [-2.0] * 10


def test_threshold_looks_at_magnitudes(xp):
    method = method_of(compressor="threshold", threshold=0.5)
    x = -abs(spread(1003))
    x[:3] = [-0.5, np.nextafter(np.float32(-0.5), np.float32(0)), 0.5]
    values, indices = host(xp, send(method, xp, x, context(xp, 1003))[0])
    expected = [i for i, v in enumerate(x.tolist()) if abs(v) >= 0.5]
    assert indices.tolist() == expected
    assert values.tolist() == x[expected].tolist()
    assert [v.shape for v in host(xp, send(method, xp, x / 1e6, context(xp, 1003))[0])] == [(0,), (0,)]


def test_randomk_covers_everything_in_time(xp):
    # With error feedback every element is eventually sent, so every position must be drawn.
    method, n = method_of(compressor="randomk", compress_ratio=0.1), 100
    seen = np.zeros(n, bool)
    for step in range(100):
        ctx = context(xp, n, step=step)
        seen |= receive(method, xp, send(method, xp, np.ones(n, np.float32), ctx)[0], ctx) != 0
    assert seen.all()


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_randomk_draws_once_a_step_and_holds_nothing_on_to(name, monkeypatch):
    xp, found = backend(name), []
    sample = type(xp.random).sample
    monkeypatch.setattr(type(xp.random), "sample", lambda *args: found.append(sample(*args)) or found[-1])
    monkeypatch.setenv("GRACE_KERNELS", "off")  # with kernels, randomk forms groups
    graces = workers({"compressor": "randomk", "compress_ratio": 0.1}, 2)
    for grace in graces:
        grace.build({"w": xp.zeros(100)})
    for step in range(1, 3):
        lockstep(graces, [{"w": xp.asarray(normal(100), "float32")} for _ in graces])
        assert len(found) == 2 * step
    drawn = [weakref.ref(each) for each in found]
    found.clear()
    assert [each() for each in drawn] == [None] * 4


# -- chains --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sparsifier", ["topk", "randomk"])
@pytest.mark.parametrize("quantizer", ["none", "fp16", "natural", "dettmers8", "efsignsgd", "qsgd", "randomk"])
def test_a_chain_is_its_parts_one_after_the_other(xp, sparsifier, quantizer):
    n, k = 1003, 300
    second = method_of(compressor=quantizer).compressor
    first = method_of(compressor=sparsifier, compress_ratio=0.3).compressor
    method, ctx = Method(Chain(first, second), NoMemory()), context(xp, n, step=4, rank=2)
    x = spread(n)
    payload, _ = send(method, xp, x, ctx)
    plain = Method(first, NoMemory())
    positions = np.flatnonzero(receive(plain, xp, send(plain, xp, x, ctx)[0], ctx))
    assert len(positions) == k
    inner, alone_ = context(xp, k, name="w/values", step=4, rank=2), Method(second, NoMemory())
    expected = np.zeros(n, np.float32)
    expected[positions] = receive(alone_, xp, send(alone_, xp, x[positions], inner)[0], inner)
    assert np.array_equal(receive(method, xp, payload, ctx), expected)


def test_a_chain_may_have_three_stages(xp):
    # The largest elements of random positions that are not sent, quantised: as in CocktailSGD.
    method = method_of(compressor="chain", sparsifier=RandomK(0.2), quantizer=Chain(TopK(0.25), QSGD(7, 24)))
    x, ctx = spread(1000), context(xp, 1000)
    payload, _ = send(method, xp, x, ctx)
    assert [len(array) for array in host(xp, payload)] == [25, 3, 50]
    found = receive(method, xp, payload, ctx)
    drawn = np.sort(np.argsort(Where().shared_words("positions", 1000), kind="stable")[:200])
    chosen = drawn[np.argsort(-abs(x[drawn]), kind="stable")[:50]]
    assert set(np.flatnonzero(found)) <= set(chosen.tolist())
    norm = np.linalg.norm(x[chosen])
    assert (abs(found - x)[chosen] <= norm / 7 * (1 + 1e-6)).all()


# -- sampled, sketched and agreed ----------------------------------------------------------------------------------
TAILS = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "laplace": lambda rng, n: rng.laplace(size=n),
    "heavy": lambda rng, n: rng.standard_t(1.5, n),
    "mixed": lambda rng, n: rng.standard_normal(n) * np.where(np.arange(n) % 7, 1e-4, 1),
}


@pytest.mark.parametrize("kind", TAILS)
@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.1])
def test_dgc_sends_nearly_as_many_as_asked_for(kind, ratio):
    xp, n = backend("numpy"), 100_000
    method, k = method_of(compressor="dgc", compress_ratio=ratio), int(100_000 * ratio)
    for seed in range(20):
        x = TAILS[kind](np.random.default_rng(seed), n).astype(np.float32)
        values, positions = host(xp, send(method, xp, x, context(xp, n, step=seed))[0])
        assert 0.5 * k <= len(positions) <= 1.3 * k
        # They are the largest ones.
        rest = np.delete(x, positions)
        assert abs(values).min() >= abs(rest).max()
        if kind != "heavy":  # with a few heavy elements the sample is less accurate
            assert abs(len(positions) - k) <= 0.25 * k + 1


def test_dgc_cuts_ties_and_sends_no_zeros(xp):
    method, n = method_of(compressor="dgc", compress_ratio=0.01), 20_000
    ctx = context(xp, n)
    # All equal: sends the maximum number, from the front.
    _, positions = host(xp, send(method, xp, np.full(n, -3, np.float32), ctx)[0])
    assert positions.tolist() == list(range(260))
    # A few large ones are all sent before the many that are equal.
    x = np.full(n, 1e-3, np.float32)
    x[-100:] = np.linspace(1, 2, 100)
    _, positions = host(xp, send(method, xp, x, ctx)[0])
    assert positions.tolist() == [*range(160), *range(n - 100, n)]
    # So few that the sample may miss them: sends exactly the elements that are not zero.
    x = np.zeros(n, np.float32)
    x[[5, 777, 19_999]] = 1, -2, 1e-30
    _, positions = host(xp, send(method, xp, x, ctx)[0])
    assert positions.tolist() == [5, 777, 19_999]
    for size in (n, 50):
        values, positions = host(xp, send(method, xp, np.zeros(size, np.float32), context(xp, size))[0])
        assert (len(values), len(positions)) == (0, 0)


def test_adaq_keeps_the_sum_of_what_it_sends(xp):
    method, x = method_of(compressor="adaq", compress_ratio=0.1), np.round(4 * spread(1003)) / 4  # with ties and zeros
    payload, _ = send(method, xp, x, context(xp, 1003))
    means, positions = host(xp, payload)
    found = receive(method, xp, payload, context(xp, 1003))
    plus, minus = positions[positions >= 0], ~positions[positions < 0]
    assert (len(plus), len(minus)) == (math.ceil(0.1 * (x > 0).sum()), math.ceil(0.1 * (x < 0).sum()))
    assert x[plus].min() >= np.delete(x, plus).max()
    assert x[minus].max() <= np.delete(x, minus).min()
    for side, mean in ((plus, means[0]), (minus, means[1])):
        assert (found[side] == mean).all()
        assert mean == pytest.approx(x[side].astype(np.float64).mean(), rel=1e-6)
    for sign in (1, -1):  # one sign is missing
        payload, _ = send(method, xp, sign * abs(x), context(xp, 1003))
        assert host(xp, payload)[0][0 if sign < 0 else 1] == 0
        assert ((host(xp, payload)[1] >= 0) == (sign > 0)).all()


@pytest.mark.parametrize("iterations, share_", [(0, 0.85), (1, 0.98), (2, 0.999), (4, 0.9999)])
def test_wangni_sends_as_many_as_asked_for_after_some_iterations(iterations, share_):
    xp, n = backend("numpy"), 10_000
    method = method_of(compressor="wangni", iterations=iterations)
    x, counts = spread(n), []
    for step in range(40):
        payload = host(xp, send(method, xp, x, context(xp, n, step=step))[0])
        counts.append(len(payload[0]) + len(payload[2]))
        assert abs(x[payload[0]]).min() >= payload[3][0] * (1 - 1e-6)
    noise = 4 * math.sqrt(0.05 * n / 40)
    assert np.mean(counts) <= 0.05 * n + noise
    assert np.mean(counts) >= share_ * 0.05 * n - noise


class AdaComps:
    """Workers of AdaComp, from the paper's formulas."""

    def __init__(self, size, n, bins):
        self.bins, self.residuals = bins, np.zeros((size, n), np.float32)

    def step(self, gradients):
        means = []
        for rank, g in enumerate(gradients):
            total = self.residuals[rank] + g
            largest = [abs(total[i : i + self.bins]).max() for i in range(0, len(g), self.bins)]
            bound = np.repeat(np.array(largest, np.float32), self.bins)[: len(g)]
            scale = np.float32(np.mean(np.array(largest, np.float64)))
            sent = np.where((abs(total + g) >= bound) & (bound > 0), np.sign(total) * scale, 0)
            self.residuals[rank] = total - sent
            means.append(sent)
        return np.mean(means, 0)


@pytest.mark.parametrize("bins", [2, 50, 128])
@pytest.mark.parametrize("communicator", ["allgather", "broadcast"])
def test_adacomp_follows_the_formula(xp, bins, communicator):
    for size in (1, 3):
        graces = workers({"compressor": "adacomp", "bin_size": bins, "communicator": communicator}, size)
        for grace in graces:
            grace.build({"w": xp.zeros(1003)})
        expected = AdaComps(size, 1003, bins)
        for step in range(5):
            gradients = [spread(1003, seed=10 * step + rank) for rank in range(size)]
            for g in gradients:
                g[::5] = 0
                g[256:512] = 0  # whole bins
            wanted = expected.step(gradients)
            for worker in lockstep(graces, [{"w": xp.asarray(g, "float32")} for g in gradients]):
                np.testing.assert_allclose(xp.to_numpy(worker["w"]), wanted, rtol=1e-5, atol=1e-5 * abs(wanted).max())


def test_adacomp_loses_nothing_in_fifty_steps(xp):
    method, n = method_of(compressor="adacomp"), 603
    state, carried, given = method.compressor.init(context(xp, n)), np.zeros(n), np.zeros(n)
    for step in range(50):
        g, ctx = spread(n, seed=step), context(xp, n, step=step)
        payload, state = send(method, xp, g, ctx, state)
        carried += receive(method, xp, payload, ctx)
        given += g
        kept = np.array(xp.to_numpy(state["residual"]))
        assert abs(carried + kept - given).max() < 1e-5 * abs(given).max() * (step + 1)
    assert abs(carried).max() > 0


class Variances:
    """Workers of variance-based sparsification, element by element from the paper's formulas."""

    def __init__(self, size, n, alpha, zeta):
        self.alpha, self.zeta = np.float32(alpha), np.float32(zeta)
        self.r, self.v = np.zeros((size, n), np.float32), np.zeros((size, n), np.float32)

    def step(self, gradients):
        return np.mean([self.sent(g, self.r[rank], self.v[rank]) for rank, g in enumerate(gradients)], 0)

    def sent(self, g, r, v):
        r += g
        v += g * g
        sent, top = np.zeros(len(g)), 2.0 ** math.floor(math.log2(abs(r).max()))
        for i in range(len(g)):
            if r[i] * r[i] > self.alpha * v[i]:
                low = 2.0 ** math.floor(math.log2(abs(r[i])))
                near = min(top, low if abs(r[i]) - low < 2 * low - abs(r[i]) else 2 * low)
                if near >= top / 2**7:
                    sent[i] = math.copysign(near, r[i])
                    r[i] = v[i] = 0
                    continue
            v[i] *= self.zeta
        return sent


@pytest.mark.parametrize(
    "alpha, zeta, communicator", [(1.5, 0.999, "allgather"), (1.0, 0.9, "broadcast"), (0.3, 1.0, "allgather")]
)
def test_variance_follows_the_formula(xp, alpha, zeta, communicator):
    params = {"compressor": "variance", "alpha": alpha, "zeta": zeta, "communicator": communicator}
    graces, expected, many = workers(params, 3), Variances(3, 1003, alpha, zeta), 0
    for grace in graces:
        grace.build({"w": xp.zeros(1003)})
    for step in range(5):
        gradients = [spread(1003, seed=10 * step + rank) for rank in range(3)]
        for g in gradients:
            g[::5] = 0
        wanted = expected.step(gradients)
        many += np.count_nonzero(wanted)
        for worker in lockstep(graces, [{"w": xp.asarray(g, "float32")} for g in gradients]):
            np.testing.assert_allclose(xp.to_numpy(worker["w"]), wanted, rtol=1e-6)
    assert many > 100
    for rank, state in enumerate(states(graces)):
        np.testing.assert_allclose(state["w", "compressor/residual"], expected.r[rank], rtol=1e-5)
        np.testing.assert_allclose(state["w", "compressor/squares"], expected.v[rank], rtol=1e-5)


def test_variance_waits_until_gradients_agree(xp):
    (grace,) = workers({"compressor": "variance"}, 1)
    grace.build({"w": xp.zeros(4)})
    found, sent = [], []
    for sign in (1, -1, 1, -1):
        g = xp.asarray(np.array([1, sign, 4, 0.0], np.float32), "float32")
        before = grace.report().bytes_sent
        found.append(xp.to_numpy(grace.step({"w": g})["w"]).tolist())
        sent.append(grace.report().bytes_sent - before)
    # A second equal gradient gives (2 g)² > 1.5 * 1.999 g²; opposite ones cancel out. A word for each of two elements.
    assert found == [[0, 0, 0, 0], [2, 0, 8, 0]] * 2
    assert sent == [4, 12] * 2


def test_variance_keeps_what_its_code_cannot_express(xp):
    method, x = method_of(compressor="variance", alpha=0.5), np.array([1, 2**-7, 2**-8 * 1.4, 0], np.float32)
    payload, state = send(method, xp, x, context(xp, 4))
    assert receive(method, xp, payload, context(xp, 4)).tolist() == [1, 2**-7, 0, 0]
    assert np.array(xp.to_numpy(state["residual"])).tolist() == [0, 0, x[2], 0]


def test_means_of_variance_are_not_compressed_again():
    assert {grace.communicator.registered_name for grace in workers({"compressor": "variance"}, 4)} == {"allgather"}
    with pytest.raises(ValueError, match=r"'twostage' cannot carry 'variance'.*Use communicator 'allgather'"):
        workers({"compressor": "variance", "communicator": "twostage"}, 4)


def taken_back(name, xp):
    """Two workers that have sent two elements each. The two largest sums contain one element of each worker."""
    graces = workers({"compressor": name, "compress_ratio": 0.25}, 2)
    gradients = [np.array([8, 0, 3, 0, 0, 1, 0, 0], np.float32), np.array([0, -4, 0, 2, -1, 0, 0, 0], np.float32)]
    for grace in graces:
        grace.build({"w": xp.zeros(8)})
    for worker in lockstep(graces, [{"w": xp.asarray(g, "float32")} for g in gradients]):
        assert xp.to_numpy(worker["w"]).tolist() == [4, -2, 0, 0, 0, 0, 0, 0]
    kept = [state["w", "memory/residual"].tolist() for state in states(graces)]
    assert kept == [[0, 0, 3, 0, 0, 1, 0, 0], [0, 0, 0, 2, -1, 0, 0, 0]]
    return graces


def test_gtopk_takes_back_what_is_not_used(xp):
    taken_back("gtopk", xp)


def test_gtopk_has_k_elements_however_many_workers(xp):
    graces = workers({"compressor": "gtopk", "compress_ratio": 0.01}, 5)
    for grace in graces:
        grace.build({"w": xp.zeros(1003)})
    for worker in lockstep(graces, [{"w": xp.asarray(spread(1003, seed=rank), "float32")} for rank in range(5)]):
        assert (xp.to_numpy(worker["w"]) != 0).sum() == 10


# -- Ok-Topk: oracle in table/agreements.py ---------------------------------------------------------------------------
def drift(n, size, step):
    """Gradients whose magnitudes differ by worker and grow with the step, so that thresholds are stale."""
    rng = np.random.default_rng([n, size, step])
    return [(rng.standard_t(3, n) * (rank + 1) * 1.5**step).astype(np.float32) for rank in range(size)]


def test_oktopk_follows_the_formula_while_thresholds_and_regions_are_reused(xp):
    n, periods = 603, (3, 4)
    for size in (2, 5, 8) if xp.name == "numpy" else (3,):
        params = dict(zip(("thresholds_every", "regions_every"), periods, strict=True))
        graces = workers({"compressor": "oktopk", "compress_ratio": 0.05, **params}, size)
        for grace in graces:
            grace.build({"w": xp.zeros(n)})
        expected, residuals = OkTopK(0.05, size, n, *periods), np.zeros((size, n), np.float32)
        for step in range(6 if xp.name == "numpy" else 5):
            xs = residuals + drift(n, size, step)
            wanted, used = expected.step(xs, step)
            means = lockstep(graces, [{"w": xp.asarray(g, "float32")} for g in drift(n, size, step)])
            found = host(xp, [mean["w"] for mean in means])
            assert all(np.array_equal(found[0], other) for other in found)
            np.testing.assert_allclose(found[0], wanted, rtol=1e-6, atol=1e-6 * abs(wanted).max())
            residuals = np.array([state["w", "memory/residual"] for state in states(graces)])
            assert np.array_equal(residuals, xs - used)
            # The mean is exactly what has left the residuals, of elements that all workers know.
            assert np.array_equal(np.flatnonzero(found[0]), expected.final)
            assert ((residuals == xs) | (found[0] != 0)).all()
            np.testing.assert_allclose(size * found[0], (xs - residuals).sum(0), rtol=1e-5, atol=1e-5)


def test_oktopk_by_hand(xp):
    # k = 2, so each owner receives at most 3 elements: in step 0 one from its own number, two from the other worker.
    # Regions end after the mean of elements 0 and 1, rounded down. Worker 1 keeps element 3, its second of region 1.
    graces = taken_back("oktopk", xp)
    # A bound and two numbers of heads (4 + 8 bytes); 8 bytes per element: worker 0 sends one and gathers one, worker 1
    # sends none and gathers two.
    counts = [(report.bytes_sent, report.bytes_received) for report in (grace.report() for grace in graces)]
    assert counts == [(12 + 8 + 8, 12 + 0 + 16), (12 + 0 + 16, 12 + 8 + 8)]


def numbers_moved(programs, xp):
    """int[2, workers]: values and positions that each worker sends and receives; a gather runs in a ring."""
    world, size = World(len(programs)), len(programs)
    flights = [
        RoundScheduler("law", {"w": program}, LocalTransport(world, rank).bind(xp), Trace())
        for rank, program in enumerate(programs)
    ]
    while [flight for flight in flights if not flight.advance()]:
        pass
    moved = np.zeros((2, size), int)
    for rank, flight in enumerate(flights):
        for _, asked, found in flight.asked:
            if isinstance(asked, AllToAll):
                moved[0, rank] += sum(len(a) for to, part in enumerate(asked.parts) if to != rank for a in part)
            elif not asked.ragged if isinstance(asked, Gather) else True:
                continue  # bounds, counts and flags
            held = np.array([sum(map(len, part)) for part in found])
            moved[1, rank] += held.sum() - held[rank]
            if isinstance(asked, Gather):
                moved[0, rank] += held.sum() - held[(rank + 1) % size]
    return moved, [flight.results["w"] for flight in flights]


@pytest.mark.parametrize("size", [2, 3, 6, 13, 64])
def test_oktopk_moves_at_most_6k_numbers_even_when_thresholds_and_regions_are_stale(size):
    n, k = 2000, 40
    xp, compressor = NumpyBackend(), method_of(compressor="oktopk", compress_ratio=0.02, thresholds_every=4).compressor
    expected = OkTopK(0.02, size, n, 4)
    state = [compressor.init(context(xp, n, world_size=size)) for _ in range(size)]
    narrow = np.where(np.arange(n) < n // 50, 100, 1)  # one region, later
    for step, shape in enumerate([np.ones(n), 100 * np.ones(n), narrow, 0.01 * np.ones(n), narrow]):
        xs = [normal(n, seed=step * size + rank) * shape.astype(np.float32) for rank in range(size)]
        ctx = [context(xp, n, world_size=size, rank=rank, step=step) for rank in range(size)]
        above = [(abs(x) >= expected.local[rank]).sum() for rank, x in enumerate(xs)]
        assert step != 1 or min(above) > 10 * k, "the threshold is not stale"
        moved, found = numbers_moved([compressor.compress(x, s, c) for x, s, c in zip(xs, state, ctx, strict=True)], xp)
        state = [kept for _, kept in found]
        expected.step(xs, step)
        assert np.array_equal(moved, expected.traffic)
        assert moved.max() <= 6 * k
        assert all(np.array_equal(payload[1][payload[0] != 0], expected.final) for payload, _ in found)
        assert len(expected.final) <= k


def test_oktopk_shows_a_bad_element_that_is_in_no_message():
    for step, rank in ((0, 0), (0, 3), (1, 4)):
        graces = workers({"compressor": "oktopk", "compress_ratio": 0.1}, 5)  # k = 1: few workers may send
        for grace in graces:
            grace.build({"w": np.zeros(12, np.float32)})
        for _ in range(step):
            lockstep(graces, [{"w": np.ones(12, np.float32)}] * 5)
        bad = np.zeros((5, 12), np.float32)
        bad[rank, 3] = np.nan
        assert not any(np.isfinite(worker["w"]).all() for worker in lockstep(graces, [{"w": x} for x in bad]))


def test_oktopk_names_the_worker_whose_positions_are_wrong(xp):
    ctx, empty = context(xp, 10, world_size=2), (xp.zeros(0), xp.zeros(0, "int32"))
    for places in ([3, 10], [4, 3], [-1, 2]):
        program = method_of(compressor="oktopk").compressor.compress(
            xp.full(10, 1.0), {"local": xp.zeros(1), "all": xp.zeros(1), "bounds": xp.asarray([4], "int32")}, ctx
        )
        next(program)
        program.send((xp.full(1, 4.0),))
        with pytest.raises(ValueError, match=r"worker 1 of 2 sent a payload for 'w' that 'oktopk' cannot.*ascend"):
            program.send([empty, (xp.full(2, 1.0), xp.asarray(places, "int32"))])


def test_oktopk_with_another_number_of_workers_keeps_its_threshold_and_divides_anew():
    def graces(size):
        found = workers({"compressor": "oktopk", "compress_ratio": 0.05}, size)
        for grace in found:
            grace.build({"w": np.zeros(600, np.float32)})
        return found

    before, after = graces(3), graces(2)
    lockstep(before, [{"w": x} for x in drift(600, 3, 0)])
    saved = [grace.state_dict() for grace in before]
    for grace in after:
        grace.load_state_dict(*saved)
    for old, new in zip(states(before), states(after), strict=False):
        assert new["w", "compressor/bounds"].tolist() == [299]
        assert new["w", "compressor/all"] == old["w", "compressor/all"] > 0
        assert new["w", "compressor/local"] == old["w", "compressor/local"] > 0
    lockstep(after, [{"w": x} for x in drift(600, 2, 1)])


@pytest.mark.parametrize("key", ["thresholds_every", "regions_every"])
def test_oktopk_refuses_a_period_of_no_steps(key):
    with pytest.raises(ValueError, match=f"{key}=0 must be at least 1"):
        method_of(compressor="oktopk", **{key: 0})


def test_cltk_has_another_leader_at_every_step(xp):
    graces = workers({"compressor": "cltk", "compress_ratio": 0.01, "memory": "residual"}, 3)
    spikes = [np.where(np.arange(1003) // 10 == rank, np.float32(5), np.float32(0.1)) for rank in range(3)]
    for grace in graces:
        grace.build({"w": xp.zeros(1003)})
    for step in range(4):
        for worker in lockstep(graces, [{"w": xp.asarray(x, "float32")} for x in spikes]):
            chosen = np.flatnonzero(xp.to_numpy(worker["w"]))
            assert set(chosen // 10) == {step % 3}


def heavy(n, positions):
    x = (normal(n) / 50).astype(np.float32)
    x[positions] = np.linspace(3, 5, len(positions)) * np.where(np.arange(len(positions)) % 2, 1, -1)
    return x


def test_sketches_are_linear_and_find_heavy_hitters(xp):
    n, positions = 5000, np.arange(40) * 123 + 7
    method = method_of(compressor="sketch_sgd", compress_ratio=0.008)
    ctx = context(xp, n, step=2)
    one, two = spread(n), heavy(n, positions)
    hashes = method.compressor.hashes(ctx)
    sketches = [method.compressor.sketch(xp.asarray(x, "float32"), hashes, ctx) for x in (one, two, one + two)]
    tables = host(xp, sketches)
    assert tables[0].shape == (5 * 512,)
    np.testing.assert_allclose(tables[0] + tables[1], tables[2], rtol=1e-4, atol=1e-4)
    estimate = np.array(xp.to_numpy(method.compressor.estimate(xp.asarray(tables[1], "float32"), hashes, ctx)))
    # An estimate is far off only if three of five rows contain another heavy element.
    assert (abs(estimate - two) > 0.5).mean() < 0.02
    assert np.median(abs(estimate - two)) < 0.05
    values, found = host(xp, send(method, xp, two, ctx)[0])
    assert found.tolist() == positions.tolist()
    assert np.array_equal(values, two[positions])


def test_estimates_of_a_sketch_are_unbiased_and_as_good_as_with_a_hash_of_each_element():
    # One row: other elements of a column add an error of mean 0; each from another group has variance x^2 / columns.
    n, columns, steps = 60, 16, 4000
    compressor, x = method_of(compressor="sketch_sgd", rows=1, columns=columns).compressor, spread(60)
    errors = []
    for step in range(steps):
        ctx = context(NumpyBackend(), n, step=step)
        hashes = compressor.hashes(ctx)
        errors.append(compressor.estimate(compressor.sketch(x, hashes, ctx), hashes, ctx) - x)
    group = np.arange(n) // columns
    variance = (group[:, None] != group) @ x.astype(np.float64) ** 2 / columns
    assert (abs(np.mean(errors, 0)) <= 5 * np.sqrt(variance / steps)).all()
    np.testing.assert_allclose(np.mean(np.square(errors), 0), variance, rtol=0.3)


def test_arctopk_finds_heavy_rows(xp):
    n = 5000
    method = method_of(compressor="arctopk", compress_ratio=0.05, row_size=16, sketch_size=4)
    rows = np.arange(15) * 20 + 3
    x = (normal(n) / 100).astype(np.float32)
    x.reshape(-1)[(rows[:, None] * 16 + np.arange(16)).reshape(-1)[: 15 * 16]] += normal(15 * 16)
    _, found = host(xp, send(method, xp, x, context(xp, n))[0])
    assert found.tolist() == rows.tolist()


def test_arctopk_sends_every_row_in_time(xp):
    # With error feedback even small rows are eventually sent.
    method, n = method_of(compressor="arctopk", compress_ratio=0.25, row_size=8), 100
    state, seen = method.init(context(xp, n)), np.zeros(n, bool)
    g = np.linspace(0.1, 1, n).astype(np.float32)
    for step in range(60):
        ctx, before = context(xp, n, step=step), state
        payload, state = alone(lambda ctx: method.encode(xp.asarray(g.copy(), "float32"), before, ctx), ctx)
        seen |= receive(method, xp, payload, ctx) != 0
    assert seen.all()


def test_chunktopk_sends_the_largest_of_each_chunk(xp):
    method, n = method_of(compressor="chunktopk", chunk_size=512, chunk_k=8), 512 * 3 + 5
    x = spread(n)
    payload, _ = send(method, xp, x, context(xp, n))
    found = receive(method, xp, payload, context(xp, n))
    for start in range(0, n, 512):
        part, sent = x[start : start + 512], found[start : start + 512]
        largest = np.sort(np.argsort(-abs(part), kind="stable")[:8])
        assert np.flatnonzero(sent).tolist() == largest.tolist()
        assert len(set(abs(sent[largest]).tolist())) == 2
        assert np.array_equal(np.sign(sent[largest]), np.sign(part[largest]))
