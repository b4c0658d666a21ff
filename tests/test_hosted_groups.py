"""Groups in TensorFlow's graphs: their bits equal those of tensors that are exchanged one by one."""

import numpy as np
import pytest
from methods import PLAIN, backend, built, lockstep, states, unchanged

from grace.engine.groups import book
from grace.engine.groups.book import GroupBook, Layout
from grace.factory import grace_from_params
from grace.transports.local import LocalTransport, World

SIZES = (7, 1000, 513, 5000, 20000)
METHODS = {
    "int4": {"compressor": "blockint"},
    "int8 stochastic": {"compressor": "blockint", "bits": 8, "rounding": "stochastic", "memory": "none"},
    "signs": {"compressor": "efsignsgd"},
    "eden": {"compressor": "eden", "bits": 3, "memory": "none"},
    "topk": {"compressor": "topk", "compress_ratio": 0.05, "index_coding": "int32"},
    "topk, coded": {"compressor": "topk", "compress_ratio": 0.05, "index_coding": "elias_fano"},
    "natural": {"compressor": "natural"},
    "signum": {"compressor": "signum"},
}
CARRIERS = {"gathered": {"communicator": "allgather"}, "two stages": {"communicator": "twostage", "min_shard": 600}}
SUMMED = {
    "uncompressed with a residual": {"compressor": "none", "memory": "residual"},
    "fp16": {"compressor": "fp16"},
    "randomk": {"compressor": "randomk", "compress_ratio": 0.05},
}
CASES = {f"{m}, {c}": {**METHODS[m], **CARRIERS[c]} for m in METHODS for c in CARRIERS} | SUMMED
CASES |= {"topk, ef21": {"compressor": "topk", "compress_ratio": 0.05, "index_coding": "int32", "memory": "ef21"}}
BROKEN = f"t{SIZES[3]}"


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    built()
    monkeypatch.setenv("GRACE_KERNELS", PLAIN)
    backend("tensorflow")
    from grace.kernels.tensorflow import TensorflowKernels

    monkeypatch.setattr(TensorflowKernels, "whole", lambda self, compressor: False)


def drawn(step, rank, shapes=SIZES):
    found = {}
    for number, shape in enumerate(shapes):
        x = np.random.default_rng([step, rank, number]).standard_normal(shape).astype("float32")
        found[f"t{shape}"] = x
    return found


def team(params, workers, shapes=SIZES, **options):
    xp, world = backend("tensorflow"), World(workers)
    made = [grace_from_params({"min_numel": 0, **params, **options}, LocalTransport(world, n)) for n in range(workers)]
    for grace in made:
        grace.build({name: xp.asarray(x, "float32") for name, x in drawn(0, 0, shapes).items()})
    return made


def alone(monkeypatch):
    """Exchange each tensor by itself."""
    monkeypatch.setattr(GroupBook, "of", lambda self, levels, switched=False: Layout(rest=tuple(levels)))


def stepping(graces, graph):
    """A function that runs a step of all workers, in a graph or eagerly."""
    import tensorflow as tf

    def step(gradients):
        return lockstep(graces, gradients)

    return tf.function(step, autograph=False) if graph else step


def run(graces, graph, steps=(1, 2, 3), shapes=SIZES, poison=2):
    """The means of some steps; in step ``poison`` the last worker's gradient of one tensor has a NaN."""
    xp, step, found = backend("tensorflow"), stepping(graces, graph), []
    for number in steps:
        given = [drawn(number, rank, shapes) for rank in range(len(graces))]
        if number == poison and BROKEN in given[-1]:
            given[-1][BROKEN][5] = np.nan
        means = step([{name: xp.asarray(x, "float32") for name, x in mine.items()} for mine in given])
        found.append([{name: mean.numpy() for name, mean in each.items()} for each in means])
    return found


def equal(one, two):
    for mine, other in zip(one, two, strict=True):
        for each, expected in zip(mine, other, strict=True):
            for name, mean in each.items():
                np.testing.assert_array_equal(mean, expected[name], err_msg=name)


