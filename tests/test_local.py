"""Local training: the algorithm on every toolkit, bytes, faults, states, and real workers."""

import functools
import re
from dataclasses import dataclass

import numpy as np
import pytest
from launch import launch
from methods import BACKENDS, backend, normal
from support.local import METHODS, SHAPES, START, Worker, drift, equal, finish, step, team

import grace
from grace import checkpoint, grace_from_params
from grace.compressors.measured.topk import TopK
from grace.compressors.studies.chunktopk import ChunkTopK
from grace.local import DiLoCo, LocalSGD, PeerMean, SlowMo, SparseLoCo, Streaming, from_params, in_turn
from grace.testing import check_compressor
from grace.transports.local import LocalTransport, World

# Two equal workers, w = 1, inner gradient 2, inner learning rate 1, two fragments, H = 6, outer SGD of learning rate 2:
# by delay and mixture, each fragment's value after 0 .. 15 steps.
FIXTURES = {
    (0, 0.0): (
        [1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41, -43, -45, -59],
        [1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47, -49, -51, -53],
    ),
    (0, 0.5): (
        [1, -1, -3, -8, -10, -12, -14, -16, -18, -24.5, -26.5, -28.5, -30.5, -32.5, -34.5, -40.25],
        [1, -1, -3, -5, -7, -9, -17, -19, -21, -23, -25, -27, -32, -34, -36, -38],
    ),
    (1, 0.0): (
        [1, -1, -3, -7, -9, -11, -13, -15, -17, -27, -29, -31, -33, -35, -37, -47],
        [1, -1, -3, -5, -7, -9, -19, -21, -23, -25, -27, -29, -39, -41, -43, -45],
    ),
    (1, 0.5): (
        [1, -1, -3, -6, -8, -10, -12, -14, -16, -21.5, -23.5, -25.5, -27.5, -29.5, -31.5, -35.75],
        [1, -1, -3, -5, -7, -9, -15, -17, -19, -21, -23, -25, -29, -31, -33, -35],
    ),
    (0, 1.0): ([1 - 2 * t for t in range(16)],) * 2,
    (1, 1.0): ([1 - 2 * t for t in range(16)],) * 2,
}
NESTEROV = [-9.64, -24.816, -44.0744]  # one fragment, H = 4, outer lr 0.7, momentum 0.9: after 4, 8, 12 steps
NONE = {"compressor": "none"}


def fixture(delay, alpha, transport=None):
    settings = {"outer_lr": 2.0, "outer_momentum": 0.0, "fragments": 2}
    settings |= {"fragment_sync_delay": delay, "fragment_update_alpha": alpha}
    return DiLoCo(grace_from_params(NONE, transport), 6, **settings)


# -- the algorithm -------------------------------------------------------------------------------------------------
def test_two_fragments_with_delay_and_mixture(xp):
    for (delay, alpha), wanted in FIXTURES.items():
        workers = team(xp, 2, {"0": np.ones(3), "1": np.ones(3)}, functools.partial(fixture, delay, alpha))
        found = [["1", "1"]]
        for _ in range(15):
            step(workers, lambda rank: {"0": 2.0, "1": 2.0})
            assert all(np.array_equal(workers[0].numpy(name), workers[1].numpy(name)) for name in "01")
            found.append([workers[0].numpy(name)[0] for name in "01"])
        assert np.array_equal(np.array(found, float).T, wanted), (delay, alpha)


def test_nesterov(xp):
    make = lambda transport: DiLoCo(grace_from_params(NONE, transport), 4)  # noqa: E731
    workers, found = team(xp, 2, {"w": np.ones(1)}, make, dtype="float64"), []
    for t in range(12):
        step(workers, lambda rank: {"w": 2.0})
        if t % 4 == 3:
            found.append(workers[0].numpy("w")[0])
    np.testing.assert_allclose(found, NESTEROV, rtol=1e-15)


def test_heavy_ball():
    # The same formulas in Python: v = mu v + D, b = b - eta v.
    make = lambda transport: SlowMo(grace_from_params(NONE, transport), 2, 0.5, outer_lr=0.25)  # noqa: E731
    workers, base, momentum = team(backend("numpy"), 2, {"w": np.ones(1)}, make, dtype="float64"), 1.0, 0.0
    for t in range(6):
        step(workers, lambda rank: {"w": 1.0 + rank})
        if t % 2:
            momentum = 0.5 * momentum + 3.0
            base -= 0.25 * momentum
            assert workers[0].numpy("w")[0] == workers[1].numpy("w")[0] == base


def test_exchanging_in_every_step_is_synchronous_sgd():
    xp, size = backend("numpy"), 4
    workers = team(xp, size, {"w": normal(30, 20)}, lambda t: LocalSGD(grace_from_params(NONE, t), 1), dtype="float64")
    data = [(normal(50, 20, seed=rank), normal(50, 30, seed=10 + rank)) for rank in range(size)]

    def gradient(w, rank):
        x, y = (each.astype(np.float64) for each in data[rank])
        return (w @ x.T - y.T) @ x / len(x)

    synchronous = workers[0].numpy("w")
    for _ in range(10):
        step(workers, lambda rank: {"w": 0.1 * gradient(workers[rank].numpy("w"), rank)})
        synchronous = synchronous - 0.1 * np.mean([gradient(synchronous, rank) for rank in range(size)], 0)
    for worker in workers:
        assert np.abs(worker.numpy("w") - synchronous).max() <= 1e-15 * np.abs(synchronous).max()


