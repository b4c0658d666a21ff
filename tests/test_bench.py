"""`grace bench kernels`: figures are noisy, so the tests check that they are complete, consistent and honest."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import warnings
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("typer", reason="the grace command needs the extra [cli]")
from rich.console import Console

import grace
from grace.backends import get_backend
from grace.bench import kernels, memory, plan, show, subjects, worker

ROOT = Path(__file__).parents[1]
N = 10_000
QUICK = ("--sizes", "1e4", "--threads", "1", "--rounds", "3", "--budget", "1", "--no-memory")
BAD_METHODS = """
import os, time
from dataclasses import dataclass
from grace.core import Compressor
from grace.core.registry import register

class Bad(Compressor):
    def compress(self, x, state, ctx):
        self.misbehave()
        return (x,), state
    def decompress(self, payload, ctx):
        return payload[0]

@register("dies")
@dataclass(frozen=True)
class Dies(Bad):
    def misbehave(self):
        os._exit(7)

@register("hangs")
@dataclass(frozen=True)
class Hangs(Bad):
    def misbehave(self):
        time.sleep(60)

@register("raises")
@dataclass(frozen=True)
class Raises(Bad):
    def misbehave(self):
        raise ValueError("out of ideas")

@register("asks")
@dataclass(frozen=True)
class Asks(Bad):
    bits: int
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder as an installer leaves it: the example's method, and methods that misbehave."""
    found = tmp_path_factory.mktemp("site")
    shutil.copy(ROOT / "examples" / "own_method" / "grace_nearest4.py", found)
    (found / "bad_methods.py").write_text(BAD_METHODS)
    for name, module in (("nearest4", "grace_nearest4"), ("bad", "bad_methods")):
        info = found / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[grace.compressors]\n{name} = {module}\n")
    return found


