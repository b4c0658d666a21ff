"""Compressor "none" sends each gradient in its own dtype, over every communicator, on every toolkit."""

import warnings

import numpy as np
import pytest
from launch import launch

from grace import simulate

PLANS = (
    "reduce_scatter(intra) allreduce(inter) allgather(intra)",
    "reduce(intra) allreduce(inter) broadcast(intra)",
    "reduce_scatter(intra) compress(gpu) allgather*(inter) decompress(gpu) allgather(intra)",
)
COMMUNICATORS = (
    {},
    {"communicator": "allgather"},
    {"communicator": "broadcast"},
    {"communicator": "twostage"},
    {"communicator": "reducescatter"},
    {"communicator": "hierarchical", "node_size": 2},
    {"communicator": "hierarchical", "node_size": 2, "outer": "twostage"},
    *({"communicator": "planned", "option": option, "node_size": 2} for option in PLANS),
    {"fuse": "bucket"},
    {"fuse": "model", "communicator": "allgather"},
    {"memory": "residual"},
    {"memory": "residual", "communicator": "allgather"},
)
KINDS = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
SIZE = 4


def gradients(xp, kinds, scale=1.0):
    """For each worker a gradient of each dtype, and the numbers in them as float64."""
    rng = np.random.default_rng(7)
    given = [{kind: xp.asarray(rng.standard_normal((SIZE, 33)) * scale, kind) for kind in kinds} for _ in range(SIZE)]
    return given, [{kind: xp.to_numpy(xp.cast(g, "float64")) for kind, g in each.items()} for each in given]


def kinds_of(xp):
    return [kind for kind in KINDS if xp.name != "numpy" or kind != "bfloat16"]


@pytest.mark.parametrize("params", COMMUNICATORS, ids=str)
@pytest.mark.parametrize("min_numel", [0, 10_000])
def test_each_gradient_travels_in_its_own_dtype(xp, params, min_numel):
    kinds = kinds_of(xp)
    given, numbers = gradients(xp, kinds)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if set(params) & {"communicator", "memory"} else "error")  # a gather may warn
        out = simulate({"compressor": "none", "min_numel": min_numel, **params}, given, backend=xp.name)
    for rank, means in enumerate(out.means):
        for kind in kinds:
            wanted = np.mean([each[kind] for each in numbers], 0)
            if params.get("communicator") == "reducescatter":
                wanted = wanted[rank]
            tolerance = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-6, "float64": 1e-15}[kind]
            if kind == "float64" and "memory" in params and not min_numel:
                tolerance = 1e-6  # memories compute in float32
            np.testing.assert_allclose(np.asarray(means[kind], np.float64), wanted, rtol=tolerance, atol=tolerance)
    each = 33 * SIZE
    sent = {t.name: t.bytes_sent / (each * KINDS[t.name]) for t in out.report.tensors if ".." not in t.name}
    if not params or params == {"communicator": "allgather"}:
        assert sent == dict.fromkeys(kinds, 1.0)
    if params.get("fuse"):
        assert out.report.bytes_sent == each * sum(KINDS[kind] for kind in kinds)
    # Half precision takes half the bytes of float32, over every communicator.
    if sent and params.get("communicator") != "reducescatter":  # reducescatter adds a byte per row
        assert sent["float16"] == sent.get("bfloat16", sent["float16"]) == sent["float32"]


@pytest.mark.parametrize("params", COMMUNICATORS[:-2], ids=str)
def test_sums_of_half_precision_do_not_overflow(xp, params):
    given = [{"w": xp.asarray(np.full((SIZE, 33), 60000.0), "float16")} for _ in range(SIZE)]
    out = simulate({"compressor": "none", "min_numel": 0, **params}, given, backend=xp.name)
    assert all((means["w"] == 60000).all() for means in out.means)


def test_other_methods_still_compute_in_float32(xp):
    given, numbers = gradients(xp, ["float16", "float64"])
    out = simulate({"compressor": "topk", "compress_ratio": 1.0, "min_numel": 0}, given, backend=xp.name)
    wanted = np.mean([each["float64"] for each in numbers], 0)
    np.testing.assert_allclose(out.means[0]["float64"], wanted, rtol=1e-5, atol=1e-6)
    assert out.means[0]["float16"].dtype == np.float16


@pytest.mark.processes
@pytest.mark.parametrize(("launcher", "kind"), [("torchrun", "torch"), ("horovodrun", "horovod")])
def test_real_workers_send_each_gradient_in_its_own_dtype(launcher, kind, tmp_path):
    pytest.importorskip("torch" if kind == "torch" else "horovod.torch")
    for worker in launch(launcher, 3, "small_numbers.py", tmp_path, kind):
        for communicator in ("allreduce", "allgather", "twostage"):
            found = worker[communicator]
            for name, off in found["off"].items():
                assert off <= (1e-15 if name.startswith("float64") else {"b": 3e-2, "f": 4e-3}[name[0]])
                assert any(found["dtypes"][name] == f"torch.{kind}" and name.startswith(kind) for kind in KINDS)
            if communicator != "twostage":
                assert set(found["sent"].values()) == {1.0}
        if kind == "torch":
            # As with PyTorch's own hooks: the gradient is the mean, and keeps the graph of this worker's pass.
            exact = 2 * np.linspace(0, 1, 2000, dtype=np.float32) * 2
            np.testing.assert_allclose(worker["twice"]["none"], exact, rtol=1e-6)
            assert all(np.isfinite(g).all() and g.any() for g in worker["twice"].values())