# TensorFlow is slow in this process; its real workers run the other methods.
LANDINGS = [(method, name) for method in METHODS for name in BACKENDS if name != "tensorflow" or method == "topk"]


@pytest.mark.parametrize("method, name", LANDINGS)
def test_base_and_momentum_are_equal_everywhere_after_every_landing(method, name):
    def make(transport):
        grc = grace_from_params(METHODS[method], transport)
        return DiLoCo(grc, 4, fragments=2, fragment_sync_delay=1, fragment_update_alpha=0.25)

    workers = team(backend(name), 3, START, make)
    for t in range(8):
        step(workers, lambda rank, t=t: drift(t, rank, SHAPES))
        states = [worker.local.global_state() for worker in workers]
        assert all(equal(state, states[0]) for state in states)
        assert workers[0].local.landed == (t + 1) // 2
    assert not np.array_equal(workers[0].numpy("a"), workers[1].numpy("a"))  # a quarter of "a" stays the worker's own
    finish(workers)
    for worker in workers:
        for name in SHAPES:
            assert np.array_equal(worker.numpy(name), np.asarray(worker.local.global_state()["base"][name]))


@pytest.mark.parametrize("method", ["topk", "powersgd", "qsgd"])
def test_what_was_sent_and_what_is_left_is_all_that_moved(method):
    # With outer_lr = 1, LocalSGD's base moves by the mean of the sent movements.
    params = {**METHODS[method], "memory": "residual", "min_numel": 0}
    workers = team(backend("numpy"), 2, START, lambda t: LocalSGD(grace_from_params(params, t), 6, fragments=2))
    total = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for t in range(18):
        before = workers[0].local.global_state()["base"]
        for rank, worker in enumerate(workers if t % 3 == 2 else []):  # in a step that launches and lands an exchange
            moved = drift(t, rank, SHAPES)
            for name in worker.local.fragments[worker.local.landed % 2]:
                total[name] += before[name] - (worker.numpy(name) - moved[name])
        step(workers, lambda rank, t=t: drift(t, rank, SHAPES))
    tensors = [worker.local.grace.state_dict()["tensors"] for worker in workers]
    base = workers[0].local.global_state()["base"]
    for name in SHAPES:
        left = [np.zeros(SHAPES[name])] * 2
        keys = [key for key in tensors[0].get(name, {}) if key.endswith("memory/residual")]
        if keys:
            left = [np.reshape(each[name][keys[0]], SHAPES[name]) for each in tensors]
        np.testing.assert_allclose(2 * (START[name] - base[name]) + sum(left), total[name], atol=2e-5)
    assert any(np.abs(each["a"]["memory/residual"]).max() > 0.01 for each in tensors)


def test_weights_count_by_worker_and_exchange():
    weights = [[1.0, 0.5, 2.0], [0.25, 1.0, 1.5]]  # for each worker, the weights of three exchanges

    def make(transport):
        calls = iter(weights[transport.rank])
        return DiLoCo(grace_from_params(NONE, transport), 1, 1.0, 0.0, weights=lambda: next(calls))

    workers, base = team(backend("numpy"), 2, {"w": np.ones(4)}, make, dtype="float64"), 1.0
    for exchange in range(3):
        step(workers, lambda rank: {"w": 1.0 + rank})
        w0, w1 = weights[0][exchange], weights[1][exchange]
        base -= (w0 * 1.0 + w1 * 2.0) / (w0 + w1)
        np.testing.assert_allclose([worker.numpy("w") for worker in workers], base, rtol=1e-7)  # weights are float32
    make = lambda transport: LocalSGD(grace_from_params(NONE, transport), 1, weights=0.0)  # noqa: E731
    with pytest.raises(ValueError, match="must be a positive number"):
        step(team(backend("numpy"), 1, {"w": np.ones(4)}, make), lambda rank: {})


def test_narrow_parameters_have_a_wide_base(xp):
    # In float16, 0.1 of a unit in the last place is lost, but ten of them add up to one.
    unit = 2.0**-11
    make = lambda transport: LocalSGD(grace_from_params(NONE, transport), 1, outer_lr=0.1)  # noqa: E731
    workers, values = team(xp, 1, {"w": np.ones(2)}, make, dtype="float16"), []
    for _ in range(12):
        step(workers, lambda rank: {"w": unit})
        values.append(float(workers[0].numpy("w")[0]))
    assert values[0] == 1.0
    assert values[-1] < 1.0
    assert str(np.asarray(workers[0].local.global_state()["base"]["w"]).dtype) == "float32"


def test_buffers_are_averaged_once_in_a_round(xp):
    def make(transport):
        return LocalSGD(grace_from_params(NONE, transport), 2, fragments=2, weights=1.0 + 2 * transport.rank)

    buffers = {"mean": np.ones(5, np.float32), "count": np.ones(1, np.int64)}
    workers = team(xp, 2, {"a": np.ones(3), "b": np.ones(3)}, make, buffers=buffers)
    for rank, worker in enumerate(workers):
        worker.buffers = {n: xp.asarray(b * (1 + rank), str(b.dtype)) for n, b in buffers.items()}
    step(workers, lambda rank: {})
    assert [float(worker.numpy("mean")[0]) for worker in workers] == [1, 2]
    step(workers, lambda rank: {})
    assert [float(worker.numpy("mean")[0]) for worker in workers] == [1.75, 1.75]  # (1 + 3 * 2) / (1 + 3)
    assert [int(worker.numpy("count")[0]) for worker in workers] == [1, 2]


