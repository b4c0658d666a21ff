"""A policy over two real workers: torch.distributed, Horovod with PyTorch, Horovod with TensorFlow graphs."""

import numpy as np
import pytest
from launch import launch
from policies import BASES, EPOCHS, RUNS, STEPS, levels_of, sequence

from grace import simulate

pytestmark = pytest.mark.processes

LOW, HIGH = 0, 1


@pytest.fixture(scope="module", params=["torch", "horovod", "tensorflow"])
def transport(request):
    return request.param


@pytest.fixture(scope="module")
def found(transport, tmp_path_factory):
    launcher = "torchrun" if transport == "torch" else "horovodrun"
    return launch(launcher, 2, "levels.py", tmp_path_factory.mktemp("out"), transport)


@pytest.mark.parametrize("name, granularity, source", RUNS)
def test_levels_means_and_bytes_are_those_of_one_process(found, transport, name, granularity, source):
    params = {**BASES[name], "policy": "accordion", "window": 2, "min_numel": 0}
    params |= {"granularity": granularity, "norm_source": source}
    alone = simulate(params, sequence(2), steps_per_epoch=STEPS)
    (held, means, levels, sent, traces), other = (worker[name, granularity, source] for worker in found)
    assert held == other[0]
    assert levels == other[2] == levels_of(alone.report)
    assert sent == alone.report.bytes_sent
    assert all(np.array_equal(x, other[1][key]) for key, x in means.items())
    for key, x in means.items():
        np.testing.assert_allclose(x, alone.means[0][key], rtol=2e-3, atol=2e-4)
    if source == "rank0":
        assert {level for step in held for level in step.values()} == {LOW, HIGH}
    assert traces == (1 if transport == "tensorflow" else STEPS * EPOCHS)


@pytest.mark.parametrize("source", ["rank0", "mean"])
def test_a_run_goes_on_from_the_middle_of_a_window(found, source):
    for worker in found:
        (levels, means), (again, means_again) = worker["resume", source]
        assert again == levels
        assert len({str(each) for each in levels}) > 1
        assert all(np.array_equal(x, means_again[name]) for name, x in means.items())
    assert found[0]["resume", source][1][0] == found[1]["resume", source][1][0]


@pytest.mark.parametrize("source, level", [("rank0", HIGH), ("mean", LOW), ("aggregated", LOW)])
def test_nan_on_one_worker(found, source, level):
    mine, other = (worker["nan", source] for worker in found)
    assert mine == other
    assert [step["calm"] for step in mine[-STEPS:]] == [level] * STEPS
    assert mine[6 * STEPS]["calm"] == HIGH


def test_workers_that_differ_all_raise(found):
    for worker in found:
        assert "policy is Accordion(" in worker["settings"]
        assert "the workers' states have different levels" in worker["states"]
        assert "did not agree before this epoch ended" in worker["epochs"]


@pytest.mark.parametrize("door", ["door", "ddp"])
def test_the_doors(found, transport, door):
    if door == "ddp" and transport != "torch":
        assert "ddp" not in found[0]
        return
    (held, weights, steps), (other_held, other_weights, _) = (worker[door] for worker in found)
    assert held == other_held
    assert np.array_equal(weights, other_weights)
    assert steps == 8 * 4
    low = [LOW] * len(held[-1])
    assert held[0] in ([], low)  # DDP's hook and Keras know tensors only from the first gradients on
    assert held[1:3] == [low] * 2
    assert HIGH in held[3]
    assert held[5] == low, "the learning rate fell"
    if door == "ddp":
        np.testing.assert_allclose(weights, found[0]["door"][1], rtol=1e-4, atol=1e-5)
