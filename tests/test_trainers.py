"""Hugging Face Accelerate and PyTorch Lightning train with GRACE's hook, over two gloo workers."""

import re

import pytest
from launch import launcher, run
from support.examples import EXAMPLES, PARAMETERS

pytestmark = pytest.mark.processes

EPOCHS, STEPS = 3, 1297 // 2 // 32


@pytest.mark.parametrize("trainer, prefix", [("accelerate", ""), ("lightning", "model.")])
def test_a_trainer_learns_and_sends_less(tmp_path, trainer, prefix):
    pytest.importorskip(trainer)
    options = ["--method", "powersgd", "--epochs", EPOCHS]
    printed = run(*launcher("torchrun", 2), EXAMPLES / f"{trainer}_torch.py", *options, log=tmp_path / "log")
    accuracy, ratio = re.findall(r"test accuracy ([\d.]+), ratio ([\d.]+)", printed)[-1]
    assert 0.6 < float(accuracy) <= 1  # chance is 0.1
    assert float(ratio) > 25
    # Every step went through the hook, with all parameters, under the model's names.
    assert f"worker 0 of 2 | {EPOCHS * STEPS} steps" in printed
    assert f"dense {4 * PARAMETERS:,} |" in printed
    assert re.search(rf"^{re.escape(prefix)}6\.weight +256x1024 +powersgd", printed, re.MULTILINE)
