"""The Pufferfish examples under their launchers: fewer parameters, fewer bytes, and a model that learns."""

import json
import sys
from pathlib import Path

import pytest
from launch import command_of, run

pytestmark = pytest.mark.processes
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.mark.parametrize("script, launch", [("torch", "horovodrun"), ("torch", "torchrun"), ("keras", "horovodrun")])
def test_over_two_workers(script, launch, tmp_path):
    out = tmp_path / "result.json"
    options = ["--forms", "dense", "hybrid", "--json", out]
    printed = run(*command_of(launch, 2, EXAMPLES / f"pufferfish_{script}.py", *options), log=tmp_path / "log")
    found = json.loads(out.read_text())
    dense, hybrid = found["rows"]
    assert found["workers"] == 2
    assert hybrid["parameters"] < dense["parameters"] / 2
    for row in (dense, hybrid):
        assert row["bytes_per_step"] == 4 * row["parameters"]
    assert dense["accuracy"] > 0.94
    assert hybrid["accuracy"] > dense["accuracy"] - 0.02  # 10 of 500 images; one run with one seed
    assert "hybrid" in printed


def test_alone_with_a_compressor(tmp_path):
    out = tmp_path / "result.json"
    options = ["--epochs", 2, "--warm-up", 1, "--forms", "hybrid", "--method", "powersgd", "--json", out]
    run(sys.executable, EXAMPLES / "pufferfish_torch.py", *options, log=tmp_path / "log")
    (row,) = json.loads(out.read_text())["rows"]
    assert row["bytes_per_step"] < row["parameters"]
