"""grace.jax on four forced devices, in a process of their own, and in several processes over gloo."""

import numpy as np
import pytest
from launch import TESTS, run
from support.jax_processes import processes

from grace import simulate

jax = pytest.importorskip("jax")
pytest.importorskip("optax")

pytestmark = pytest.mark.processes
SHAPES = {"a": (64, 256), "b": (256,), "c": (32, 1024)}
METHODS = {
    "blockint": {"compressor": "blockint", "block_size": 64},
    "topk": {"compressor": "topk", "compress_ratio": 0.05},
    "powersgd": {"compressor": "powersgd"},
    "ef21": {"compressor": "topk", "compress_ratio": 0.05, "memory": "ef21"},
}


def gradients(seed=0):
    rng = np.random.default_rng(seed)
    return [{n: rng.standard_normal(s).astype(np.float32) for n, s in SHAPES.items()} for _ in range(4)]


@pytest.fixture(scope="module")
def devices(tmp_path_factory):
    """The findings of four forced devices."""
    import pickle
    import sys

    out = tmp_path_factory.mktemp("devices")
    run(sys.executable, TESTS / "workers" / "jax_devices.py", out, log=out / "log.txt", JAX_PLATFORMS="cpu")
    return pickle.loads((out / "0.pickle").read_bytes())


def close(found, expected):
    for means, simulated in zip(found, expected, strict=True):
        for name, mean in means.items():
            np.testing.assert_allclose(mean, simulated[name], rtol=1e-4, atol=1e-5)


def simulated(config, steps=2):
    return [means[0] for means in simulate(config, [gradients(step) for step in range(steps)]).history]


# -- four devices --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", METHODS)
def test_means_and_bytes_are_those_of_the_simulation(devices, name):
    found, report = devices[f"means {name}"]
    communicator = {"blockint": "twostage", "topk": "twostage", "powersgd": "allreduce", "ef21": "allgather"}[name]
    close(found, simulated({**METHODS[name], "communicator": communicator}))
    expected = simulate({**METHODS[name], "communicator": communicator}, gradients()).report
    assert (report.bytes_sent, report.bytes_dense) == (expected.bytes_sent, expected.bytes_dense)
    assert report.steps == 1
    assert [(each.name, each.bytes_sent) for each in report.tensors] == [
        (each.name, each.bytes_sent) for each in expected.tensors
    ]


def of(kind, collectives):
    return [(dtype, elements) for op, dtype, elements in collectives if op == kind]


@pytest.mark.parametrize("kind", ["gathered", "two stages"])
def test_a_compiled_step_sends_bytes_and_no_gradient(devices, kind):
    found = devices[f"compiled {kind}"]
    compressed = sum(sent for _, method, sent in found["tensors"] if method != "dense")
    gathered = sum(elements for dtype, elements in of("all-gather", found["collectives"]) if dtype == "u8")
    exchanged = sum(elements for dtype, elements in of("all-to-all", found["collectives"]) if dtype == "u8")
    if kind == "gathered":
        assert gathered == 4 * compressed
        assert exchanged == 0
    else:  # three quarters of the payload go out, and a quarter of the means' payload
        assert exchanged > 0
        assert exchanged * 3 / 4 + gathered / 4 == compressed
    # The bias of 256 elements is all that is summed uncompressed.
    summed = sum(elements for _, elements in of("all-reduce", found["collectives"]))
    assert summed == 256 < found["gradient"] / 100
    assert of("reduce-scatter", found["collectives"]) == []


@pytest.mark.parametrize("kind", ["gathered", "two stages"])
def test_donated_residuals_are_not_copied(devices, kind):
    found = devices[f"compiled {kind}"]
    assert found["residuals"] >= 4 * 0.9 * (found["gradient"] - 256)
    assert found["donated"] >= found["residuals"] + found["replicated"] - 16
    assert found["output"] - found["donated"] < 4096