@pytest.fixture(scope="module")
def bench(site, tmp_path_factory):
    """Runs the command as a user does; returns its JSON output and the process."""

    def run(*arguments, check=True):
        file = tmp_path_factory.mktemp("out") / "records.json"
        paths = {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
        command = [sys.executable, "-m", "grace.cli", "bench", "kernels", *arguments, "--output", str(file)]
        done = subprocess.run(command, env={**os.environ, **paths}, capture_output=True, text=True, check=False)
        if check:
            assert done.returncode == 0, done.stderr[-3000:]
        return (json.loads(file.read_text()) if file.exists() else None), done

    return run


@pytest.fixture(scope="module")
def measured(bench):
    """Two methods and an installed third-party one on NumPy, with both allocators."""
    return bench(
        "topk", "topk:compress_ratio=0.1", "efsignsgd:block_size=512", "nearest4", "--backend", "numpy", *QUICK
    )


LABELS = {"topk", "topk:compress_ratio=0.1", "efsignsgd:block_size=512", "nearest4"}


@pytest.mark.slow
def test_every_case_has_a_record_in_every_configuration(measured):
    found, _ = measured
    keys = [(record["label"], record["allocator"]) for record in found["records"]]
    assert sorted(keys) == sorted((label, allocator) for label in LABELS for allocator in plan.ALLOCATORS)
    settings = {(r["backend"], r["mode"], r["threads"], r["size"], r["tensors"]) for r in found["records"]}
    assert settings == {("numpy", "eager", 1, N, "flat")}
    assert [each for each in found["left_out"] if each["label"] in LABELS] == []


def test_multiples_are_times_over_the_memcpy_of_the_same_run(measured):
    for record in measured[0]["records"]:
        copy = record["memcpy"]["us"]
        assert copy > 0
        for operation in ("encode", "commit", "decode"):
            found = record[operation]
            assert 0 < found["q1_us"] <= found["us"] <= found["q3_us"]
            assert found["x"] == pytest.approx(found["us"] / copy)
            assert found["samples"] == 3
            assert found["once"] is False
        assert record["step"] is None


def test_bytes_are_those_of_a_real_exchange(measured):
    gradients = [{"w": np.random.default_rng(w).laplace(size=N).astype(np.float32)} for w in range(2)]
    expected = {
        label: grace.simulate(plan.parse(label).params, gradients).report.bytes_sent for label in LABELS - {"nearest4"}
    }
    expected["nearest4"] = N // 2 + 4 * math.ceil(N / 64)
    for record in measured[0]["records"]:
        assert record["bytes"] == expected[record["label"]]
        assert record["bits_per_element"] == pytest.approx(8 * record["bytes"] / N)
        assert record["workers_decoded"] == 4
        assert record["state_bytes"] == 4 * N


def test_records_say_how_a_method_was_set(measured):
    by_label = {record["label"]: record for record in measured[0]["records"]}
    assert by_label["topk"]["parameters"]["compress_ratio"] == 0.01
    assert by_label["topk:compress_ratio=0.1"]["parameters"]["compress_ratio"] == 0.1
    assert (by_label["nearest4"]["compressor"], by_label["nearest4"]["memory"]) == ("nearest4", "residual")
    assert by_label["efsignsgd:block_size=512"]["form"] == "blockwise"


def test_the_machine_is_described_but_not_named(measured):
    found, _ = measured
    assert found["machine"]["cores"] >= 1
    assert {"cpu", "python", "numpy", "grace", "kernels"} <= set(found["machine"])
    assert os.uname().nodename not in json.dumps(found["machine"]).split('"')


def test_the_table_shows_both_allocators(measured):
    text = measured[1].stdout
    assert "numpy, 1 thread, n = 10,000" in text
    assert re.search(r"memcpy in µs: as it comes [\d.]+, tuned [\d.]+", text)
    assert re.search(r"nearest4 .*5,628 +4\.5 +[\d.e+]+ / [\d.e+]+ ", text)
    assert re.search(r"nearest4 .* \d+, \d+\n", text)  # shares of a copy's throughput


def test_all_methods_are_measured_by_default_and_those_that_cannot_be_are_named(site):
    code = (
        "from grace.bench.plan import everything; import json; cases, left = everything();"
        " print(json.dumps([[case.label for case in cases], left]))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    labels, left = json.loads(done.stdout)
    assert {label.partition(":")[0] for label in labels} >= {*grace.registry.compressors, "nearest4"}
    assert list(left) == ["asks"]
    assert "Give the missing parameters as asks:key=value" in left["asks"]


@pytest.mark.parametrize("case", plan.everything()[0], ids=lambda case: case.label)
def test_every_method_can_be_timed(case):
    xp = get_backend("numpy")
    # 10,080 elements: a method for matrices sees 120 x 84.
    bench = subjects.Bench(xp, plan.Config("numpy", 1, "asis", 10_080))
    subject = subjects.Ours(case, bench, "eager")
    subject.several(repeated=False)
    for _ in range(2):
        subject.refill()
        subject.encode()
        subject.look()
        subject.commit()
        subject.decode()
    assert subject.bytes > 0
    assert all(len(part.payloads) == subject.workers for part in subject.parts)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("topkk",), "did you mean 'topk'"),
        (("topkk",), "`grace methods` lists"),
        (("topk:ratio=0.1",), "unknown key 'ratio'"),
        (("topk:0.1",), "key=value"),
        (("topk", "--backend", "mxnet"), "choose from torch, numpy, tensorflow, cuda, jax"),
        (("topk", "--sizes", "many"), "such as 1e4,25e6"),
        (("topk", "--peer", "nowhere"), "has no grace_dl/dist"),
        (("topk", "--targets"), "leave out METHOD"),
    ],
)
def test_errors_name_the_remedy(arguments, words):
    from typer.testing import CliRunner

    from grace.cli.app import app

    done = CliRunner().invoke(app, ["bench", "kernels", *arguments], env={"COLUMNS": "400", "TERM": "dumb"})
    assert done.exit_code == 2
    assert words in re.sub(r"[│\s]+", " ", done.output)