def test_a_base_on_the_host_has_the_same_bits(xp):
    found = []
    for on_host in (False, True):
        make = lambda t, on_host=on_host: DiLoCo(grace_from_params(METHODS["topk"], t), 2, on_host=on_host)  # noqa: E731
        workers = team(xp, 2, START, make)
        for t in range(4):
            step(workers, lambda rank, t=t: drift(t, rank, SHAPES))
        found.append([workers[0].local.global_state(), {name: workers[0].numpy(name) for name in SHAPES}])
        assert isinstance(workers[0].local._model.bases["a"], np.ndarray) == (on_host or xp.name == "numpy")
    assert equal(*found)


def test_finish_is_one_last_exchange_and_no_second_one():
    workers = team(backend("numpy"), 2, {"w": np.ones(1)}, lambda t: DiLoCo(grace_from_params(NONE, t), 4))
    for _ in range(6):
        step(workers, lambda rank: {"w": 1.0 + rank})
    finish(workers)
    after = workers[0].local.state_dict()
    assert workers[0].numpy("w") == workers[1].numpy("w") == after["base"]["w"]
    finish(workers)  # a second call must not move the base by the momentum
    assert equal(workers[0].local.state_dict(), after)
    step(workers, lambda rank: {"w": 1.0})
    assert workers[0].local.state_dict()["inner"] == 1


def test_a_step_of_the_grace_is_a_turn_of_all_fragments():
    # ACP-SGD alternates its factors by step: with a step for each fragment, a fragment would use only one of them.
    params = {"compressor": "acpsgd", "compress_rank": 2}
    workers = team(backend("numpy"), 2, START, lambda t: LocalSGD(grace_from_params(params, t), 2, fragments=2))
    for t in range(4):
        step(workers, lambda rank, t=t: drift(t, rank, SHAPES))
        assert workers[0].local.grace.steps == (t + 1) // 2


# -- settings ------------------------------------------------------------------------------------------------------
def test_settings_that_cannot_work_name_the_remedy():
    cases = {
        "take 8 or 12": {"sync_every": 10, "fragments": 4},
        "take 4": {"sync_every": 2, "fragments": 4},
        "must be in 0 .. 2": {"sync_every": 6, "fragments": 2, "fragment_sync_delay": 3},
        "sync_every=0 must be 1": {"sync_every": 0},
        "fragment_update_alpha=1.5": {"sync_every": 6, "fragment_update_alpha": 1.5},
        "outer_lr=0": {"sync_every": 6, "outer_lr": 0.0},
        "outer_momentum=1": {"sync_every": 6, "outer_momentum": 1.0},
    }
    for message, settings in cases.items():
        with pytest.raises(ValueError, match=message):
            DiLoCo(grace_from_params(NONE), **settings)
    with pytest.raises(TypeError, match=r"sync_every=2\.5 is a number of inner steps"):
        DiLoCo(grace_from_params(NONE), 2.5)
    with pytest.raises(TypeError, match="a Grace is needed, not dict"):
        DiLoCo(NONE, 4)
    for params, message in [({"nonfinite": "zero"}, "nonfinite='poison'"), ({"fuse": "model"}, "fuse='tensor'")]:
        with pytest.raises(ValueError, match=message):
            DiLoCo(grace_from_params({**NONE, **params}), 4)
    with pytest.raises(ValueError, match="'auto' times training steps"):
        DiLoCo(grace_from_params({"compressor": "auto"}), 4)
    with pytest.warns(UserWarning, match="set outer_momentum to 0"):
        DiLoCo(grace_from_params({"compressor": "topk", "memory": "dgc"}), 4)
    with pytest.raises(ValueError, match=r"'dion' returns updates.*set outer_momentum to 0"):
        DiLoCo(grace_from_params({"compressor": "dion"}), 4)
    built = grace_from_params(NONE)
    built.build(START)
    with pytest.raises(ValueError, match="averages tensors already"):
        DiLoCo(built, 4)
    local = LocalSGD(grace_from_params(NONE), 4)
    with pytest.raises(RuntimeError, match="call build"):
        local.step()
    with pytest.raises(TypeError, match="'n' has dtype int64"):
        local.build({"n": np.arange(3)})
    local.build(START)
    with pytest.raises(RuntimeError, match="build it once"):
        local.build(START)


def test_fragments_are_runs_of_about_equal_bytes_or_as_listed():
    for fragments, wanted in [
        (1, [("a", "b", "c", "d")]),
        (2, [("a",), ("b", "c", "d")]),
        (4, [("a",), ("b",), ("c",), ("d",)]),
        ([["a", "c"], ["b", "d"]], [("a", "c"), ("b", "d")]),
    ]:
        local = LocalSGD(grace_from_params(NONE), 4, fragments=fragments)
        local.build(START)
        assert local.fragments == wanted
    local = LocalSGD(grace_from_params(NONE), 4, fragments=2)
    local.build({"p": np.ones(5), "q": np.ones(5), "r": np.ones(10)})
    assert local.fragments == [("p", "q"), ("r",)]
    for fragments, message in [
        ([["a", "b"], ["c"]], "lacks a parameter of the model, 'd'"),
        ([["a", "b", "c"], ["d", "e"]], "names a parameter that the model lacks, 'e'"),
        ([["a", "b", "c"], ["d", "a"]], "names 'a' twice"),
        (5, "only 4 parameters"),
    ]:
        with pytest.raises(ValueError, match=message):
            LocalSGD(grace_from_params(NONE), 20, fragments=fragments).build(START)


