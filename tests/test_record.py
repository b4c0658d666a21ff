"""The record of a training: writing, reading, and `grace report`."""

import csv
import json
import math
import pickle
import re
import struct
import sys
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
from methods import normal
from typer.testing import CliRunner

from grace import grace_from_params, simulate, trackers
from grace.cli.app import app
from grace.core.registry import communicators, compressors, memories, policies
from grace.engine.about import params_of
from grace.engine.record import read, warnings_of
from grace.policies.auto import Auto
from grace.simulate import end_epoch
from grace.transports.local import LocalTransport, World

N = 2000
K = 20  # 1 % of N
TOPK = {"compressor": "topk", "compress_ratio": 0.01}


def gradients(steps=5, **more):
    return [[{"w": normal(N, seed=2 * s + r), **more} for r in range(2)] for s in range(steps)]


def rows(path):
    return [json.loads(row) for row in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def test_lines_are_what_the_report_gained(xp, path):
    params = {**TOPK, "record": str(path), "record_every": 3}
    out = simulate(params, gradients(bias=np.zeros(4, np.float32)), backend=xp.name, steps=8)
    run = read(path)
    assert [(line.step, line.steps) for line in run.lines] == [(3, 3), (6, 3)], "steps 7 and 8 are not due"
    for line in run.lines:
        assert line.names == ["w", "bias"]
        assert line.sent == [3 * 8 * K, 3 * 4 * 4]
        assert line.dense == [3 * 4 * N, 3 * 4 * 4]
        assert (line.bytes_sent, line.bytes_received) == (sum(line.sent), sum(line.sent))
        assert line.ratio == pytest.approx(out.report.ratio)
        assert line.residual[0] > 0
        assert line.residual[1] is None
        assert set(line.times) == (set() if xp.traced else {"compress", "wait", "decompress"})
        assert sum(line.times.values()) <= line.seconds
    assert run.about["method"] == out.report.method
    assert (run.about["toolkit"], run.about["world_size"], run.about["every"]) == (xp.name, 2, 3)
    assert [row["kind"] for row in rows(path)] == ["begin", "tensors", "steps", "steps"], "one worker writes"


def test_norms_are_of_the_memory(xp, path):
    out = simulate({**TOPK, "record": str(path), "record_every": 4}, gradients(4), backend=xp.name)
    kept = np.asarray(out.state[0]["tensors"]["w"]["memory/residual"])
    assert read(path).lines[-1].residual[0] == pytest.approx(np.linalg.norm(kept), rel=1e-4)
    assert out.report.tensors[0].residual_norm == pytest.approx(np.linalg.norm(kept), rel=1e-5)


def test_without_a_name_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    simulate(TOPK, gradients(1))
    assert list(tmp_path.iterdir()) == []
    grc = grace_from_params(TOPK, "local")
    with pytest.raises(ValueError, match=r"'record': 'run\.jsonl'"):
        grc.record()


def test_options_are_checked(path):
    with pytest.raises(ValueError, match="record_every=0 must be 1 or more"):
        grace_from_params({**TOPK, "record_every": 0}, "local")
    with pytest.raises(FileNotFoundError, match="make it first"):
        grace_from_params({**TOPK, "record": str(path / "no" / "run.jsonl")}, "local")


def test_workers_may_name_different_files_and_the_first_one_writes(tmp_path, monkeypatch):
    texts = []
    monkeypatch.setattr(LocalTransport, "exchange", lambda self, text: texts.append(text) or [text] * self.size)
    world = World(2)
    for rank, more in ((0, {}), (1, {}), (1, {"seed": 1})):
        record = {"record": str(tmp_path / f"{rank}.jsonl"), "record_every": 1 + rank}
        grc = grace_from_params({**TOPK, **record, **more}, LocalTransport(world, rank))
        grc.build({"w": np.zeros(N, np.float32)})
    assert [each.name for each in tmp_path.iterdir()] == ["0.jsonl"]
    assert texts[0] == texts[1] != texts[2], "what the workers compare"


def test_the_last_steps_are_written_on_demand_and_once(path):
    grc = grace_from_params({**TOPK, "record": str(path)}, "local")
    grc.build({"w": normal(N)})
    for _ in range(2):
        grc.step({"w": normal(N)})
    grc.record()
    grc.record()
    assert [(line.step, line.steps) for line in read(path).lines] == [(2, 2)]


def test_tensors_are_written_again_when_something_of_them_changes(path):
    grc = grace_from_params({**TOPK, "record": str(path), "record_every": 1}, "local")
    grc.build({"w": normal(N)})
    grc.step({"w": normal(N)})
    grc.note("w", "a note")
    grc.step({"w": normal(N)})
    grc.rebuild({"w": normal(N), "v": normal(2 * N)})
    grc.step({"w": normal(N), "v": normal(2 * N)})
    one, two, three = read(path).lines
    assert [line.tensors[0]["reason"] for line in (one, two, three)] == ["", "a note", "a note"]
    assert three.names == ["w", "v"]
    assert three.sent == [8 * K, 16 * K], "counts begin anew with the tensors"
    assert "w: a note." in warnings_of(read(path))


def test_no_line_spans_a_change_of_level(path):
    policy = {"policy": "warmup", "warmup_ratio": 0.1, "warmup_epochs": 2}
    world = World(1)
    grc = grace_from_params({**TOPK, **policy, "record": str(path)}, LocalTransport(world, 0))
    grc.build({"w": normal(N)})
    for _ in range(3):
        for _ in range(5):
            grc.step({"w": normal(N)})
        end_epoch([grc])
    lines = read(path).lines
    assert [line.step for line in lines] == [5, 10, 15]
    levels = [line.tensors[0]["level"] for line in lines]
    assert len(set(levels)) > 1
    ratios = [float(level.split("=")[1]) for level in levels]
    assert [line.sent[0] for line in lines] == [5 * 8 * round(ratio * N) for ratio in ratios]


def test_a_run_that_goes_on_takes_the_place_of_what_it_repeats(path):
    def some(steps, state=None):
        grc = grace_from_params({**TOPK, "record": str(path), "record_every": 1}, "local")
        if state:
            grc.load_state_dict(state)
        grc.build({"w": normal(N)})
        for _ in range(steps):
            grc.step({"w": normal(N)})
        return grc

    state = some(3).state_dict()
    some(4, state)
    some(2, state)  # continues from step 3, and replaces later lines
    run = read(path)
    assert [line.step for line in run.lines] == [1, 2, 3, 4, 5]
    assert all(line.sent == [8 * K] and line.steps == 1 for line in run.lines)
    some(2)
    assert [line.step for line in read(path).lines] == [1, 2], "a run from the start"


def test_a_line_without_an_end_is_still_being_written(path):
    simulate({**TOPK, "record": str(path), "record_every": 1}, gradients(3))
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert [line.step for line in read(path).lines] == [1, 2]
    path.write_bytes(whole[:-20] + b"\n" + whole)
    with pytest.raises(ValueError, match="line 5, is not part of a record"):
        read(path)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "is no record"),
        ("step,loss\n1,2\n", "line 1, is not part"),
        ('{"kind": "begin", "format": 99}\n', "reads 1"),
        ("[1]\n", "line 1, is not part"),
        ('{"kind": "metrics", "step": 1, "values": {"loss": "low"}}\n', "line 1, is not part"),
    ],
)
def test_other_files_are_refused(path, text, message):
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read(path)


