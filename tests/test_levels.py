"""Two-stage exchanges over a grid of workers: `levels` of communicator "twostage"."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from launch import launch
from methods import backend, lockstep, spread, states, unchanged, workers
from support.groups import equal, groups_of, step, team

from grace import grace_from_params, simulate
from grace.communicators.auto import LinkTimes, choose, levels_for
from grace.core.collectives import AllToAll, arrays_of
from grace.core.grid import Grid, factors
from grace.core.registry import triple
from grace.engine.reshard import parsed, stage
from grace.planner import models, ways
from grace.planner.costs import Cluster, Codec, Curve, Link, Speed
from grace.planner.measured import costs
from grace.planner.profile import Profile, TensorProfile
from grace.transports.local import LocalTransport, World

GRIDS = [(4, 2), (6, 2), (8, 3)]
METHODS = {
    "int4": {"compressor": "blockint"},
    "stochastic": {"compressor": "blockint", "bits": 2, "rounding": "stochastic", "memory": "none"},
    "eden": {"compressor": "eden", "bits": 3},
    "topk": {"compressor": "topk", "compress_ratio": 0.05, "index_coding": "int32"},
    "topk, coded": {"compressor": "topk", "compress_ratio": 0.01, "index_coding": "elias_fano"},
    "signum": {"compressor": "signum"},
    "lengths that vary": {"compressor": "threshold", "threshold": 1.0},
    "1-bit Adam": {"compressor": "efsignsgd", "block_size": 64, "memory": "onebit_adam", "freeze_step": 1},
}
GROUPED = [name for name in METHODS if name not in ("lengths that vary", "1-bit Adam")]


def twostage(params, levels, **more):
    return {"min_numel": 0, **params, "communicator": "twostage", "levels": levels, **more}


# -- the grid -------------------------------------------------------------------------------------------------------
def products(workers, count):
    """All ascending sequences of ``count`` factors of at least 2."""
    if count == 1:
        return [[workers]] if workers > 1 else []
    return [
        [each, *rest]
        for each in range(2, workers + 1)
        if workers % each == 0
        for rest in products(workers // each, count - 1)
        if rest[0] >= each
    ]


@given(st.integers(2, 300), st.integers(1, 4))
def test_factors_are_as_many_and_as_equal_as_possible(number, count):
    found = factors(number, count)
    assert math.prod(found) == number
    possible = [each for many in range(1, count + 1) for each in products(number, many)]
    longest = max(map(len, possible))
    assert len(found) == longest
    assert sum(found) == min(sum(each) for each in possible if len(each) == longest)
    assert list(found) == sorted(found, reverse=True)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_every_worker_is_once_on_each_line_and_behind_one_cell(dims, data):
    grid = Grid(tuple(dims))
    rank = data.draw(st.integers(0, grid.size - 1))
    assert sorted(grid.behind(rank, 0)) == list(range(grid.size))
    assert grid.behind(rank, len(dims)) == [rank]
    for axis, size in enumerate(dims):
        line = grid.line(rank, axis)
        assert len(line) == size
        assert line[grid.place(rank, axis)] == rank
        assert [grid.place(each, axis) for each in line] == list(range(size))
        assert grid.behind(rank, axis) == [cell for each in line for cell in grid.behind(each, axis + 1)]
        assert set(grid.behind(rank, axis)) == {o for o in range(grid.size) if grid.shared(o, rank, axis)}


# -- the exchange ---------------------------------------------------------------------------------------------------
def kept(x, ratio=0.1):
    """The largest tenth of a vector, in place."""
    found, k = np.zeros_like(x), min(len(x), max(1, int(ratio * len(x))))
    best = np.argsort(-abs(x), kind="stable")[:k]
    found[best] = x[best]
    return found


@pytest.mark.parametrize("size, levels, blocks", [(4, 2, 9), (6, 2, 1), (8, 3, 9), (12, 2, 9), (5, 2, 9)])
def test_a_grid_averages_line_by_line(xp, size, levels, blocks):
    """The oracle: top-k with error feedback of each shard, for each worker, of the mean over one axis after another."""
    dims, n = factors(size, levels), 8 * size * blocks - 3
    graces = workers(twostage({"compressor": "topk", "compress_ratio": 0.1}, levels), size)
    for grace in graces:
        grace.build({"w": xp.zeros(n)})
    full = math.ceil(n / (8 * size)) * 8
    cuts = [slice(min(i * full, n), min((i + 1) * full, n)) for i in range(size)]
    residuals = np.zeros((levels + 1, size, n))
    for number in range(3):
        gradients = [spread(n, seed=10 * number + rank) for rank in range(size)]
        found = lockstep(graces, [{"w": xp.asarray(g, "float32")} for g in gradients])
        # x[..., c1, c0, :]: the vector of the worker with these coordinates
        x = np.reshape(np.array(gradients, np.float64), (*reversed(dims), n))
        mean = np.zeros(n)
        for owner, part in enumerate(cuts):
            if part.start == part.stop:
                continue
            here = x[..., part]
            coordinates = np.unravel_index(owner, tuple(reversed(dims)))[::-1]
            for level in range(len(dims) + 1):
                rows = residuals[level].reshape(*reversed(dims), n)
                where = tuple(slice(None) if axis >= level else coordinates[axis] for axis in range(len(dims)))[::-1]
                here = here + rows[(*where, part)]
                sent = np.apply_along_axis(kept, -1, here)
                rows[(*where, part)] = here - sent
                here = sent.mean(-2) if level < len(dims) else sent
            mean[part] = here
        for worker in found:
            np.testing.assert_allclose(np.array(xp.to_numpy(worker["w"])), mean, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["int4", "topk, coded", "lengths that vary"])
@pytest.mark.parametrize("size, levels", GRIDS)
def test_nothing_is_lost(name, size, levels):
    """Means + residuals of each level, each weighted by the workers that share its elements = all gradients."""
    params = METHODS[name]
    shapes = {"large": (30, 200), "small": (500,)}
    graces = workers(twostage(params, levels), size)
    for grace in graces:
        grace.build({each: np.zeros(shape, np.float32) for each, shape in shapes.items()})
    given_, applied = ({each: np.zeros(math.prod(shape)) for each, shape in shapes.items()} for _ in range(2))
    for number in range(10):
        gradients = [{k: spread(*v, seed=size * number + rank) for k, v in shapes.items()} for rank in range(size)]
        found = lockstep(graces, gradients)
        for each in shapes:
            assert all(np.array_equal(found[0][each], other[each]) for other in found)
            given_[each] += np.mean([mine[each].ravel() for mine in gradients], 0, dtype=np.float64)
            applied[each] += found[0][each].ravel()
    left, stages = outstanding(graces, shapes)
    assert stages == {"worker", *(f"level{level}" for level in range(2, levels + 1)), "server"}
    for each in shapes:
        scale = np.abs(given_[each]).max()
        np.testing.assert_allclose(applied[each] + left[each], given_[each], atol=1e-5 * scale, err_msg=each)


def residuals(graces, shapes):
    """By tensor and stage: the sum of all workers' residuals, and the number of workers that hold each element."""
    found = {}
    for state in [grace.state_dict() for grace in graces]:
        for name, cells in state["tensors"].items():
            for key, array in cells.items():
                point, part, field = parsed(key)
                if (part, field) == ("memory", "residual"):
                    start, count = state["points"][name][point]
                    sums = found.setdefault((name, stage(point)), np.zeros((2, math.prod(shapes[name]))))
                    sums[:, start : start + count] += [array, np.ones(count)]
    return found