def test_presets_and_dictionaries_are_settings():
    local = from_params({"local": {"sync_every": 8, "outer_lr": 0.5}, "compressor": "topk", "compress_ratio": 0.1})
    assert (local.settings.sync_every, local.settings.outer_lr) == (8, 0.5)
    assert local.grace.method.compressor.compress_ratio == 0.1
    with pytest.raises(ValueError, match="how often workers exchange"):
        from_params({"compressor": "topk"})
    with pytest.raises(ValueError, match="choose from localsgd, slowmo, diloco, streaming, sparseloco"):
        from_params({"local": {"preset": "gossip", "sync_every": 8}})
    sparse = from_params({"local": {"preset": "sparseloco", "sync_every": 8}, "chunk_k": 8})
    assert (sparse.settings.outer_lr, sparse.settings.outer_momentum) == (1, 0)
    assert (sparse.grace.method.compressor.chunk_k, sparse.grace.method.memory.beta) == (8, 0.95)
    streaming = Streaming(grace_from_params(NONE), 8, 2)
    assert (streaming.settings.fragment_sync_delay, streaming.settings.fragment_update_alpha) == (1, 0.5)


# -- means of peers ------------------------------------------------------------------------------------------------
SENT = [[4.0, 1.0, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0], [0.0, 0.0, 8.0, 1.0]]
"""Pseudo-gradients of three workers, each of which sends the largest element: 4 and 2 at place 0, and 8 at place 2."""


@pytest.mark.parametrize(
    "means, wanted",
    [
        ({}, [2, 0, 8 / 3, 0]),
        ({"average": "senders"}, [3, 0, 8, 0]),
        ({"clip": "median"}, [2, 0, 4 / 3, 0]),  # the median norm is 4
        ({"average": "senders", "clip": "median"}, [3, 0, 4, 0]),
    ],
    ids=lambda each: "-".join(map(str, each.values())) if isinstance(each, dict) else "",
)
def test_means_over_senders_and_clipped_to_the_median_norm(xp, means, wanted):
    params = {"compressor": "topk", "compress_ratio": 0.25, "min_numel": 0}
    params |= {} if means else {"communicator": "allgather"}  # otherwise the default communicator
    make = lambda t: from_params({"local": {"preset": "localsgd", "sync_every": 1, **means}, **params}, t)  # noqa: E731
    workers = team(xp, 3, {"w": np.zeros(4)}, make)
    step(workers, lambda rank: {"w": SENT[rank]})
    for rank, worker in enumerate(workers):
        np.testing.assert_allclose(worker.numpy("w"), -np.array(wanted), rtol=1e-6)
        left = np.where(np.array(SENT[rank]) == max(SENT[rank]), 0, SENT[rank])
        kept = worker.local.grace.state_dict()["tensors"]["w"]["memory/residual"]
        np.testing.assert_array_equal(np.asarray(kept).reshape(-1), left)


def test_a_mean_of_peers_is_equal_everywhere_and_keeps_the_laws():
    make = lambda t: SparseLoCo(2, t, average="senders", clip="median", fragments=2)  # noqa: E731
    workers = team(backend("numpy"), 3, START, make)
    for t in range(8):
        step(workers, lambda rank, t=t: drift(t, rank, SHAPES))
        states = [worker.local.global_state() for worker in workers]
        assert all(equal(state, states[0]) for state in states)
    assert workers[0].local.report().skipped == 0
    workers[1].values["a"][3, 5] = np.inf
    before = workers[0].local.global_state()["base"]["a"]
    with pytest.warns(UserWarning, match="not finite"):
        finish(workers)
    assert all(equal(worker.local.global_state()["base"]["a"], before) for worker in workers)
    check_compressor(PeerMean(ChunkTopK(64, 8), "senders", "median"), ["numpy"])


def test_what_has_no_mean_of_peers_is_refused():
    for means, message in (
        ({"average": "peers"}, "choose 'workers' or 'senders'"),
        ({"clip": 1.0}, "choose 'none' or 'median'"),
    ):
        with pytest.raises(ValueError, match=message):
            SparseLoCo(4, **means)
    for compressor in ("powersgd", "none", "signsgd"):
        with pytest.raises(ValueError, match="need each worker's payload"):
            from_params({"local": {"sync_every": 4, "clip": "median"}, "compressor": compressor})
    with pytest.raises(ValueError, match="use average='workers'"):
        SparseLoCo(4, average="senders", weights=1.0)


def test_bytes_of_a_step_are_those_of_a_payload_over_h():
    # SparseLoCo with whole chunks: (8 + 4 + 2) bits for each of 64 elements and for two magnitudes, per 4096 elements.
    world, rows = World(2), 25
    start = {"w": normal(rows, 4096)}
    workers = [
        Worker(backend("numpy"), start, lambda t: SparseLoCo(5, t), LocalTransport(world, rank)) for rank in (0, 1)
    ]
    for t in range(10):
        step(workers, lambda rank, t=t: drift(t, rank, {"w": (rows, 4096)}))
    report = workers[0].local.report()
    assert report.steps == 10
    assert (report.bytes_sent - 2 * 36) * 8 * 5 / 10 == 0.234375 * rows * 4096  # two handshakes
    assert report.ratio == pytest.approx(5 * 32 / 0.234375, rel=0.02)
    assert "every 5 steps" in str(report)