@pytest.mark.slow
def test_what_fails_is_left_out_with_its_reason_and_the_rest_is_measured(bench):
    names = ("dies", "topk", "hangs", "raises", "powersgd")
    quick = ("--sizes", "10007", "--threads", "1", "--allocator", "asis", "--rounds", "3", "--no-memory")
    found, done = bench(*names, "--backend", "numpy", "--call-limit", "2", *quick)
    assert {record["label"] for record in found["records"]} == {"topk"}
    reasons = {each["label"]: each["reason"] for each in found["left_out"]}
    assert reasons["dies"].startswith("the process ended with status 7")
    assert reasons["hangs"].startswith("given up after 2 s")
    assert reasons["raises"] == "ValueError: out of ideas"
    assert "does not apply to [1, 10007]" in reasons["powersgd"]  # a prime: no matrix
    for name, reason in reasons.items():
        assert name in done.stdout
        assert reason.split(".")[0] in re.sub(r"\s+", " ", done.stdout)


@pytest.mark.slow
def test_a_call_for_which_three_rounds_do_not_fit_is_measured_once_and_marked(bench):
    found, done = bench("topk", "--backend", "numpy", "--allocator", "asis", *QUICK[:-2], "0", "--no-memory")
    (record,) = found["records"]
    assert record["encode"]["once"]
    assert record["encode"]["samples"] == 1
    assert record["note"] == "one payload stands for those of all workers"
    assert re.search(r"topk +800 +0\.64 +[\d.e+]+\*", done.stdout)


@pytest.fixture
def spend(monkeypatch):
    """A fake clock: a function that advances it by a number of seconds."""
    now = [0.0]
    monkeypatch.setattr(worker.time, "perf_counter", lambda: now[0])

    def spend(seconds):
        now[0] += seconds

    return spend


def clocked(encode, traced=False, events=None):
    """A subject with this single operation, and its clock."""
    subject = SimpleNamespace(bytes=0, state_bytes=0, workers=0, note="", refill=lambda: None, release=lambda: None)
    return subject, worker.Clock(subject, [("encode", encode)], lambda: None, traced, events)


@pytest.mark.parametrize(
    "seconds, calls", [(25e-6, 80), (worker.SHORTEST / 4, 4), (worker.SHORTEST, 1), (0.05, 1), (1e-9, 1000)]
)
def test_short_calls_are_repeated_until_a_sample_is_long_enough(seconds, calls, spend):
    _, clock = clocked(lambda: spend(seconds))
    clock.warm_up(1.0)
    clock.sample()
    assert clock.calls == pytest.approx(calls, abs=1)
    assert clock.seconds == pytest.approx(clock.calls * seconds)
    assert clock.results()["encode"]["us"] == pytest.approx(1e6 * seconds)


@pytest.mark.slow
def test_rounds_end_with_the_budget(spend):
    def samples(budget):
        said = []
        subject, clock = clocked(lambda: spend(0.01))
        clock.warm_up(1.0)
        config = plan.Config("numpy", 1, "asis", 1)
        xp = SimpleNamespace(kernels=None)
        fake = SimpleNamespace(memcpy=lambda: spend(1e-4), wait=lambda: None, n=1, xp=xp, device="")
        limits = plan.Limits(rounds=100, budget=budget)
        worker.rounds(config, limits, [(subject, "sleeps", "eager", [clock])], fake, lambda **m: said.append(m))
        return said[-1]["records"][0]["encode"]["samples"]

    assert samples(0) == plan.LEAST
    assert plan.LEAST < samples(0.1) <= 10


@pytest.mark.parametrize("where", ["host", "graph", "device"])
def test_what_it_takes_to_make_a_graph_or_compile_is_not_taken_for_what_a_call_takes(where, spend):
    def events(operation):
        began = worker.time.perf_counter()
        operation()
        return worker.time.perf_counter() - began

    pauses = iter([0.3, *[0.0] * 10_000])
    _, clock = clocked(lambda: spend(next(pauses)), where == "graph", events if where == "device" else None)
    clock.warm_up(0.01)
    assert clock.once is (where == "host")
    assert (clock.seconds > 0.2) is (where == "host")


