"""Recomputed plans, for other numbers of workers and for a policy's levels; no residual is lost."""

import json
import random
from itertools import pairwise

import numpy as np
import pytest
from launch import launch
from methods import BACKENDS, backend, lockstep
from strategies import PARAMETERS, PROFILE, planned, priced
from support.commands import run

from grace import grace_from_params, simulate
from grace.communicators.planned import table as ways
from grace.communicators.planned.strategy import DENSE_FLAT, options, parse
from grace.compressors.measured.topk import TopK
from grace.planner import plan
from grace.planner.costs import Cluster, Costs, Link
from grace.planner.costs import cluster as cluster_of
from grace.simulate import end_epoch
from grace.transports.local import LocalTransport, World

LEVELS = {"policy": "warmup", "warmup_ratio": 0.5, "warmup_factor": 0.1}
"""compress_ratio 0.5 in the first epoch, 0.05 in the second, then the plan's own 0.01."""
TOPK = {"compressor": "topk", "compress_ratio": 0.01}


def given(step, size, tensors=None):
    """The gradients of all workers in a step."""
    rngs = [np.random.default_rng([step, rank]) for rank in range(size)]
    return [
        {name: rng.standard_normal(x.shape).astype(np.float32) for name, x in (tensors or PARAMETERS).items()}
        for rng in rngs
    ]


def workers(params, size, tensors=None):
    world = World(size)
    graces = [grace_from_params(params, LocalTransport(world, rank)) for rank in range(size)]
    for grace in graces:
        grace.build(tensors or PARAMETERS)
    return graces


def strategies(grace):
    return {tensor.name: tensor.strategy or DENSE_FLAT for tensor in grace.report().tensors}


def same_bits(means):
    assert all(np.array_equal(means[0][name], mean[name]) for mean in means for name in means[0])


# -- which plan --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "made_for, node_size, size, per_node",
    [((8, 1), 0, 2, 1), ((8, 1), 0, 4, 1), ((8, 2), 0, 4, 2), ((8, 2), 0, 3, 1), ((8, 1), 2, 4, 2), ((4, 4), 0, 3, 3)],
    ids=str,
)
@pytest.mark.parametrize("source", ["text", "file"])
def test_for_other_workers_the_plan_is_what_the_planner_makes_for_them(
    made_for, node_size, size, per_node, source, tmp_path
):
    file = planned(*made_for, ratio=0.1)
    file.save(tmp_path / "plan.json")
    chosen = file.to_dict() if source == "text" else str(tmp_path / "plan.json")
    graces = workers({"plan": chosen, "node_size": node_size}, size)
    want = planned(size, per_node, ratio=0.1)
    assert [strategies(grace) for grace in graces] == [want.strategies] * size
    if made_for == (8, 2):
        assert want.strategies != file.strategies
    same_bits(lockstep(graces, given(0, size)))
    report = graces[0].report()
    assert f"for {size} workers, {per_node} on each machine" in report.plan
    assert f"links: measured among {made_for[0]} workers, scaled to {size};" in report.plan
    assert report.plan in str(report)
    assert report.to_dict()["plan"] == report.plan


def test_a_plan_for_these_workers_is_taken_as_it_is():
    file = planned(4, ratio=0.1).to_dict()
    (grace, *_) = workers({"plan": file}, 4)
    assert "links: measured;" in grace.report().plan
    file["basis"]["cluster"]["inter"]["gbit_per_s"] = 1e6  # a new plan would not compress
    assert strategies(workers({"plan": file}, 4)[0]) == strategies(grace) == planned(4, ratio=0.1).strategies


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("policy", [LEVELS, {"policy": "accordion", "k_low": 0.5, "window": 1}], ids=["warmup", "acc"])
def test_every_level_has_the_plan_that_the_planner_makes_for_it(name, policy):
    backend(name)
    ratios = (0.5, 0.05) if policy is LEVELS else (0.5,)
    file = planned(4, levels=ratios).to_dict()
    graces = workers({"plan": file, **policy}, 4)
    seen = []
    for epoch in range(3):
        ratio = [*ratios, 0.01][min(epoch, len(ratios))] if policy is LEVELS else [0.5, 0.5, 0.01][epoch]
        want = planned(4, 1, ratio)
        assert [strategies(grace) for grace in graces] == [want.strategies] * 4
        seen.append(want.strategies)
        means = [lockstep(graces, given(0, 4)) for _ in range(2)]
        same_bits(means[0])
        end_epoch(graces)
    assert len({json.dumps(each) for each in seen}) == len(ratios) + 1
    methods = {tensor.name: tensor.method for tensor in graces[0].report().tensors}
    assert methods == {n: "topk" if parse(text).compressions else "dense" for n, text in seen[-1].items()}


