"""The record of a training: writing, reading, and `grace report`."""

import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from methods import normal

from grace import grace_from_params, simulate
from grace.engine.record import read, warnings_of
from grace.simulate import end_epoch
from grace.transports.local import LocalTransport, World

N = 2000
K = 20  # of 1 %
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
    some(2, state)  # back to step 3
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


def test_a_policy_that_changes_the_method_is_followed(path):
    grc = grace_from_params({"compressor": "auto", "candidates": ["topk"], "record": str(path)}, "local")
    grc.build({"w": normal(N)})
    for _ in range(20):
        grc.step({"w": normal(N)})
        grc.tune()
    grc.record()
    run = read(path)
    assert run.about["method"] == grc.report().method
    methods = [line.tensors[0]["method"] for line in run.lines]
    assert methods[:3] == ["none", "none", "topk"], "each trial has lines of its own; what follows, the clock decides"
    for line, method in zip(run.lines, methods, strict=True):
        assert line.sent == [line.steps * (8 * K if method == "topk" else 4 * N)]
    assert warnings_of(run) == []


# -- warnings -------------------------------------------------------------------------------------------------------
def made(path, norms, reason="", method="topk", sent=10, dense=100, skipped=0, kernels=True):
    """A record of one tensor, a line for each norm."""
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
        ([min(n, 10) for n in range(1, 41)], False),  # settled
        ([n**0.5 for n in range(1, 41)], False),
        ([*range(1, 31), *range(30, 0, -3)], False),  # on its way down
        ([1, 2, 3, 4], False),  # too short to say
        ([None] * 40, False),
        ([0] * 20 + [1] * 20, False),  # from nothing
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
        assert run.lines[0].sent[0] == 2 * 8 * 40  # of 4096
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