def test_later_rounds_leave_while_training_goes_on():
    params = {**METHODS["powersgd"], "min_numel": 0}  # two rounds of communication
    make = lambda t: LocalSGD(grace_from_params(params, t), 4, fragment_sync_delay=2)  # noqa: E731
    workers = team(backend("numpy"), 2, START, make)
    rounds = []
    for t in range(8):
        step(workers, lambda rank, t=t: drift(t, rank, SHAPES))
        rounds.append(workers[0].local._exchange.flight.rounds if workers[0].local.in_flight else None)
    assert rounds == [None, 0, 0, None, None, 0, 1, None]
    assert "an exchange has 2 rounds" in workers[0].local.report().exchange


# -- faults --------------------------------------------------------------------------------------------------------
class Lossy(LocalTransport):
    """A transport in which all workers fail at a given point."""

    fault = None

    def start(self, collectives, name):
        if Lossy.fault == "launch":
            raise ConnectionError("cut at launch")
        wait = super().start(collectives, name)

        def finish():
            if Lossy.fault == "flight":
                raise ConnectionError("cut in flight")
            return wait()

        return finish


@dataclass(frozen=True)
class Failing(TopK):
    """Top-k that fails if `Lossy.fault` names it."""

    def compress(self, x, state, ctx):
        if Lossy.fault == "compress" and ctx.name == "a":
            raise ArithmeticError("cut in compress")
        return super().compress(x, state, ctx)


@pytest.mark.parametrize("fault", ["launch", "compress", "flight"])
def test_an_exchange_that_fails_changes_nothing_and_the_next_one_has_it_all(fault, xp):
    def make(transport):
        params = {"compressor": Failing(0.1), "min_numel": 0}
        return DiLoCo(grace_from_params(params, transport), 4, fragment_sync_delay=1, weights=1.0)

    def own(worker):
        return [worker.local.global_state(), worker.local.grace.state_dict(), {n: worker.numpy(n) for n in SHAPES}]

    runs, last = [], 7 if fault == "flight" else 6  # the step that launches, or the one that lands
    for failing in (False, True):
        world = World(2)
        workers = [Worker(xp, START, make, Lossy(world, rank)) for rank in (0, 1)]
        for t in range(4):
            step(workers, lambda rank, t=t: drift(t, rank, SHAPES))
        for t in range(4, 8):
            if failing and t != last:
                step(workers, lambda rank, t=t: drift(t, rank, SHAPES))
                continue
            for rank, worker in enumerate(workers):
                worker.move(drift(t, rank, SHAPES))
                if failing:
                    before = own(worker)
                    Lossy.fault = fault
                    with pytest.raises((ConnectionError, ArithmeticError), match="cut"):
                        worker.local.step()
                    Lossy.fault = None
                    assert not worker.local.in_flight
                    assert equal(own(worker), before)
        for t in range(8, 12):
            step(workers, lambda rank, t=t: drift(t, rank, SHAPES))
        assert [worker.local.landed for worker in workers] == [2, 2]
        runs.append([own(worker) for worker in workers])
    assert equal(*runs)
    assert equal(runs[1][0][0], runs[1][1][0])


def test_workers_of_different_landings_find_out_and_begin_again_from_the_last_base():
    make = lambda transport: DiLoCo(grace_from_params(NONE, transport), 4, fragments=2)  # noqa: E731
    world = World(2)
    workers = [Worker(backend("numpy"), START, make, Lossy(world, rank)) for rank in (0, 1)]
    step(workers, lambda rank: drift(0, rank, SHAPES))
    runs = [worker.local.stepping() for worker in workers]
    for _ in range(2):  # the handshake, and the launch
        assert [next(run, "ended") for run in runs] == [None, None]
    Lossy.fault = "flight"
    with pytest.raises(ConnectionError):
        in_turn(runs[:1])
    Lossy.fault = None
    in_turn(runs[1:])
    assert [worker.local.landed for worker in workers] == [0, 1]
    step(workers, lambda rank: drift(2, rank, SHAPES))
    runs = [worker.local.stepping() for worker in workers]
    assert [next(run, "ended") for run in runs] == [None, None]
    for run, worker in zip(runs, workers, strict=True):
        with pytest.raises(RuntimeError, match="different numbers of exchanges"):
            in_turn([run])
        assert not worker.local.in_flight
    states, world = [worker.local.state_dict() for worker in workers], World(2)
    for rank, worker in enumerate(workers):
        worker.local.reset(LocalTransport(world, rank), states)
        assert equal(worker.local.global_state()["base"], states[1]["base"])
    assert np.array_equal(workers[0].numpy("a"), states[1]["base"]["a"])
    for t in range(4):
        step(workers, lambda rank, t=t: drift(t, rank, SHAPES))
    assert equal(workers[0].local.global_state(), workers[1].local.global_state())


