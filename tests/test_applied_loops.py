"""Real training loops over two workers: discarded exchanges leave no trace, and unsuitable loops raise errors."""

import logging

import pytest
from launch import launch

pytestmark = pytest.mark.processes

LEAST = 40
"""Fewest situations, so that none is lost unseen."""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return launch("torchrun", 2, "applied_loops.py", tmp_path_factory.mktemp("out"))


def test_what_is_thrown_away_leaves_no_trace(found):
    """Masters, WGANs, GANs in one DDP and under fully_shard, spikes, DCP, towers, growing accumulation."""
    texts = {key: value for key, value in found[0].items() if isinstance(value, str) and ":" not in value}
    del texts["DDP's module alone"]
    assert len(texts) >= LEAST - 4
    assert {key: text for key, text in texts.items() if text} == {}


def test_without_a_second_row_the_residuals_of_a_discarded_step_are_zeroed_and_said(found):
    assert [worker["rollback=drop"] for worker in found] == [(0.0, 5, 1, True)] * 2


def test_a_model_that_averages_too_is_refused_once_its_reducer_runs(found):
    for worker in found:
        assert "register grace.torch.ddp_hook with it" in worker["DDP beside the optimizer"]
        assert worker["DDP's module alone"] == ""


def test_a_removed_parameter_group_sends_nothing_and_stays_local(found):
    for worker in found:
        sent, apart, local = worker["a removed group"]
        assert sent[0] == sent[1] == sent[2] > 1.9 * sent[3]
        assert (apart, local) == (0.0, True)
        assert "removed from its optimizer on worker 0" in worker["a group removed on one worker alone"]


def test_parameters_in_another_order_are_refused_unless_they_have_names(found):
    for worker in found:
        assert "have the same parameters in another order" in worker["parameters from a set"]


def test_a_model_that_has_changed_is_refused_with_the_remedy(found):
    for worker in found:
        for text in worker["another head"]:
            assert "grc.rebuild(model.named_parameters()), or make a new Grace" in text


def test_lightnings_gan_with_toggled_optimizers_trains_as_without_compression(tmp_path):
    pytest.importorskip("lightning")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    found = launch("torchrun", 2, "lightning_gan.py", tmp_path)
    for worker in found:
        for toggled in (True, False):
            plain, none, topk = worker[toggled]
            assert (plain == none).all()
            assert abs(plain - topk).max() < 0.1
    for toggled in (True, False):
        assert (found[0][toggled][2] == found[1][toggled][2]).all()