@pytest.mark.slow
def test_cases_for_which_there_is_no_room_are_put_off_to_another_process(monkeypatch):
    def messages(job, config, limits):
        said = []
        worker.measure(job, lambda **message: said.append(message))
        return said

    monkeypatch.setattr(kernels, "messages", messages)
    monkeypatch.setattr(subjects.Bench, "free_bytes", lambda self: 0)
    results = kernels.Results({})
    cases = [plan.parse(name) for name in ("topk", "none", "qsgd")]
    config, limits = plan.Config("numpy", 1, "asis", 2000), plan.Limits(rounds=3, budget=0.1)
    kernels.measure(results, {"flat": cases}, [config], limits, memory=False)
    assert [(record["label"], record["batch"]) for record in results.records] == [("topk", 0), ("none", 1), ("qsgd", 2)]
    assert results.left_out == []


@pytest.fixture
def device(monkeypatch):
    """Makes PyTorch's CPU tensors pass for those of a CUDA device; lists the calls of torch.cuda."""
    asked = []

    class Cuda:
        def __getattr__(self, name):
            answers = {"get_device_name": "Some GPU", "mem_get_info": (10**12, 10**12), "max_memory_allocated": 5000}

            def ask(*arguments, **_):
                asked.append((name, *map(str, arguments)))
                return cuda if name == "Event" else answers.get(name, 1000)

            return ask

    cuda = Cuda()
    for module in (subjects, worker, memory):
        monkeypatch.setattr(module, "cuda_of", lambda xp: cuda)
    monkeypatch.setitem(plan.DEVICES, "cuda", "cpu")
    return asked


@pytest.mark.slow
def test_a_device_is_waited_for_and_named(device, monkeypatch):
    def messages(job, *_):
        said = []
        run = {"kernels": worker.measure, "memory": lambda job, say: say(memory=memory.measure(job))}[job["task"]]
        run(job, lambda **message: said.append(message))
        return said

    commit = subjects.Ours.commit

    def waiting(self):
        commit(self)
        if ("set_sync_debug_mode", "warn") in device and ("set_sync_debug_mode", "default") not in device:
            for _ in range(2):
                warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    monkeypatch.setattr(subjects.Ours, "commit", waiting)
    monkeypatch.setattr(kernels, "messages", messages)
    results = kernels.Results({})
    config, limits = plan.Config("cuda", 1, "asis", 1_000_000), plan.Limits(rounds=3, budget=0.1)
    kernels.measure(results, {"flat": [plan.parse("topk")]}, [config], limits)
    assert results.left_out == []
    (record,) = results.records
    assert (record["backend"], record["device"], record["host_waits"]) == ("cuda", "Some GPU", 2)
    assert record["extra_memory"]["peak_bytes"] == 4000
    assert ("set_sync_debug_mode", "default") in device
    assert device.count(("synchronize",)) > 10
    console = Console(width=160, file=StringIO())
    show.render(results, console)
    assert "cuda (Some GPU), 1 thread, n = 1,000,000" in console.file.getvalue()
    assert re.search(r"host waits.*\n.*topk .* 2 ", console.file.getvalue())


@pytest.mark.slow
def test_where_there_is_no_device_that_is_said(bench, monkeypatch):
    import torch

    if torch.cuda.is_available():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    arguments = ("--backend", "cuda", "--threads", "1,2", "--sizes", "1e4", "--no-memory")
    found, done = bench("topk", *arguments, check=False)
    assert found["records"] == []
    (reason,) = (each["reason"] for each in found["left_out"])  # a single reason: threads concern only the host
    assert reason.endswith("RuntimeError: PyTorch finds no CUDA device here: torch.cuda.is_available() is False")
    assert "no CUDA device" in re.sub(r"\s+", " ", done.stdout)


def test_a_device_is_measured_with_its_own_kernels():
    assert kernels.environment(plan.Config("cuda", 1, "asis", 1), {})["GRACE_KERNELS"] == "triton"
    assert kernels.environment(plan.Config("cuda", 1, "asis", 1, kernels="off"), {})["GRACE_KERNELS"] == "off"


