"""Execution of every strategy of the tree: means, bytes, a memory at every compression; plan files."""

import json
import random
import warnings

import numpy as np
import pytest
from launch import launch
from methods import BACKENDS, SETTINGS, backend, lockstep, spread, workers
from strategies import LOSSLESS, Identity, gradients, plan_of
from support.digits import accuracy, digits, gradient

from grace import grace_from_params, simulate
from grace.backends import get_backend
from grace.communicators.planned.runner import GATHERED, Planned, expand_plan
from grace.communicators.planned.strategy import DENSE_FLAT, options, parse
from grace.compressors.measured.topk import TopK
from grace.core import Context
from grace.core.registry import compressors
from grace.testing.cases import carries
from grace.transports.local import LocalTransport, World

GPU = options(devices=("gpu",))
"""The 174 strategies whose compressions run where gradients are computed."""
SAMPLE = random.Random(0).sample(options(), 300)


def exchanged(chosen, params, given=None, **settings):
    """Simulate two machines of two workers; tensor i takes strategy i."""
    given = given or [gradients(chosen, rank) for rank in range(4)]
    return simulate({**params, **plan_of(chosen)}, given, **settings)


# -- what leaves is what was meant ---------------------------------------------------------------------------------
@pytest.mark.parametrize("params", LOSSLESS, ids=str)
@pytest.mark.parametrize(
    "name, chosen",
    [
        *(pytest.param(name, GPU, id=f"{name}-gpu") for name in BACKENDS if name != "tensorflow"),
        pytest.param("tensorflow", GPU[::4], id="tensorflow-gpu"),
        pytest.param("numpy", SAMPLE, id="numpy-sample"),
        *(
            pytest.param(name, SAMPLE[:60], id=f"{name}-sample", marks=pytest.mark.exhaustive)
            for name in BACKENDS
            if name != "numpy"
        ),
    ],
)
def test_every_strategy_yields_the_exact_mean(name, params, chosen):
    backend(name)
    given = [gradients(chosen, rank) for rank in range(4)]
    means = exchanged(chosen, params, given, backend=name).means
    for tensor, option in enumerate(chosen):
        want = np.mean([g[f"{tensor}"] for g in given], 0, dtype=np.float64)
        for mean in means:
            np.testing.assert_allclose(mean[f"{tensor}"], want, atol=1e-6, err_msg=str(option))
            assert np.array_equal(mean[f"{tensor}"], means[0][f"{tensor}"]), f"workers differ: {option}"


def test_where_compression_runs_changes_nothing():
    twins = random.Random(1).sample([option for option in GPU if option.compressions], 40)
    moved = [option.on(["cpu"] * len(option.devices)) for option in twins]
    given = [[gradients(twins, rank, step) for rank in range(4)] for step in range(3)]
    found = [exchanged(chosen, {"compressor": "topk", "compress_ratio": 0.2}, given) for chosen in (twins, moved)]
    for tensor, option in enumerate(twins):
        one, two = (f.means[0][f"{tensor}"] for f in found)
        assert np.array_equal(one, two), str(option)


# -- memories ------------------------------------------------------------------------------------------------------
def running_means(chosen, params, steps):
    """For each strategy, the error of the running mean over exchanges of constant gradients."""
    given = [gradients(chosen, rank) for rank in range(4)]
    history = exchanged(chosen, params, given, steps=steps).history
    errors = []
    for tensor in range(len(chosen)):
        want = np.mean([g[f"{tensor}"] for g in given], 0, dtype=np.float64)
        found = np.mean([means[0][f"{tensor}"] for means in history], 0, dtype=np.float64)
        errors.append(np.linalg.norm(found - want) / np.linalg.norm(want))
    return np.array(errors)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*without error feedback")
def test_a_memory_at_every_compression_loses_nothing():
    topk, chosen = {"compressor": "topk", "compress_ratio": 0.25}, [o for o in GPU if o.compressions][::4]
    late = running_means(chosen, topk, 40)
    assert late.max() < 0.2, str(chosen[late.argmax()])
    assert late.mean() < 0.4 * running_means(chosen, topk, 10).mean()
    assert running_means(chosen, {**topk, "memory": "none"}, 10).min() > 0.2