def outstanding(graces, shapes):
    """By tensor, what the residuals of all workers hold back from the mean; and the stages with residuals."""
    every = residuals(graces, shapes)
    found = {name: np.zeros(math.prod(shape)) for name, shape in shapes.items()}
    for (name, _), (total, holders) in every.items():
        found[name] += total / np.maximum(holders, 1)
    return found, {which for (_, which), (total, _) in every.items() if total.any()}


def poison(xp):
    bad = np.zeros(513, np.float32)
    bad[300] = np.nan

    def change(gradients):
        gradients[1]["t513"] = gradients[1]["t513"] + xp.asarray(bad, "float32")

    return change


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("size, levels, min_shard", [(4, 2, 0), (6, 2, 600), (8, 3, 600)])
def test_a_group_has_the_bits_of_its_tensors(name, size, levels, min_shard):
    xp, sizes = backend("numpy"), (1, 9, 513, 5000)
    params = twostage(METHODS[name], levels, min_shard=min_shard)
    graces = team(params, size, xp, sizes)
    assert groups_of(graces[0]).groups
    singles = {each: team(params, size, xp, (each,)) for each in sizes}
    for number in (1, 2, 3):
        change = poison(xp) if number == 2 else None
        found = step(graces, xp, number, change, sizes)
        for each, alone in singles.items():
            mine = [{f"t{each}": means[f"t{each}"]} for means in found]
            equal(mine, step(alone, xp, number, change if each == 513 else None, (each,)))
    for rank, grace in enumerate(graces):
        assert grace.report().bytes_sent == sum(alone[rank].report().bytes_sent for alone in singles.values())
        assert grace.report().bytes_received == sum(alone[rank].report().bytes_received for alone in singles.values())


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("toolkit", ["numpy", "torch", "tensorflow"])
def test_a_group_computes_what_the_plain_functions_do(name, toolkit, monkeypatch):
    """The law of communicators: an exchange of a group equals `reduce` of each tensor, and keeps the same state."""
    xp, params, sizes = backend(toolkit), twostage(METHODS[name], 2, min_shard=600), (1, 9, 513, 5000)
    size, steps = (4, 2) if toolkit == "tensorflow" else (6, 3)  # TensorFlow's eager operations are slow
    graces = team(params, size, xp, sizes)
    monkeypatch.setenv("GRACE_KERNELS", "off")
    plain = team(params, size, xp, sizes)
    monkeypatch.delenv("GRACE_KERNELS")
    for number in range(1, steps + 1):
        change = poison(xp) if number == 2 else None
        found = step(graces, xp, number, change, sizes)
        monkeypatch.setenv("GRACE_KERNELS", "off")
        assert not groups_of(plain[0]).groups
        wanted = step(plain, xp, number, change, sizes)
        monkeypatch.delenv("GRACE_KERNELS")
        for mine, other in zip(found, wanted, strict=True):
            for key, mean in mine.items():
                np.testing.assert_allclose(mean, other[key], rtol=1e-4, atol=1e-5, err_msg=key)
    for one, other in zip(graces, plain, strict=True):
        assert one.report().bytes_sent == other.report().bytes_sent
        assert one.report().bytes_received == other.report().bytes_received