def test_levels_and_other_workers_together():
    file = planned(8, 1, levels=(0.5, 0.05)).to_dict()
    graces = workers({"plan": file, **LEVELS}, 3)
    for ratio in (0.5, 0.05, 0.01):
        assert strategies(graces[0]) == planned(3, 1, ratio).strategies
        same_bits(lockstep(graces, given(0, 3)))
        end_epoch(graces)


def test_a_plan_that_cannot_be_made_anew_stays_and_says_why():
    old = planned(8).to_dict()
    del old["basis"]
    with pytest.warns(UserWarning, match="made for 8 workers, but there are 4: .*Plan anew$"):
        assert strategies(workers({"plan": old}, 4)[0]) == planned(8).strategies
    with pytest.warns(UserWarning, match=r"not for TopK\(.*ratio=0.5.*does not hold what it was made from"):
        graces = workers({"plan": old | {"workers": 4}, "policy": "accordion", "k_low": 0.5}, 4)
    assert strategies(graces[0]) == planned(8).strategies
    with pytest.warns(UserWarning, match=r"without costs of TopK\(.*ratio=0.5.*grace plan --level"):
        graces = workers({"plan": planned(8).to_dict(), "policy": "accordion", "k_low": 0.5}, 4)
    assert strategies(graces[0]) == planned(4).strategies, "for the workers it is made anew all the same"
    same_bits(lockstep(graces, given(0, 4)))
    momentum = planned(8, ratio=0.1, memory="dgc").to_dict()
    with pytest.warns(UserWarning, match="Plan anew: memory 'dgc' cannot follow"):
        assert strategies(workers({"plan": momentum}, 4)[0]) == planned(8, ratio=0.1).strategies


def test_tensors_with_a_method_of_their_own_keep_it_at_every_level():
    file = {
        "params": TOPK,
        "tensors": {
            "in": {"option": "compress(gpu) allgather*(flat) decompress(gpu)"},
            "middle": {"option": "compress(gpu) allgather*(flat) decompress(gpu)", "compressor": "efsignsgd"},
            "out": {"option": "compress(gpu) allgather*(flat) decompress(gpu)", "compress_ratio": 0.01},
        },
    }
    with pytest.warns(UserWarning, match="the strategies stay"):
        graces = workers({"plan": file, **LEVELS}, 2)
    sent = []
    for _ in range(3):
        before = {tensor.name: tensor.bytes_sent for tensor in graces[0].report().tensors}
        lockstep(graces, given(0, 2))
        sent.append({tensor.name: tensor.bytes_sent - before[tensor.name] for tensor in graces[0].report().tensors})
        end_epoch(graces)
    assert [each["in"] for each in sent] == [8 * 18000, 8 * 1800, 8 * 360]
    assert len({each["middle"] for each in sent}) == 1
    assert [each["out"] for each in sent] == [8 * 2000, 8 * 200, 8 * 40]  # given, but equal to the plan's ratio


@pytest.mark.parametrize(
    "params, message",
    [
        ({"plan": "nowhere.json", **LEVELS}, "every worker needs the plan"),
        ({"plan": planned(4).to_dict(), **LEVELS, "compressor": "qsgd"}, "compressor='qsgd', but the plan says 'topk'"),
        ({"plan": planned(4).to_dict(), **LEVELS, "compress_ratio": 0.2}, "compress_ratio=0.2, but the plan says 0.01"),
        ({"plan": planned(4).to_dict(), "policy": "auto"}, "policy 'auto' changes methods"),
        ({"plan": planned(4).to_dict(), "policy": "acordion"}, "did you mean 'accordion'"),
    ],
)
def test_what_does_not_fit_a_plan_with_levels_is_refused(params, message):
    with pytest.raises(ValueError, match=message):
        workers(params, 4)