@pytest.mark.parametrize("option", random.Random(2).sample([o for o in GPU if o.compressions], 24), ids=str)
def test_what_arrived_and_what_every_stage_kept_make_up_what_was_given(option):
    n, rng = 256, np.random.default_rng(3)
    given = [[{"w": rng.standard_normal(n).astype(np.float32)} for _ in range(4)] for _ in range(5)]
    params = {"compressor": "topk", "compress_ratio": 0.25, "communicator": "planned", "option": str(option)}
    out = simulate({**params, "node_size": 2, "min_numel": 0}, given)
    arrived = np.sum([means[0]["w"] for means in out.history], 0, dtype=np.float64)
    truth = np.sum([np.mean([g["w"] for g in step], 0, dtype=np.float64) for step in given], 0)
    lost = np.zeros((option.compressions, n))
    copies = np.zeros((option.compressions, n))  # number of workers with a residual of an element
    for rank, worker in enumerate(out.state):
        for leg in expand_plan(
            option, TopK(0.25), Context(get_backend("numpy"), "w", (n,), rank=rank, world_size=4), 2
        ):
            for key, leaf in leg.kept() if leg.action.kind == "compress" and leg.here else ():
                part = slice(leaf.offset, leaf.offset + leaf.size)
                lost[leg.stage, part] += worker["tensors"]["w"][f"{key}/memory/residual"]
                copies[leg.stage, part] += 1
    assert copies.min() >= 1
    np.testing.assert_allclose(arrived + (lost / copies).sum(0), truth, atol=1e-5)
    assert np.abs(lost[0]).max() > 0.1