@pytest.mark.parametrize("name", ["int4", "topk", "eden"])
def test_numbers_in_forwarded_messages_are_aligned(name):
    """Devices cannot read float32 numbers elsewhere, and lengths of payloads in bytes are odd."""
    graces = team(twostage(METHODS[name], 2), 6, backend("numpy"), (5001, 70001))
    (grouped,) = groups_of(graces[0]).groups
    decoder = grouped.group._decoder
    wide = {array for point in decoder.points for array, dtype, _ in point.recipe.arrays if dtype != "uint8"}
    assert wide
    assert all((decoder._places[array] % 4 == 0).all() for array in wide)


@pytest.mark.parametrize("params", [{}, {"min_shard": 600}])
def test_a_level_has_the_same_bits_as_no_levels(params):
    for name in METHODS:
        both = [
            simulate(twostage(METHODS[name], levels, **params), [[drawn(n, r) for r in range(5)] for n in range(2)])
            for levels in (1, 2)
        ]
        for one, other in zip(*(each.means for each in both), strict=True):
            assert all(np.array_equal(one[key], other[key]) for key in one)
        for one, other in zip(*(each.state for each in both), strict=True):
            assert one["points"] == other["points"]
    assert "levels" not in both[0].report.exchange
    assert both[1].report.exchange == "twostage: 1 level instead of 2, as 5 has no more prime factors"


def drawn(number, rank):
    rng = np.random.default_rng([number, rank])
    return {f"t{size}": rng.standard_normal(size).astype(np.float32) for size in (1, 9, 513, 5000)}