def spoilt(key, value):
    data = planned(4).to_dict()
    data["basis"][key] = value
    return data


@pytest.mark.parametrize(
    "data, message",
    [
        (spoilt("codecs", []), "no costs of its compressor"),
        (spoilt("codecs", [{"params": {"compressor": "topk"}}]), "compression costs are"),
        (spoilt("devices", ["moon"]), "choose from gpu, cpu"),
        (spoilt("devices", ["cpu"]), "lacks costs of"),
        (spoilt("max_compressions", -1), "max_compressions of the plan's basis is -1"),
        (spoilt("servers", 0), "servers of the plan's basis is 0"),
        (spoilt("mode", "guess"), "mode 'guess'"),
        (spoilt("profile", {"tensors": []}), "a profile is"),
        (spoilt("cluster", {}), "a cluster is"),
        (spoilt("more", 1), "the basis of the plan has not profile"),
        ({**planned(4).to_dict(), "hash": "0"}, "the plan's hash does not fit"),
    ],
)
def test_what_a_plan_was_made_from_is_not_trusted(data, message):
    with pytest.raises(ValueError, match=message):
        plan.from_dict(data)
    with pytest.raises(ValueError, match=message):
        workers({"plan": data}, 4)


def test_a_basis_is_read_as_it_was_written(tmp_path):
    made = planned(8, 2, 0.1, levels=(0.5,), memory="residual")
    made.save(tmp_path / "plan.json")
    again = plan.load(tmp_path / "plan.json")
    assert again == made
    assert (again.basis.profile, again.basis.codecs) == (
        PROFILE,
        (priced(0.1, memory="residual"), priced(0.5, memory="residual")),
    )
    assert again.basis.plan(6).strategies == made.basis.plan(6).strategies
    free = plan.make(PROFILE, Costs(Cluster(4, 1, Link(0.0, float("inf"))), priced(0.1))).plan
    free.save(tmp_path / "free.json")
    assert plan.load(tmp_path / "free.json") == free


def test_a_cluster_of_another_size_is_said_not_to_be_measured():
    two_by_four = Cluster(2, 4, Link(1e-5, 1e8), Link(1e-6, 1e9), "measured", Link(2e-5, 2e8))
    shapes = {6: (6, 1), 4: (1, 4), 12: (3, 4), 1: (1, 1)}
    for size, shape in shapes.items():
        found = two_by_four.among(size)
        assert (found.nodes, found.per_node) == shape
        assert found.source == f"measured among 8 workers, scaled to {size}"
        assert (found.inter, found.intra) == (two_by_four.inter, two_by_four.intra)
        assert cluster_of(found.to_dict()).source == found.source
        # With a single machine, traffic among all workers does not cross links between machines.
        assert found.link("flat") == (two_by_four.flat if found.nodes > 1 else two_by_four.intra)
    assert two_by_four.among(8) is two_by_four
    with pytest.raises(ValueError, match="node_size=4 does not divide 6"):
        two_by_four.among(6, 4)


def test_where_nothing_may_go_to_one_worker_alone_no_plan_does():
    rooted = {o for ratio in (0.1, 0.3) for o in planned(64, 1, ratio).tensors.values() if o.rooted}
    assert rooted
    for ratio in (0.1, 0.3):
        found = planned(8, 1, 0.01, levels=(0.1, 0.3)).basis
        codec = next(each for each in found.codecs if each.params["compress_ratio"] == ratio)
        assert found.codec(TopK(ratio)) is codec
        assert not any(option.rooted for option in found.plan(64, 0, TopK(ratio), rooted=False).tensors.values())


