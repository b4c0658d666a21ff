"""Groups: many tensors encoded and decoded by one call each give the bits of one tensor at a time."""

import itertools

import numpy as np
import pytest
from methods import PLAIN, backend, built, states, unchanged
from support.groups import (
    CARRIERS,
    MATRICES,
    METHODS,
    SIZES,
    WORKERS,
    carried,
    carries,
    drawn,
    equal,
    groups_of,
    step,
    team,
    tensors,
)

from grace.core.collectives import AllToAll, Gather, arrays_of
from grace.engine.groups.book import GroupBook
from grace.engine.groups.rows import RowTable
from grace.engine.scheduler import RoundScheduler
from grace.factory import grace_from_params
from grace.kernels import library
from grace.kernels.rows import NUMBERS, Refused, Rows
from grace.transports.local import LocalTransport


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    built()
    monkeypatch.setenv("GRACE_KERNELS", PLAIN)  # all instruction sets give the same bits, also the plain functions


DECIDED = ("int4", "topk", "powersgd", "signum", "topk, coded, ef21", "randomk")
PAIRS = [(method, carrier) for method in METHODS for carrier in CARRIERS if carries(method, carrier)]


@pytest.mark.parametrize("name", ["numpy", "torch"])
@pytest.mark.parametrize("method, carrier", PAIRS)
def test_a_group_has_the_bits_of_its_tensors_one_by_one(method, carrier, name):
    """Payloads (by their bytes), states and means, with a NaN in one tensor, over three steps."""
    xp, params, sizes = backend(name), carried(method, carrier), tensors(method)
    broken = f"t{sizes[2]}"

    def poison(gradients):
        if broken in gradients[-1]:
            gradients[-1][broken].reshape(-1)[5] = float("nan")

    for workers in WORKERS[carrier] if name == "numpy" else WORKERS[carrier][-2:-1]:
        graces, alone = team(params, workers, xp, sizes), team(params, workers, xp, sizes, bucket_mb=1e-9)
        layout = groups_of(graces[0])
        assert [len(each.units) for each in layout.groups] == [len(sizes)]
        assert not layout.rest
        assert [len(each.units) for each in alone[0].setup.table.buckets] == [1] * len(sizes)
        for number in (1, 2, 3):
            change = poison if number == 2 else None
            equal(step(graces, xp, number, change, sizes), step(alone, xp, number, change, sizes))
        assert unchanged(states(graces), states(alone))
        assert all(np.isfinite(array).all() for each in states(graces) for array in each.values())
        for one, other in zip(graces, alone, strict=True):
            sent, expected = ({each.name: each.bytes_sent for each in grace.report().tensors} for grace in (one, other))
            assert sent == expected
            assert one.report().bytes_received == other.report().bytes_received


@pytest.mark.parametrize("method, carrier", PAIRS)
def test_a_group_computes_what_the_plain_functions_do(method, carrier, monkeypatch):
    xp, params, sizes = backend("numpy"), carried(method, carrier), tensors(method)
    graces = team(params, WORKERS[carrier][-2], xp, sizes)
    monkeypatch.setenv("GRACE_KERNELS", "off")
    plain = team(params, WORKERS[carrier][-2], xp, sizes)
    for number in (1, 2, 3):
        monkeypatch.setenv("GRACE_KERNELS", PLAIN)
        found = step(graces, xp, number, sizes=sizes)
        monkeypatch.setenv("GRACE_KERNELS", "off")
        assert not groups_of(plain[0]).groups
        for mine, other in zip(found, step(plain, xp, number, sizes=sizes), strict=True):
            for name, mean in mine.items():
                np.testing.assert_allclose(mean, other[name], rtol=1e-4, atol=1e-5, err_msg=name)
    for one, other in zip(graces, plain, strict=True):
        assert [t.bytes_sent for t in one.report().tensors] == [t.bytes_sent for t in other.report().tensors]
        assert one.report().bytes_received == other.report().bytes_received