def test_bytes_are_flat_and_messages_are_counted():
    """At any levels a worker sends the bytes of 2 (N - 1) / N payloads, in two messages to each worker of its lines."""
    n = 2**14
    for size, levels, messages in ((4, 1, 6), (4, 2, 4), (8, 1, 14), (8, 2, 8), (8, 3, 6), (12, 2, 10)):
        graces = workers(twostage({"compressor": "blockint", "block_size": 64}, levels), size)
        transport, sent = graces[1].transport, []
        start = transport.start

        def counting(collectives, name, start=start, transport=transport, sent=sent):
            for each in collectives:
                group = transport if each.group == "world" else transport._groups[each.group]
                others = [part for to, part in enumerate(getattr(each, "parts", ())) if to != group.rank]
                bytes_ = [sum(array.nbytes for array in part) for part in others]
                sent.extend(
                    bytes_
                    if isinstance(each, AllToAll)
                    else [sum(a.nbytes for a in arrays_of(each))] * (group.size - 1)
                )
            return start(collectives, name)  # fmt: skip

        for grace in graces:
            grace.build({"w": np.zeros(n, np.float32)})
        transport.start = counting
        lockstep(graces, [{"w": spread(n, seed=rank)} for rank in range(size)])
        payload = n / 2 + 4 * n / 64
        assert len(sent) == messages == Grid(factors(size, levels)).messages
        assert sum(sent) == pytest.approx(2 * (size - 1) / size * payload, rel=0.02)
        assert graces[1].report().bytes_received == pytest.approx(sum(sent), rel=0.02)
        if levels > 1:
            assert f"{messages} messages per worker" in graces[0].report().exchange


# -- the state ------------------------------------------------------------------------------------------------------
SHAPES = {"large": (30, 200), "small": (500,)}


def made(size, levels, **params):
    graces = workers(twostage({"compressor": "efsignsgd", "block_size": 64, **params}, levels), size)
    for grace in graces:
        grace.build({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()})
        grace.transport.exchange = lambda text: [text]  # a single thread: no other worker would answer
    return graces


def train(graces, steps):
    size, found = len(graces), []
    for number in steps:
        gradients = [{k: spread(*v, seed=size * number + rank) for k, v in SHAPES.items()} for rank in range(size)]
        found += [mean for worker in lockstep(graces, gradients) for mean in worker.values()]
    return found