def test_grace_plan_keeps_the_costs_of_levels(tmp_path):
    costs, out = tmp_path / "costs.json", tmp_path / "plan.json"
    costs.write_text(json.dumps([priced(ratio).to_dict() for ratio in (0.01, 0.5, 0.1)]))
    words = ("plan", "lstm", "--compressor", "topk:compress_ratio=0.01", "--costs", costs, "-o", out)
    done = run(*words, "--level", "compress_ratio=0.1", "--level", "compress_ratio=0.5")
    assert done.exit_code == 0, done.output
    found = plan.load(out)
    assert found.params == TOPK
    assert found.basis.codecs == (priced(0.01), priced(0.1), priced(0.5))
    assert found.basis.plan().strategies == found.strategies
    assert run(*words, "--level", "compress_rank=2").exit_code == 2


class Joining(LocalTransport):
    """A transport that workers may join later; nothing is sent before they meet."""

    elastic = True

    def __init__(self, size, rank, theirs=None):
        super().__init__(World(size), rank)
        self.theirs, self.told = theirs, []

    def exchange(self, text):
        self.told.append(text)
        return [self.theirs or text, text][: self.size]


def test_in_an_elastic_job_every_worker_plans_and_they_compare():
    file = planned(4, ratio=0.1).to_dict()
    transport = Joining(2, 0)
    grace = grace_from_params({"plan": file}, transport)
    grace.build(PARAMETERS)
    assert not transport.told
    assert strategies(grace) == planned(2, ratio=0.1).strategies
    grace.settle()
    assert transport.told
    other = planned(4, ratio=0.5).to_dict()
    late = grace_from_params({"plan": file}, Joining(2, 1, json.dumps([json.dumps(other), json.dumps(other)])))
    late.build(PARAMETERS)
    with pytest.raises(ValueError, match="not worker 0's"):
        late.settle()
    with pytest.raises(ValueError, match="every worker needs the plan"):
        grace_from_params({"plan": "nowhere.json"}, Joining(2, 1)).build(PARAMETERS)


def test_elastic_workers_go_on_with_a_plan_for_those_that_are_left(monkeypatch):
    monkeypatch.setattr(LocalTransport, "elastic", True)
    file = planned(8, ratio=0.1, levels=(0.5, 0.05)).to_dict()
    for policy in ({}, {**LEVELS, "warmup_factor": 0.1}):
        chosen = file if not policy else planned(8, levels=(0.5, 0.05)).to_dict()
        graces = workers({"plan": chosen, **policy}, 4)
        ratio = 0.5 if policy else 0.1
        for grace in graces:
            assert strategies(grace) == planned(4, ratio=ratio).strategies  # no message was sent yet
        same_bits(lockstep(graces, given(0, 4)))
        states, world = [grace.state_dict() for grace in graces], World(3)
        for rank, grace in enumerate(graces[:3]):
            grace.reset(LocalTransport(world, rank), states)
            grace.settle()
        assert strategies(graces[0]) == planned(3, ratio=ratio).strategies
        same_bits(lockstep(graces[:3], given(1, 3)))


def test_a_plan_that_is_none_is_refused_by_all_and_not_by_worker_0_alone():
    transport = Joining(2, 0)
    transport.elastic = False
    with pytest.raises(ValueError, match="no costs of its compressor"):
        grace_from_params({"plan": {**spoilt("codecs", []), "workers": 8}}, transport).build(PARAMETERS)
    (told,) = transport.told
    other = Joining(2, 1, told)
    other.elastic = False
    with pytest.raises(ValueError, match="no costs of its compressor"):
        grace_from_params({"plan": "nowhere.json"}, other).build(PARAMETERS)


# -- nothing is lost ---------------------------------------------------------------------------------------------------
SIZES = {"w": (40, 36), "v": (600,)}
SOME = {name: np.zeros(shape, np.float32) for name, shape in SIZES.items()}
RATIOS = {0.5: 0, 0.05: 1, 0.01: 2}  # the epoch of each ratio
GPU = options(devices=("gpu",))
FLAT = [option for option in GPU if option.flat]
DRAW = random.Random(5)
ROUTES = [[parse(DENSE_FLAT), *DRAW.sample(GPU, 2)], [*DRAW.sample(GPU, 2), parse(DENSE_FLAT)]]
ROUTES += [DRAW.sample(GPU, 3) for _ in range(10)]


