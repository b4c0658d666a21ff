"""Which exchanges count in Keras, over two workers: those whose means the optimizer applied."""

import numpy as np
import pytest
from launch import launch

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module", params=["tensorflow", "torch"])
def found(request, tmp_path_factory):
    launcher = "torchrun" if request.param == "torch" else "horovodrun"
    return launch(launcher, 2, "applied_keras.py", tmp_path_factory.mktemp("out"), request.param)


def equal(pairs, key):
    for step, (mine, oracle) in enumerate(pairs):
        assert mine.keys() == oracle.keys(), (key, step)
        for name, value in mine.items():
            assert np.array_equal(value, oracle[name]), (key, step, name)


def cases(found, *kinds):
    return [(worker[key], key) for worker in found for key in worker if key[0] in kinds]


SKIPPED = ["scaler", "scaler around it", "scaler with accumulation", "skips inside", "raises"]
APPLIED = ["rate 0 with moments", "rate 0 without", "accumulation", "uncounted", "adds"]


@pytest.mark.parametrize("kind", SKIPPED)
def test_a_step_that_is_skipped_leaves_all_memories_and_does_not_count(found, kind):
    for pairs, key in cases(found, kind):
        equal(pairs, key)


def test_reports_count_skipped_steps_outside_of_graphs(found):
    for counts, (_, name, _, mode) in cases(found, "discarded"):
        assert counts == ((0, 0) if mode == "graph" else (2, 0)), name


@pytest.mark.parametrize("kind", APPLIED)
def test_means_that_the_optimizer_keeps_count_as_applied(found, kind):
    for pairs, key in cases(found, kind):
        equal(pairs, key)
        assert pairs[-1][0]["steps"] == 8


def test_a_skipped_step_at_any_level_of_a_policy(found):
    for pairs, key in cases(found, "policy"):
        equal(pairs, key)
        assert len({str(pair[0]["levels"]) for pair in pairs}) > 1, key


def test_a_state_saved_after_a_skipped_step_goes_on(found):
    for pairs, key in cases(found, "resumed"):
        equal(pairs, key)


def test_workers_may_trace_a_graph_differently_often(found):
    for worker in found:
        equal(worker.get("traced more often", []), "traced more often")


def test_a_worker_that_fails_alone_is_an_error_on_all_at_the_next_exchange(found):
    mine, other = (worker["alone"] for worker in found)
    assert len(mine) == 1
    assert other[0] == "ArithmeticError: no step"
    assert mine[-1] == other[-1]
    assert "applied on worker 0, discarded on worker 1" in mine[-1]