def test_a_disk_that_is_full_does_not_end_a_training(path):
    grc = grace_from_params({**TOPK, "record": str(path), "record_every": 1}, "local")
    grc.build({"w": normal(N)})
    path.unlink()
    path.mkdir()
    with pytest.warns(UserWarning, match="has a gap here"):
        grc.step({"w": normal(N)})
    assert grc.report().steps == 1


def test_a_policy_that_changes_the_method_is_followed(path, monkeypatch):
    monkeypatch.setattr(Auto, "predicts", False)  # tries all candidates
    n, k = 20 * N, 20 * K  # the sample that measures noise is small beside it
    grc = grace_from_params({"compressor": "auto", "candidates": ["topk"], "record": str(path)}, "local")
    grc.build({"w": normal(n)})
    for _ in range(20):
        grc.step({"w": normal(n)})
        grc.tune()
    grc.record()
    run = read(path)
    assert run.about["method"] == grc.report().method
    methods = [line.tensors[0]["method"] for line in run.lines]
    assert methods[:2] == ["none", "topk"], "each trial has lines of its own; what follows, the clock decides"
    for line, method in zip(run.lines, methods, strict=True):
        assert line.sent == [line.steps * (8 * k if method == "topk" else 4 * n)]
    assert warnings_of(run) == []


# -- metrics --------------------------------------------------------------------------------------------------------
def trained_with(path, metrics, **params):
    """A worker that trains two steps before each element of ``metrics``, and records it."""
    grc = grace_from_params({**TOPK, "record": str(path), **params}, "local")
    grc.build({"w": normal(N)})
    for each in metrics:
        for _ in range(2):
            grc.step({"w": normal(N)})
        grc.record(**each)
    return grc


