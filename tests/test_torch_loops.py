"""Real-world training loops over two workers: nothing is lost, and nothing fails silently."""

import numpy as np
import pytest
from launch import launch

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module", params=["horovod", "torch"])
def transport(request):
    return request.param


@pytest.fixture(scope="module")
def found(transport, tmp_path_factory):
    launcher = "torchrun" if transport == "torch" else "horovodrun"
    return launch(launcher, 2, "torch_loops.py", tmp_path_factory.mktemp("out"), transport)


def alike(found, key):
    """Assert that both workers have the same bits; returns their weights, and the oracle's."""
    (mine, *_), (other, *_) = (worker[key] for worker in found)
    assert np.array_equal(mine, other), f"workers differ after {key}"
    return mine, found[0][key][1]


@pytest.mark.parametrize("kind", ["none", "topk", "powersgd", "efsignsgd"])
def test_gradients_that_a_gan_throws_away_leave_no_trace(found, kind):
    reached, expected = alike(found, f"gan {kind}")
    _, _, steps, residuals, discarded = found[0][f"gan {kind}"]
    assert np.array_equal(reached, expected)
    assert (steps, residuals, discarded) == (6, True, 5)


@pytest.mark.parametrize(
    "how, discarded",
    [
        ("a gradient penalty", 5),
        ("no_sync", 0),
        ("two passes", 0),
        ("gradients removed by hand", 5),
        ("gradients zeroed through data", 5),
        ("ddp", 5),
    ],
)
def test_gans_of_other_kinds_leave_no_trace(found, transport, how, discarded):
    if how == "ddp" and transport == "horovod":
        assert "gan, ddp" not in found[0]  # DDP is torch.distributed's
        return
    reached, expected = alike(found, f"gan, {how}")
    assert np.array_equal(reached, expected)
    assert found[0][f"gan, {how}"][2:] == (6, True, discarded)


def test_a_pass_that_one_worker_alone_makes_is_an_error_on_all(found):
    for worker in found:
        error = worker["extra_pass_on_worker_0"]
        assert "out of step (worker 0: step 2, exchange 1; worker 1: step 3, exchange 0)" in error
        assert "no_sync()" in error


def test_such_a_pass_inside_no_sync_is_that_workers_own(found):
    alike(found, "extra_pass_inside_no_sync")
    assert found[0]["extra_pass_inside_no_sync"][1] == 4


@pytest.mark.parametrize("how", ["after optimizer.zero_grad", "after model.zero_grad"])
def test_gradients_set_by_hand_after_an_attack_are_exchanged(found, how):
    reached, expected = alike(found, f"by hand {how}")
    assert np.array_equal(reached, expected)
    assert found[0][f"by hand {how}"][2], "residuals"


def test_gradients_set_by_hand_over_means_are_exchanged(found):
    reached, expected = alike(found, "by hand, nothing zeroed")
    assert np.array_equal(reached, expected)


@pytest.mark.parametrize("how", ["kept", "noise"])
def test_gradients_that_would_differ_between_workers_are_an_error_on_all(found, how):
    for worker in found:
        assert "call grc.discard() before you set your own" in worker[f"by hand, {how}, not discarded"]


def test_means_that_were_changed_by_hand_are_not_exchanged_again(found):
    reached, expected = alike(found, "means_divided_by_hand")
    assert np.array_equal(reached, expected)


@pytest.mark.parametrize("key", ["one tensor as two gradients", "expanded gradients"])
def test_the_users_own_tensors_are_read_and_not_written_to(found, key):
    reached, expected = alike(found, key)
    assert np.array_equal(reached, expected)


@pytest.mark.parametrize("what, steps", [("clip", 3), ("scaler", 2), ("plain", 3), ("ends early", 3)])
def test_clipping_and_scalers_see_means_also_where_an_accumulation_ends_early(found, what, steps):
    key = f"accumulation {what}"
    reached, expected = alike(found, key)
    np.testing.assert_allclose(reached, expected, atol=1e-6)
    assert found[0][key][2] == steps


@pytest.mark.parametrize("what", ["clip", "scaler"])
def test_gradients_that_are_changed_before_their_exchange_are_an_error_on_all(found, what):
    for worker in found:
        assert "optimizer.synchronize()" in worker[f"local {what}"]


@pytest.mark.parametrize("key", ["only_a_new_group_has_gradients", "only_unfrozen_parameters_have_gradients"])
def test_parameters_that_are_new_have_means_when_backward_returns(found, key):
    for worker in found:
        mine, expected = worker[key]
        assert mine == pytest.approx(expected, rel=1e-5)


def test_a_closures_loss_keeps_its_dtype(found):
    assert found[0]["a_closures_loss_keeps_its_dtype"] == ["torch.float64", "torch.float32"]