@pytest.mark.parametrize("method, carrier", PAIRS)
def test_the_bytes_that_are_counted_are_those_that_are_sent(method, carrier):
    xp, sizes, sent = backend("numpy"), tensors(method), []
    graces = team(carried(method, carrier), WORKERS[carrier][-2], xp, sizes)
    transport, start = graces[1].transport, graces[1].transport.start

    def counting(collectives, name):
        for each in collectives:
            own = each.parts[transport.group_rank(each.group)] if isinstance(each, AllToAll) else ()
            sent.append(sum(a.nbytes for a in arrays_of(each)) - sum(a.nbytes for a in own))
        return start(collectives, name)

    transport.start = counting
    step(graces, xp, 1, sizes=sizes)
    assert sum(sent) == sum(each.bytes_sent for each in graces[1].report().tensors)


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_a_dead_direction_is_revived_as_by_the_plain_functions(name, monkeypatch):
    """A gradient of zeros makes rows of Q zeros: random rows, the same everywhere, replace them."""
    xp, found = backend(name), []

    def still(gradients):
        for mine in gradients:
            mine["t(40, 50)"] = mine["t(40, 50)"] * 0

    for kernels in (PLAIN, "off"):
        monkeypatch.setenv("GRACE_KERNELS", kernels)
        graces = team(METHODS["powersgd"], 2, xp, MATRICES)
        step(graces, xp, 1, still, MATRICES)
        found.append(step(graces, xp, 2, sizes=MATRICES))
    for mine, other in zip(*found, strict=True):
        for key, mean in mine.items():
            assert mean.any()
            np.testing.assert_allclose(mean, other[key], rtol=1e-4, atol=1e-5, err_msg=key)


@pytest.mark.parametrize("method, carrier", [pair for pair in PAIRS if pair[0] in DECIDED])
def test_a_thrown_away_exchange_of_a_group_leaves_no_trace(carrier, method):
    xp, params, sizes = backend("torch"), carried(method, carrier), tensors(method)
    graces, others = team(params, WORKERS[carrier][-2], xp, sizes), team(params, WORKERS[carrier][-2], xp, sizes)
    for each in graces:
        each.defer_commit = True
    for number in range(6):
        if number % 2:
            step(graces, xp, 100 + number, sizes=sizes)
            for each in graces:
                each.discard()
        if number == 4:  # two exchanges share a decision
            step(graces, xp, 104, sizes=sizes)
            step(graces, xp, 105, sizes=sizes)
            for each in graces:
                each.discard()
        equal(step(graces, xp, number, sizes=sizes), step(others, xp, number, sizes=sizes))
        for each in graces:
            each.commit()
    assert unchanged(states(graces), states(others))


@pytest.mark.parametrize("rounds", [0, 1, 2, 3])
@pytest.mark.parametrize("carrier", CARRIERS)
def test_an_exchange_that_is_abandoned_in_flight_leaves_no_trace(carrier, rounds):
    xp = backend("torch")
    graces, others = (team(carried("int4", carrier), WORKERS[carrier][-2], xp) for _ in range(2))
    equal(step(graces, xp, 1), step(others, xp, 1))
    for grace, mine in zip(graces, [drawn(2, rank) for rank in range(len(graces))], strict=True):
        grace.launch({name: xp.asarray(x, "float32") for name, x in mine.items()}, spent=True)
    for _ in range(rounds):
        for grace in graces:
            grace.advance()
    for grace in graces:
        grace.abandon()
    assert unchanged(states(graces), states(others))
    equal(step(graces, xp, 3), step(others, xp, 3))


@pytest.mark.parametrize("to", [3, 4], ids=["a group", "a vector"])
@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_what_a_change_of_method_left_is_kept_until_an_exchange_counts(name, to):
    """The next gradient gets the residual of top-k in two stages, as a group or one vector; once, if it is applied."""
    candidates = [
        {"compressor": "topk", "compress_ratio": 0.05, "communicator": "twostage"},
        {"compressor": "blockint"},
    ]
    xp, auto = backend(name), {"compressor": "auto", "candidates": [*candidates, "fp16"]}
    graces, others = team(auto, 3, xp), team(auto, 3, xp)
    for each in [*graces, *others]:
        each.defer_commit = True

    def move(grace, level):
        for tensor in grace.names:
            before, grace.schedule.decision.levels[tensor] = grace.schedule.level(tensor), level
            grace.setup.switch_level(tensor, before)

    for team_ in (graces, others):
        for each in team_:
            move(each, 2)
        step(team_, xp, 1)
        for each in team_:
            each.commit()
            move(each, to)
    carried = [{key: array for key, array in each.items() if key[1] == "carried"} for each in states(graces)]
    assert all(any(array.any() for array in each.values()) for each in carried)
    layout = groups_of(graces[0])
    assert [len(each.units) for each in (*layout.groups, *layout.joined)] == [len(SIZES)]
    step(graces, xp, 7)
    for each in graces:
        each.discard()
    assert unchanged(states(graces), states(others))
    equal(step(graces, xp, 2), step(others, xp, 2))
    for each in [*graces, *others]:
        each.commit()
    assert unchanged(states(graces), states(others))
    assert not any(array.any() for each in states(graces) for key, array in each.items() if key[1] == "carried")


