"""`grace bench gpu`, on a CPU."""

import json
import math
import platform
import re

import pytest

pytest.importorskip("torch")
pytest.importorskip("typer", reason="the command line")

from launch import launch
from support.endings import end
from typer.testing import CliRunner

from grace.cli.app import app
from grace_bench import gpu, processes, text, trainings


def call(*words, status=0):
    done = CliRunner().invoke(app, ["bench", "gpu", *map(str, words)], env={"COLUMNS": "400", "TERM": "dumb"})
    assert done.exit_code == status, done.output
    return re.sub(r"[\u2502\s]+", " ", done.output)


@pytest.mark.processes
def test_all_parts_run_to_the_end_on_a_cpu_and_the_result_is_marked(tmp_path):
    file = tmp_path / "cpu.json"
    said = call("--backend", "cpu", "--quick", "--output", file)
    found = json.loads(file.read_text())
    assert found["complete"]
    assert (found["gpu"], found["device"], found["quick"]) == (False, "CPU", True)
    assert found["seconds"] < 120
    assert found["laws"]["held"] >= 30
    assert not found["laws"]["broken"]
    assert not found["laws"]["left_out"]
    assert bool(found["kernels"]["cases"]) == bool(found["kernels"]["isa"])
    assert all(case["equal"] for case in found["kernels"]["cases"])
    assert not found["trainings"]["left_out"]
    assert len(found["trainings"]["rows"]) == len(trainings.LOOPS) * len(trainings.SHARDED)
    assert not gpu.differing(found)
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
    assert not {"laws", "kernels", "times", "trainings", "exchange"} & found.keys()
    assert "| dense |" in said
    assert "| dense |" in call("--show", file, "--backend", "cpu")
    assert "choose from kernels, loops, steps, training" in call("--backend", "cpu", "--part", "nothing", status=2)


def test_without_a_device_nothing_is_measured(monkeypatch, tmp_path):
    import torch

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
        "times": {"records": [waits, {**waits, "label": "d", "variable_length": True}, {**waits, "host_waits": None}]},
    }
    assert gpu.failures(data) == [
        "law: a: law: AssertionError",
        "kernels: b differs",
        "trainings: ddp over gloo, e: differs by 0.5",
        "trainings: fsdp over nccl, g: differs by nan",
        "trainings: gloo: the processes ended with [-11, None]",
        "host waits: a waits 2 times",
    ]


@pytest.mark.parametrize("off, expected", [(0.0, 0.0), (0.5, 0.5), (math.inf, math.inf), (math.nan, math.nan)])
def test_trainings_are_compared_relative_to_the_change_of_the_parameters(off, expected, monkeypatch):
    def train(device, params):
        weights = [w.detach().clone() for w in trainings.Linear().weights]
        weights[3][0] += 2.0
        if device != "cpu":
            weights[3][0] += 2.0 * off
        return weights

    monkeypatch.setitem(trainings.LOOPS, "ddp", train)
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
    assert gpu.file_name("NVIDIA H100 80GB HBM3") == "gpu-nvidia-h100-80gb-hbm3.json"


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(platform.system() != "Linux", reason="Triton is for Linux")
def test_the_host_reads_no_value_of_a_device_in_a_step(tmp_path):
    """With methods of a fixed length; headers and flags of a step are read in the next one."""
    for worker in launch("torchrun", 2, "waits.py", tmp_path):
        for case, (reads, late, steps, runs_as) in worker.items():
            assert not any(reads), (case, reads)
            assert (late, steps, runs_as) == ([1], 4, "triton"), case
