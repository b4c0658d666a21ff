"""Frozen quantised parameters, wrapped optimizers, quantised optimizer states, and parameters in another order."""

import numpy as np
import pytest
from launch import launch

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return launch("torchrun", 2, "frozen.py", tmp_path_factory.mktemp("out"))


@pytest.mark.parametrize("how", ["all", "trained", "unnamed"])
def test_frozen_quantised_weights_may_be_in_the_optimizer(found, how):
    for worker in found:
        assert np.abs(worker[f"dense, {how}"] - worker["by hand"]).max() < 1e-6
        assert np.array_equal(worker[f"top-k, {how}"], found[0]["top-k, trained"])


def test_other_frozen_tensors_too(found):
    for everything, trained in (worker["sparse"] for worker in found):
        assert np.array_equal(everything, trained)


def test_the_optimizer_inside_a_wrapper_is_distributed(found):
    for worker in found:
        by_hand, dense, topk = worker["wrapped"]
        assert np.abs(dense - by_hand).max() < 1e-6
        assert 0 < np.abs(topk - by_hand).max() < 0.5
        assert np.array_equal(topk, found[0]["wrapped"][2])


def test_a_quantised_weight_that_is_unfrozen_is_refused(found):
    for worker in found:
        assert "TypeError: 'weight' is a __main__.Quantised, a tensor subclass" in worker["unfrozen"]


def test_quantised_weights_are_broadcast(found):
    for first, second in zip(*(worker["weights"] for worker in found), strict=True):
        assert np.array_equal(first, second)
    codes, twice, scale, a = found[1]["weights"]
    assert (codes.dtype, twice.dtype, scale, a.shape) == (np.int8, np.int8, 1.0, (4, 32))


@pytest.mark.parametrize(
    "what, words",
    [
        ("unknown state", "worker 0: state_dict()['state'][0]['average'] is __main__.Quantised, which cannot be"),
        ("unknown state", "on all workers by torch.serialization.add_safe_globals([Quantised])"),
        ("known to one", "worker 1: cannot read worker 0's state: __main__.Quantised is not allowed here"),
    ],
)
def test_quantised_states_of_a_class_that_is_not_allowed_change_nothing(found, what, words):
    for worker in found:
        assert words in worker[what][0]
    assert not np.array_equal(found[0][what][1], found[1][what][1])


def test_quantised_states_of_an_allowed_class_are_broadcast(found):
    for worker in found:
        assert worker["known state"][0] == ""
        assert np.array_equal(worker["known state"][1], found[0]["unknown state"][1])


def test_parameters_in_another_order_are_refused_or_matched_by_name(found):
    for rank, worker in enumerate(found):
        message, buffers = worker["set"]
        assert "worker 0 and worker 1 have the same parameters in another order, from number 0 on" in message
        assert "torch.optim.SGD(model.named_parameters())" in message
        assert buffers == [[10.0, 20.0, 30.0], [0.0, 0.0, 0.0]][rank]
        assert worker["named set"] == worker["list"] == ("", [10.0, 20.0, 30.0])
        same, own, turned = worker["orders"]
        assert same == own == ""
        assert "in another order, from number 0 on" in turned
