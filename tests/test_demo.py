"""The demo: two real workers train, all figures follow from measurements, and missed targets are reported."""

import copy
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launch import run

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def demo():
    sys.path.insert(0, str(EXAMPLES))
    import demo

    yield demo
    sys.path.remove(str(EXAMPLES))


@pytest.mark.processes
def test_the_demo_trains_with_every_method_and_computes_seconds(demo, tmp_path):
    pytest.importorskip("torch")
    options = ["--epochs", 8, "--target", 0.9, "--out", tmp_path]
    printed = run(sys.executable, EXAMPLES / "demo.py", *options, log=tmp_path / "log")
    results = json.loads((tmp_path / "results.json").read_text())
    assert [one["method"] for one in results] == list(demo.METHODS)
    for one in results:
        assert one["report"]["world_size"] == 2
        assert len(one["history"]) == 8
        first = next(epoch for epoch in one["history"] if epoch["accuracy"] >= 0.9)
        assert one["reached"] == pytest.approx(first["computed"] + first["bytes_sent"] / 12.5e6)
        assert 0 < first["computed"] < 100
        assert re.search(rf"{one['method']} .*{one['accuracy']:.1%} .*{one['bytes_per_step']:,.0f} ", printed)
    assert all(one["reached"] < results[0]["reached"] for one in results[1:])
    assert results[-1]["report"]["chosen"], "auto has tried its methods and chosen one"
    assert (tmp_path / "time_to_accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert "are computed, not measured" in " ".join(printed.split())
    assert re.search(r"Time: set-up \d+ s, .*dense \d+ s, .*in all \d+ s", " ".join(printed.split()))


@pytest.mark.processes
def test_a_target_that_is_missed_fails_the_demo(tmp_path):
    pytest.importorskip("torch")
    options = ["--epochs", 1, "--target", 1, "--out", tmp_path]
    printed = run(sys.executable, EXAMPLES / "demo.py", *options, log=tmp_path / "log", fails=True)
    assert "The demo's claim does not hold: PyTorch dense: no epoch with a test accuracy of 100.0%" in printed


def results_of(demo):
    """Results that meet all targets."""
    sent = {"dense": 80, "blockint 4 bits": 10, "eden 3 bits": 9, "PowerSGD": 2, "auto": 20}
    return [
        {"toolkit": "PyTorch", "method": name, "accuracy": 0.97, "bytes_per_step": sent[name], "reached": sent[name]}
        for name in demo.METHODS
    ]


@pytest.mark.parametrize(
    "method, change, told",
    [
        ("dense", {"reached": None}, "no epoch with"),
        ("auto", {"reached": None}, "no epoch with"),
        ("auto", {"reached": 80}, "no less than dense"),
        ("eden 3 bits", {"accuracy": 0.95}, "2.0 points behind dense"),
        ("blockint 4 bits", {"bytes_per_step": 20}, "4.0 times fewer bytes"),
        ("PowerSGD", {"bytes_per_step": 4}, "20.0 times fewer bytes"),
    ],
)
def test_each_missed_target_is_told(demo, method, change, told):
    results = results_of(demo)
    assert demo.failures(results, 0.96) == []
    changed = copy.deepcopy(results)
    next(one for one in changed if one["method"] == method).update(change)
    (line,) = demo.failures(changed, 0.96)
    assert line.startswith(f"PyTorch {method}: ")
    assert told in line


def commands(target):
    """The commands that make would run for a target, with nothing built before."""
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    done = subprocess.run(["make", "-nB", target], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.lower()


def test_make_demo_needs_neither_horovod_nor_tensorflow():
    assert "horovod" in commands("demo-all")
    demo = commands("demo")
    assert "examples/demo.py" in demo
    assert "set_up_demo.py" in demo
    for name in ("horovod", "tensorflow", "keras", "toolkit"):
        assert name not in demo
    packages = re.search(r"^PACKAGES = \((.*)\)$", (ROOT / "scripts" / "set_up_demo.py").read_text(), re.MULTILINE)[1]
    assert {"torch", "matplotlib"} <= set(re.findall(r'"([\w-]+)"', packages))
    assert not re.search("horovod|tensorflow|keras", packages)