class Team:
    """Workers of local training with top-k, some of which are killed; others join."""

    def __init__(self, momentum):
        self.momentum, self.t = momentum, 0
        self.workers = []

    def make(self, transport):
        params = {**METHODS["topk"], "communicator": "allgather", "min_numel": 0}
        settings = {"outer_lr": 1.0, "outer_momentum": self.momentum, "fragment_sync_delay": 1}
        return DiLoCo(grace_from_params(params, transport), 4, **settings)

    def residuals(self, workers):
        tensors = [worker.local.grace.state_dict()["tensors"] for worker in workers]
        return {
            name: sum(each[name]["memory/residual"].astype("f8").reshape(shape) for each in tensors)
            for name, shape in SHAPES.items()
        }

    def states(self, workers):
        return [(w.local.global_state(), {n: w.numpy(n) for n in SHAPES}, w.local.landed) for w in workers]

    def gather(self, survivors, joins):
        """Continue with ``survivors`` and new workers; checks all states."""
        before, rest = self.states(survivors), self.residuals(survivors)
        newest, _, landed = max(before, key=lambda state: state[2])
        states = [worker.local.state_dict() for worker in survivors]
        new = [Worker(backend("numpy"), START, self.make, Lossy(World(1), 0)) for _ in range(joins)]
        self.workers = [*survivors, *new]
        world = World(len(self.workers))
        for rank, worker in enumerate(self.workers):
            worker.local.reset(Lossy(world, rank), states)
        for rank, (shared, own, _) in enumerate(self.states(self.workers)):
            assert equal(shared, newest)
            stays = rank < len(before) and before[rank][2] == landed
            assert equal(own, before[rank][1] if stays else newest["base"])
        for name, left in self.residuals(self.workers).items():  # only the killed worker's residual is lost
            np.testing.assert_allclose(left, rest[name], atol=1e-5)

    def interval(self, fault=None):
        """Train until a landing. A ``fault`` stops all workers ("part": only worker 0), and must change nothing."""
        before, rest, moved = self.states(self.workers), self.residuals(self.workers), {}
        for inner in range(1, 5):
            for rank, worker in enumerate(self.workers):
                worker.move(drift(self.t, rank, SHAPES))
            self.t += 1
            base = before[0][0]["base"]
            if inner == 3:
                moved = {n: sum(base[n].astype("f8") - worker.numpy(n) for worker in self.workers) for n in SHAPES}
            runs = [worker.local.stepping() for worker in self.workers]
            if (inner, fault) in ((3, "launch"), (4, "flight"), (4, "part")):
                failed = runs[:1] if fault == "part" else runs
                Lossy.fault = "launch" if fault == "launch" else "flight"
                for run in failed:
                    with pytest.raises(ConnectionError, match="cut"):
                        in_turn([run])
                Lossy.fault = None
                in_turn(runs[len(failed) :])
                for (state, _, landed), worker in list(zip(before, self.workers, strict=True))[: len(failed)]:
                    assert equal(worker.local.global_state(), state)
                    assert worker.local.landed == landed
                return
            in_turn(runs)
        after, left = self.workers[0].local.global_state(), self.residuals(self.workers)
        assert all(equal(worker.local.global_state(), after) for worker in self.workers)
        for name in SHAPES:
            mean = base[name].astype("f8") - after["base"][name]
            if self.momentum:
                mean = after["momentum"][name].astype("f8") - self.momentum * before[0][0]["momentum"][name]
            np.testing.assert_allclose(
                len(self.workers) * mean + left[name], moved[name] + rest[name], atol=1e-4, err_msg=name
            )


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_survivors_of_twenty_kills_are_equal_and_lose_nothing(momentum):
    rng, group = np.random.default_rng(7), Team(momentum)
    group.workers = team(backend("numpy"), 3, START, group.make)
    group.gather(group.workers, 0)
    for kill in range(20):
        group.interval()
        kind = ("launch", "flight", "landed", "part", "joining")[kill % 5]
        if kind == "joining":
            group.gather(group.workers, 1)
            group.interval("launch")
            lost = len(group.workers) - 1  # the worker that joined last
        else:
            group.interval(None if kind == "landed" else kind)
            lost = int(rng.integers(len(group.workers)))
        rest = [worker for rank, worker in enumerate(group.workers) if rank != lost]
        group.gather(rest, int(rng.integers(max(0, 2 - len(rest)), 5 - len(rest))))
    group.interval()
    finish(group.workers)
    base = group.workers[0].local.global_state()["base"]
    assert all(np.array_equal(worker.numpy(name), base[name]) for worker in group.workers for name in SHAPES)


def test_a_mean_that_is_not_finite_leaves_its_tensor_alone(xp):
    make = lambda t: DiLoCo(grace_from_params({**METHODS["topk"], "min_numel": 0}, t), 1)  # noqa: E731
    workers = team(xp, 2, START, make)
    step(workers, lambda rank: drift(0, rank, SHAPES))
    before = workers[0].local.global_state(), workers[0].local.grace.state_dict()["tensors"]
    with pytest.warns(UserWarning, match="'b' is not finite"):
        step(workers, lambda rank: {**drift(1, rank, SHAPES), "b": np.full(1500, np.inf if rank else 0.0, np.float32)})
    after = workers[0].local.global_state(), workers[0].local.grace.state_dict()["tensors"]
    assert workers[0].local.report().skipped == 1
    for name in SHAPES:
        assert equal(before[0]["base"][name], after[0]["base"][name]) == (name == "b")
        assert equal(before[0]["momentum"][name], after[0]["momentum"][name]) == (name == "b")
        assert equal(before[1][name], after[1][name]) == (name == "b")
    assert np.isinf(workers[1].numpy("b")).all()
    assert np.isfinite(workers[0].numpy("b")).all()


# -- states --------------------------------------------------------------------------------------------------------
def resumable(transport, method="qsgd"):
    params = {**METHODS[method], "memory": "residual", "seed": 3}
    settings = {"fragments": 2, "fragment_sync_delay": 2, "fragment_update_alpha": 0.5, "weights": 1.0 + transport.rank}
    return DiLoCo(grace_from_params(params, transport), 6, **settings, on_host=transport.rank == 1)