# -- other methods, bytes, reports ---------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [name for name in compressors if carries(Planned(), compressors[name]())])
def test_every_method_travels(name):
    method = {"compressor": name, **SETTINGS.get(name, {})}
    chosen = [
        option
        for option in GPU[::9]
        if not compressors[name]().traits.variable_length or not any(map(moved, option.actions))
    ]
    names = [f"{i}" for i in range(len(chosen))]
    given = [[dict.fromkeys(names, spread(40, 36, seed=10 * step + rank)) for rank in range(4)] for step in range(2)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*without error feedback")
        means = exchanged(chosen, method, given).means
    for mean in means:
        for tensor, option in enumerate(chosen):
            assert np.isfinite(mean[f"{tensor}"]).all(), str(option)
            assert np.array_equal(mean[f"{tensor}"], means[0][f"{tensor}"]), str(option)


def moved(action):
    return action.compressed and action.kind in ("alltoall", "gather")


def test_compressing_once_and_gathering_is_the_communicator_allgather():
    given = [[{"w": spread(40, 36, seed=10 * step + rank)} for rank in range(4)] for step in range(3)]
    for method in ({"compressor": "topk", "compress_ratio": 0.1}, {"compressor": "qsgd"}, {"compressor": "efsignsgd"}):
        usual = simulate({**method, "min_numel": 0, "communicator": "allgather"}, given)
        planned = simulate({**method, "min_numel": 0, "communicator": "planned"}, given)
        assert np.array_equal(usual.means[0]["w"], planned.means[0]["w"])
        assert usual.report.bytes_sent == planned.report.bytes_sent


SUMMED = sorted(set(options(devices=("gpu",), summable=True)) - set(GPU), key=str)
"""Strategies that sum payloads on the wire."""


@pytest.mark.parametrize("name", BACKENDS)
def test_payloads_are_summed_to_the_exact_mean(name):
    backend(name)
    given = [gradients(SUMMED, rank) for rank in range(4)]
    for params in ({"compressor": "none"}, {"compressor": "randomk", "compress_ratio": 1.0}):
        means = exchanged(SUMMED, params, given, backend=name).means
        for tensor, option in enumerate(SUMMED):
            want = np.mean([g[f"{tensor}"] for g in given], 0, dtype=np.float64)
            for mean in means:
                np.testing.assert_allclose(mean[f"{tensor}"], want, atol=1e-6, err_msg=f"{params}, {option}")
                assert np.array_equal(mean[f"{tensor}"], means[0][f"{tensor}"]), f"workers differ: {option}"


def test_summing_payloads_is_the_communicator_allreduce():
    given = [[{"w": spread(40, 36, seed=10 * step + rank)} for rank in range(4)] for step in range(3)]
    flat, levels = "allreduce*(flat)", "allreduce*(inter)"
    for method in ({"compressor": "randomk", "compress_ratio": 0.1}, {"compressor": "fp16", "memory": "residual"}):
        for usual, text in (
            ({"communicator": "allreduce"}, f"compress(gpu) {flat} decompress(gpu)"),
            (
                {"communicator": "hierarchical", "outer": "allreduce", "node_size": 2},
                f"reduce_scatter(intra) compress(gpu) {levels} decompress(gpu) allgather(intra)",
            ),
        ):
            one = simulate({**method, **usual, "min_numel": 0}, given)
            planned = {"communicator": "planned", "option": text, "node_size": 2}
            two = simulate({**method, **planned, "min_numel": 0}, given)
            assert np.array_equal(one.means[0]["w"], two.means[0]["w"]), (method, text)
            assert one.report.bytes_sent == two.report.bytes_sent


@pytest.mark.parametrize("name", ["topk", "efsignsgd", "shared_int"])
def test_payloads_that_must_not_be_averaged_are_refused(name):
    method = {"compressor": name, "communicator": "planned", "option": str(SUMMED[0]), "node_size": 2, "min_numel": 0}
    with pytest.raises(ValueError, match="allreduce"):
        simulate(method, [{"w": spread(40, 36, seed=rank)} for rank in range(4)])


def test_bytes_are_those_of_the_strategy():
    # 64 numbers, four workers, two machines; "identity" sends 4 bytes per number.
    expected = {  # bytes sent by worker 0, a root, and by worker 3
        "compress(gpu) allgather*(flat) decompress(gpu)": (256, 256),
        "compress(gpu) gather*(flat) decompress(gpu) broadcast(flat)": (256, 256),
        "compress(gpu) gather*(flat) broadcast*(flat) decompress(gpu)": (4 * 256, 256),
        "reduce(flat) broadcast(flat)": (256, 256),
        "reduce_scatter(flat) allgather(flat)": (256 * 3 // 4 + 64, 256 * 3 // 4 + 64),
        "compress(gpu) alltoall*(flat) decompress(gpu) allgather(flat)": (256 * 3 // 4 + 64, 256 * 3 // 4 + 64),
        "reduce(intra) compress(gpu) allgather*(inter) decompress(gpu) broadcast(intra)": (256 + 256, 256),
        "reduce_scatter(intra) allreduce(inter) allgather(intra)": (3 * 128, 3 * 128),
    }
    chosen = [parse(text) for text in expected]
    worlds = workers({"compressor": Identity(), **plan_of(chosen)}, 4)
    given = {f"{i}": np.ones(64, np.float32) for i in range(len(chosen))}
    for grace in worlds:
        grace.build(given)
    lockstep(worlds, [given] * 4)
    for rank, place in ((0, 0), (3, 1)):
        sent = {tensor.strategy: tensor.bytes_sent for tensor in worlds[rank].report().tensors}
        assert sent == {text: counts[place] for text, counts in expected.items()}


PLAN = {
    "params": {"compressor": "topk", "compress_ratio": 0.1},
    "tensors": {
        "a": {"option": "compress(gpu) alltoall*(flat) decompress(gpu) compress(gpu) allgather*(flat) decompress(gpu)"},
        "b": {"option": "reduce_scatter(intra) compress(gpu) allgather*(inter) decompress(gpu) allgather(intra)"},
        "c": {"option": "compress(cpu) allgather*(flat) decompress(cpu)", "compressor": "qsgd", "memory": "none"},
        "d": {"option": DENSE_FLAT},
    },
    "workers_per_node": 2,
}
PARAMETERS = {name: np.zeros((40, 36), np.float32) for name in "abcd"}


def of_plan(plan, **params):
    world = World(4)
    return [grace_from_params({"plan": plan, **params}, LocalTransport(world, rank)) for rank in range(4)]


# -- plans ---------------------------------------------------------------------------------------------------------
def test_a_plan_is_a_file_and_the_report_shows_it(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(PLAN))
    graces = of_plan(str(path))
    for grace in graces:
        grace.build(PARAMETERS)
    given = [{name: spread(40, 36, seed=rank) for name in PARAMETERS} for rank in range(4)]
    means = lockstep(graces, given)
    want = np.mean([g["d"] for g in given], 0)
    np.testing.assert_allclose(means[0]["d"], want, rtol=1e-5, atol=1e-6)
    assert all(np.array_equal(means[0][name], mean[name]) for mean in means for name in PARAMETERS)
    report = graces[0].report()
    rows = {tensor.name: tensor for tensor in report.tensors}
    assert {name: row.method for name, row in rows.items()} == {"a": "topk", "b": "topk", "c": "qsgd", "d": "dense"}
    assert rows["d"].reason == f"its strategy is {DENSE_FLAT}"
    for name in "abc":
        assert rows[name].strategy == PLAN["tensors"][name]["option"]
        assert rows[name].strategy in str(report)
    kept = {name: sorted(arrays) for name, arrays in graces[0].state_dict()["tensors"].items()}
    assert kept["a"] == [*(f"compress0.{shard}/memory/residual" for shard in range(4)), "compress1.0/memory/residual"]
    assert kept["b"] == ["compress0.0/memory/residual"]
    assert "c" not in kept


def test_a_resumed_run_goes_on_bit_for_bit():
    given = [[{name: spread(40, 36, seed=10 * s + w) for name in PARAMETERS} for w in range(4)] for s in range(4)]
    graces, others = of_plan(PLAN), of_plan(PLAN)
    for grace in (*graces, *others):
        grace.build(PARAMETERS)
    for step in given[:2]:
        lockstep(graces, step)
    for grace, other in zip(graces, others, strict=True):
        other.load_state_dict(grace.state_dict())
    for step in given[2:]:
        one, two = lockstep(graces, step), lockstep(others, step)
        assert all(np.array_equal(one[0][name], two[0][name]) for name in PARAMETERS)


@pytest.mark.parametrize(
    "plan, params, message",
    [
        ("nowhere.json", {}, "this is no plan"),
        ({"layers": {}}, {}, "this is no plan"),
        (
            {"tensors": {"a": {"option": "allreduce(everywhere)"}}},
            {},
            r"plan, tensor 'a': 'allreduce\(everywhere\)' is no",
        ),
        ({"tensors": {"a": {"option": "compress(gpu) decompress(gpu)"}}}, {}, "plan, tensor 'a': .* just compressed"),
        ({"tensors": {"a": {}}}, {}, "plan, tensor 'a': a strategy is a text"),
        ({"tensors": {"a": {"option": DENSE_FLAT, "compressor": "topp"}}}, {}, "tensor 'a': unknown compressor 'topp'"),
        ({"tensors": {"b": {"option": DENSE_FLAT}}}, {}, "no strategy for 'a'.*another model"),
        (PLAN, {"communicator": "allgather"}, "leave communicator out"),
        (PLAN, {"fuse": "bucket"}, "use fuse='tensor'"),
        (PLAN, {"node_size": 3}, "node_size=3 does not divide 4 workers"),
    ],
)
def test_what_is_no_plan_is_refused(plan, params, message):
    with pytest.raises(ValueError, match=message):
        of_plan(plan, **params)[0].build({"a": PARAMETERS["a"]})


@pytest.mark.parametrize(
    "params, message",
    [
        ({"compressor": "powersgd"}, "agree on one payload while they compress. Use communicator 'allreduce'"),
        ({"compressor": "topk", "memory": "ef21"}, "tracks the mean of what the workers sent"),
        ({"compressor": "threshold", "option": "gather"}, r"gather\*\(flat\) cannot carry payloads of 'threshold'"),
    ],
)
def test_methods_that_cannot_go_that_way_are_refused(params, message):
    option = "compress(gpu) gather*(flat) broadcast*(flat) decompress(gpu)"
    chosen = {**params, "communicator": "planned", "option": option if "option" in params else GATHERED}
    with pytest.raises(ValueError, match=message):
        grace_from_params(chosen, LocalTransport(World(4), 0))


def test_a_plan_for_other_workers_warns():
    with pytest.warns(UserWarning, match="made for 64 workers, but there are 4: .*Plan anew"):
        of_plan({**PLAN, "workers": 64})[0].build(PARAMETERS)


# -- training ------------------------------------------------------------------------------------------------------
MIXED = {
    "params": {"compressor": "topk", "compress_ratio": 0.05},
    "tensors": {
        "a": {
            "option": "reduce_scatter(intra) compress(gpu) alltoall*(inter) decompress(gpu) compress(cpu) "
            "allgather*(inter) decompress(gpu) allgather(intra)"
        },
        "b": {
            "option": "compress(cpu) gather*(intra) decompress(cpu) compress(gpu) allgather*(inter) broadcast*(intra) "
            "decompress(gpu)"
        },
        "c": {"option": DENSE_FLAT},
        "d": {"option": "reduce(flat) compress(gpu) broadcast*(flat) decompress(gpu)", "compressor": "efsignsgd"},
    },
    "workers_per_node": 2,
}


@pytest.mark.slow
def test_digits_with_a_plan_that_mixes_strategies():
    dense, planned = (trained(params) for params in ({"compressor": "none", "min_numel": 0}, {"plan": MIXED}))
    assert dense > 95
    assert abs(planned - dense) <= 1.5


def trained(params, steps=400):
    x, y, _, _ = digits()
    rng = np.random.default_rng(1)
    p = {"a": rng.standard_normal((64, 64)) / 8, "b": rng.standard_normal((64, 10)) / 8}
    p = {name: value.astype(np.float32) for name, value in p.items()}
    p |= {"c": np.zeros(10, np.float32), "d": np.zeros(64, np.float32)}
    world = World(4)
    graces = [grace_from_params(params, LocalTransport(world, rank)) for rank in range(4)]
    for grace in graces:
        grace.build(p)
    for step in range(steps):
        rows = [(step * 32 + np.arange(32)) % 336 + 336 * rank for rank in range(4)]
        means = lockstep(graces, [gradient(p, x[mine], y[mine]) for mine in rows])[0]
        p = {name: p[name] - np.float32(0.3) * means[name] for name in p}
    return accuracy(p)


@pytest.mark.processes
@pytest.mark.parametrize(
    "launcher, toolkit, transport, count",
    [
        ("torchrun", "torch", "torch", 174),
        ("horovodrun", "torch", "horovod", 174),
    ],
)
def test_every_strategy_over_real_processes(launcher, toolkit, transport, count, tmp_path):
    found = launch(launcher, 4, "plan.py", tmp_path, toolkit, transport, str(count))
    chosen = GPU[:: -(-len(GPU) // count)]
    assert found[0]["tensors"] == len(chosen) >= count
    given = [gradients(chosen, rank) for rank in range(4)]
    steps = 1 if toolkit == "tensorflow" else 3
    exact = [key for key in found[0] if key.startswith("exact")]
    lossy = [[gradients(chosen, rank, step) for rank in range(4)] for step in range(steps)]
    local = exchanged(chosen, {"compressor": "topk", "compress_ratio": 0.2}, lossy, backend="torch")
    for tensor, option in enumerate(map(str, chosen)):
        name = f"{tensor}"
        want = np.mean([g[name] for g in given], 0, dtype=np.float64)
        for worker in found:
            for key in exact:
                np.testing.assert_allclose(worker[key][name], want, atol=1e-6, err_msg=option)
            np.testing.assert_allclose(worker["lossy"][name], local.means[0][name], atol=1e-5, err_msg=option)
            for key in (*exact, "lossy"):
                assert np.array_equal(worker[key][name], found[0][key][name]), f"workers differ: {option}"
    assert found[0]["bytes"][0] == {tensor.name: tensor.bytes_sent for tensor in local.report.tensors}
    for worker in found:
        assert "the plan has no strategy for 'unknown'" in worker["unknown"]