def by_level(monkeypatch, routes):
    """Fix the strategy of each level's plan, instead of planning."""

    def replan(text, workers, node_size, compressor, rooted, load):
        option = str(routes[RATIOS[compressor.compress_ratio]])
        return json.dumps({"params": TOPK, "workers_per_node": 2, "tensors": {n: {"option": option} for n in SIZES}})

    monkeypatch.setattr(ways, "replan", replan)


ANY = {"plan": {"params": TOPK, "tensors": {n: {"option": DENSE_FLAT} for n in SIZES}}, "node_size": 2, **LEVELS}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("routes", ROUTES, ids=lambda routes: " | ".join(map(str, routes))[:60])
def test_what_was_not_sent_on_one_way_is_sent_on_the_next(name, routes, monkeypatch):
    # The last epoch does not compress and so sends all residuals: the sums of means and gradients must then agree.
    backend(name)
    by_level(monkeypatch, [*routes[:2], parse(DENSE_FLAT)])
    sequence = [given(step, 4, SOME) for step in range(6)]
    out = simulate(ANY, sequence, backend=name, steps_per_epoch=2)
    for means in out.history:
        same_bits(means)
    for tensor in SIZES:
        arrived = np.cumsum([means[0][tensor] for means in out.history], 0, dtype=np.float64)
        truth = np.cumsum([np.mean([g[tensor] for g in step], 0, dtype=np.float64) for step in sequence], 0)
        np.testing.assert_allclose(arrived[-1], truth[-1], atol=2e-5)
        if any(route.compressions for route in routes[:2]):
            assert np.abs(arrived - truth)[:-2].max() > 0.1
    held = out.state[0]["tensors"].get("w", {})
    assert not held or (list(held) == ["carried"] and not np.asarray(held["carried"]).any())


def test_back_and_forth_in_a_graph_that_is_traced_once(monkeypatch):
    backend("tensorflow")
    import tensorflow as tf

    both = [parse("compress(gpu) allgather*(flat) decompress(gpu)"), parse(DENSE_FLAT)]
    by_level(monkeypatch, [both[0], both[1], both[1]])
    params = {**ANY, "policy": "accordion", "k_low": 0.5, "window": 1, "eta": 0.5}
    params = {key: value for key, value in params.items() if key not in LEVELS or key == "policy"}
    grace = grace_from_params(params, "local")
    grace.build({name: tf.zeros(shape) for name, shape in SIZES.items()})
    traces, arrived, truth, seen = [], 0.0, 0.0, []

    @tf.function(autograph=False)
    def step(gradients):
        traces.append(1)
        return grace.step(gradients)

    for number, scale in enumerate([1, 1, 1, 50, 50, 50, 50]):
        (mine,) = given(1, 1, SOME)
        mine = {name: x * np.float32(scale) for name, x in mine.items()}
        means = step({name: tf.constant(x) for name, x in mine.items()})
        arrived, truth = arrived + means["w"].numpy().astype(np.float64), truth + mine["w"].astype(np.float64)
        seen.append(grace.report().tensors[0].strategy)
        if seen[-1] == DENSE_FLAT:
            np.testing.assert_allclose(arrived, truth, atol=1e-4, err_msg=str(number))
        grace.end_epoch()
    assert len(traces) == 1
    changes = [one != other for one, other in pairwise(seen)]
    assert sum(changes) >= 3, seen


def held(graces):
    """All residuals of w, in units of the summed gradients, for strategies that first compress the workers' own."""
    total = np.zeros((40, 36))
    for grace in graces:
        state = grace.state_dict()
        for key, array in state["tensors"].get("w", {}).items():
            start, count = state["points"]["w"].get(key.partition("/")[0], (0, 1440)) if key != "carried" else (0, 1440)
            total.reshape(-1)[start : start + count] += np.asarray(array, np.float64)
    return total