def test_a_hundred_steps_are_traced_and_compiled_once(devices):
    traces, compiled, count, nonfinite = devices["hundred"]
    assert (traces, compiled, count, nonfinite) == (1, 1, 100, 0)


def test_replicated_parameters_with_and_without_check_vma(devices):
    (checked, equal), (unchecked, also) = devices["parameters"]
    assert equal
    assert also
    for one, two in zip(checked, unchecked, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-6)


def test_a_gradient_that_is_summed_already_is_an_error(devices):
    assert "the gradient of 'a' is the sum over 'data' already" in devices["summed"]
    assert "jax.lax.pcast(params, 'data', to='varying')" in devices["summed"]


def test_a_memory_that_tracks_the_mean_needs_check_vma_off(devices):
    assert "pass check_vma=False to shard_map, or use memory 'residual'" in devices["ef21 checked"]


def test_a_mean_that_is_not_finite_is_counted_and_changes_no_residual(devices):
    for kind, finite in (("not finite", False), ("zeroed", True)):
        number, kept, means = devices[kind]
        assert number == 1
        assert kept == {"a": True, "c": False}
        assert means == {"a": finite, "b": True, "c": True}


def test_the_function_equals_the_transformation(devices):
    (found, by_key), (means, _) = devices["function"], devices["means blockint"]
    for one, two in zip(found, means, strict=True):
        assert all(np.array_equal(one[name], two[name]) for name in SHAPES)
    exact = np.mean([each["c"] for each in gradients(2)], 0)
    assert np.linalg.norm(by_key["c"] - exact) < 0.5 * np.linalg.norm(exact)


def test_dtypes_are_kept_and_small_tensors_go_dense(devices):
    means, reasons = devices["mixed"]
    assert {name: dtype for name, (dtype, _) in means.items()} == {
        "brain": "bfloat16",
        "few": "float32",
        "half": "float16",
    }
    assert all(error < 1e-6 for _, error in means.values())
    assert reasons == {"brain": "", "half": "", "few": "fewer than min_numel=1024 elements"}


def test_two_axes_are_exact_within_a_node(devices):
    found, _ = devices["hierarchical"]
    close(found, simulated({**METHODS["blockint"], "communicator": "hierarchical", "node_size": 2}))
    assert devices["two axes"] == "blockint + residual + hierarchical"


# -- processes over gloo -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [2, 4])
def test_processes_over_gloo_exchange_more_than_four_mebibytes(tmp_path, size):
    """gloo's psum_scatter gives wrong sums from 4 MiB on (jax issue 40830); what grace uses does not."""
    found = processes(size, "jax_processes.py", tmp_path)
    large = 2**20 + 2**16
    assert 4 * large > 2**22

    def made(step):
        return [
            {"large": np.random.default_rng(100 * step + rank).standard_normal(large).astype(np.float32)}
            for rank in range(size)
        ]

    for kind in ("none", "gathered", "two stages"):
        each = [worker[kind]["large"] for worker in found]
        assert all(np.array_equal(each[0], other) for other in each), kind
    np.testing.assert_allclose(found[0]["none"]["large"], np.mean([g["large"] for g in made(1)], 0), atol=1e-6)
    for kind, communicator in (("gathered", "allgather"), ("two stages", "twostage")):
        config = {"compressor": "blockint", "block_size": 64, "communicator": communicator}
        expected = simulate(config, [made(0), made(1)]).means[0]["large"]
        # A sum in another order may round a code to its neighbour.
        far = np.abs(found[0][kind]["large"] - expected) > 1e-5
        assert far.mean() < 1e-3, kind
    assert all("process 1 has other settings, parameters or axes than process 0" in w["differing"] for w in found)


def test_no_module_calls_psum_scatter():
    sources = [path for folder in ("jax", "transports") for path in (TESTS.parent / "grace" / folder).glob("*.py")]
    assert len(sources) > 10
    assert [path for path in sources if "psum_scatter(" in path.read_text()] == []
