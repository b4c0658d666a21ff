"""Keras on PyTorch over two gloo workers, and against Keras on TensorFlow over two of Horovod's."""

import numpy as np
import pytest
from launch import launch

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return launch("torchrun", 2, "keras_torch.py", tmp_path_factory.mktemp("out"))


def test_fit_with_topk_ends_with_equal_weights_and_a_lower_loss(found):
    (mine, losses, iterations), (other, other_losses, _) = (worker["topk"] for worker in found)
    assert np.array_equal(mine, other)
    assert losses == other_losses
    assert losses[-1] < 0.8 * losses[0]
    assert iterations == 8 * 4  # worker 0's iterations


def test_bytes_names_and_the_record(found):
    steps, sent, dense, named_by_paths = found[0]["report"]
    assert steps == 8 * 4
    assert dense == steps * 4 * (20 * 30 + 30 + 30 * 5 + 5)
    assert sent == steps * (8 * (60 + 3 + 15 + 1) + 20 + 4 * 4)  # plus the header, and flags of present gradients
    assert named_by_paths
    assert found[0]["record"]


@pytest.mark.parametrize("settings", ["clipnorm", "accumulation", "loss scale", "weight decay and averages"])
def test_an_optimizers_settings_act_on_means(found, settings):
    (mine, whole), (other, _) = (worker[settings] for worker in found)
    assert np.array_equal(mine, other)
    np.testing.assert_allclose(mine, whole, rtol=1e-4, atol=1e-5)


def test_an_overflow_on_one_worker_is_skipped_by_all_and_leaves_residuals(found):
    for worker in found:
        weights, skipped, residuals_kept, scale = worker["scaler"]
        assert skipped == [False, False, True, False]
        assert residuals_kept
        assert all(residuals_kept)
        assert scale == 8.0
        assert np.array_equal(weights, found[0]["scaler"][0])


def test_a_loop_with_absent_and_sparse_gradients(found):
    expected = np.zeros((6, 3), np.float32)
    expected[:2], expected[5] = 0.5, 1.0
    for worker in found:
        table, unused, absent, names = worker["loop"]
        assert np.array_equal(table, expected)
        assert unused == [1.5]
        assert absent is None
        assert names == ["table", "unused", "absent"]


def int4(x):
    """A tensor, as it is stored, as 4-bit integers in blocks of 16."""
    rows = x.reshape(-1, 16)
    scales = np.abs(rows).max(1, keepdims=True)
    return (np.rint(rows / scales * 7) * (scales / 7)).reshape(x.shape)


def test_blockwise_methods_exchange_kernels_transposed(found):
    workers = [worker["blockwise"] for worker in found]
    gradients = list(zip(*(worker["gradients"] for worker in workers), strict=True))
    kernels = [np.mean([int4(np.ascontiguousarray(x.T)).T for x in each], 0) for each in gradients[:2]]
    expected = [*kernels, np.mean([int4(x) for x in gradients[2]], 0)]
    for rank, worker in enumerate(workers):
        for number, (mean, wanted) in enumerate(zip(worker["means"], expected, strict=True)):
            np.testing.assert_allclose(mean, wanted, rtol=1e-5, atol=1e-6)
            x = gradients[number][rank]
            left = x.T - int4(np.ascontiguousarray(x.T)) if number < 2 else x - int4(x)
            np.testing.assert_allclose(worker["residuals"][number], left.ravel(), rtol=1e-5, atol=1e-6)
        assert worker["absent"] is None
        assert worker["unchanged"]
        assert worker["contiguous"]
        assert worker["transposed"] is True


def test_a_resumed_run_goes_on_bit_for_bit(found):
    for worker in found:
        saved, whole, resumed = worker["resume"]
        assert worker["plain"]
        assert not np.array_equal(saved, whole)
        assert np.array_equal(whole, resumed)


def test_local_training_ends_with_equal_weights(found):
    assert np.array_equal(found[0]["local"], found[1]["local"])


def test_factors_in_place_of_layers_are_refused(found):
    for worker in found:
        assert "Keras runs on torch, where layers cannot change in place: set KERAS_BACKEND" in worker["factorised"]


def test_models_that_differ_and_plain_optimizers_are_named(found):
    for worker in found:
        assert "worker 0 and worker 1 differ" in worker["mismatch"]
        assert worker["warned"]


def test_a_distribution_of_keras_is_refused(found):
    for worker in found:
        assert "keras.distribution.DataParallel is set" in worker["distribution"]


@pytest.mark.parametrize("optimizer", ["SGD", "Adam clipnorm"])
def test_dense_losses_equal_those_of_keras_on_tensorflow(found, keras_doors, optimizer):
    torch, tensorflow = (workers[0]["dense"][optimizer] for workers in (found, keras_doors))
    assert torch[-1] < torch[0]
    np.testing.assert_allclose(torch, tensorflow, rtol=0, atol=1e-4)