FIRST = "compress(gpu) allgather*(flat) decompress(gpu)"
CHANGES = [
    (FIRST, DENSE_FLAT),
    (FIRST, "reduce(flat) broadcast(flat)"),
    (DENSE_FLAT, FIRST),
    ("compress(gpu) alltoall*(flat) decompress(gpu) allgather(flat)", FIRST),
    (FIRST, "compress(gpu) alltoall*(flat) decompress(gpu) allgather(flat)"),
    ("compress(gpu) alltoall*(flat) decompress(gpu) allgather(flat)",) * 2,
    ("reduce_scatter(flat) compress(gpu) allgather*(flat) decompress(gpu)", FIRST),
    (FIRST, "reduce_scatter(flat) compress(gpu) allgather*(flat) decompress(gpu)"),
    ("reduce_scatter(flat) compress(gpu) allgather*(flat) decompress(gpu)", DENSE_FLAT),
    ("compress(gpu) alltoall*(flat) decompress(gpu) compress(gpu) allgather*(flat) decompress(gpu)", FIRST),
    ("compress(gpu) alltoall*(intra) decompress(gpu) allreduce(inter) allgather(intra)", FIRST),
    ("compress(gpu) gather*(flat) decompress(gpu) compress(gpu) broadcast*(flat) decompress(gpu)", DENSE_FLAT),
]


@pytest.mark.parametrize("sizes", [(4, 3), (4, 6), (4, 1)], ids=str)
@pytest.mark.parametrize("before, after", CHANGES)
@pytest.mark.parametrize("way", ["reset", "load"])
def test_other_workers_go_on_with_all_that_was_not_sent(before, after, sizes, way, monkeypatch):
    # Sums over the workers, whose number changes: gradients = received means + final residuals.
    old, new = sizes
    per_node = {4: 2, 3: 1, 6: 1, 1: 1}
    last = []

    def replan(text, workers, node_size, compressor, rooted, load):
        option = before if workers == old else after
        option = DENSE_FLAT if last else option
        tensors = {n: {"option": option} for n in SIZES}
        return json.dumps({"params": TOPK, "workers_per_node": per_node.get(workers, 1), "tensors": tensors})

    monkeypatch.setattr(ways, "replan", replan)
    params = {"plan": {"params": TOPK, "tensors": {n: {"option": FIRST} for n in SIZES}}}
    graces = workers(params, old, SOME)
    arrived, truth = np.zeros((40, 36)), np.zeros((40, 36))

    def train(steps, first):
        nonlocal arrived, truth
        for step in range(first, first + steps):
            gradients = given(step, len(graces), SOME)
            means = lockstep(graces, gradients)
            same_bits(means)
            arrived = arrived + means[0]["w"].astype(np.float64) * len(graces)
            truth = truth + np.sum([g["w"] for g in gradients], 0, dtype=np.float64)

    def change(size):
        states, world = [grace.state_dict() for grace in graces], World(size)
        if way == "load":
            others = workers(params, size, SOME)
            for grace in others:
                grace.load_state_dict(*states)
            return others
        others = [*graces[:size], *workers(params, size, SOME)[len(graces) :]]
        for rank, grace in enumerate(others):
            grace.reset(LocalTransport(world, rank), states)
        return others

    train(3, 0)
    if before != DENSE_FLAT:
        assert np.abs(arrived - truth).max() > 0.1
    graces = change(new)
    assert {grace.state_dict()["step"] for grace in graces} == {3}
    train(2, 3)
    if after == DENSE_FLAT:
        np.testing.assert_allclose(arrived, truth, atol=1e-4)
    if parse(after).compressions == 1 and after.startswith("compress"):
        np.testing.assert_allclose(arrived + held(graces), truth, atol=1e-4)
        last.append(True)
        size, graces = len(graces), change(len(graces) + 2)
        train(1, 9)
        np.testing.assert_allclose(arrived, truth, atol=1e-4, err_msg=f"{size} workers and two more")