def test_what_a_change_of_method_left_survives_a_mean_that_is_not_finite():
    """Also for a method whose payload does not show values that are not finite; its tensors then form no group."""
    xp = backend("numpy")
    auto = {"compressor": "auto", "candidates": [{"compressor": "topk", "communicator": "twostage"}, "natural"]}
    (grace,) = graces = team(auto, 1, xp)
    for level in (2, 3):
        for name in grace.names:
            before, grace.schedule.decision.levels[name] = grace.schedule.level(name), level
            grace.setup.switch_level(name, before)
        if level == 2:
            step(graces, xp, 1)
    left = states(graces)[0]["t5000", "carried"]
    assert left.any()
    assert not groups_of(grace).groups

    def poison(gradients):
        gradients[0]["t5000"][7] = np.inf

    step(graces, xp, 2, poison)
    np.testing.assert_array_equal(states(graces)[0]["t5000", "carried"], left)


def test_tensors_of_a_group_are_decided_apart():
    xp = backend("torch")
    graces, others = team(METHODS["signs"], 2, xp), team(METHODS["signs"], 2, xp)
    for each in graces:
        each.defer_commit = True
    step(graces, xp, 1)
    step(others, xp, 1, sizes=(512, 1025))
    for each in graces:
        each.decide(applied=["t512", "t1025"], discarded=[f"t{n}" for n in SIZES if n not in (512, 1025)])
    assert unchanged(states(graces), states(others))


def test_a_joined_exchange_keeps_both_errors():
    """Two exchanges that share a decision: the second one feeds back what the first did not send."""
    xp = backend("torch")
    graces, others = team(METHODS["topk"], 2, xp), team(METHODS["topk"], 2, xp)
    for each in graces:
        each.defer_commit = True
    for number in (1, 2):
        equal(step(graces, xp, number), step(others, xp, number))
    for each in graces:
        each.commit()
    for one, two in zip(states(graces), states(others), strict=True):
        for key in one:
            np.testing.assert_array_equal(one[key], two[key])


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_tensor_without_gradients_keeps_its_residual(carrier):
    xp = backend("torch")
    graces = team({**METHODS["int4"], **CARRIERS[carrier]}, WORKERS[carrier][-2], xp)
    for each in graces:
        each.track_missing = True
    step(graces, xp, 1)
    before = states(graces)

    def drop(gradients):
        for mine in gradients:
            mine["t513"] = None
        gradients[0]["t1025"] = None  # absent on one worker: zeros

    found = step(graces, xp, 2, drop)
    assert all(each["t513"] is None for each in found)
    assert all(each["t1025"].any() for each in found)
    changed = set()
    for one, two in zip(before, states(graces), strict=True):
        changed |= {name for (name, key), array in two.items() if not np.array_equal(array, one[name, key])}
    assert "t513" not in changed
    assert {"t1025", "t5000"} <= changed


@pytest.mark.parametrize("options", [{"nonfinite": "zero"}, {"nonfinite": "raise"}], ids=str)
def test_a_mean_that_is_not_finite_is_zero_or_an_error(options):
    xp = backend("numpy")
    graces = team(METHODS["int4"], 2, xp, **options)
    step(graces, xp, 1)
    before = states(graces)

    def poison(gradients):
        gradients[1]["t513"][5] = np.inf

    if options["nonfinite"] == "raise":
        with pytest.raises(FloatingPointError, match="'t513'"):
            step(graces, xp, 2, poison)
        assert unchanged([states(graces)[0]], [before[0]])  # the error stops the test before worker 1 lands
        return
    found = step(graces, xp, 2, poison)
    assert not any(each["t513"].any() for each in found)
    assert all(np.isfinite(mean).all() for each in found for mean in each.values())
    key = ("t513", "memory/residual")
    assert all(np.array_equal(one[key], two[key]) for one, two in zip(before, states(graces), strict=True))


