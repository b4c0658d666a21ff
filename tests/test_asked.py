"""Requirements from PyTorch's tests of DistributedDataParallel hooks and Horovod's tests of its optimizer."""

import numpy as np
import pytest
from launch import launch

pytest.importorskip("torch")
pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return launch("torchrun", 2, "asked.py", tmp_path_factory.mktemp("asked"))


def test_the_hook_trains_as_ddp_does_in_every_situation(found):
    one, other = (worker["ddp"] for worker in found)
    assert len(one) >= 18
    for name, weights in one.items():
        assert np.array_equal(weights["none"], weights["plain"]), name
        assert not np.array_equal(weights["topk"], weights["plain"]), name
        for method in weights:
            assert np.array_equal(weights[method], other[name][method]), f"{name}, {method}: workers differ"


def test_every_optimizer_of_pytorch_begins_from_worker_0s_state_and_stays_equal(found):
    one, other = (worker["optimizers"] for worker in found)
    assert len(one) >= 10
    for name, (first, arrived, last) in one.items():
        assert np.array_equal(first, arrived), name
        assert not np.array_equal(arrived, last), name
        for mine, theirs in zip((first, arrived, last), other[name], strict=True):
            assert np.array_equal(mine, theirs), f"{name}: workers differ"