def sent(graces):
    return [each.setup.meter.read() for each in graces]


def operations(graces):
    xp = backend("tensorflow")
    given = [{name: xp.asarray(x, "float32") for name, x in drawn(1, 0).items()} for _ in graces]
    return len(stepping(graces, True).get_concrete_function(given).graph.get_operations())


@pytest.mark.parametrize(
    "graph, workers",
    [
        pytest.param(True, 3, id="graph"),
        pytest.param(False, 2, id="eager"),
        pytest.param(True, 2, id="graph-2", marks=pytest.mark.exhaustive),
        pytest.param(False, 3, id="eager-3", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("case", CASES)
def test_a_group_has_the_bits_of_its_tensors_one_by_one(case, graph, workers, monkeypatch):
    graces = team(CASES[case], workers)
    found = run(graces, graph)
    alone(monkeypatch)
    others = team(CASES[case], workers)
    # TensorFlow's graphs replace a division by 3 by a product with 1 / 3: in sums, and in natural for single tensors.
    equal(found, run(others, graph and (workers == 2 or case in SUMMED)))
    assert unchanged(states(graces), states(others))
    assert sent(graces) == sent(others)


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("outer", ["allgather", "twostage"])
@pytest.mark.parametrize("method", ["int4", "topk"])
def test_a_group_between_machines_has_the_bits_of_its_tensors(method, outer, graph, monkeypatch):
    params = {**METHODS[method], "communicator": "hierarchical", "outer": outer, "node_size": 2}
    graces = team(params, 4)
    found = run(graces, graph)
    alone(monkeypatch)
    others = team(params, 4)
    equal(found, run(others, graph))
    assert unchanged(states(graces), states(others))
    assert sent(graces) == sent(others)


@pytest.mark.parametrize("case", [case for case in CASES if "two stages" in case or case in SUMMED])
def test_a_tensor_more_adds_few_operations(case, monkeypatch):
    together = operations(team(CASES[case], 2))
    alone(monkeypatch)
    assert together < operations(team(CASES[case], 2)) * (0.8 if case in SUMMED else 0.5)


@pytest.mark.parametrize("method, own", [("int4", True), ("topk", True), ("topk, coded", False), ("powersgd", False)])
def test_methods_with_operations_of_their_own_form_groups_of_many_small_tensors_in_a_switch(method, own, monkeypatch):
    import tensorflow as tf

    monkeypatch.undo()
    params = {"compressor": "powersgd"} if method == "powersgd" else {**METHODS[method], **CARRIERS["gathered"]}
    (grace,) = team(params, 1, ((40, 50), (50, 40)) if method == "powersgd" else SIZES)
    levels = grace.setup.levels([unit for bucket in grace.setup.table.buckets for unit in bucket.units])
    found = []

    @tf.function
    def trace():
        for switched, many in ((False, 1), (True, 1), (True, len(SIZES))):
            monkeypatch.setattr(book, "MANY", many)
            groups = grace.setup.groups.of(levels, switched).groups
            found.append([unit.size for each in groups for unit in each.units])

    trace()
    every = [unit.size for unit in levels]
    small = [size for size in every if size < book.SMALL]
    assert found == ([[], small, []] if own else [every] * 3)


@pytest.mark.parametrize("nonfinite", ["zero", "raise"])
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
def test_a_mean_that_is_not_finite_is_zero_or_an_error(nonfinite, graph, monkeypatch):
    import tensorflow as tf

    graces = team(CASES["int4, gathered"], 2, nonfinite=nonfinite)
    run(graces, graph, (1,))
    before = states(graces)
    if nonfinite == "raise":
        with pytest.raises((FloatingPointError, tf.errors.InvalidArgumentError), match=BROKEN):
            run(graces, graph, (2,))
        if not graph:
            assert unchanged(states(graces), before)
        return
    found = run(graces, graph, (2,))
    assert not found[0][0][BROKEN].any()
    alone(monkeypatch)
    others = team(CASES["int4, gathered"], 2, nonfinite=nonfinite)
    run(others, graph, (1,))
    equal(found, run(others, graph, (2,)))
    assert unchanged(states(graces), states(others))


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
def test_powersgd_computes_what_its_tensors_do_one_by_one(graph, monkeypatch):
    shapes, params = ((40, 50), (50, 40), (16, 8, 3, 3), (40, 50, 1)), {"compressor": "powersgd", "compress_rank": 3}
    graces = team(params, 2, shapes)
    found = run(graces, graph, shapes=shapes)
    alone(monkeypatch)
    others = team(params, 2, shapes)
    for mine, other in zip(found, run(others, graph, shapes=shapes), strict=True):
        for name, mean in mine[0].items():
            np.testing.assert_array_equal(mean, mine[1][name])
            np.testing.assert_allclose(mean, other[0][name], rtol=1e-4, atol=1e-5)
    for one, two in zip(states(graces), states(others), strict=True):
        assert one.keys() == two.keys()
        for key, array in one.items():
            np.testing.assert_allclose(array, two[key], rtol=1e-4, atol=1e-5)
    assert sent(graces) == sent(others)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_levels_of_a_policy_are_groups(carrier, monkeypatch):
    """Methods with a residual in two layouts, which carries over, and one without; each level in the same graph."""
    candidates = [{**METHODS["int4"], **CARRIERS[carrier]}, {**METHODS["topk"], **CARRIERS["gathered"]}, "fp16"]
    params = {"compressor": "auto", "candidates": candidates}

    def trained():
        graces = team(params, 1)  # one worker: a switch of levels cannot wait for other workers of this process
        step, found = stepping(graces, True), []
        xp = backend("tensorflow")
        for number, level in enumerate((0, 2, 3, 3, 1, 4, 2, 2)):
            for each in graces:
                for name in each.names:
                    before, each.schedule.decision.levels[name] = each.schedule.level(name), level
                    if before != level:
                        each.setup.switch_level(name, before)
                each.schedule._publish()
            given = [drawn(number, 0)]
            if number == 3:
                given[0][BROKEN][5] = np.nan
            means = step([{name: xp.asarray(x, "float32") for name, x in mine.items()} for mine in given])
            found.append([{name: mean.numpy() for name, mean in each.items()} for each in means])
        noise = graces[0].schedule.probe.noise()
        return found, states(graces), sent(graces), noise

    means, kept, counted, noise = trained()
    alone(monkeypatch)
    others = trained()
    equal(means, others[0])
    assert unchanged(kept, others[1])
    assert counted == others[2]
    assert {row[2] for name, row in counted[0].items() if name in noise} == {8}
    assert noise == others[3]
    assert all(each.wanted for each in noise.values())


def test_a_refused_payload_names_its_sender(monkeypatch):
    import tensorflow as tf

    from grace.engine.groups.hosted import HostedGroup

    plain = HostedGroup._begin
    monkeypatch.setattr(
        HostedGroup, "_begin", lambda self, *arrays: [np.full_like(x, 255) for x in plain(self, *arrays)]
    )
    for graph, error in ((True, tf.errors.OpError), (False, ValueError)):
        graces = team(CASES["topk, gathered"], 2)
        with pytest.raises(error, match="worker 0"):
            run(graces, graph, (1,))


def test_a_graph_that_builds_the_state_is_traced_once():
    import tensorflow as tf

    grace, traces = grace_from_params(METHODS["int4"], LocalTransport(World(1), 0)), []

    @tf.function(autograph=False)
    def step(x):
        traces.append(x)
        with tf.init_scope():
            grace.build({"w": tf.zeros(5000)})
        return grace.step({"w": x})["w"]

    step(tf.ones(5000))
    assert len(traces) == 1
    assert grace.steps == 1