@pytest.mark.parametrize("method, array", [("topk", "positions"), ("topk, coded", "upper")])
def test_a_wrong_payload_names_tensor_and_method(method, array):
    xp = backend("numpy")
    (grace,) = team(METHODS[method], 1, xp)
    (grouped,) = groups_of(grace).groups
    transport, start = grace.transport, grace.transport.start

    def damaged(collectives, name):
        (gather, *_) = collectives
        place = grouped.group._message.places[array][[u.name for u in grouped.units].index("t5000")]
        gather.arrays[0][place : place + 4] = 255
        return start(collectives, name)

    transport.start = damaged
    with pytest.raises(ValueError, match=r"worker 0 of 1 sent a payload for 't5000' that 'topk' cannot have made"):
        grace.step({name: xp.asarray(x, "float32") for name, x in drawn(1, 0).items()})


@pytest.mark.parametrize("kernels", [PLAIN, "off"])
def test_a_wrong_payload_of_a_second_stage_names_its_worker(kernels, monkeypatch):
    """A hash of the name decides which workers own the shards of a small tensor."""
    monkeypatch.setenv("GRACE_KERNELS", kernels)
    params = {"compressor": "topk", "index_coding": "int32", "communicator": "twostage", "min_shard": 3000}
    graces = team(params, 4, backend("numpy"), (5000,))
    setup = graces[0].setup
    (unit,) = setup.table.units
    (owner,) = setup.communicator.owned(setup.method.compressor, setup.context(unit, 0))
    assert owner
    transport, start = graces[owner].transport, graces[owner].transport.start

    def damaged(collectives, name):
        for each in collectives:
            if isinstance(each, Gather):
                array = each.arrays[-1].view("uint8")
                array[-4:] = 127
        return start(collectives, name)

    transport.start = damaged
    with pytest.raises(ValueError, match=f"worker {owner} of 4 sent a payload for 't5000"):
        step(graces, backend("numpy"), 1, sizes=(5000,))


@pytest.mark.parametrize("kernels", [PLAIN, "off"])
def test_a_wrong_payload_from_another_machine_names_its_worker(kernels, monkeypatch):
    monkeypatch.setenv("GRACE_KERNELS", kernels)
    params = {"compressor": "topk", "communicator": "hierarchical", "outer": "allgather", "node_size": 2}
    graces = team(params, 6, backend("numpy"), (5000,))
    start = graces[5].transport.start

    def damaged(collectives, name):
        for each in collectives:
            if each.group == "cross":
                each.arrays[-1].view("uint8")[-4:] = 127
        return start(collectives, name)

    graces[5].transport.start = damaged
    with pytest.raises(ValueError, match="worker 5 of 6 sent a payload for 't5000"):
        step(graces, backend("numpy"), 1, sizes=(5000,))


@pytest.mark.parametrize("carrier", CARRIERS)
def test_tensors_whose_positions_are_coded_otherwise_are_groups_of_their_own(carrier, monkeypatch):
    """Index coding "auto" takes the smallest for each tensor."""
    xp, params = backend("numpy"), {"compressor": "topk", "compress_ratio": 0.2, **CARRIERS[carrier]}
    sizes = (2, 3, 5, 9, 33, 5000, 70001)
    graces = team(params, WORKERS[carrier][-2], xp, sizes)
    assert sum(len(each.units) for each in groups_of(graces[0]).groups) + len(groups_of(graces[0]).rest) == len(sizes)
    singles = {size: team(params, WORKERS[carrier][-2], xp, sizes) for size in sizes}
    for number in (1, 2):
        found = step(graces, xp, number, sizes=sizes)
        for size, alone in singles.items():
            equal([{f"t{size}": means[f"t{size}"]} for means in found], step(alone, xp, number, sizes=(size,)))


def test_a_gradient_that_is_not_donated_is_not_written_to():
    xp = backend("torch")
    (grace,) = team(METHODS["int4"], 1, xp)
    gradients = {name: xp.asarray(x, "float32") for name, x in drawn(1, 0).items()}
    before = {name: x.clone() for name, x in gradients.items()}
    grace.step(gradients)
    assert all(bool((x == before[name]).all()) for name, x in gradients.items())


