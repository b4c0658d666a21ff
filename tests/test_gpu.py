"""`grace bench gpu`, on a CPU."""

import json
import math
import platform
import re

import pytest

pytest.importorskip("torch")
pytest.importorskip("typer", reason="the command line")

import torch
from launch import launch
from support.endings import end
from typer.testing import CliRunner

from grace.bench import kernels
from grace.cli.app import app
from grace_bench import device_trace, gpt2_steps, gpu, gpu_tables, processes, streams, text, trainings


def call(*words, status=0):
    done = CliRunner().invoke(app, ["bench", "gpu", *map(str, words)], env={"COLUMNS": "400", "TERM": "dumb"})
    assert done.exit_code == status, done.output
    return re.sub(r"[\u2502\s]+", " ", done.output)


@pytest.mark.processes
def test_all_parts_run_to_the_end_on_a_cpu_and_the_result_is_marked(tmp_path):
    file = tmp_path / "cpu.json"
    said = call("--backend", "cpu", "--quick", "--minutes", 20, "--output", file)
    found = json.loads(file.read_text())
    assert found["complete"]
    assert (found["gpu"], found["device"], found["quick"]) == (False, "CPU", True)
    assert found["seconds"] < 60 * 20
    assert found["laws"]["held"] >= 30
    assert not found["laws"]["broken"]
    assert not found["laws"]["left_out"]
    assert bool(found["kernels"]["cases"]) == bool(found["kernels"]["isa"])
    assert all(case["equal"] for case in found["kernels"]["cases"])
    assert not found["trainings"]["left_out"]
    assert not {each["loop"] for each in found["trainings"]["absent"]} - {"trainer"}  # it needs transformers
    ran = [(row["loop"], row["method"]) for row in found["trainings"]["rows"]]
    left = {each["loop"] for each in found["trainings"]["absent"]}
    assert ran == [(each, m) for each in trainings.LOOPS if each not in left for m in trainings.methods_of(each, True)]
    assert not gpu_tables.differing(found)
    assert found["streams"]["absent"]
    assert not found["gpt2"]["left_out"]
    bf16 = "bf16_compress_hook"  # requires NCCL
    expected = {gpt2_steps.ALONE, gpt2_steps.DENSE, *gpt2_steps.HOOKS, *gpt2_steps.METHODS} - {bf16}
    assert {row["method"] for row in found["gpt2"]["rows"]} == expected
    assert all(row["ms"] > 0 and row["launches"] is None for row in found["gpt2"]["rows"])
    encoded = [each for each in found["times"]["records"] if each["encode"]]
    assert encoded
    assert all(kernels.share_of_copy(each, "encode") > 0 for each in encoded)
    assert {each["label"] for each in found["times"]["records"]} == {*gpu.QUICK, "torch powerSGD_hook"}
    exchanged = found["exchange"]
    assert not exchanged["left_out"]
    assert {(row["model"], row["method"]) for row in exchanged["rows"]} == {
        (model, method) for model in ("ResNet-50", "GPT-2 124M") for method in gpu.EXCHANGED
    }
    for row in exchanged["rows"]:
        assert row["ms"] > 0
        assert row["bytes"] == 2 * row["elements"] if row["method"] == gpu.BASELINE else row["bytes"] > 0
    learnt = found["training"]
    assert not learnt["left_out"]
    assert [row["method"] for row in learnt["rows"]] == list(text.METHODS)
    for row in learnt["rows"]:
        assert row["tokens"] == text.kind_of_tokens()
        assert len(row["losses"]) == text.QUICK.steps
        assert row["losses"][-1] < row["losses"][0] - 0.5
        assert abs(row["losses"][-1] - learnt["rows"][0]["losses"][-1]) < 0.5
    sent = {row["method"]: row["bytes_per_step"] for row in learnt["rows"]}
    assert (
        sent["diloco, blockint, 4 bits"]
        < sent["eden, 3 bits"]
        < sent["blockint, 4 bits"]
        < sent["fp16"]
        < sent["dense"]
    )
    assert "A CPU: a test of the command, no result of a GPU" in said
    refused = call("--show", file, status=2)
    assert "none of these files is of a GPU" in refused
    assert "no result of a GPU" in call("--show", file, "--backend", "cpu")