def test_a_run_goes_on_from_any_inner_step_bit_for_bit(xp):
    buffers = {"mean": np.ones(3, np.float32)}
    steps, whole = 15, team(xp, 2, START, resumable, buffers=buffers)
    saved = []
    for t in range(steps):
        saved.append([
            (checkpoint.to_bytes(worker.local.state_dict()), {n: worker.numpy(n) for n in [*SHAPES, "mean"]})
            for worker in whole
        ])  # fmt: skip
        step(whole, lambda rank, t=t: drift(t, rank, SHAPES))
    moments = range(steps) if xp.name == "numpy" else (5, 7)  # in 5 an exchange is in flight, with two steps to go
    for moment in moments:
        again = team(xp, 2, START, resumable, buffers=buffers)
        for worker, (state, values) in zip(again, saved[moment], strict=True):
            for name, value in values.items():
                worker._put(name, xp.asarray(value, "float32"))
            worker.local.load_state_dict(checkpoint.from_bytes(state))
        assert [worker.local.in_flight for worker in again] == [moment % 3 in (1, 2)] * 2
        for t in range(moment, steps):
            step(again, lambda rank, t=t: drift(t, rank, SHAPES))
        for worker, other in zip(whole, again, strict=True):
            assert equal(worker.local.state_dict(), other.local.state_dict()), moment
            assert all(np.array_equal(worker.numpy(name), other.numpy(name)) for name in [*SHAPES, "mean"]), moment


def test_files_hold_it_and_before_build_it_waits(tmp_path):
    make = lambda transport: DiLoCo(grace_from_params(METHODS["topk"], transport), 4)  # noqa: E731
    (worker,) = team(backend("numpy"), 1, START, make)
    for t in range(6):
        step([worker], lambda rank, t=t: drift(t, rank, SHAPES))
    checkpoint.save(worker.local, tmp_path)
    assert checkpoint.steps(tmp_path) == [6]
    other = make(LocalTransport())
    assert checkpoint.load(other, tmp_path) == 6
    values = {name: worker.numpy(name) for name in SHAPES}
    other.build(values)
    assert equal(other.state_dict(), worker.local.state_dict())
    assert equal(values, {name: worker.numpy(name) for name in SHAPES})  # parameters remain this worker's own


def test_another_number_of_workers_begins_an_interval_from_the_base():
    make = lambda t: DiLoCo(grace_from_params({**METHODS["topk"], "communicator": "allgather"}, t), 4)  # noqa: E731
    three = team(backend("numpy"), 3, START, make)
    for t in range(6):
        step(three, lambda rank, t=t: drift(t, rank, SHAPES))
    states = [worker.local.state_dict() for worker in three]
    for size, given in [(2, states), (4, states[:2])]:
        workers = team(backend("numpy"), size, START, make)
        if len(given) == 3:  # all states, from checkpoints
            for worker in workers:
                worker.local.load_state_dict(*given)
        else:  # two workers of an elastic job remain, and two join
            world = World(size)
            workers = [*three[:2], *workers[2:]]
            for rank, worker in enumerate(workers):
                worker.local.reset(LocalTransport(world, rank), given)
        for rank, worker in enumerate(workers):
            assert equal(worker.local.global_state(), three[0].local.global_state())
            assert worker.local.steps == 6
            begins = size == 2 or rank >= 2  # a remaining worker keeps its own parameters
            assert np.array_equal(worker.numpy("a"), states[0]["base"]["a"]) == begins
        left = sum(worker.local.grace.state_dict()["tensors"]["a"]["memory/residual"] for worker in workers)
        before = sum(state["grace"]["tensors"]["a"]["memory/residual"] for state in given)
        np.testing.assert_allclose(left, before, atol=1e-6)
        for t in range(4):
            step(workers, lambda rank, t=t: drift(t, rank, SHAPES))
        assert all(equal(worker.local.global_state(), workers[0].local.global_state()) for worker in workers)
        assert workers[0].local.landed == 2


def test_all_workers_exchange_in_a_finish_right_after_one_joins():
    make = lambda t: DiLoCo(grace_from_params(NONE, t), 4)  # noqa: E731
    for steps in (4, 6):  # right after a landing, and between landings
        survivors = team(backend("numpy"), 2, START, make)
        for t in range(steps):
            step(survivors, lambda rank, t=t: drift(t, rank, SHAPES))
        states, world = [worker.local.state_dict() for worker in survivors], World(3)
        workers = [*survivors, *team(backend("numpy"), 1, START, make)]
        for rank, worker in enumerate(workers):
            worker.local.reset(LocalTransport(world, rank), states)
        in_turn(worker.local.finishing() for worker in workers)
        assert [worker.local.landed for worker in workers] == [2] * 3
        assert all(equal(worker.local.global_state(), workers[0].local.global_state()) for worker in workers)


def test_states_that_do_not_fit_are_refused():
    make = lambda transport: LocalSGD(grace_from_params(NONE, transport), 4)  # noqa: E731
    (worker,) = team(backend("numpy"), 1, START, make)
    state = worker.local.state_dict()
    for change, message in [
        ({"settings": "Settings()"}, "use the same settings"),
        ({"base": {"a": START["a"]}}, "belongs to another model"),
        ({"format": 9}, "has format 9"),
    ]:
        with pytest.raises(ValueError, match=message):
            worker.local.load_state_dict({**state, **change})
    with pytest.raises(ValueError, match="none of local training"):
        worker.local.load_state_dict(worker.local.grace.state_dict())
    with pytest.raises(ValueError, match="saved together"):
        worker.local.load_state_dict(state, {**state, "step": 3})