def test_allocator_threads_and_kernels_are_settled_before_a_process_starts():
    mine = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=2:glibc.rtld.nns=4", "MALLOC_TRIM_THRESHOLD_": "1", "HOME": "h"}
    mine["GRACE_KERNELS"] = "off"
    asis = kernels.environment(plan.Config("torch", 2, "asis", 1), mine)
    assert asis["GLIBC_TUNABLES"] == "glibc.rtld.nns=4"
    assert asis["OMP_NUM_THREADS"] == "2"
    assert asis["HOME"] == "h"
    assert not {"MALLOC_TRIM_THRESHOLD_", "GRACE_KERNELS"} & set(asis)
    tuned = kernels.environment(plan.Config("torch", 1, "tuned", 1, kernels="off"), {})
    assert tuned["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    assert tuned["GRACE_KERNELS"] == "off"


def test_resnet50_is_the_one_that_everybody_means():
    shapes = list(plan.resnet50().values())
    assert len(shapes) == 161
    assert sum(map(math.prod, shapes)) == 25_557_032
    assert sum(len(shape) > 1 for shape in shapes) == 54
    assert shapes.count((512, 512, 3, 3)) == 3


def test_gradients_are_heavy_tailed_and_differ():
    from grace.bench.subjects import gradient

    one, two = gradient(100_001, 0), gradient(100_001, 1)
    assert one.dtype == np.float32
    assert abs(one).mean() == pytest.approx(1e-3, rel=0.02)
    assert (abs(one) > 4.6e-3).mean() == pytest.approx(0.01, rel=0.1)
    assert abs(np.sign(one).mean()) < 0.02
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.02


PEER = {
    "compressor/topk.py": """
import torch
class TopKCompressor:
    average = True
    def __init__(self, compress_ratio):
        self.ratio = compress_ratio
    def compress(self, x, name):
        _, places = torch.topk(x.abs(), int(self.ratio * x.numel()))
        return (x[places], places.int()), x.shape
    def decompress(self, payload, shape):
        return torch.zeros(shape).scatter_(0, payload[1].long(), payload[0])
    def aggregate(self, decoded):
        return sum(decoded)
""",
    "memory/residual.py": """
class ResidualMemory:
    kept = 0
    def compensate(self, x, name):
        return x + self.kept
    def update(self, x, name, compressor, payload, ctx):
        self.kept = x - compressor.decompress(payload, ctx)
""",
}


@pytest.mark.slow
def test_a_peer_is_measured_in_the_same_run(bench, tmp_path):
    pytest.importorskip("torch")
    for name, text in PEER.items():
        file = tmp_path / "grace_dl" / "dist" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    found, done = bench("topk", "--backend", "torch", "--allocator", "asis", "--peer", str(tmp_path), *QUICK)
    by_label = {record["label"]: record for record in found["records"]}
    ours, theirs = by_label["topk:compress_ratio=0.01"], by_label["upstream topk + residual"]
    assert len(by_label) == 3  # topk appears once, though it is named and paired; and chunktopk
    assert theirs["bytes"] == ours["bytes"] == 800
    assert theirs["commit"] is None
    ratios = ours["speedup"]["upstream topk + residual"]
    spent = ours["encode"]["us"] + ours["commit"]["us"]
    assert ratios == {
        "encode": pytest.approx(theirs["encode"]["us"] / spent),
        "decode": pytest.approx(theirs["decode"]["us"] / ours["decode"]["us"]),
    }
    assert found["options"]["peer"] is True
    assert str(tmp_path) not in json.dumps(found)
    assert "upstream topk + residual" in done.stdout


@pytest.mark.slow
def test_tensorflow_is_measured_eagerly_and_in_a_graph(bench):
    pytest.importorskip("tensorflow")
    found, _ = bench("powersgd", "--backend", "tensorflow", "--allocator", "asis", *QUICK, "--budget", "0.1")
    assert [(record["mode"], record["bytes"]) for record in found["records"]] == [("eager", 3200), ("graph", 3200)]
    assert {record["workers_decoded"] for record in found["records"]} == {1}


@pytest.mark.slow
def test_jax_is_measured_as_compiled(bench):
    pytest.importorskip("jax")
    options = [option for option in QUICK if option != "--no-memory"]
    found, done = bench("powersgd", "topk", "efsignsgd", "--backend", "jax", "--allocator", "asis", *options)
    assert [(each["label"], each["mode"], each["bytes"]) for each in found["records"]] == [
        ("powersgd", "graph", 3200),
        ("topk", "graph", 800),
        ("efsignsgd", "graph", 1254),
    ]
    assert all(each["encode"]["us"] > 0 < each["decode"]["us"] for each in found["records"])
    assert found["left_out"] == [], done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is counted in Linux's /proc")
def test_memory_of_a_step_is_told_apart_from_what_is_kept(bench):
    arguments = ("--backend", "numpy", "--sizes", "4e6", "--threads", "1", "--allocator", "asis", "--rounds", "3")
    found, _ = bench("none", "topk", *arguments, "--budget", "0")
    extra = {record["label"]: record["extra_memory"] for record in found["records"]}
    assert extra["none"]["state_bytes"] == 0
    assert extra["topk"]["state_share"] == 1
    assert extra["topk"]["step_bytes"] == extra["topk"]["peak_bytes"] - extra["topk"]["state_bytes"]
    assert -0.1 <= extra["none"]["step_share"] <= 4  # other pages of this process may be freed in the meantime
    assert 0 <= extra["topk"]["step_share"] <= 12


def test_targets_are_checked_against_what_was_measured():
    def record(label, tensors, operation, us, on="off", speedup=None, native=""):
        rest = {"label": label, "tensors": tensors, "kernels": on, "allocator": "asis", "memcpy": {"us": 10.0}}
        rest["native"] = native
        times = {"encode": None, "commit": None, "decode": None, "step": None}
        return {**rest, **times, operation: {"us": us}, "speedup": speedup or {}}

    results = kernels.Results({})
    peer = {"upstream topk + residual": {"encode": 29.0}}
    results.records = [
        record("topk:compress_ratio=0.01", "flat", "encode", 80.0, speedup=peer),
        record("efsignsgd:block_size=512", "flat", "encode", 61.0),
        record("efsignsgd:block_size=512", "flat", "encode", 17.0, "on", native="avx2"),
        record("efsignsgd:block_size=4096", "flat", "encode", 17.0, "on"),  # as if the kernels were not built
        record("eden:bits=2", "flat", "decode", 16.0, "on", native="avx2"),
    ]
    lines = show.check(results)
    met = {(line["spec"], line["how"]): line["met"] for line in lines if line["met"] is not None}
    assert met == {
        ("topk:compress_ratio=0.01", "portable, as it comes"): True,
        ("topk:compress_ratio=0.01", "portable, as it comes, against upstream topk + residual"): False,
        ("efsignsgd:block_size=512", "portable, as it comes"): False,
        ("efsignsgd:block_size=512", "native, as it comes"): True,
        ("eden:bits=2", "native, as it comes"): False,
    }
    console = Console(file=StringIO(), width=200)
    show.render_check(lines, console)
    assert re.search(r"exact top-k 1% .* 8 M +<= 8 M +yes", console.file.getvalue())
    assert "not measured" in console.file.getvalue()


@pytest.mark.slow
def test_a_chart_is_drawn(measured, tmp_path):
    pytest.importorskip("matplotlib")
    results = kernels.Results(measured[0]["machine"], records=measured[0]["records"])
    show.plot(results, str(tmp_path / "bars.png"))
    assert (tmp_path / "bars.png").stat().st_size > 10_000


@pytest.mark.slow
def test_forms_of_a_method_are_measured_beside_each_other(monkeypatch):
    pytest.importorskip("torch")
    from grace.bench.subjects import Bench, Ours

    specs = ["blockint:bits=8", "topk"]
    cases = plan.in_forms([plan.parse(spec) for spec in specs], plan.HOWS)
    assert [case.how for case in cases] == ["native", "plain"] * 2
    assert len({case.label for case in cases}) == 4
    xp, config = get_backend("torch"), plan.Config("torch", 1, "asis", 10_000)
    monkeypatch.setenv("GRACE_KERNELS", "off")  # each case changes this variable, and restores it
    bench = Bench(xp, config)
    plain = Ours(cases[1], bench, "eager")
    plain.refill()
    plain.decode()
    assert xp.kernels is None
    if kernels.native():
        Ours(cases[0], bench, "eager").refill()
        assert xp.kernels is not None
