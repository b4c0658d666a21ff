"""The examples of grace.patch run: a trainer that publishes, and a process that follows another."""

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from launch import free_port

import grace

EXAMPLES = Path(__file__).parents[1] / "examples"
FOLLOW = EXAMPLES / "patch_processes.py"
pytest.importorskip("zstandard")
pytest.importorskip("xxhash")


def sums(printed):
    return re.findall(r"version 4 sum ([\d.]+)", printed)


def expected():
    draw, weights = np.random.default_rng(0), np.zeros((1000, 100))
    for _ in range(4):
        weights += draw.random(weights.shape) < 0.02
    return weights.sum()


def run(*command):
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_process_follows_over_a_folder(tmp_path):
    run(FOLLOW, "publish", tmp_path)
    assert [float(each) for each in sums(run(FOLLOW, "follow", tmp_path))] == [expected()]


@pytest.mark.processes
def test_a_process_follows_over_http(tmp_path):
    port = free_port()
    command = [sys.executable, FOLLOW, "publish", tmp_path / "there", str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        assert server.stdout.readline() == b"serving\n"
        printed = run(FOLLOW, "follow", tmp_path / "here", f"http://127.0.0.1:{port}")
        server.stdin.close()
    assert [float(each) for each in sums(printed)] == [expected()]


@pytest.mark.processes
def test_a_trainer_publishes(tmp_path):
    pytest.importorskip("transformers")
    script = EXAMPLES / "patch_trainer.py"
    assert len(script.read_text().splitlines()) <= 40
    printed = run(script, tmp_path / "weights")
    sizes = [int(size) for size in re.findall(r"weight_v\d+ (\d+) bytes", printed)]
    assert len(sizes) == 3
    assert max(sizes[1:]) < sizes[0] / 2
    assert grace.patch.load(tmp_path / "weights").version == 2


def test_the_plug_in_calls_vllm_as_its_interfaces_say(tmp_path, monkeypatch):
    """vLLM is replaced by its interfaces alone, so that this shows only that the plug-in's own code works."""
    torch = pytest.importorskip("torch")
    calls = []
    modules = {
        "vllm.distributed.weight_transfer.base": {
            each: type(each, (), {})
            for each in ("WeightTransferEngine", "WeightTransferInitInfo", "WeightTransferUpdateInfo")
        },
        "vllm.distributed.weight_transfer.factory": {
            "WeightTransferEngineFactory": SimpleNamespace(register_engine=lambda *each: calls.append(each))
        },
        "vllm.model_executor.model_loader.checkpoint_weight_patch": {
            "CheckpointWeightPatch": lambda *each: each,
            "load_checkpoint_weight_patches": lambda model, patches: model.patch(patches),
        },
    }
    for name, content in modules.items():
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:count]), ModuleType(".".join(parts[:count])))
        vars(sys.modules[name]).update(content)
    monkeypatch.syspath_prepend(EXAMPLES)
    import patch_vllm

    class Model:
        def load_weights(self, weights):
            self.held = {name: each.clone() for name, each in weights}

        def patch(self, patches):
            for name, shape, dtype, values, indices in patches:
                assert self.held[name].shape == shape
                assert self.held[name].dtype == values.dtype == dtype
                self.held[name].view(-1)[indices] = values

    weights = {"w": torch.randn(50, 30).bfloat16(), "b": torch.zeros(7)}
    publisher = grace.patch.Publisher(tmp_path)
    publisher.publish(weights)
    patch_vllm.register()
    assert calls == [("grace", patch_vllm.GraceEngine)]
    engine = patch_vllm.GraceEngine()
    engine.model = Model()
    engine.init_transfer_engine(patch_vllm.Init(str(tmp_path)))
    for _ in range(3):
        weights["w"][::4] += 1
        publisher.publish(weights)
    engine.receive_weights(patch_vllm.Update(3))
    assert all(torch.equal(engine.model.held[name], weights[name]) for name in weights)