# -- integrations --------------------------------------------------------------------------------------------------
def test_pytorch_fixtures():
    backend("torch")
    import torch

    def train(local, steps, dtype=torch.float32):
        p = [torch.nn.Parameter(torch.ones(2, dtype=dtype)) for _ in local.settings.parts * "p"]
        optimizer, found = torch.optim.SGD(p, lr=1.0), [[1.0] * len(p)]
        assert grace.torch.local(optimizer, local) is optimizer
        for _ in range(steps):
            optimizer.zero_grad()
            (2 * sum(each.sum() for each in p)).backward()
            optimizer.step()
            found.append([each[0].item() for each in p])
        return np.array(found).T

    for (delay, alpha), wanted in FIXTURES.items():
        assert np.array_equal(train(fixture(delay, alpha), 15), wanted), (delay, alpha)
    (found,) = train(DiLoCo(grace_from_params(NONE), 4), 12, torch.float64)
    np.testing.assert_allclose(found[4::4], NESTEROV, rtol=1e-15)


def test_pytorch_buffers_inference_mode_and_parameters_that_come_later():
    backend("torch")
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    local = LocalSGD(grace_from_params(NONE), 2, fragments=2)
    grace.torch.local(optimizer, local, model.named_parameters(), model.named_buffers())
    assert list(local._model.buffers) == ["1.running_mean", "1.running_var"]
    with torch.no_grad():
        model[0].bias.fill_(7.0)  # like a broadcast: the first step takes this value as the base

    def batch():
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()

    batch()
    assert torch.equal(local.global_state()["base"]["0.bias"], torch.full((3,), 7.0))
    with torch.inference_mode():
        local.finish()
    batch()  # fails if `finish` made inference tensors, which cannot be changed in place
    model.train()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    with pytest.raises(RuntimeError, match="parameters that local training does not know"):
        optimizer.step()
    for arguments, message in [((local, optimizer), "optimizer"), ((optimizer, local.grace), "DiLoCo is needed")]:
        with pytest.raises(TypeError, match=message):
            grace.torch.local(*arguments)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = LocalSGD(grace_from_params(NONE), 2)
    grace.torch.local(optimizer, local, model.named_parameters(), hook=False)
    optimizer.step()
    assert local.steps == 0


def test_keras_fixtures():
    backend("tensorflow")
    import keras

    def train(local, steps, dtype="float32"):
        inputs = keras.Input((1,), dtype=dtype)
        layers = [keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", dtype=dtype) for _ in range(2)]
        layers = layers[: local.settings.parts]
        outputs = [layer(inputs) for layer in layers]
        model = keras.Model(inputs, keras.layers.Add(dtype=dtype)(outputs) if len(outputs) > 1 else outputs[0])
        model.compile(keras.optimizers.SGD(1.0), lambda y, prediction: prediction, jit_compile=False)
        found = [[1.0] * len(layers)]

        class Watch(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                found.append([float(layer.kernel[0, 0]) for layer in layers])

        x = np.full((steps, 1), 2.0, dtype)
        callbacks = [grace.tensorflow.LocalCallback(local), Watch()]
        model.fit(x, x, batch_size=1, shuffle=False, verbose=0, callbacks=callbacks)
        base = local.global_state()["base"]
        assert [float(layer.kernel[0, 0]) for layer in layers] == [value.item() for value in base.values()]
        return np.array(found).T

    for (delay, alpha), wanted in FIXTURES.items():
        assert np.array_equal(train(fixture(delay, alpha), 15), wanted), (delay, alpha)
    (found,) = train(DiLoCo(grace_from_params(NONE), 4), 12, "float64")
    np.testing.assert_allclose(found[4::4], NESTEROV, rtol=1e-15)


# -- real processes ------------------------------------------------------------------------------------------------
LAUNCHES = [("torchrun", "torch", 4), ("horovodrun", "horovod", 4), ("horovodrun", "tensorflow", 2)]


@pytest.mark.processes
@pytest.mark.parametrize("launcher, kind, size", LAUNCHES)
def test_workers_in_other_processes(launcher, kind, size, tmp_path):
    found = launch(launcher, size, "local.py", tmp_path, kind)
    for worker in found:
        for key, (delay, alpha) in [(f"fixture {d} {a}", (d, a)) for d, a in worker["fixtures"]]:
            assert np.array_equal(worker[key], np.array(FIXTURES[delay, alpha])[:, : len(worker[key][0])]), key
        assert worker["finished"]
        assert re.search(r"differ in their parameters: .* Begin from the same: .*broadcast", worker["start"])
    for group in {worker["group"] for worker in found}:
        mine = [worker for worker in found if worker["group"] == group]
        for name, history in mine[0]["pair"].items():
            assert len(set(history)) == len(history) == 6, name  # every landing changes base and momentum
            assert all(worker["pair"][name] == history for worker in mine), name
    for name, history in found[0]["all"].items():
        assert len(set(history)) == len(history) == 6, name
        assert all(worker["all"][name] == history for worker in found), name
    # Worker 1 launches half a second late: the others continue to train, and wait for it when the exchange lands.
    assert found[0]["launch seconds"] < 0.25
    assert found[0]["step seconds"] < 0.25
    assert found[0]["land seconds"] > 0.2
    if kind != "tensorflow":
        assert found[0]["under way"] >= 0.1  # messages are in flight during two steps of 0.05 s
    if kind == "torch":
        for worker in found[:-1]:
            assert re.search(r"has lost another one|has waited 5 s", worker["lost"])
            assert worker["unchanged"]
            assert worker["goes on"]
