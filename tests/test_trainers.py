"""The examples of trainers learn and send less, over two gloo workers."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from unittest.mock import patch

import pytest
from launch import command_of, run
from support.examples import EXAMPLES, PARAMETERS
from torch import nn

import grace.torch

pytestmark = pytest.mark.processes

EPOCHS, STEPS = 3, 1297 // 2 // 32


@pytest.mark.parametrize("trainer, prefix", [("accelerate", ""), ("lightning", "model.")])
def test_a_trainer_learns_and_sends_less(tmp_path, trainer, prefix):
    pytest.importorskip(trainer)
    options = ["--method", "powersgd", "--epochs", EPOCHS]
    printed = run(*command_of("torchrun", 2, EXAMPLES / f"{trainer}_torch.py", *options), log=tmp_path / "log")
    accuracy, ratio = re.findall(r"test accuracy ([\d.]+), ratio ([\d.]+)", printed)[-1]
    assert 0.6 < float(accuracy) <= 1  # chance is 0.1
    assert float(ratio) > 25
    # Every step used the hook, with all parameters and the model's names.
    assert f"worker 0 of 2 | {EPOCHS * STEPS} steps" in printed
    assert f"dense {4 * PARAMETERS:,} |" in printed
    assert re.search(rf"^{re.escape(prefix)}6\.weight +256x1024 +powersgd", printed, re.MULTILINE)


def test_trl_learns_and_sends_less(tmp_path):
    pytest.importorskip("trl")
    options = ["--steps", 30, "--folder", tmp_path]
    printed = run(*command_of("torchrun", 2, EXAMPLES / "trl_torch.py", *options), log=tmp_path / "log")
    ((first, last, ratio),) = re.findall(r"loss ([\d.]+) -> ([\d.]+), ratio ([\d.]+)", printed)
    assert float(last) < 0.7 * float(first)
    assert float(ratio) > 5


def test_transformers_trainer_learns_resumes_and_sends_less(tmp_path):
    pytest.importorskip("transformers")
    script = command_of("torchrun", 2, EXAMPLES / "trainer_torch.py", "--folder", tmp_path)
    printed = run(*script, "--steps", 60, log=tmp_path / "log")
    (found,) = re.findall(r"^loss ([\d.]+), ratio ([\d.]+)", printed, re.MULTILINE)
    assert float(found[0]) < 4, "that of guessing is 4.6"
    assert float(found[1]) > 7
    again = run(*script, "--steps", 62, "--resume", log=tmp_path / "log")
    assert "worker 0 of 2 | 2 steps" in again


def test_a_spec_of_torchtitan_parallelizes_and_compresses(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import torchtitan_spec

    @dataclass
    class Spec:
        parallelize_fn: Callable[..., nn.Module]
        name: str = "a model"

    seen = []
    spec = Spec(lambda model, **options: seen.append(options) or nn.Sequential(model))
    with patch.object(grace.torch, "compress") as compress:
        found = torchtitan_spec.compressed(spec, {"compressor": "none"})
        model = found.parallelize_fn(nn.Linear(2, 2), parallel_dims=1)
    assert (found.name, seen) == ("a model", [{"parallel_dims": 1}])
    compress.assert_called_once_with(model, {"compressor": "none"})
