"""The examples run under every launcher that they name, learn, and send less."""

import ast
import json
import math
import pickle
import re
import sys
from importlib.util import find_spec

import pytest
from launch import command_of, run
from support.examples import EXAMPLES, PARAMETERS

from grace.engine.record import read

pytestmark = pytest.mark.processes


def check(path, toolkit, workers, epochs, least_ratio):
    found = json.loads(path.read_text())
    assert found["toolkit"] == toolkit
    assert found["report"]["world_size"] == workers
    assert found["dense_bytes_per_step"] == 4 * PARAMETERS
    assert found["ratio"] >= least_ratio
    assert len(found["history"]) == epochs
    assert all(math.isfinite(epoch["loss"]) for epoch in found["history"])
    assert 0.2 < found["accuracy"] <= 1  # chance is 0.1


def test_torch_over_horovod(tmp_path):
    out = tmp_path / "result.json"
    options = ["--epochs", 2, "--json", out]
    printed = run(*command_of("horovodrun", 2, EXAMPLES / "digits_torch.py", *options), log=tmp_path / "log")
    check(out, "PyTorch", 2, 2, 35)
    assert "topk + residual + allgather | worker 0 of 2" in printed


def test_torch_over_torch_distributed(tmp_path):
    out = tmp_path / "result.json"
    options = ["--method", "efsignsgd", "--epochs", 2, "--json", out]
    run(*command_of("torchrun", 2, EXAMPLES / "digits_torch.py", *options), log=tmp_path / "log")
    check(out, "PyTorch", 2, 2, 25)


def test_local_training_over_torch_distributed(tmp_path):
    out = tmp_path / "result.json"
    options = ["--method", "qsgd", "--every", 4, "--fragments", 2, "--delay", 1, "--epochs", 2, "--json", out]
    printed = run(*command_of("torchrun", 2, EXAMPLES / "local_torch.py", *options), log=tmp_path / "log")
    check(out, "PyTorch", 2, 2, 12)
    assert "every 4 steps, 2 fragments" in printed


def test_torch_alone(tmp_path):
    out = tmp_path / "result.json"
    options = ["--params", '{"compress_ratio": 0.05}', "--epochs", 1, "--json", out]
    run(sys.executable, EXAMPLES / "digits_torch.py", *options, log=tmp_path / "log")
    check(out, "PyTorch", 1, 1, 9)


def test_keras_over_horovod(tmp_path):
    out = tmp_path / "result.json"
    options = ["--method", "powersgd", "--epochs", 2, "--json", out]
    run(*command_of("horovodrun", 2, EXAMPLES / "digits_keras.py", *options), log=tmp_path / "log")
    check(out, "Keras on TensorFlow", 2, 2, 25)


def test_keras_on_pytorch_over_torch_distributed(tmp_path):
    out = tmp_path / "result.json"
    options = ["--method", "powersgd", "--epochs", 2, "--json", out]
    command = command_of("torchrun", 2, EXAMPLES / "digits_keras.py", *options)
    run(*command, log=tmp_path / "log", KERAS_BACKEND="torch")
    check(out, "Keras on PyTorch", 2, 2, 25)


def test_a_pipeline_over_torch_distributed(tmp_path):
    out = tmp_path / "result.json"
    command = command_of("torchrun", 2, EXAMPLES / "stages_torch.py", "--epochs", 2, "--json", out)
    printed = run(*command, log=tmp_path / "log")
    found = json.loads(out.read_text())
    assert found["accuracy"] > 0.7
    assert [(edge["edge"], edge["direction"]) for edge in found["edges"]] == [("0-1", "forward"), ("0-1", "backward")]
    assert all(edge["ratio"] > 3.9 for edge in found["edges"])
    assert "epoch 2: loss" in printed


def test_six_methods_in_one_process(tmp_path):
    script = EXAMPLES / "compare_methods.py"
    assert len(script.read_text().splitlines()) <= 30
    folder = tmp_path / "new" / "records"
    printed = run(sys.executable, script, folder, log=tmp_path / "log")
    rows = re.findall(r"^(\w+) +([\d.]+)% +([\d,]+) +([\d.]+)$", printed, re.MULTILINE)
    assert len(rows) == 6
    for method, accuracy, sent, ratio in rows:
        record = read(folder / f"{method}.jsonl")
        assert float(accuracy) > 70, method
        assert record.metrics[-1].values["accuracy"] == pytest.approx(float(accuracy) / 100, abs=6e-4)
        assert int(sent.replace(",", "")) == pytest.approx(record.total("bytes_sent") / record.total("steps"), abs=1)
        assert float(ratio) >= 3.5 or method == "none"


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """The reports of `train` in ray_train.py without Ray, and each worker's findings, after worker 1 was killed."""
    out = tmp_path_factory.mktemp("out")
    script = EXAMPLES.parent / "tests" / "workers" / "ray_train.py"
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # or restarted workers find the dead ones' addresses
    command = command_of("torchrun", 2, script, out, options=["--max-restarts=1"])
    printed = run(*command, log=out / "log", **environment)
    assert "exitcode: -9" in printed
    return [pickle.loads((out / f"{rank}.pickle").read_bytes()) for rank in range(2)]


def test_training_under_ray_without_ray_is_resumed_after_a_worker_was_killed(resumed):
    for checkpoints, reported, equal in resumed:
        assert checkpoints == ["epoch-1"]
        assert [each["epoch"] for each in reported] == [2], "only the epoch that was lost"
        assert all(equal), "as if nobody had been killed"
        assert reported[-1]["accuracy"] > 0.2


@pytest.mark.skipif(find_spec("ray") is None, reason="needs pip install 'ray[train]', which no extra installs")
def test_training_under_ray_is_resumed_after_a_worker_was_killed(resumed, tmp_path):
    options = ["--epochs", 2, "--batch-size", 64, "--kill", 2, "--storage", tmp_path / "storage"]
    environment = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": "100000000"}
    printed = run(sys.executable, EXAMPLES / "ray_train.py", *options, log=tmp_path / "log", **environment)
    assert "continues after epoch 1" in printed
    metrics = ast.literal_eval(re.findall(r"^{.*}$", printed, re.MULTILINE)[-1])
    assert metrics == resumed[0][1][-1], "as without Ray"