@pytest.mark.processes
def test_a_part_runs_alone(tmp_path):
    file = tmp_path / "cpu.json"
    said = call("--backend", "cpu", "--quick", "--part", "training", "--output", file)
    found = json.loads(file.read_text())
    assert found["complete"]
    assert found["parts"] == ["training"]
    assert not {"laws", "kernels", "times", "trainings", "streams", "gpt2", "exchange"} & found.keys()
    assert "| dense |" in said
    assert "| dense |" in call("--show", file, "--backend", "cpu")
    assert "choose from kernels, loops, steps, training" in call("--backend", "cpu", "--part", "nothing", status=2)


def test_without_a_device_nothing_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device here" in call(status=2)
    monkeypatch.chdir(tmp_path)  # without results
    (other := tmp_path / "other.json").write_text("{}")
    assert "other.json was not written by" in call("--show", other, status=2)
    assert "none of these files is of a GPU" in call("--show", "--backend", "cpu", status=2)


def test_what_does_not_hold_is_named():
    waits = {"label": "a", "host_waits": 2, "variable_length": False}
    data = {
        "laws": {"broken": ["a: law: AssertionError"]},
        "kernels": {"cases": [{"case": "b", "equal": False}, {"case": "c", "equal": True}]},
        "trainings": {
            "rows": [
                {"network": "gloo", "loop": "ddp", "method": "e", "difference": 0.5},
                {"network": "gloo", "loop": "ddp", "method": "f", "difference": 0.0},
                {"network": "nccl", "loop": "fsdp", "method": "g", "difference": float("nan")},
            ],
            "left_out": [
                {"network": "gloo", "reason": "the processes ended with [-11, None]"},
                {"network": "nccl", "reason": "rank 0: TimeoutError: no time was left for ddp, topk"},
            ],
        },
        "streams": {
            "rows": [
                {"check": "waits", "loop": "ddp", "method": "h", "waits": "called a synchronizing CUDA operation"},
                {"check": "waits", "loop": "ddp", "method": "i", "waits": ""},
                {"check": "streams", "method": "i", "others_ms": 1.0, "beside_ms": 0.5},
            ],
            "left_out": [],
        },
        "times": {"records": [waits, {**waits, "label": "d", "variable_length": True}, {**waits, "host_waits": None}]},
    }
    assert gpu_tables.failures(data) == [
        "law: a: law: AssertionError",
        "kernels: b differs",
        "trainings: ddp over gloo, e: differs by 0.5",
        "trainings: fsdp over nccl, g: differs by nan",
        "trainings: gloo: the processes ended with [-11, None]",
        "host waits: a waits 2 times",
        "host waits: h by ddp: called a synchronizing CUDA operation",
    ]


@pytest.mark.parametrize("off, expected", [(0.0, 0.0), (0.5, 0.5), (math.inf, math.inf), (math.nan, math.nan)])
def test_trainings_are_compared_relative_to_the_change_of_the_parameters(off, expected, monkeypatch):
    def train(device, params):
        weights = [w.detach().clone() for w in trainings.Linear().weights]
        weights[3][0] += 2.0
        if device != "cpu":
            weights[3][0] += 2.0 * off
        return weights

    monkeypatch.setitem(trainings.LOOPS, "ddp", trainings.Loop(train, train))
    assert trainings.compare("ddp", "none", "another") == pytest.approx(expected, rel=1e-6, nan_ok=True)


@pytest.mark.processes
@pytest.mark.parametrize(
    "codes, reason",
    [
        ((0, 0), ""),
        ((0, 7), "the processes ended with [0, 7]"),
        ((None, 7), "the processes ended with [None, 7]"),
        ((None, "error"), "rank 1: ValueError: no"),
        ((None, None), "no time was left"),
    ],
)
def test_processes_that_fail_are_told_from_those_that_take_too_long(codes, reason):
    assert processes.in_processes(end, 2, -26.0, codes) == ([], reason)