def test_metrics_stand_beside_the_steps_seconds_and_bytes_up_to_them(path):
    with pytest.warns(UserWarning, match="not finite at step 4, and null in the record: 'loss'"):
        grc = trained_with(path, [{"loss": np.float32(0.5)}, {"loss": float("nan"), "accuracy": 1}])
    grc.record(accuracy=2)  # at the same step
    run = read(path)
    assert [(each.step, each.values) for each in run.metrics] == [
        (2, {"loss": 0.5}),
        (4, {"loss": None, "accuracy": 1.0}),
        (4, {"accuracy": 2.0}),
    ]
    assert [(line.step, line.steps) for line in run.lines] == [(2, 2), (4, 2)]
    one, two = run.history()
    assert (one["step"], one["bytes_sent"], one["loss"]) == (2, 2 * 8 * K, 0.5)
    assert (two["step"], two["bytes_sent"], two["loss"], two["accuracy"]) == (4, 4 * 8 * K, None, 2.0)
    assert two["seconds"] == pytest.approx(run.total("seconds"))
    assert two["residual"] == run.lines[-1].norm
    assert (two["ratio"], two["bytes_dense"]) == (run.ratio, 4 * 4 * N)


def test_metrics_that_are_never_finite_are_told_once_and_shown(path):
    never = [{"loss": float("nan"), "f1": value, "accuracy": 0.5} for value in (math.inf, -math.inf, math.nan)]
    with pytest.warns(UserWarning, match="not finite") as told:
        trained_with(path, never)
    assert [str(each.message) for each in told] == ["not finite at step 2, and null in the record: 'f1', 'loss'"]
    run = read(path)
    assert [each.values for each in run.metrics] == [{"loss": None, "f1": None, "accuracy": 0.5}] * 3
    shown = CliRunner().invoke(app, ["report", str(path)], env={"COLUMNS": "120"})
    assert shown.exit_code == 0
    rows = {words[0]: " ".join(words[1:]) for line in shown.output.splitlines() if (words := line.split())}
    assert rows["loss"] == rows["f1"] == "not finite"
    assert rows["accuracy"].endswith("0.5 → 0.5")
    page = path.with_suffix(".html")
    assert CliRunner().invoke(app, ["report", str(path), "--html", str(page)]).exit_code == 0
    assert "f1: not finite" in page.read_text()


def test_metrics_before_the_first_step_and_of_a_resumed_run(path):
    grc = trained_with(path, [])
    grc.record(accuracy=0.1)
    first = trained_with(path, [{"accuracy": value} for value in (0.2, 0.3)])  # a new run under the name
    state = first.state_dict()
    grc = trained_with(path, [{"accuracy": 0.9}])
    assert [(each.step, each.values["accuracy"]) for each in read(path).metrics] == [(2, 0.9)]
    trained_with(path, [{"accuracy": value} for value in (0.2, 0.3)])
    grc = grace_from_params({**TOPK, "record": str(path)}, "local")
    grc.load_state_dict({**state, "step": 2})
    grc.build({"w": normal(N)})
    grc.record(accuracy=0.25)
    assert [(point["step"], point.get("accuracy")) for point in read(path).history()] == [(2, 0.25)]


