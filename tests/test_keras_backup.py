"""Keras trainings that are interrupted and restarted, over two workers."""

import numpy as np
import pytest
from launch import launch

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module", params=["tensorflow", "torch"])
def found(request, tmp_path_factory):
    launcher = "torchrun" if request.param == "torch" else "horovodrun"
    return launch(launcher, 2, "keras_backup.py", tmp_path_factory.mktemp("out"), request.param)


@pytest.mark.parametrize("how", [("restored", "shared"), ("restored", "own"), "between"])
def test_a_restarted_fit_ends_as_an_uninterrupted_one(found, how):
    for worker in found:
        whole, steps, _ = worker["whole"]
        weights, restarted, epochs, *left = worker[how]
        assert np.array_equal(weights, whole)
        assert restarted == steps == 12
        assert epochs == [2, 3]
        assert left in ([], [False])  # a finished training leaves no folder


def test_a_backup_within_an_epoch_begins_it_again_on_all(found):
    (mine, steps, epochs), (other, *_) = (worker["batches"] for worker in found)
    assert np.array_equal(mine, other)
    assert (steps, epochs) == (4 + 3 * 3, [1, 2, 3])


@pytest.mark.parametrize(
    "what, message",
    [
        ("missing", "worker 1 cannot restore its Grace from"),
        ("damaged", "worker 0 cannot restore its backup from"),
        ("after", "worker 0 starts in epoch 2 at step 6, and worker 1 in epoch 0 at step 0"),
        ("before", "worker 0 starts in epoch 2 at step 6, and worker 1 in epoch 0 at step 6"),
        ("done", "worker 0 starts with no epoch left, and worker 1 in epoch 0"),
        ("without", "worker 0 starts at step 6 of its optimizer, and worker 1 at step 0"),
        (("loop", "one"), "worker 0 starts at step 1 of its optimizer, and worker 1 at step 0"),
    ],
)
def test_what_one_worker_alone_restores_is_an_error_on_all(found, what, message):
    for worker in found:
        text = worker[what] if isinstance(what, str) else worker[what][0]
        assert text.startswith(f"ValueError: {message}")


def test_a_restart_without_residuals_is_told_once(found):
    for rank, worker in enumerate(found):
        epochs, told = worker["plain"]
        assert epochs == [2, 3]
        for error, messages in (("", told), worker["loop", "all"]):
            assert error == ""
            assert len(messages) == (rank == 0)
        assert worker["loop", "with its state"] == ("", [])
