"""Numbers: non-finite, scaled, half-precision, clipped and accumulated gradients; absent, sparse and shared ones.

Over two real workers, in every integration; if possible, compared with one worker that has all batches.
"""

import numpy as np
import pytest
from launch import launch

pytestmark = pytest.mark.processes

MADE_DENSE = "its sparse gradients are made dense first"
WEIGHT = "0.weight/memory/residual"
VARIANTS = ["rebuilt", "static graph", "unused", "views", "all"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The findings of a launcher's workers; each launcher runs once."""
    done = {}

    def run(launcher):
        if launcher not in done:
            script, *arguments = {
                "torchrun": ("numbers_torch.py", "torch"),
                "horovodrun": ("numbers_torch.py", "horovod"),
                "keras": ("numbers_keras.py",),
            }[launcher]
            name = launcher.replace("keras", "horovodrun")
            done[launcher] = launch(name, 2, script, tmp_path_factory.mktemp(launcher), *arguments)
        return done[launcher]

    return run


@pytest.fixture(params=["horovodrun optimizer", "torchrun optimizer", "torchrun ddp"])
def torch(request, runs):
    """Findings of PyTorch's workers with one integration: a function of a key returns those of both workers."""
    launcher, door = request.param.split()

    def ask(key):
        return [worker[f"{key} {door}"] for worker in runs(launcher)]

    ask.door = door
    return ask


@pytest.fixture
def ddp(runs):
    return lambda key: [worker[key] for worker in runs("torchrun")]


def alike(values):
    """Assert that both workers found the same bits and finite numbers; returns them."""
    mine, other = values
    assert np.array_equal(mine, other), "workers differ"
    assert np.isfinite(mine).all()
    return mine


def trained(found, tolerance):
    """Assert that workers agree to the bit, and nearly with one worker with all batches, relative to its movement."""
    mine = alike([worker[0] for worker in found])
    _, whole, start = found[0][:3]
    way = np.abs(whole - start).max()
    assert way > 1e-3, "nothing was trained"
    assert np.abs(mine - whole).max() <= tolerance * way


# -- bad numbers -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("policy", ["poison", "zero"])
def test_a_bad_number_on_one_worker_is_seen_by_all_and_kept_by_none(torch, policy):
    found = torch(f"nonfinite {policy}")
    alike([worker[0] for worker in found])
    for _, means, kept, _, steps in found:
        if policy == "zero":
            assert steps == 4
            assert kept == {WEIGHT}, "the other tensors went on, this one's memory is as it was"
        else:
            assert steps == 3, "a step that is not made is none"
            assert kept > {WEIGHT}, "and leaves all memory as it was"
        for name, mean in means.items():
            if name != "0.weight":
                assert np.isfinite(mean).all()
                assert mean.any()
            elif policy == "zero":
                assert not mean.any()
            else:
                assert not np.isfinite(mean).all()
    for name, mean in found[0][1].items():
        assert np.array_equal(mean, found[1][1][name], equal_nan=True)


def test_all_workers_raise_and_can_go_on(torch):
    found = torch("nonfinite raise")
    alike([worker[0] for worker in found])
    for _, _, kept, message, steps in found:
        assert kept > {WEIGHT}, "the other tensors' memory, too"
        assert "'0.weight' is not finite" in message
        # DDP does not continue after an error; other integrations exchange again when the next backward pass ends.
        assert steps == (2 if torch.door == "ddp" else 3)


def test_a_loss_scaler_grows_and_falls_alike_on_all_workers(torch):
    found = torch("scaler")
    trained(found, 0.02)  # autocast computes in bfloat16
    for *_, scales in found:
        assert scales == 2 * [1024.0, 2048.0, 2048.0, 4096.0, 2048.0, 2048.0]


def test_a_mean_too_large_for_float16_leaves_the_memory(torch):
    for trace in torch("half"):
        assert trace == [(True, 0), (False, 1), (True, 0)]


# -- dtypes ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype, tolerance", [("float16", 0.01), ("bfloat16", 0.06), ("float64", 1e-12)])
def test_models_of_other_dtypes(torch, dtype, tolerance):
    trained(torch(f"dtype torch.{dtype}"), tolerance)


def test_complex_parameters_are_refused_by_name(torch):
    for message in torch("complex"):
        assert message.startswith("'phase' has dtype complex64: ")


def test_integer_parameters_are_in_nobodys_way(torch):
    for names, table in torch("integer"):
        assert names == ["0.bias", "0.weight", "2.bias", "2.weight"]
        assert table == [0, 1, 2, 3]


# -- clipping and accumulation -----------------------------------------------------------------------------------------
def test_means_are_clipped_after_the_exchange(torch):
    trained(torch("clipped after"), 1e-4)


@pytest.mark.parametrize("by", ["value", "norm"])
@pytest.mark.parametrize("launcher", ["torchrun", "horovodrun"])
def test_each_worker_may_clip_its_own_gradient_before(runs, launcher, by):
    trained([worker[f"clipped before, by {by}"] for worker in runs(launcher)], 1e-4)


def test_passes_are_added_up_and_exchanged_once(torch):
    found = torch("accumulated none")
    trained(found, 1e-4)
    assert [worker[3] for worker in found] == [4, 4]


@pytest.mark.parametrize("door", ["ddp", "ddp view"])
def test_no_sync_sends_what_backward_passes_per_step_sends(ddp, door):
    trained(ddp(f"accumulated none {door}"), 1e-4)
    ours = alike([worker[0] for worker in ddp("accumulated topk optimizer")])
    found = ddp(f"accumulated topk {door}")
    np.testing.assert_allclose(alike([worker[0] for worker in found]), ours, rtol=1e-5, atol=1e-6)
    assert [worker[3] for worker in found] == [4, 4]


# -- absent, sparse, shared, frozen ------------------------------------------------------------------------------------
def test_a_gradient_that_some_workers_lack_counts_as_zero(torch):
    trained(torch("absent"), 1e-4)


def nothing_is_lost(found):
    handed = alike([worker[0] for worker in found])
    kept = np.mean([worker[1] for worker in found], 0)
    assert np.abs(kept).max() > 0.01
    np.testing.assert_allclose(handed + kept, found[0][2], atol=1e-5)
    assert all(worker[3] for worker in found), "what nobody uses has no gradient"


def test_what_an_unused_parameter_has_kept_is_sent_when_it_is_used_again(torch):
    nothing_is_lost(torch("absent kept"))


def test_unused_parameters_with_gradients_as_views(ddp):
    trained(ddp("absent view ddp"), 1e-4)
    nothing_is_lost(ddp("absent view kept ddp"))


def test_sparse_gradients_are_made_dense_and_the_report_says_so(torch):
    trained(torch("sparse"), 1e-4)
    for reasons in torch("sparse report"):
        for name, reason in reasons.items():
            assert reason.startswith("fewer than min_numel")
            assert reason.endswith(MADE_DENSE) == name.startswith(("words", "other"))
    found = torch("sparse compressed")
    alike([worker[0] for worker in found])
    for _, tensors in found:
        assert tensors["words.weight"] == tensors["other.weight"] == ("topk", MADE_DENSE)


def test_a_shared_parameter_is_one_gradient(torch):
    trained(torch("tied"), 1e-4)
    assert torch("tied names") == [["words.weight"]] * 2


@pytest.mark.parametrize("launcher", ["torchrun", "horovodrun"])
@pytest.mark.parametrize("to_none", [True, False])
def test_a_frozen_parameter_rests_with_its_memory_and_goes_on_when_it_is_unfrozen(runs, launcher, to_none):
    found = [worker[f"frozen {to_none}"] for worker in runs(launcher)]
    alike([worker[0] for worker in found])
    for _, before, frozen, kept, after in found:
        assert np.array_equal(before, frozen)
        assert kept == {"0.weight/memory/residual", "0.bias/memory/residual"}
        assert not np.array_equal(before, after)


# -- torch.compile and DistributedDataParallel -------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["none", "topk"])
def test_a_compiled_model_trains_as_the_plain_one_under_its_own_names(torch, kind):
    found = torch(f"compiled {kind}")
    for (plain, *sent), (compiled, *sent_compiled) in found:
        np.testing.assert_allclose(compiled, plain, rtol=1e-4, atol=1e-5)
        assert sent_compiled == sent
        assert sent[0] == ["0.bias", "0.weight", "2.bias", "2.weight"]
    alike([compiled[0] for _, compiled in found])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", ["none", "fp16", "topk", "powersgd"])
def test_the_ddp_hook_gives_what_the_optimizer_gives(ddp, kind, variant):
    found = ddp(f"ddp {kind} {variant}")
    np.testing.assert_allclose(alike([worker[0] for worker in found]), found[0][1], rtol=1e-5, atol=1e-6)
    layouts = found[0][2]
    assert len(layouts[-1]) == 3, "several buckets"
    assert (layouts[0] == layouts[-1]) == (variant == "unused"), "buckets are rebuilt but with unused parameters"


@pytest.mark.parametrize("named", [True, False])
def test_a_checkpoint_may_come_before_the_first_pass_of_several_buckets(ddp, named):
    for went_on, resumed, buckets, steps in ddp(f"checkpoint {named}"):
        assert buckets == 3
        assert steps == 6
        assert np.array_equal(went_on, resumed)


def test_workers_with_fewer_batches_join(ddp):
    trained(ddp("join"), 1e-4)


# -- TensorFlow and Keras ----------------------------------------------------------------------------------------------
@pytest.fixture
def keras(runs):
    return lambda key: [worker[key] for worker in runs("keras")]


@pytest.mark.parametrize("loop", ["eager", "graph"])
@pytest.mark.parametrize("policy", ["poison", "zero", "raise"])
def test_keras_a_bad_number_on_one_worker_is_seen_by_all_and_kept_by_none(keras, policy, loop):
    found = keras(f"nonfinite {policy} {loop}")
    alike([worker[0] for worker in found])
    for _, means, kept, message in found:
        assert "sequential/a/kernel/memory/residual" in kept
        if policy == "raise":
            assert "sequential/a/kernel" in message
            assert "is not finite on any worker" in message
            continue
        assert len(kept) == 1, "the other tensors went on"
        kernel, *others = means
        assert not kernel.any() if policy == "zero" else not np.isfinite(kernel).all()
        assert all(np.isfinite(mean).all() and mean.any() for mean in others)
    for mine, other in zip(found[0][1], found[1][1], strict=True):
        assert np.array_equal(mine, other, equal_nan=True)


def test_keras_a_loss_scaler_grows_and_falls_alike_on_all_workers(keras):
    trained(keras("scaler none"), 1e-4)
    found = keras("scaler topk")
    alike([worker[0] for worker in found])
    for worker in [*keras("scaler none"), *found]:
        assert worker[3] == [1024.0, 2048.0, 2048.0, 1024.0, 1024.0, 2048.0]
    for *_, kept in found:
        assert kept == [0, 0, 0, 4, 0, 0], "the memory of all four tensors rests in the step that overflows"


@pytest.mark.parametrize(
    "policy, dtype, tolerance",
    [
        ("mixed_bfloat16", "float32", 0.06),
        ("mixed_float16", "float32", 0.01),
        ("float16", "float16", 0.03),
        ("float64", "float64", 1e-12),
    ],
)
def test_keras_models_of_other_dtypes(keras, policy, dtype, tolerance):
    found = keras(policy)
    trained(found, tolerance)
    assert [worker[3] for worker in found] == [dtype] * 2


@pytest.mark.parametrize("key", ["clipnorm", "global_clipnorm", "clipvalue", "clipped before", "accumulation"])
def test_keras_clipping_and_accumulation(keras, key):
    trained(keras(key), 1e-4)


@pytest.mark.parametrize("kind", ["none", "topk"])
def test_keras_a_gradient_that_some_workers_lack_counts_as_zero(keras, kind):
    found = keras(f"absent {kind}")
    handed = alike([worker[0] for worker in found])
    kept = np.mean([worker[1] for worker in found], 0)
    assert kept.any() == (kind == "topk")
    np.testing.assert_allclose(handed + kept, found[0][2], atol=1e-5)
    for *_, nobody in found:
        assert nobody == [[False, True, True, True] if step % 3 == 0 else [False] * 3 + [True] for step in range(5)]


def test_keras_sparse_gradients_are_made_dense_and_the_report_says_so(keras):
    found = keras("sparse")
    alike([worker[0] for worker in found])
    for _, tensors in found:
        assert list(tensors.values()) == [("topk", MADE_DENSE)]


def test_keras_a_shared_variable_is_one_gradient(keras):
    found = keras("tied")
    trained(found, 1e-4)
    assert len(found[0][3]) == 1


def test_keras_a_frozen_layer_rests_with_its_memory_and_goes_on_when_it_is_unfrozen(keras):
    found = keras("frozen")
    alike([worker[0] for worker in found])
    for _, before, frozen, kept, after in found:
        assert np.array_equal(before, frozen)
        assert len(kept) == 2
        assert not np.array_equal(before, after)


def test_keras_complex_and_integer_variables_are_refused_by_name(keras):
    for message in keras("complex"):
        assert message.startswith("'phase' has dtype complex64: ")
    for message in keras("integer"):
        assert message.startswith("'table' has dtype int32: only float16")
