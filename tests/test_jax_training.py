"""Training with grace.jax: the examples, and runs that are killed and resumed through Orbax."""

import json
import pickle
import sys

import numpy as np
import pytest
from launch import TESTS, run
from support.examples import EXAMPLES, PARAMETERS

pytest.importorskip("jax")
pytest.importorskip("optax")

pytestmark = pytest.mark.processes


def test_digits_with_flax_and_optax_lose_less_than_a_point(tmp_path):
    pytest.importorskip("flax")
    found = {}
    # Dense: one device with the batches of both, which gives the same steps and needs no sums of large arrays.
    one, two = ["--devices", 1, "--batch-size", 64], ["--params", '{"compress_rank": 3}']
    for name, more in (("none", one), ("powersgd", two)):
        out = tmp_path / f"{name}.json"
        options = ["--method", name, *more, "--epochs", 10, "--json", out]
        run(sys.executable, EXAMPLES / "digits_jax.py", *options, log=tmp_path / "log")
        found[name] = json.loads(out.read_text())
    dense, sent = found["none"], found["powersgd"]
    assert (dense["report"]["world_size"], sent["report"]["world_size"]) == (1, 2)
    assert dense["bytes_per_step"] == dense["dense_bytes_per_step"] == 4 * PARAMETERS
    assert dense["bytes_per_step"] >= 40 * sent["bytes_per_step"]
    assert dense["accuracy"] > 0.95
    assert sent["accuracy"] >= dense["accuracy"] - 0.01


@pytest.mark.parametrize("script", ["jax_optax.py", "local_jax.py"])
def test_an_example_learns_on_four_devices(tmp_path, script):
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    printed = run(sys.executable, EXAMPLES / script, log=tmp_path / "log", XLA_FLAGS=flags, NPROC="16")
    losses = [float(line.rpartition(" ")[2]) for line in printed.splitlines() if ": loss " in line]
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 4
    if script == "jax_optax.py":
        assert "eden + none + twostage | worker 0 of 4" in printed


def test_a_killed_run_resumes_to_the_bit(tmp_path):
    """Parameters, Adam's moments, residuals and counts come from Orbax's checkpoint of the last whole step."""
    pytest.importorskip("orbax.checkpoint")
    script = TESTS / "workers" / "jax_resume.py"
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    run(sys.executable, script, tmp_path / "whole", tmp_path / "one", 4, log=tmp_path / "log")
    run(sys.executable, script, tmp_path / "killed", tmp_path / "two", 4, 1, log=tmp_path / "log", fails=True)
    assert not (tmp_path / "killed" / "0.pickle").exists()
    run(sys.executable, script, tmp_path / "killed", tmp_path / "two", 4, log=tmp_path / "log")
    (begun, whole), (again, resumed) = (
        pickle.loads((tmp_path / name / "0.pickle").read_bytes()) for name in ("whole", "killed")
    )
    assert (begun, again) == (0, 2)
    assert any(array.shape == (2, 64 * 64) and array.any() for array in whole), "residuals, one row for each device"
    for one, two in zip(whole, resumed, strict=True):
        assert np.array_equal(one, two)