@pytest.mark.parametrize("size, levels", GRIDS)
def test_a_saved_run_goes_on_bit_for_bit(size, levels):
    straight, again = made(size, levels), made(size, levels)
    train(straight, range(3))
    for grace, other in zip(straight, again, strict=True):
        other.load_state_dict(grace.state_dict())
    for one, other in zip(train(straight, range(3, 6)), train(again, range(3, 6)), strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize(
    "old, new", [((8, 3), (8, 2)), ((8, 2), (8, 1)), ((4, 1), (4, 2)), ((6, 2), (4, 2)), ((4, 2), (8, 3))]
)
def test_another_grid_takes_the_residuals_over(old, new):
    """They add up to the same part of the sum of all gradients, whatever the number of workers and levels."""
    before, after = made(*old), made(*new)
    train(before, range(4))
    exported = [grace.state_dict() for grace in before]
    for grace in after:
        grace.load_state_dict(*exported)
    held, taken = outstanding(before, SHAPES)[0], outstanding(after, SHAPES)[0]
    if old[0] != new[0]:  # the sums over workers stay the same, as they do without levels
        held, taken = ({k: s[0] for k, s in residuals(g, SHAPES).items()} for g in (before, after))
    for name, residual in held.items():
        assert np.abs(residual).max() > 0
        np.testing.assert_allclose(taken[name], residual, atol=1e-5 * np.abs(residual).max(), err_msg=str(name))
    means = train(after, range(2))
    assert all(np.isfinite(mean).all() for mean in means)


def test_own_state_of_another_grid_is_refused():
    before, after = made(4, 1), made(4, 2)
    train(before, range(2))
    kept_ = states(after)
    with pytest.raises(ValueError, match=r"levels.*all workers"):
        after[1].load_state_dict(before[1].state_dict())
    assert unchanged(kept_, states(after))


# -- machines -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["int4", "topk", "lengths that vary"])
def test_machines_form_a_grid_too(name, monkeypatch):
    """8 machines of 2 workers as 2 x 2 x 2: each place on a machine exchanges as flat workers do, with exact means."""
    params = {"min_numel": 0, **METHODS[name], "communicator": "hierarchical", "outer": "twostage", "node_size": 2}
    xp, sizes = backend("numpy"), (513, 5000)
    graces = team({**params, "outer_levels": 3}, 16, xp, sizes)
    monkeypatch.setenv("GRACE_KERNELS", "off")
    plain = team({**params, "outer_levels": 3}, 16, xp, sizes)
    monkeypatch.delenv("GRACE_KERNELS")
    assert graces[0].communicator.outer.levels == 3
    for number in (1, 2):
        found = step(graces, xp, number, sizes=sizes)
        monkeypatch.setenv("GRACE_KERNELS", "off")
        wanted = step(plain, xp, number, sizes=sizes)
        monkeypatch.delenv("GRACE_KERNELS")
        for mine, other in zip(found, wanted, strict=True):
            for key, mean in mine.items():
                np.testing.assert_array_equal(mean, found[0][key])
                np.testing.assert_allclose(mean, other[key], rtol=1e-4, atol=1e-5, err_msg=key)
    assert graces[3].report().bytes_received == plain[3].report().bytes_received


def test_outer_levels_need_two_stages():
    with pytest.raises(ValueError, match="needs outer 'twostage', not 'allgather'"):
        grace_from_params(
            {"compressor": "topk", "communicator": "hierarchical", "outer": "allgather", "outer_levels": 2}, "local"
        )


# -- the choice -----------------------------------------------------------------------------------------------------
def test_more_levels_are_taken_where_messages_cost_more_than_rounds():
    slow_messages, slow_rounds, slow_bytes = LinkTimes(0, 1e-4, 0), LinkTimes(0.02, 2e-5, 0), LinkTimes(0, 1e-6, 1e-7)
    assert [levels_for(size, slow_messages) for size in (4, 15, 16, 64, 512, 4096, 509)] == [1, 1, 2, 3, 3, 4, 1]
    assert {levels_for(size, slow_rounds) for size in (16, 64, 512)} == {1}, "each level adds two rounds"
    assert levels_for(4096, slow_rounds) > 1
    assert levels_for(64, slow_bytes) == 1, "bytes take most of the time"
    method, _ = triple({"compressor": "blockint"})
    assert choose(method, 512, 1)[0].levels == 1, "nothing is known about the link"
    communicator, why = choose(method, 512, 1, slow_messages)
    assert communicator.levels == 3
    assert why.endswith("3 levels, a grid of 8 x 8 x 8: 42 messages per worker, as the link's latency suggests")
    assert choose(method, 4096, 8, slow_messages)[0].outer.levels == 3
    assert str(choose(triple({"compressor": "powersgd"})[0], 512, 1, slow_messages)[0]) == "Allreduce()"


class Slow(LocalTransport):
    """One of 16 workers whose rounds, messages and bytes take a given time."""

    lockstep, divides, clock = False, True, 0.0
    times = LinkTimes(0.01, 1e-3, 1e-8)

    def start(self, collectives, name):
        (asked,) = collectives
        if isinstance(asked, AllToAll):
            sent = [part[0].nbytes for to, part in enumerate(asked.parts) if part and to != self.rank]
            self.clock += self.times.round + len(sent) * self.times.message + sum(sent) * self.times.byte
            return lambda: [list(asked.parts)]
        return lambda: [asked.arrays]


def test_the_measurement_finds_the_link(monkeypatch):
    transport = Slow(World(16), 3)
    transport.bind(backend("numpy"))
    monkeypatch.setattr("grace.communicators.auto.perf_counter", lambda: transport.clock)
    method, communicator = triple({"compressor": "blockint"})
    assert communicator.measure(method, transport)
    np.testing.assert_allclose(transport.link, Slow.times, rtol=1e-3)
    assert communicator.resolve(method, transport) == choose(method, 16, 1, Slow.times)[0]
    assert not communicator.measure(method, transport), "once is enough"
    transport.link = None
    assert not communicator.measure(triple({"compressor": "fp16"})[0], transport)
    few = Slow(World(15), 3)
    assert not communicator.measure(method, few)
    assert few.link is None


def test_a_grid_worked_out_by_hand():
    # 4 workers as 2 x 2, 1 MB/s, 1 ms of latency; 10 kB of payload for 100,000 elements
    profile, there = Profile((TensorProfile("w", (100_000,), 0.0),), "made up"), Cluster(4, 1, Link(1e-3, 1e6))
    rate = Curve((1.0,), (1e-6,))
    signs = Codec({"compressor": "efsignsgd", "block_size": 8}, Curve((1.0,), (0.1,)), {"gpu": Speed(rate, rate, rate)})
    half, quarter = 0.05, 0.025  # seconds to encode or decode these parts
    there_ = 0.1 + (0.001 + 0.005) + 2 * half + half + (0.001 + 0.0025) + 2 * quarter + quarter
    back = (0.001 + 0.0025) + (0.001 + 0.005) + 0.1
    seconds = ways.play(profile, there, signs, ways.GRIDS["twostage, levels 2"]).seconds
    assert seconds == pytest.approx(there_ + back)
    one = ways.play(profile, there, signs, ways.FLAT["twostage"]).seconds
    assert one == pytest.approx(0.1 + (0.003 + 0.0075) + 4 * quarter + quarter + (0.003 + 0.0075) + 0.1)


@pytest.mark.parametrize("device", ["epyc", "h100"])
@pytest.mark.parametrize("model", ["gpt2", "bert-base"])
def test_int4_is_not_slower_than_dense_on_thousands_of_workers_if_it_is_faster_on_64(device, model):
    (codec,) = (each for each in costs(device) if each.params == {"compressor": "blockint", "bits": 4})
    profile, best, usual, single = models.profile(model), [], [], []
    for machines in (8, 12, 16, 32, 60, 64, 100, 128, 256, 512):
        there = Cluster(machines, 8, Link(50e-6, 100 / 8e-9), Link(5e-6, 800 / 8e-9))
        each = {way.name: ways.play(profile, there, codec, way).seconds for way in ways.every(codec.params, there)}
        dense = ways.play(profile, there, None, ways.DENSE).seconds
        best.append(dense / min(each.values()))
        usual.append(dense / each[ways.usual(triple(codec.params)[0], there).name])
        single.append(dense / each["hierarchical, outer twostage"])
    assert best[0] > 1
    assert min(best) >= 1, best
    assert min(single) < 0.3, "a single level is slower"
    assert min(np.array(usual) / best) > 0.8, "the default comes close to the best way"


# -- settings -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("levels", [0, -1])
def test_levels_are_positive(levels):
    with pytest.raises(ValueError, match=f"levels={levels} must be 1 or more"):
        grace_from_params({"compressor": "blockint", "communicator": "twostage", "levels": levels}, "local")


@pytest.mark.parametrize("transport", ["torchrun", "horovodrun"])
@pytest.mark.parametrize("size", [4, 6])
@pytest.mark.processes
def test_real_workers_find_the_same_as_simulated_ones(transport, size, tmp_path, monkeypatch):
    found = launch(transport, size, "grids.py", tmp_path)
    for name, params in {"int4": METHODS["int4"], "lengths that vary": METHODS["lengths that vary"]}.items():
        every = [[drawn(number, rank) for rank in range(size)] for number in range(3)]
        wanted = simulate(twostage(params, 2), every, backend="torch").means[0]
        for worker in found:
            for key, mean in wanted.items():
                mine = worker[name]["means"][key]
                np.testing.assert_array_equal(mine, found[0][name]["means"][key], err_msg=key)
                # a tensor without a shard for each worker goes dense, and is summed in another order
                close = {"rtol": 0, "atol": 0} if len(mine) > 9 else {"rtol": 1e-5, "atol": 1e-6}
                np.testing.assert_allclose(mine, mean, **close, err_msg=key)
            assert worker[name]["exchange"].startswith("twostage: 2 levels, a grid of ")
            if transport == "torchrun" and name == "int4":  # payloads and headers alike
                assert worker[name]["peers"] == sum(factors(size, 2)) - 2
    monkeypatch.setattr("grace.communicators.auto.MANY", 4)
    links = {worker["default"]["link"] for worker in found}
    assert len(links) == 1, "all workers agree on what they have measured"
    chosen, why = choose(triple(METHODS["int4"])[0], size, 1, LinkTimes(*links.pop()))
    for worker in found:
        assert (worker["default"]["levels"], worker["default"]["exchange"]) == (chosen.levels, f"twostage: {why}")
        for key, mean in worker["default"]["means"].items():
            np.testing.assert_array_equal(mean, found[0]["default"]["means"][key])
