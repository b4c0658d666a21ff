"""Four workers that are killed and restarted: a short `python -m benchmarks.soak`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.loops import KINDS  # noqa: E402
from benchmarks.soak import CASES, ROUNDED, SIZE, Found  # noqa: E402 - benchmarks is no installed package
from grace.core.registry import communicators  # noqa: E402


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    pytest.importorskip("torch")
    path = tmp_path_factory.mktemp("soak") / "found.json"
    command = [sys.executable, "-m", "benchmarks.soak", "--minutes", "0.6", "--json", path, "--seed", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return Found(**json.loads(path.read_text()))


pytestmark = pytest.mark.processes


def test_every_communicator_takes_part():
    assert {params.get("communicator", "auto") for params in CASES.values()} == set(communicators)


def test_workers_were_killed_and_begun_again(found):
    assert found.kills > 0
    assert found.restarts > 0
    assert found.hangs == 0
    assert found.unexpected == []
    assert found.slowest_end < 30


def test_weights_are_the_same_bits_at_every_checkpoint(found):
    assert found.steps >= 20
    assert found.checkpoints == found.steps // 10
    assert found.compared >= SIZE * len(CASES) * found.checkpoints
    assert found.different == 0


def test_nothing_is_lost(found):
    assert set(found.lost) == set(CASES)
    assert [name for name, off in found.lost.items() if off and name not in ROUNDED] == []
    assert all(found.lost[name] < ROUNDED[name] for name in ROUNDED)


def test_memory_stays_small(found):
    # Only a long run shows whether memory grows: `make soak`.
    assert 50 < found.memory < 1500


def test_what_should_not_be_is_a_failure():
    fine = {"lost": dict.fromkeys(CASES, 0.0), "longest": 2000}
    assert Found(**fine).failures == []
    for bad, said in (
        ({"lost": {**fine["lost"], "allgather": 1e-9}}, "allgather has lost"),
        ({"lost": {}}, "was not compared"),
        ({"different": 1}, "digests differ"),
        ({"hangs": 1}, "hung"),
        ({"growth": 300.0}, "memory grows"),
        ({"seconds": 600.0, "longest": 0}, "memory was not measured"),
        ({"unexpected": ["worker 1 ended"]}, "worker 1 ended"),
    ):
        assert any(said in text for text in Found(**{**fine, **bad}).failures)


def test_irregular_steps_lose_nothing_and_fail_on_all_workers_together(tmp_path):
    path = tmp_path / "found.json"
    command = [sys.executable, "-m", "benchmarks.loops", "--steps", "150", "--json", path, "--seed", "5"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(path.read_text())
    assert set(found["steps"]) == set().union(*KINDS.values())
    assert sum(found["steps"].values()) == 150
    assert (found["different"], found["lost"], found["hangs"], found["failures"]) == (0, 0.0, 0, [])