def test_layouts_follow_the_tensors():
    xp = backend("numpy")
    (grace,) = team(METHODS["int4"], 1, xp)
    grace.step({name: xp.asarray(x, "float32") for name, x in drawn(1, 0, (512, 513)).items()})
    residual = grace.state_dict()["tensors"]["t512"]["memory/residual"]
    grace.rebuild({name: xp.asarray(x, "float32") for name, x in drawn(0, 0, (512, 5000)).items()})
    assert np.array_equal(grace.state_dict()["tensors"]["t512"]["memory/residual"], residual)
    grace.step({name: xp.asarray(x, "float32") for name, x in drawn(2, 0, (512, 5000)).items()})
    assert {unit.name for each in groups_of(grace).groups for unit in each.units} == {"t512", "t5000"}
    assert isinstance(grace.setup.groups, GroupBook)


# -- tensors that travel as one vector ---------------------------------------------------------------------------------
VECTORS = {
    "fp16": {"compressor": "fp16"},
    "bf16": {"compressor": "bf16", "communicator": "allgather"},
    "none, gathered": {"compressor": "none", "communicator": "allgather"},
}


@pytest.mark.parametrize("kernels", [PLAIN, "off"])
@pytest.mark.parametrize("name", ["numpy", "torch"])
@pytest.mark.parametrize("method", VECTORS)
def test_a_vector_of_tensors_has_the_bits_of_its_tensors_one_by_one(method, name, kernels, monkeypatch):
    """With an infinity in one tensor, a tensor without gradients and one that a worker lacks."""
    monkeypatch.setenv("GRACE_KERNELS", kernels)
    xp = backend(name)
    graces = team(VECTORS[method], 4, xp)
    (joined,) = groups_of(graces[0]).joined
    assert sorted(unit.size for unit in joined.units) == list(SIZES)
    singles = {size: team(VECTORS[method], 4, xp, (size,)) for size in SIZES}
    assert not any(groups_of(alone[0]).joined for alone in singles.values())
    for each in [*graces, *(one for alone in singles.values() for one in alone)]:
        each.track_missing = True

    def change(gradients):
        for mine in gradients:
            mine |= {key: None for key in mine if key == "t512"}
        gradients[1] |= {key: None for key in gradients[1] if key == "t1025"}
        if "t9" in gradients[2]:
            gradients[2]["t9"][3] = float("inf")

    for number in (1, 2):
        found = step(graces, xp, number, change if number == 2 else None)
        for size, alone in singles.items():
            mine = [{f"t{size}": means[f"t{size}"]} for means in found]
            equal(mine, step(alone, xp, number, change if number == 2 else None, (size,)))
    for each in graces[0].report().tensors:
        (alone,) = singles[int(each.name[1:])][0].report().tensors
        assert each.bytes_sent == alone.bytes_sent


@pytest.mark.parametrize("communicator", ["twostage", "hierarchical"])
def test_what_cuts_tensors_into_shards_takes_them_one_by_one(communicator):
    params = {"compressor": "bf16", "communicator": communicator}
    params |= {"node_size": 2} if communicator == "hierarchical" else {}
    assert not groups_of(team(params, 4, backend("numpy"))[0]).joined


@pytest.mark.parametrize(
    "params", [{"compressor": "bf16", "rounding": "stochastic"}, {"compressor": "fp16", "memory": "residual"}]
)
def test_tensors_with_random_numbers_or_a_state_travel_apart(params):
    (grace,) = team(params, 1, backend("numpy"))
    assert not groups_of(grace).joined