def test_an_optimizer_that_is_made_anew_releases_the_one_before(found):
    reached, expected = alike(found, "recreated_every_epoch")
    assert np.array_equal(reached, expected)
    _, _, steps, hooks, refused = found[0]["recreated_every_epoch"]
    assert (steps, hooks) == (3, 1)
    assert "given to another DistributedOptimizer" in refused


def test_a_grace_drives_one_optimizer(found):
    for worker in found:
        refused, after_release = worker["one_grace_for_two"]
        assert refused.startswith("ValueError")
        assert "release(optimizer)" in refused
        assert after_release == "" or "two tensors are named" in after_release


def test_duplicate_names_are_refused_when_wrapping(found):
    for worker in found:
        assert "two parameters are named 'weight'" in worker["duplicate_names"]


def test_a_batch_that_one_worker_drops_is_an_error_on_all_and_nothing_is_lost(found):
    for worker in found:
        error, kept, _ = worker["a_batch_dropped_on_one_worker"]
        assert "worker 1 gave up step 2: its backward pass failed" in error
        assert kept, "weights and residuals are those before the step"


def test_a_batch_that_all_workers_drop_is_as_if_it_had_never_been(found):
    (mine, _, reached), (_, _, other) = (worker["a_batch_dropped_on_all_workers"] for worker in found)
    assert mine == ""
    assert np.array_equal(reached, other)


def test_an_update_by_hand_is_a_step(found):
    reached, expected = alike(found, "an_update_by_hand")
    np.testing.assert_allclose(reached, expected, atol=1e-6)


def test_inner_and_outer_optimizers_share_parameters(found):
    reached, expected = alike(found, "inner_and_outer_optimizer")
    np.testing.assert_allclose(reached, expected, atol=1e-6)
    _, _, steps, unguarded = found[0]["inner_and_outer_optimizer"]
    assert steps == 3
    assert "SGD steps parameters whose gradients a DistributedOptimizer exchanges" in unguarded


@pytest.mark.parametrize(
    "key", ["an_optimizer_in_each_backward", "sharpness_aware", "no_sync_accumulates_as_ddps", "accumulation plain"]
)
def test_dense_loops_equal_one_worker_with_all_batches(found, key):
    reached, expected = alike(found, key)
    np.testing.assert_allclose(reached, expected, atol=1e-6)


def test_two_losses_of_disjoint_parts_are_one_step(found):
    reached, expected = alike(found, "two_losses_of_disjoint_parts")
    assert np.array_equal(reached, expected)
    assert found[0]["two_losses_of_disjoint_parts"][2:] == (True, 4)


def test_a_step_that_is_skipped_leaves_no_trace(found):
    reached, expected = alike(found, "a_skipped_step_leaves_no_trace")
    assert np.array_equal(reached, expected)
    assert found[0]["a_skipped_step_leaves_no_trace"][2], "residuals"


def test_steps_inside_no_sync_are_each_workers_own(found):
    assert [worker["steps_inside_no_sync_are_local"] for worker in found] == [(True, 0)] * 2


def test_a_pass_inside_no_sync_on_top_of_means_is_refused(found):
    for worker in found:
        assert "added this worker's gradients to means" in worker["a_pass_inside_no_sync_on_top_of_means"]


def test_a_grace_by_itself_is_as_it_was_after_a_step_that_raises(found):
    means = [worker["a_grace_by_itself"][2] for worker in found]
    assert np.array_equal(*means)
    for worker in found:
        paused, (shape, name), _, apart, steps = worker["a_grace_by_itself"]
        assert paused
        assert "has shape" in shape
        assert "was not built" in name
        assert "out of step (worker 0: step 0, exchange 0; worker 1: step 3, exchange 0)" in apart
        assert steps == 2


def test_a_copy_of_an_optimizer_is_refused_and_an_average_of_weights_is_plain(found):
    for worker in found:
        refused, same = worker["copies"]
        assert refused.startswith("TypeError: an optimizer that averages gradients cannot be copied")
        assert same


def test_copies_of_a_model_with_the_hook_train_together(found, transport):
    if transport == "torch":
        for part in range(3):
            assert np.array_equal(found[0]["ddp_copies"][part], found[1]["ddp_copies"][part])
        assert found[0]["ddp_copies"][3:] == (3, True)


def test_the_hook_and_the_optimizer_on_the_same_parameters_are_refused(found, transport):
    if transport == "torch":
        assert all("use one of them" in worker["hook_and_optimizer"] for worker in found)


def test_a_model_and_a_grace_of_different_workers_are_refused(found, transport):
    if transport == "torch":
        for rank, worker in enumerate(found):
            few, many, same = worker["another_group"]
            assert f"replicated over workers [{rank}], but grace averages over 2 workers" in few
            assert "replicated over workers [0, 1], but grace averages over 1 workers" in many
            assert same == ""


def test_accumulation_on_top_of_means_equals_plain_ddp(found, transport):
    if transport == "torch":
        reached, expected = alike(found, "ddp_accumulates_without_no_sync")
        np.testing.assert_allclose(reached, expected, atol=1e-6)
