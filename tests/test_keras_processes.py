"""TensorFlow's and Keras's integrations over two real workers."""

import numpy as np
import pytest

pytestmark = pytest.mark.processes

LOOPS = ["fit", "several steps per call", "eager fit", "tape", "tape in a function", "optimizer"]


@pytest.fixture
def found(keras_doors):
    return keras_doors


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW clipnorm", "RMSprop", "Adafactor", "Lion"])
def test_dense_training_equals_one_worker_with_all_batches(found, name):
    (mine, whole), (other, _) = (worker[f"optimizer {name}"] for worker in found)
    assert np.array_equal(mine, other)
    np.testing.assert_allclose(mine, whole, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["topk", "powersgd"])
@pytest.mark.parametrize("loop", LOOPS)
def test_every_way_to_write_the_loop_gives_the_same_weights(found, kind, loop):
    mine, other = (worker[f"loops {kind}"][loop] for worker in found)
    assert np.array_equal(mine, other)
    if kind == "topk":  # PowerSGD seeds its factor by the variable's name, which differs between loops
        np.testing.assert_allclose(mine, found[0]["loops topk"]["fit"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["topk", "powersgd"])
def test_a_graph_is_traced_once_more_for_its_variables_only_and_counts_its_bytes(found, kind):
    assert found[0][f"traces {kind}"] <= 2
    steps, sent, dense = found[0][f"report {kind}"]
    assert steps == 4
    assert dense == 4 * 4 * (20 * 30 + 30 + 30 * 5 + 5)
    if kind == "topk":
        assert sent == 4 * 8 * (60 + 3 + 15 + 1)
    else:
        assert sent == 4 * 4 * (2 * (20 + 30) + 30 + 2 * (30 + 5) + 5)


def test_the_tape_keeps_structure_none_and_dense_embeddings(found):
    for worker in found:
        table, unused, w, again = worker["structure"]
        expected = np.zeros((6, 3), np.float32)
        for row, value in ((0, 1.0), (1, 1.0), (5, 2.0)):
            expected[row] = value
        assert np.array_equal(table, expected)
        assert unused
        assert w == again == 6.0


def test_an_overflow_on_one_worker_is_skipped_by_all_and_leaves_the_memory(found):
    for worker in found:
        assert [skipped for skipped, _ in worker["scaler"][1]] == [False, False, True, False]
        assert [kept for _, kept in worker["scaler"][1]] == [False, False, True, False]
        assert worker["scaler"][2] == 8.0
        assert np.isfinite(worker["scaler"][0]).all()
    assert np.array_equal(found[0]["scaler"][0], found[1]["scaler"][0])


def test_workers_agree_under_keras_accumulation(found):
    assert np.array_equal(found[0]["accumulation"], found[1]["accumulation"])


def test_callbacks_start_from_the_root_and_average_metrics(found):
    (mine, root, loss, own), (other, _, other_loss, other_own) = (worker["callbacks"] for worker in found)
    assert np.array_equal(mine, root)
    assert np.array_equal(other, root)
    assert loss == other_loss
    assert loss == pytest.approx((own + other_own) / 2, rel=1e-5)


def test_xla_is_refused_with_the_remedy(found):
    assert "jit_compile=False" in found[0]["jit"]
    assert "jit_compile=False" in found[1]["jit"]


def test_a_saved_model_holds_the_plain_optimizer(found):
    for worker in found:
        before, after, plain, distributed = worker["saved"]
        assert np.array_equal(before, after)
        assert plain
        assert not distributed


def test_a_resumed_run_goes_on_bit_for_bit(found):
    for worker in found:
        assert np.array_equal(*worker["resume"])


def test_workers_that_differ_all_fail_and_name_the_difference(found):
    for worker in found:
        assert "worker 0 and worker 1 differ: 'kernel' is float32[3, 4]" in worker["mismatch"]