# -- rows of state ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_rows_keep_what_was_before(name):
    """Arrays that are held or not, moved or not, kept or restored, compared with a list of arrays and copies."""
    xp, rng = backend(name), np.random.default_rng(0)
    table, n = RowTable(xp), 5
    cells = [table.add(xp.asarray(rng.standard_normal(4), "float32")) for _ in range(n)]
    now = [np.array(xp.to_numpy(cell.read())) for cell in cells]
    before = [None] * n
    for event in range(3000):
        chosen = np.flatnonzero(rng.random(n) < 0.5)
        kind = rng.choice(["hold", "exchange", "release", "restore", "store", "assign", "all"])
        if kind == "hold":
            table.hold(chosen)
            for i in chosen:
                before[i] = now[i].copy() if before[i] is None else before[i]
        elif kind == "exchange":
            old, new = table.old(chosen), table.new(chosen)
            for place, i in enumerate(chosen):
                assert old[place] == xp.buffers.address(cells[i].read())
                assert (old[place] == new[place]) == (before[i] is None or not np.array_equal(now[i], before[i]))
            table.advance(chosen)
            for place, i in enumerate(chosen):
                value = rng.standard_normal(4).astype("float32")
                assert xp.buffers.address(cells[i].read()) == new[place]
                xp.buffers.write(cells[i].read(), xp.asarray(value, "float32"))
                now[i] = value
        elif kind in ("store", "assign"):
            for i in chosen:
                now[i] = rng.standard_normal(4).astype("float32")
                given = xp.asarray(now[i].copy(), "float32")
                getattr(cells[i], kind)(given)
                assert xp.buffers.same_memory(cells[i].read(), given) == (kind == "assign")
        else:
            which = np.arange(n) if kind == "all" else chosen
            for i in which:
                if kind == "restore" and before[i] is not None:
                    now[i] = before[i]
                before[i] = None
            (table.restore if kind == "restore" else table.release)(None if kind == "all" else which)
        for i, cell in enumerate(cells):
            np.testing.assert_array_equal(xp.to_numpy(cell.read()), now[i], err_msg=f"event {event}, {kind}")
            held = cell.before()
            assert (held is None) == (before[i] is None), f"event {event}, {kind}"
            if held is not None:
                np.testing.assert_array_equal(xp.to_numpy(held), before[i], err_msg=f"event {event}, {kind}")
    assert [cell.number for cell in cells] == list(range(n))


# -- calls from a table -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["numpy", "torch"])
@pytest.mark.parametrize("counts", [True, False])
def test_a_flag_decides_between_rows(name, counts):
    """For devices, whose flags the host does not read. Arrays without an undecided exchange stay unchanged."""
    xp = backend(name)
    table = RowTable(xp)
    moved, still = (table.add(xp.full(3, value)) for value in (1.0, 5.0))
    table.hold([0, 1])
    moved.assign(xp.full(3, 2.0))
    table.choose(xp.asarray(counts, "bool"), [0, 1])
    np.testing.assert_array_equal(xp.to_numpy(moved.read()), [2 if counts else 1] * 3)
    np.testing.assert_array_equal(xp.to_numpy(still.read()), [5] * 3)
    moved.assign(xp.full(3, 7.0))
    table.restore()  # decided: nothing is restored
    np.testing.assert_array_equal(xp.to_numpy(moved.read()), [7] * 3)


@pytest.mark.parametrize("threads", [1, 3])
def test_rows_make_each_call_once(threads):
    found = library()
    words = [np.zeros(9 + n, np.int32) for n in range(20)]
    rows = Rows(found, "words", len(words))
    rows.set(key0=7, key1=range(20), start=[3 * n for n in range(20)], n=[len(each) for each in words])
    rows.set(out=[each.ctypes.data for each in words])
    rows.call(threads)
    for n, each in enumerate(words):
        alone = np.zeros_like(each)
        found.words(7, n, 3 * n, len(alone), alone.ctypes.data)
        np.testing.assert_array_equal(each, alone)


def test_rows_report_a_wrong_payload_with_its_row():
    values, positions = np.ones((3, 2), np.float32), np.array([[0, 4], [4, 1], [2, 3]], np.int32)
    out, counts = np.zeros((3, 5), np.float32), np.array([2], np.int64)
    rows = Rows(library(), "sparse_mean", 3)
    rows.keep("values", [np.array([each.ctypes.data], np.int64) for each in values])
    rows.keep("positions", [np.array([each.ctypes.data], np.int64) for each in positions])
    rows.keep("counts", [counts] * 3)
    rows.set(workers=1, n=5, out=[each.ctypes.data for each in out])
    with pytest.raises(Refused, match="worker 0 sent positions") as caught:
        rows.call()
    assert caught.value.row == 1


@pytest.mark.parametrize("kernel, width", [(-1, 6), (10**6, 6), (NUMBERS["words"], 7)])
def test_an_unknown_kernel_or_another_number_of_arguments_is_refused(kernel, width):
    words, results = np.zeros((1, width), np.int64), np.zeros(1, np.int64)
    assert library().rows(kernel, words.ctypes.data, width, 1, results.ctypes.data) == -3