def test_files_are_named_after_their_device():
    assert gpu_tables.file_name("NVIDIA H100 80GB HBM3") == "gpu-nvidia-h100-80gb-hbm3.json"


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(platform.system() != "Linux", reason="Triton is for Linux")
def test_the_host_reads_no_value_of_a_device_in_a_step(tmp_path):
    """For methods of fixed length; the next step reads the headers and flags of a step."""
    for rank, (worker, (steps, error)) in enumerate(launch("torchrun", 2, "waits.py", tmp_path)):
        for case, (reads, *rest) in worker.items():
            assert not any(reads), (case, reads)
            assert rest == [[1], 4, "triton"], case
        assert "the workers are out of step (worker 0: step 2, exchange 1; worker 1: step 3, exchange 0)" in error
        assert steps == rank + 1  # differing headers are read one exchange later; worker 0 is one exchange ahead


def event(stream, begin, duration, kind="kernel"):
    return {"cat": kind, "name": "k", "args": {"stream": stream}, "ts": begin, "dur": duration}


def test_a_trace_tells_busy_time_and_what_runs_beside_the_busiest_stream():
    work = device_trace.work_of(
        {
            "traceEvents": [
                *(event(7, 10 * number, 8) for number in range(10)),
                event(9, 4, 10),  # 8 microseconds beside stream 7
                event(9, 12, 6, "gpu_memcpy"),  # overlaps the previous event
                event(9, 200, 5),
                event(7, 0, 1000, "cpu_op"),
                {"cat": "kernel", "name": "no duration", "ts": 3},
            ]
        }
    )
    assert len(work) == 13
    assert sum(each.kernel for each in work) == 12
    assert device_trace.busy(work)[:2] == [(0, 18), (20, 28)]
    assert device_trace.length(device_trace.busy(work)) == 18 + 8 * 8 + 5
    assert device_trace.beside(work) == (14 + 5, 4 + 8)
    assert device_trace.beside([]) == (0, 0)


@pytest.mark.parametrize("operation, share", [("encode", 0.625), ("decode", 0.75), ("step", None)])
def test_a_share_of_copy_counts_what_has_to_be_read_and_written(operation, share):
    record = {"elements": 1000, "bytes": 500, "state_bytes": 4000, "workers_decoded": 4, "memcpy": {"us": 1.0}}
    record |= {"encode": {"us": 2.0}, "commit": {"us": 0.5}, "decode": {"us": 1.0}, "step": None}
    assert kernels.share_of_copy(record, operation) == share


@pytest.mark.parametrize("length", [1, 5])
def test_text_is_told_by_tokens_that_fit_the_vocabulary(length):
    tokens = text.encoded(text.text(20_000) * length, 300)
    assert tokens.dtype == torch.int64
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < 300
    assert length * 1000 < len(tokens) <= length * 20_000


def test_the_model_of_the_named_training_is_gpt2():
    with torch.device("meta"):
        model = text.Gpt2(text.LARGE)
    assert sum(p.numel() for p in model.parameters()) == 124_439_808
    assert len(list(model.parameters())) == 148


@pytest.mark.processes
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here: `grace bench gpu` runs this, too")
def test_on_a_device_the_host_waits_for_nothing_and_streams_are_kept_apart():
    rows, reason = processes.measure(streams.measurements, 1, 300, "nccl", "cuda", True)
    assert not reason
    assert not [row for row in rows if row["check"] == "waits" and row["waits"]]
    assert {row["method"] for row in rows if row["check"] == "streams"} == {gpt2_steps.DENSE, *streams.METHODS}
    rows, reason = processes.measure(trainings.measurements, 1, 300, "nccl", "cuda", True)
    assert not reason
    assert [row for row in rows if row["loop"] == "side stream"]
    assert not [row for row in rows if not row["difference"] <= trainings.TOLERANCE]