@pytest.mark.parametrize("size", [3, 5])
def test_what_is_carried_by_a_dense_tensor_is_in_its_checkpoints(size, monkeypatch):
    def replan(text, workers, node_size, compressor, rooted, load):
        tensors = {n: {"option": FIRST if workers == 4 else DENSE_FLAT} for n in SIZES}
        return json.dumps({"params": TOPK, "tensors": tensors})

    monkeypatch.setattr(ways, "replan", replan)
    params = {"plan": {"params": TOPK, "tensors": {n: {"option": FIRST} for n in SIZES}}}
    graces = workers(params, 4, SOME)
    lockstep(graces, given(0, 4, SOME))
    kept = held(graces)
    assert np.abs(kept).max() > 0.1
    for count in (3, size):  # first to three workers, then to ``size``, without a step in between
        states, graces = [grace.state_dict() for grace in graces], workers(params, count, SOME)
        for grace in graces:
            if len(states) == count:
                grace.load_state_dict(states[grace.rank])
            else:
                grace.load_state_dict(*states)
        np.testing.assert_allclose(held(graces), kept, atol=1e-4)
    gradients = given(1, size, SOME)
    want = (kept + sum(g["w"] for g in gradients)) / size
    np.testing.assert_allclose(lockstep(graces, gradients)[0]["w"], want, atol=1e-5)
    np.testing.assert_allclose(lockstep(graces, gradients)[0]["w"], want - kept / size, atol=1e-5)


def test_what_is_carried_is_saved_and_waits_for_a_mean_that_is_finite(monkeypatch):
    by_level(monkeypatch, [parse(FIRST), parse(DENSE_FLAT), parse(DENSE_FLAT)])
    graces, others = workers(ANY, 4, SOME), workers(ANY, 4, SOME)
    lockstep(graces, given(0, 4, SOME))
    end_epoch(graces)
    states = [grace.state_dict() for grace in graces]
    assert np.any(states[0]["tensors"]["w"]["carried"])
    for grace, state in zip(others, states, strict=True):
        grace.transport.exchange = lambda text: [text]  # one thread: nobody else is there to answer
        grace.load_state_dict(state)
    bad = given(1, 4, SOME)
    bad[2]["w"][3, 3] = np.nan
    for each in (graces, others):
        assert np.isnan(lockstep(each, bad)[0]["w"]).any()
    for step in (2, 3):
        one, two = lockstep(graces, given(step, 4, SOME)), lockstep(others, given(step, 4, SOME))
        assert all(np.array_equal(one[0][name], two[0][name]) for name in SIZES)
        if step == 2:
            carried = np.mean([state["tensors"]["w"]["carried"].reshape(40, 36) for state in states], 0)
            want = np.mean([g["w"] for g in given(2, 4, SOME)], 0) + carried
            np.testing.assert_allclose(one[0]["w"], want, atol=1e-5)
    assert not np.any(graces[0].state_dict()["tensors"]["w"]["carried"])


def test_a_reset_that_fails_leaves_the_plan_as_it_was():
    graces = workers({"plan": planned(8, 2).to_dict(), "node_size": 2}, 4)
    before = strategies(graces[0])
    with pytest.raises(ValueError, match="does not divide"):
        graces[0].reset(LocalTransport(World(3), 0), [grace.state_dict() for grace in graces])
    assert strategies(graces[0]) == before
    same_bits(lockstep(graces, given(0, 4)))


# -- real workers ------------------------------------------------------------------------------------------------------
@pytest.mark.processes
@pytest.mark.parametrize("launcher, transport", [("torchrun", "torch"), ("horovodrun", "horovod")])
def test_real_workers_plan_anew(launcher, transport, tmp_path):
    found = launch(launcher, 3, "plan_anew.py", tmp_path, transport)
    for worker in found:
        assert worker["plan"] == planned(3, ratio=0.1).strategies  # two of them have no file
        assert worker["levels"] == [planned(3, 1, ratio).strategies for ratio in (0.5, 0.05, 0.01)]
        for name, mean in worker["means"].items():
            assert np.array_equal(mean, found[0]["means"][name])
        assert "scaled to 3" in worker["origin"]
    graces = workers({"plan": planned(8, levels=(0.5, 0.05)).to_dict(), **LEVELS}, 3)
    total = dict.fromkeys(PARAMETERS, 0.0)
    for epoch in range(3):
        (means, *_) = lockstep(graces, given(epoch, 3))
        total = {name: total[name] + means[name].astype(np.float64) for name in total}
        end_epoch(graces)
    for name, want in total.items():
        np.testing.assert_allclose(found[0]["means"][name], want, atol=1e-5)
