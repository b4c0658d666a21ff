"""Every strategy of the tree carried out: means, bytes, a memory at every compression; plans as files."""

import hashlib
import json
import random

import numpy as np
import pytest
from launch import launch
from methods import BACKENDS, backend, states, workers
from strategies import LOSSLESS, gradients, plan_of

from grace import grace_from_params, simulate
from grace.planner.options import options, parse
from grace.transports.local import LocalTransport, World

GPU = options(devices=("gpu",))
"""The 174 strategies whose compressions run where gradients are computed."""
SAMPLE = random.Random(0).sample(options(), 300)


def exchanged(chosen, params, given=None, **settings):
    """All workers' means and the rest, on two machines of two; tensor i takes strategy i."""
    given = given or [gradients(chosen, rank) for rank in range(4)]
    return simulate({**params, **plan_of(chosen)}, given, **settings)


# -- what leaves is what was meant ---------------------------------------------------------------------------------
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("params", LOSSLESS, ids=str)
@pytest.mark.parametrize("chosen", [GPU, SAMPLE], ids=["gpu", "sample"])
def test_every_strategy_yields_the_exact_mean(name, params, chosen):
    backend(name)
    if name != "numpy":
        chosen = GPU if chosen is GPU else SAMPLE[:60]
    given = [gradients(chosen, rank) for rank in range(4)]
    means = exchanged(chosen, params, given, backend=name).means
    for tensor, option in enumerate(chosen):
        want = np.mean([g[f"{tensor}"] for g in given], 0, dtype=np.float64)
        for mean in means:
            np.testing.assert_allclose(mean[f"{tensor}"], want, atol=1e-6, err_msg=str(option))
            assert np.array_equal(mean[f"{tensor}"], means[0][f"{tensor}"]), f"workers differ: {option}"


@pytest.mark.processes
@pytest.mark.parametrize(
    "launcher, toolkit, transport, count",
    [
        ("torchrun", "torch", "torch", 174),
        ("horovodrun", "torch", "horovod", 174),
        ("horovodrun", "tensorflow", "horovod", 12),
    ],
)
def test_every_strategy_over_real_processes(launcher, toolkit, transport, count, tmp_path):
    found = launch(launcher, 4, "plan.py", tmp_path, toolkit, transport, str(count))
    chosen = GPU[:: -(-len(GPU) // count)]
    assert found[0]["tensors"] == len(chosen) >= count
    given = [gradients(chosen, rank) for rank in range(4)]
    steps = 1 if toolkit == "tensorflow" else 3
    lossy = [[gradients(chosen, rank, step) for rank in range(4)] for step in range(steps)]
    local = exchanged(chosen, {"compressor": "topk", "compress_ratio": 0.2}, lossy, backend="torch")
    for tensor, option in enumerate(map(str, chosen)):
        name = f"{tensor}"
        want = np.mean([g[name] for g in given], 0, dtype=np.float64)
        for rank, worker in enumerate(found):
            for key in ("exact 0", "exact 1"):
                np.testing.assert_allclose(worker[key][name], want, atol=1e-6, err_msg=option)
            np.testing.assert_allclose(worker["lossy"][name], local.means[0][name], atol=1e-5, err_msg=option)
            for key in ("exact 0", "exact 1", "lossy"):
                assert np.array_equal(worker[key][name], found[0][key][name]), f"workers differ: {option}"
    assert found[0]["bytes"][0] == {tensor.name: tensor.bytes_sent for tensor in local.report.tensors}
    for worker in found:
        assert "the plan has no strategy for 'unknown'" in worker["unknown"]
