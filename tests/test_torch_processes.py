"""PyTorch's integrations over two real workers, through Horovod and torch.distributed."""

import numpy as np
import pytest
from launch import launch

pytestmark = pytest.mark.processes

OPTIMIZERS = ["SGD", "Adam", "AdamW", "Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD", "Adadelta"]


@pytest.fixture(scope="module", params=["horovod", "torch"])
def transport(request):
    return request.param


@pytest.fixture(scope="module")
def found(transport, tmp_path_factory):
    launcher = "torchrun" if transport == "torch" else "horovodrun"
    return launch(launcher, 2, "torch_doors.py", tmp_path_factory.mktemp("out"), transport)


def alike(found, key, part=0):
    """Assert that both workers found the same bits; returns the value."""
    mine, other = (worker[key] for worker in found)
    mine, other = (x[part] if isinstance(x, tuple) else x for x in (mine, other))
    assert np.array_equal(mine, other), f"workers differ after {key}"
    return mine


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_dense_training_equals_one_worker_with_all_batches(found, name):
    mine = alike(found, f"optimizer {name}")
    np.testing.assert_allclose(mine, found[0][f"optimizer {name}"][1], rtol=1e-4, atol=2e-5)


def test_accumulated_passes_are_exchanged_once(found):
    alike(found, "accumulation")
    assert found[0]["accumulation"][1] == 4


def test_a_line_search_decides_alike_on_all_workers(found):
    alike(found, "closure")
    losses = found[0]["closure"][1]
    assert losses == found[1]["closure"][1]
    assert losses[-1] < losses[0]


def test_an_overflow_on_one_worker_is_skipped_by_all_and_leaves_the_memory(found):
    alike(found, "scaler")
    for worker in found:
        trace = worker["scaler"][1]
        assert [skipped for skipped, _, _ in trace] == [False, False, True, False]
        assert [kept for _, kept, _ in trace] == [False, False, True, False]
        assert trace[2][2] == trace[1][2] / 2
        assert worker["scaler"][2] == 4  # tensors
        assert np.isfinite(worker["scaler"][0]).all()


def test_hooks_in_another_order_and_absent_gradients_do_not_mix_tensors(found):
    alike(found, "order")
    for worker in found:
        assert worker["order"][1], "a layer that nobody uses keeps no gradient"
        assert not worker["order"][2], "a layer that one worker uses gets the mean everywhere"


@pytest.mark.parametrize("key", ["synchronize", "added", "dtype torch.float16", "dtype torch.bfloat16", "sparse"])
def test_workers_end_with_the_same_bits(found, key):
    assert np.isfinite(alike(found, key)).all()


def test_added_and_unfrozen_parameters_are_taken_in(found):
    assert found[0]["added"][1] == ["0.bias", "0.weight", "2.bias", "2.weight"]


def test_bytes_dense_counts_the_gradients_own_dtype(found):
    single = 2 * (20 * 30 + 30 + 30 * 5 + 5)
    alike(found, "dtype torch.float64")
    assert found[0]["dtype torch.float16"][1] == 2 * single
    assert found[0]["dtype torch.float64"][1] == 8 * single


def test_a_sparse_gradient_is_averaged_as_dense(found):
    expected = np.zeros((50, 8), np.float32)
    for row, value in ((0, 0.5), (1, 0.5), (7, 1.0)):
        expected[row] = value
    assert np.array_equal(found[0]["sparse"], expected)


def test_broadcast_copies_parameters_moments_and_settings(found):
    for part in (0, 1):
        alike(found, "broadcast", part)
    assert found[0]["broadcast"][2] == found[1]["broadcast"][2] == 0.02
    assert np.abs(found[0]["broadcast"][1]).max() > 0


@pytest.mark.parametrize(
    "key, words",
    [
        ("parameters", ["'weight'", "[30, 20]", "[31, 20]", "same model"]),
        ("settings", ["compressor", "compress_ratio=0.1", "compress_ratio=0.2"]),
        ("list", ["worker 0 lacks", "extra.weight"]),
    ],
)
def test_workers_that_differ_all_fail_and_name_the_difference(found, key, words):
    for worker in found:
        message = worker[f"mismatch {key}"]
        assert "worker 0 and worker 1 differ" in message
        for word in words:
            assert word in message


@pytest.mark.parametrize("kind", ["topk", "powersgd"])
def test_a_resumed_run_goes_on_bit_for_bit(found, kind):
    for worker in found:
        whole, resumed = worker[f"resume {kind}"]
        assert np.array_equal(whole, resumed)


def test_another_workers_state_is_refused(found):
    for rank, worker in enumerate(found):
        assert f"worker {1 - rank} of 2" in worker["other worker's state"]


@pytest.mark.parametrize("name", ["none", "topk", "efsignsgd", "powersgd"])
def test_the_ddp_hook_gives_what_the_optimizer_gives(found, transport, name):
    if transport == "horovod":
        assert not any(key.startswith("ddp") for key in found[0])  # DDP is torch.distributed's
        return
    hooked = alike(found, f"ddp {name}")
    _, optimizer, names = found[0][f"ddp {name}"]
    np.testing.assert_allclose(hooked, optimizer, rtol=1e-5, atol=1e-6)
    assert names == ["0.bias", "0.weight", "2.bias", "2.weight"]


def test_the_dense_ddp_hook_equals_plain_ddp(found, transport):
    if transport == "torch":
        np.testing.assert_allclose(found[0]["ddp none"][0], found[0]["ddp plain"], rtol=1e-5, atol=1e-6)