@pytest.mark.parametrize(
    "metrics, error, match",
    [
        ({"ratio": 1.0}, ValueError, "'ratio' of its own: use another name"),
        ({"step": 1.0}, ValueError, "'step' of its own"),
        ({"loss": "low"}, TypeError, "a metric is one number"),
        ({"loss": np.ones(2)}, TypeError, "a metric is one number"),
        ({"loss": None}, TypeError, "a metric is one number"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_no_metric_is_refused_on_every_worker(path, metrics, error, match, rank):
    grc = grace_from_params({**TOPK, "record": str(path)}, LocalTransport(World(2), rank))
    with pytest.raises(RuntimeError, match="after the first step"):
        grc.record(loss=1.0)
    grc.build({"w": normal(N)})
    with pytest.raises(error, match=match):
        grc.record(**metrics)


# -- what repeats a run ---------------------------------------------------------------------------------------------
def dictionaries():
    pytest.importorskip("typer", reason="the examples are the command line's")
    from grace.cli.catalog import example

    for kind, registry in (("compressors", compressors), ("memories", memories), ("communicators", communicators)):
        for name in registry:
            yield example(name, kind)
    yield {**TOPK, "memory": "dgc", "communicator": "twostage", "seed": 7, "min_numel": 0, "bucket_mb": 1.5}
    yield {"compressor": "auto", "candidates": ["topk", {"compressor": "qsgd", "quantum_num": 7}]}
    for name in policies:
        yield {"compressor": "topk", "policy": name, **({"k_low": 0.2} if name == "accordion" else {})}
    yield {"compressor": "chain", "sparsifier": "randomk", "quantizer": "qsgd", "quantum_num": 127}
    plan = {"tensors": {"w": {"option": "allgather", "compressor": "topk"}}, "params": {"compressor": "topk"}}
    yield {"compressor": "topk", "plan": plan}


@pytest.mark.filterwarnings("ignore")
def test_the_dictionary_of_a_record_makes_an_equal_grace():
    def parts(grc):
        setup = grc.setup
        return setup.method, setup.unresolved, setup.policy, setup.options

    for params in dictionaries():
        grc = grace_from_params(params, "local")
        found = json.loads(json.dumps(params_of(*parts(grc))))
        again = grace_from_params(found, "local")
        assert json.loads(json.dumps(params_of(*parts(again)))) == found, params
        method, communicator, policy, options = parts(grc)
        assert (again.method, again.options) == (method, options), params
        if "plan" in params:
            assert found["plan"] == params["plan"]
        else:
            assert (repr(again.setup.unresolved), repr(again.setup.policy)) == (repr(communicator), repr(policy)), (
                params
            )


def test_the_first_line_holds_what_repeats_the_run(path):
    params = {**TOPK, "compress_ratio": 0.02, "seed": 5, "memory": "dgc"}
    kernel = normal(N)
    one = simulate({**params, "record": str(path)}, [{"w": kernel}, {"w": kernel}], steps=3)
    about = read(path).about
    assert about["params"] | params == about["params"]
    assert about["versions"]["numpy"] == np.__version__
    assert about["machine"]["cores"] >= 1
    assert about["transport"] == "LocalTransport"
    two = simulate(about["params"], [{"w": kernel}, {"w": kernel}], steps=3)
    np.testing.assert_array_equal(one.means[0]["w"], two.means[0]["w"])


# -- trackers -------------------------------------------------------------------------------------------------------
def test_a_tracker_gets_the_numbers_of_each_line(path):
    told = []
    simulate_ = {"record_every": 2, "tracker": lambda step, numbers: told.append({"step": step, **numbers})}
    with pytest.warns(UserWarning, match="not finite at step 6"):
        grc = trained_with(path, [{"loss": 0.5}, {}, {"loss": float("inf")}], **simulate_)
    history = read(path).history()
    assert [point["step"] for point in history] == [2, 4, 6]
    found = {point["step"]: point for point in told}
    for point in history:
        kept = {name: value for name, value in point.items() if value is not None}
        assert found[point["step"]] == pytest.approx(kept), "as the record says, without what is unknown"
    assert all("loss" not in point for point in told if point["step"] > 2)
    assert grc.report().steps == 6


def test_only_worker_0_tracks_and_workers_may_differ(path):
    told, world = [], World(2)
    for rank in range(2):
        params = {**TOPK, "record": str(path), "tracker": lambda step, numbers, rank=rank: told.append(rank)}
        grc = grace_from_params(params, LocalTransport(world, rank))
        grc.build({"w": normal(N)})
        grc.record(loss=1.0)
    assert told == [0]


def test_a_tracker_that_fails_does_not_end_a_training(path):
    def lost(step, numbers):
        raise ConnectionError("no network")

    with pytest.warns(UserWarning, match="the tracker failed at step 2: ConnectionError"):
        grc = trained_with(path, [{"loss": 0.5}], tracker=lost)
    assert grc.report().steps == 2
    assert read(path).metrics[0].values == {"loss": 0.5}


def test_what_is_no_tracker_is_refused(path):
    with pytest.raises(ValueError, match="must be a function of a step"):
        grace_from_params({**TOPK, "record": str(path), "tracker": "wandb"}, "local")
    with pytest.raises(ValueError, match="name its file, too"):
        grace_from_params({**TOPK, "tracker": print}, "local")


@pytest.mark.parametrize("name, package", [("tensorboard", "tensorboard"), ("wandb", "wandb"), ("mlflow", "mlflow")])
def test_a_package_that_is_missing_is_named_before_the_training(name, package, monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda each: None if each == package else each)
    with pytest.raises(ModuleNotFoundError, match=f"pip install {package}"):
        getattr(trackers, name)(*["folder"] * (name == "tensorboard"))


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_trackers_call_the_packages_as_documented(path, name, monkeypatch):
    """Stand-ins for the packages accept only documented arguments."""
    calls = []

    class SummaryWriter:
        def __init__(self, log_dir):
            calls.append(("open", log_dir))

        def add_scalar(self, tag, scalar_value, global_step=None):
            calls.append((tag, scalar_value, global_step))

        def flush(self):
            calls.append("flush")

    class Run:
        def define_metric(self, name, step_metric=None):
            calls.append((name, step_metric))

        def log(self, data):
            calls.append(data)

    def log_metrics(metrics, step=None):
        calls.append((metrics, step))

    modules = {
        "torch.utils.tensorboard": SimpleNamespace(SummaryWriter=SummaryWriter),
        "wandb": SimpleNamespace(run=Run()),
        "mlflow": SimpleNamespace(log_metrics=log_metrics),
    }
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: name)
    tracker = getattr(trackers, name)(*["runs/x"] * (name == "tensorboard"))
    assert pickle.loads(pickle.dumps(tracker))
    assert calls == [], "nothing is opened before the first line"
    for module, stand_in in modules.items():
        monkeypatch.setitem(sys.modules, module, stand_in)
    trained_with(path, [{"loss": 0.5}, {"loss": 0.25}], tracker=tracker)
    losses = [0.5, 0.25]
    if name == "tensorboard":
        assert calls.count(("open", "runs/x")) == 1
        assert [call[1:] for call in calls if call[0] == "grace/loss"] == list(zip(losses, (2, 4), strict=True))
        assert calls.count("flush") == 2
    elif name == "wandb":
        axis, *logged = calls
        assert axis == ("grace/*", "grace/step")
        assert [(each["grace/step"], each["grace/loss"]) for each in logged] == [(2, 0.5), (4, 0.25)]
        assert [each["grace/bytes_sent"] for each in logged] == [2 * 8 * K, 4 * 8 * K]
    else:
        assert [(metrics["grace/loss"], step) for metrics, step in calls] == [(0.5, 2), (0.25, 4)]


# These tests read the packages' own files. `make install` omits wandb, with its 16 dependencies, and MLflow, whose
# importlib-metadata is older than the one in constraints.txt.
def tracked(path, tracker):
    """The values that the packages should store in a training with the tracker: by name, at steps 2 and 4."""
    assert pickle.loads(pickle.dumps(tracker))
    trained_with(path, [{"loss": 0.5}, {"loss": 0.25}], tracker=tracker)
    first, second = read(path).history()
    assert {"loss", "bytes_sent", "bytes_received", "bytes_dense", "seconds", "ratio"} <= set(first)
    return {f"grace/{name}": [(2, first[name]), (4, second[name])] for name in first if name != "step"}


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_reads_its_event_files(path, tmp_path):
    pytest.importorskip("torch")
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    expected = tracked(path, trackers.tensorboard(tmp_path / "runs"))
    events = reader.EventAccumulator(str(tmp_path / "runs")).Reload()
    found = {name: [(each.step, each.value) for each in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert set(found) == set(expected)
    for name, values in expected.items():
        assert found[name] == [(step, pytest.approx(value)) for step, value in values], name


def wandb_records(file):
    """The records of an offline run: protocol buffers in the frames of LevelDB's log, in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record = file.read_bytes(), 7, b""  # skip the file's header
    while at + 7 <= len(data):
        left = 2**15 - at % 2**15
        if left < 7:
            at += left
            continue
        _, length, part = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if part in (1, 4):  # a whole record, or its last part
            yield Record.FromString(record)
            record = b""


@pytest.mark.filterwarnings("ignore")
def test_wandb_writes_an_offline_run(path, tmp_path):
    wandb = pytest.importorskip("wandb", reason="pip install wandb")
    settings = wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_machine_info=True)
    try:
        with wandb.init(mode="offline", project="grace", dir=tmp_path, settings=settings) as run:
            run.log({"own": 1}, step=7)  # the script logs with step numbers of its own
            expected = tracked(path, trackers.wandb())
            run.log({"own": 2}, step=20)
    finally:
        wandb.teardown()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    found, axes = {}, []
    for record in wandb_records(file):
        numbers = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for name in numbers.keys() & expected.keys():
            found.setdefault(name, []).append((numbers["grace/step"], numbers[name]))
        axes += [record.metric.step_metric] if record.metric.glob_name == "grace/*" else []
    assert {name: found[name] for name in expected} == expected
    assert axes == ["grace/step"]


@pytest.mark.filterwarnings("ignore")
def test_mlflow_reads_its_database(path, tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="pip install mlflow")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    mlflow.set_tracking_uri(uri)
    mlflow.set_experiment("grace")
    with mlflow.start_run() as run:
        expected = tracked(path, trackers.mlflow())
    client = mlflow.MlflowClient(uri)
    for name, values in expected.items():
        assert [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)] == values, name
    assert set(client.get_run(run.info.run_id).data.metrics) == set(expected)


# -- warnings -------------------------------------------------------------------------------------------------------
def made(path, norms, reason="", method="topk", sent=10, dense=100, skipped=0, kernels=True):
    """A record of one tensor, with a line for each residual norm."""
    facts = {"name": "w", "shape": [25], "method": method, "reason": reason, "strategy": "", "level": ""}
    begin = {"format": 1, "when": 0.0, "step": 0, "every": 1, "grace": "1", "toolkit": "numpy", "kernels": kernels}
    begin |= {"kind": "begin", "graph": False, "world_size": 1}
    steps = {"kind": "steps", "steps": 1, "seconds": 0.1, "bytes_sent": sent, "bytes_received": sent, "times": {}}
    steps |= {"bytes_dense": dense, "skipped": skipped, "sent": [sent], "dense": [dense]}
    tensors = {"kind": "tensors", "method": "topk + residual + allgather", "tensors": [facts]}
    lines = [{**steps, "step": number, "residual": [norm]} for number, norm in enumerate(norms, 1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in [begin, tensors, *lines]))
    return read(path)


@pytest.mark.parametrize(
    "norms, growing",
    [
        (range(1, 41), True),
        ([min(n, 10) for n in range(1, 41)], False),  # settles
        ([n**0.5 for n in range(1, 41)], False),
        ([*range(1, 31), *range(30, 0, -3)], False),  # rises and falls
        ([1, 2, 3, 4], False),  # too short to say
        ([None] * 40, False),
        ([0] * 20 + [1] * 20, False),  # rises from zero, then stays
    ],
)
def test_a_residual_that_goes_on_growing_is_named(path, norms, growing):
    found = [text for text in warnings_of(made(path, norms)) if "growing: w" in text]
    assert len(found) == growing
    assert all("1.9 times" in text and "ef21" in text for text in found)


def test_warnings(path):
    assert warnings_of(made(path, [1.0])) == []
    assert "2 times a tensor's mean" in warnings_of(made(path, [1.0, 1.0], skipped=1))[0]
    assert "More bytes leave" in warnings_of(made(path, [1.0], sent=101))[0]
    dense = warnings_of(made(path, [None], "too small", "dense", sent=100))
    assert dense == ["w goes dense, 100% of the bytes sent: too small."]
    assert "Native kernels are not in use" in warnings_of(made(path, [1.0], kernels=False))[0]
    assert warnings_of(made(path, [1.0], kernels=None)) == []
    assert "No steps are recorded yet" in warnings_of(made(path, []))[0]


# -- toolkits -------------------------------------------------------------------------------------------------------
def test_an_optimizer_of_pytorch_writes_by_itself(path):
    torch = pytest.importorskip("torch")
    import grace

    model = torch.nn.Linear(64, 64)
    grc = grace_from_params({**TOPK, "record": str(path), "record_every": 2}, "local")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    grace.torch.DistributedOptimizer(optimizer, grc, model.named_parameters())
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
    run = read(path)
    assert [line.step for line in run.lines] == [2, 4]
    assert run.lines[0].names == ["weight", "bias"]
    assert set(run.times) == {"compress", "wait", "decompress", "elsewhere"}
    assert sum(run.times.values()) == pytest.approx(run.total("seconds"))


@pytest.mark.parametrize("callback", [True, False])
def test_fit_writes_with_a_callback(path, callback):
    keras = pytest.importorskip("keras")
    pytest.importorskip("tensorflow")
    import grace

    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
    grc = grace_from_params({**TOPK, "record": str(path), "record_every": 2}, "local")
    model.compile(grace.tensorflow.DistributedOptimizer(keras.optimizers.SGD(0.1), grc), "mse", jit_compile=False)
    callbacks = [grace.tensorflow.RecordCallback()] * callback
    x = np.ones((40, 64), "float32")
    model.fit(x, x, batch_size=8, verbose=0, callbacks=callbacks)
    run = read(path)
    if callback:
        assert [(line.step, line.steps) for line in run.lines] == [(2, 2), (4, 2), (5, 1)]
        assert run.lines[0].sent[0] == 2 * 8 * 40  # 40 of 4096 elements
        assert run.times == {}
    else:
        assert run.lines == []
        assert "RecordCallback" in warnings_of(run)[0]


# -- the command ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("record") / "run.jsonl"
    params = {**TOPK, "policy": "warmup", "warmup_ratio": 0.1, "warmup_epochs": 2, "record": str(path)}
    sequence = [[{"w<b>": normal(N, seed=s), "b": np.ones(3, np.float32)}] for s in range(5)]
    simulate({**params, "record_every": 2}, sequence, steps=40, steps_per_epoch=10)
    return path


def invoke(*arguments):
    pytest.importorskip("typer", reason="the command line")
    from typer.testing import CliRunner

    from grace.cli.app import app

    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_the_terminal_shows_totals_curves_levels_and_warnings(trained):
    found = invoke(trained)
    assert found.exit_code == 0, found.output
    run = read(trained)
    assert "topk + residual + allgather" in found.output
    assert f"{run.ratio:.1f} times fewer" in " ".join(found.output.split())
    assert re.search(r"^ratio +[▁-█]+ +[\d.]+ → [\d.]+", found.output, re.MULTILINE)
    assert re.search(r"^residual +[▁-█]+", found.output, re.MULTILINE)
    assert re.search(r"compress \d+% .* elsewhere \d+%", " ".join(found.output.split()))
    assert re.search(r"^w<b> +2000 +topk +400 B +20.0 +[\d.]+ +[▁-█]+ +0.025 *$", found.output, re.MULTILINE), (
        found.output
    )
    assert "! b goes dense" in found.output


def test_the_page_is_whole_and_stands_alone(trained, tmp_path):
    page = tmp_path / "run.html"
    found = invoke(trained, "--html", page)
    assert found.exit_code == 0, found.output
    text = page.read_text()
    assert not re.search(r"(src|href)=|https?://|url\(|@import|<script", text), "nothing is fetched"
    tree = ElementTree.fromstring(
        text.replace("<!doctype html>", "")
        .replace('<meta charset="utf-8">', "")
        .replace('initial-scale=1">', 'initial-scale=1"/>')
        .replace("<td class=n>", "<td>")
        .replace("<th class=n>", "<th>")
    )
    assert tree.tag == "html", "tags are closed, and names are escaped"
    titles = [title.text for title in tree.iter("title")]
    run = read(trained)
    for line in run.lines:
        assert f"ratio: {line.ratio:.3g} at step {line.step}" in titles
        assert f"w<b>: {line.residual[0]:.3g} at step {line.step}" in titles
        assert any(title.endswith(f"ms, up to step {line.step}") for title in titles if title)
    assert "w<b>: compress_ratio=0.1, steps 0 to 20" in titles
    assert "b goes dense" in text
    for curve in tree.iter("polyline"):
        points = [tuple(map(float, point.split(","))) for point in curve.get("points").split()]
        assert all(0 <= x <= 520 and 0 <= y <= 230 for x, y in points)


def test_a_run_without_steps_yet_can_be_shown(path):
    grace_from_params({**TOPK, "record": str(path)}, "local").build({"w": normal(N)})
    for arguments in ((path,), (path, "--html", path.with_suffix(".html"))):
        found = invoke(*arguments)
        assert found.exit_code == 0, found.output
    assert "No steps are recorded yet" in path.with_suffix(".html").read_text()


def test_many_lines_become_fewer_that_add_up(path):
    run = made(path, [float(n % 7) for n in range(1000)])
    thin = run.thinned(300)
    assert len(thin) == 250
    assert sum(line.steps for line in thin) == 1000
    assert sum(line.bytes_sent for line in thin) == run.total("bytes_sent")
    assert thin[-1].residual == run.lines[-1].residual
    assert [line.step for line in thin] == list(range(4, 1001, 4))


def test_what_is_no_record_is_said_in_a_sentence(tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("hello\n")
    for wrong, message in ((other, "is not part of a record"), (tmp_path / "none", "No such file")):
        found = invoke(wrong)
        assert found.exit_code == 2
        assert message in re.sub(r"[\s│]+", " ", found.output)


def test_following_shows_what_comes_and_ends_with_the_key(trained, monkeypatch):
    pytest.importorskip("typer", reason="the command line")
    from grace.cli import report

    lines = trained.read_text().splitlines(keepends=True)
    growing = trained.with_name("growing.jsonl")
    growing.write_text("".join(lines[:6]))
    naps = iter([lambda: growing.write_text("".join(lines)), lambda: None])

    def sleep(_):
        nap = next(naps, None)
        if nap is None:
            raise KeyboardInterrupt
        nap()

    monkeypatch.setattr(report.time, "sleep", sleep)
    found = invoke(growing, "--follow")
    assert found.exit_code == 0, found.output
    assert f"step {read(trained).lines[-1].step}" in found.output


# -- several runs ---------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Records of 4 and 3 epochs of 2 steps; the second run sends a tenth of the bytes."""
    folder = tmp_path_factory.mktemp("runs")
    for name, losses, ratio in (("a", (8, 4, 2, 1), 0.1), ("b", (9, 6, 3), 0.01)):
        trained_with(folder / f"{name}.jsonl", [{"loss": loss, "odd[x]": 1} for loss in losses], compress_ratio=ratio)
    trained_with(folder / "c.jsonl", [{}])
    return [folder / f"{name}.jsonl" for name in "abc"]


def test_runs_are_compared_at_the_same_steps_seconds_and_bytes(runs, monkeypatch):
    monkeypatch.chdir(runs[0].parent)  # long paths are wrapped in the output
    found = invoke(*(run.name for run in runs))
    assert found.exit_code == 0, found.output
    text = " ".join(found.output.split())
    assert "loss over steps last at step 6 at" in text
    table = found.output[found.output.index("over steps") :]
    one, two = (re.search(rf"{name}\.jsonl +([▁-█]+) +(.*)", table)[2].split() for name in "ab")
    assert (one[0], one[1]) == ("1", "2"), "last, and at step 6"
    assert (two[0], two[1]) == ("3", "3")
    assert one[3] == "–", "before its first measure it sent more than the other run in all"
    assert two[3] == "3"
    assert "at 960 B" in text
    assert "c.jsonl" not in table, "it has no metrics"
    assert "odd[x]" in found.output


def test_runs_without_metrics_say_how_to_record_them(runs, tmp_path):
    trained_with(tmp_path / "d.jsonl", [{}])
    for arguments in ((), ("--html", tmp_path / "page.html")):
        found = invoke(runs[2], tmp_path / "d.jsonl", *arguments)
        assert found.exit_code == 0, found.output
        text = (tmp_path / "page.html").read_text() if arguments else found.output
        assert "grc.record(loss=..., accuracy=...)" in " ".join(text.split())


def test_each_of_many_runs_has_its_own_colour(runs, tmp_path):
    many = []
    for number in range(14):
        many.append(tmp_path / f"run{number}.jsonl")
        many[-1].write_bytes(runs[0].read_bytes())
    page = tmp_path / "page.html"
    assert invoke(*many, "--html", page).exit_code == 0
    figure = page.read_text().partition("loss over step</figcaption>")[2].partition("</figure>")[0]
    drawn = re.findall(r'stroke="([^"]+)" stroke-width="2"', figure)
    assert len(set(drawn)) == len(drawn) == 14
    assert re.findall(r'background:([^"]+)"', figure) == drawn


@pytest.mark.parametrize("count", [1, 2, 3])
def test_csv_and_json_have_the_history(runs, count):
    table = list(csv.DictReader(invoke(*runs[:count], "--csv").stdout.splitlines()))
    data = json.loads(invoke(*runs[:count], "--json").stdout)
    data = {str(runs[0]): data} if count == 1 else data
    assert list(data) == list(map(str, runs[:count]))
    points = [(name, point) for name, run in data.items() for point in run["history"]]
    assert len(points) == len(table) == sum((4, 3, 1)[:count])
    for (name, point), row in zip(points, table, strict=True):
        assert row["run"] == name
        assert {key: value for key, value in row.items() if value and key != "run"} == {
            key: str(value) for key, value in point.items() if value is not None
        }
    assert data[str(runs[0])]["metrics"][-1] == {"step": 8, "values": {"loss": 1.0, "odd[x]": 1.0}}


def test_a_page_draws_metrics_over_steps_seconds_and_bytes(runs, tmp_path):
    page = tmp_path / "page.html"
    assert invoke(*runs, "--html", page).exit_code == 0
    text = page.read_text()
    assert not re.search(r"(src|href)=|https?://|url\(|@import|<script", text), "nothing is fetched"
    assert f"<title>{runs[0]}: 1 at step 8</title>" in text
    assert f"<title>{runs[1]}: 3 at bytes sent 960 B</title>" in text
    for curve in re.findall(r'<polyline points="([^"]+)"', text):
        points = [tuple(map(float, point.split(","))) for point in curve.split()]
        assert all(0 <= x <= 520 and 0 <= y <= 230 for x, y in points)
    assert len(re.findall(r"<figcaption>loss over (step|seconds|bytes sent)<", text)) == 3
    assert invoke(runs[0], "--html", page).exit_code == 0
    assert "<title>loss: 1 at step 8</title>" in page.read_text()
    assert re.search(r"^loss +█\S* +8 → 1", invoke(runs[0]).output, re.MULTILINE)


@pytest.mark.parametrize(
    "arguments, match",
    [
        (("--csv", "--json"), "leave out --follow, --html and"),
        (("--csv", "--follow"), "leave out --follow, --html and"),
        (("--follow",), "--follow shows one record"),
    ],
)
def test_options_that_do_not_go_together(runs, arguments, match):
    found = invoke(*runs[:2], *arguments)
    assert found.exit_code == 2
    assert match in re.sub(r"[\s│]+", " ", found.output)


def test_a_file_that_is_named_twice_is_refused(runs):
    found = invoke(runs[0], runs[0])
    assert found.exit_code == 2
    assert "a file is named twice" in found.output