def test_keys_of_many_streams_are_those_of_each():
    from grace.core.rng import keys

    stems = np.array([0, 1, 2**32 - 1, 123456789], np.int64)
    for number, worker in itertools.product((0, 1, 2**31), (0, 1, 64)):
        found = np.zeros((2, len(stems)), np.int64)
        library().stream_keys(stems.ctypes.data, len(stems), number, worker, found[0].ctypes.data, found[1].ctypes.data)
        assert found.T.tolist() == [list(keys(int(stem), number, worker)) for stem in stems]


def test_a_method_without_a_recipe_is_exchanged_tensor_by_tensor():
    grace = grace_from_params({"compressor": "threshold", "threshold": 0.1, "min_numel": 60}, "local")
    grace.build({"w": np.zeros((40, 50), np.float32), "v": np.zeros(50, np.float32)})
    layout = groups_of(grace)
    assert not layout.groups
    assert [unit.name for unit in layout.rest] == ["w"]
    assert [joined.names for joined in layout.joined] == [("v",)]


# -- the order of rounds ----------------------------------------------------------------------------------------------
class Alone(LocalTransport):
    """One worker, which lists the messages that it sends, as bucket.round."""

    lockstep = False

    def __init__(self):
        super().__init__()
        self.sent = []

    def start(self, collectives, name):
        bucket, *_, number = name.removeprefix("bucket").split(".")
        self.sent.append(f"{bucket}.{number}")
        return super().start(collectives, name)


TWO_ROUNDS = {
    "a group": {"compressor": "blockint", "communicator": "twostage"},
    "tensor by tensor": {"compressor": "threshold", "threshold": 0.1, "communicator": "twostage"},
    "without a state": {"compressor": "bf16", "communicator": "twostage"},
    "low rank": {"compressor": "powersgd"},
}
THREE_ROUNDS = {
    "machines": {"compressor": "blockint", "communicator": "hierarchical", "outer": "allgather"},
    "machines, tensor by tensor": {"compressor": "threshold", "threshold": 0.1, "communicator": "hierarchical"},
}
ORDERS = {
    **dict.fromkeys(TWO_ROUNDS, "0.0 1.0 0.1 2.0 1.1 3.0 2.1 3.1"),
    **dict.fromkeys(THREE_ROUNDS, "0.0 1.0 0.1 2.0 0.2 1.1 3.0 1.2 2.1 2.2 3.1 3.2"),
}


@pytest.mark.parametrize("arrive", ["in order", "late", "together", "not all"])
@pytest.mark.parametrize("case", ORDERS)
def test_later_rounds_begin_during_the_backward_pass_in_one_order(case, arrive):
    """All workers send in the same order, however gradients arrive, even if a worker gives up."""
    transport, params = Alone(), {**TWO_ROUNDS, **THREE_ROUNDS}[case]
    grace = grace_from_params({"min_numel": 0, "bucket_mb": 4000 / 2**20, **params}, transport)
    gradients = {f"t{number}": np.ones((25, 20), np.float32) for number in range(8)}
    grace.build(gradients)
    names = [[unit.name for unit in bucket.units] for bucket in grace.setup.table.buckets]
    assert list(map(len, names)) == [2, 2, 2, 2]
    if arrive == "together":
        grace.start_all(gradients)
    for number in {"in order": (0, 1, 2, 3), "late": (1, 3, 0), "not all": (0,)}.get(arrive, ()):
        for name in names[number]:
            grace.start(name, gradients[name])
    if arrive == "in order":
        assert transport.sent == ORDERS[case].partition(" 2.2" if case in THREE_ROUNDS else " 3.1")[0].split()
    if arrive == "not all":
        with pytest.raises(RuntimeError, match="gave up"):
            grace.abort("as a test")
    else:
        grace.flush()
    assert transport.sent == ORDERS[case].split()


def test_a_message_with_a_single_round_is_awaited_at_the_end(monkeypatch):
    transport = Alone()
    grace = grace_from_params({"compressor": "blockint", "min_numel": 0, "bucket_mb": 1e-3}, transport)
    gradients = {f"t{number}": np.ones(1000, np.float32) for number in range(4)}
    grace.build(gradients)
    monkeypatch.setattr(RoundScheduler, "advance", lambda self: pytest.fail("waits for a message"))
    for name, gradient in gradients.items():
        grace.start(name, gradient)
    assert transport.sent == ["0.0", "1.0", "2.0", "3.0"]
