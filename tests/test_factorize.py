"""Plans, and properties of all toolkits: equal numbers, equal errors, and no other changes to a model."""

import subprocess
import sys

import numpy as np
import pytest
from methods import backend, normal

from grace.factorize import NameMap, Plan, WarmUp, defactorize, factorize, plan
from grace.factorize.algebra import svd_factor
from grace.factorize.plan import Layer, Matrix, decide


def layers(*sizes):
    return [Layer(f"net.{n}", "Linear", size, size[0] * size[1], (Matrix(*size),)) for n, size in enumerate(sizes)]


FOUR = layers((64, 32), (64, 64), (128, 64), (10, 128))


def test_importing_it_imports_no_toolkit():
    code = (
        "import sys, grace.factorize\nprint([n for n in ('torch', 'keras', 'tensorflow', 'numpy') if n in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_ranks_parameters_and_reasons():
    made = decide(FOUR, {"net.1": [3]})
    assert made.ranks == {"net.1": (16,), "net.2": (16,)}
    assert [layer.reason for layer in made.layers] == ["kept: one of the first layers", "", "", "kept: the last layer"]
    assert made.parameters == 64 * 32 + 64 * 64 + 128 * 64 + 10 * 128
    assert made.parameters_after == 64 * 32 + 16 * 128 + 16 * 192 + 10 * 128
    assert (made.macs, made.macs_after) == (3 * 64 * 64, 3 * 16 * 128)
    assert "net.1" in str(made)
    assert made.to_dict()["layers"][1]["ranks"] == (16,)


@pytest.mark.parametrize(
    "settings, chosen",
    [
        ({"keep_first": 0, "keep_last": False, "min_numel": 0}, [8, 16, 16, 2]),
        ({"keep_first": 0, "keep_last": False}, [8, 16, 16, 2]),
        ({"keep_first": 0, "min_numel": 2049}, [0, 16, 16, 0]),
        ({"keep_first": ("net.1",)}, [8, 0, 16, 0]),
        ({"include": "net.2"}, [0, 0, 16, 0]),
        ({"exclude": ("net.[12]",)}, [0, 0, 0, 0]),
        ({"exclude": "net"}, [0, 0, 0, 0]),
        ({"rank_ratio": 0.5}, [0, 0, 32, 0]),  # 32 x 128 would not be smaller than 64 x 64
        ({"ranks": {"net.0": 32, "net.3": 1}}, [32, 16, 16, 1]),
    ],
)
def test_settings(settings, chosen):
    assert [sum(layer.ranks) for layer in decide(FOUR, **settings).layers] == chosen


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"rank_ratio": 0}, "rank_ratio=0"),
        ({"min_numel": -1}, "min_numel=-1"),
        ({"keep_first": -1}, "keep_first=-1"),
        ({"exclude": "nte.1"}, "exclude names 'nte.1', but no layer matches"),
        ({"ranks": {"net.0": 33}}, "its ranks are 1 to 32"),
        ({"ranks": {"net.0": (8, 8)}}, r"ranks \(8, 8\), but its matrices have up to \(32,\)"),
        ({"ranks": {"net.0": (33,)}}, r"ranks \(33,\), but"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        decide(FOUR, **settings)


def test_a_rank_for_what_cannot_be_factorised_is_refused():
    with pytest.raises(ValueError, match="cannot be factorised: grouped"):
        decide([Layer("conv", "Conv2d", (8, 2, 3, 3), 144, (), "grouped")], ranks={"conv": 2})


def test_names_and_back():
    names = NameMap({"fc.weight": ("fc.u.weight", "fc.v.weight"), "fc.bias": ("fc.v.bias",)})
    assert names.added == ["fc.u.weight", "fc.v.weight", "fc.v.bias"]
    assert names.inverse()["fc.v.weight"] == ("fc.weight",)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("shape, rank", [((60, 40), 10), ((40, 60), 40), ((1, 50), 1), ((2000, 30), 3)])
def test_factors_are_balanced_and_lose_the_small_singular_values(shape, rank, dtype):
    matrix = normal(*shape).astype(dtype)
    u, v = svd_factor(matrix, rank)
    exact = matrix.astype(np.float64)
    values = np.linalg.svd(exact, compute_uv=False)
    lost = np.sum((exact - v.astype(np.float64) @ u.astype(np.float64)) ** 2)
    assert lost == pytest.approx(np.sum(values[rank:] ** 2), rel=1e-4, abs=1e-6 * np.sum(values**2))
    for gram in (v.T @ v, u @ u.T):
        np.testing.assert_allclose(gram, np.diag(values[:rank]), atol=1e-4 * values[0])
    assert u.dtype == v.dtype == (np.float64 if dtype == np.float64 else np.float32)


def test_the_sign_of_the_singular_vectors_is_fixed():
    u, v = svd_factor(normal(50, 30), 8)
    assert (v[np.abs(v).argmax(0), np.arange(8)] > 0).all()
    negative_u, negative_v = svd_factor(-normal(50, 30), 8)
    assert np.array_equal(v, negative_v) or np.allclose(v, negative_v, atol=1e-5)
    np.testing.assert_allclose(u, -negative_u, atol=1e-5)


def test_weights_that_diverged_are_refused():
    with pytest.raises(ValueError, match="not finite"):
        svd_factor(np.array([[1, np.nan]], np.float32), 1)


def test_the_toolkits_get_the_same_factors_to_the_bit():
    backend("torch"), backend("tensorflow")
    import keras
    import torch

    matrix = normal(48, 36)
    linear = torch.nn.Linear(36, 48)
    linear.weight.data = torch.from_numpy(matrix.copy())
    linear, _ = factorize(linear, ranks={"": 9})
    dense = keras.layers.Dense(48)
    dense.build((None, 36))
    dense.kernel.assign(matrix.T)
    dense, _ = factorize(dense, ranks={"": 9})
    u, v = svd_factor(matrix, 9)
    for weight, kernel, factor in ((linear.u.weight, dense.u.kernel, u), (linear.v.weight, dense.v.kernel, v)):
        assert np.array_equal(weight.detach().numpy(), factor)
        assert np.array_equal(np.asarray(kernel).T, factor)


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match=r"neither a torch.nn.Module nor a Keras 3 layer"):
        plan("model")


def test_arguments_of_factorize():
    backend("torch")
    import torch

    net = torch.nn.Sequential(torch.nn.Linear(64, 64))
    with pytest.raises(ValueError, match="choose 'svd' or 'random'"):
        factorize(net, init="qr")
    with pytest.raises(ValueError, match="a plan or settings, not both: rank_ratio"):
        factorize(net, plan=Plan(()), rank_ratio=0.5)
    model, names = factorize(net)  # nothing changes: the only layer is the first one, which is kept
    assert model is net
    assert names == {} == defactorize(net)[1]


def test_the_learning_rate_rises_again_after_the_switch():
    warmup = WarmUp(10, ramp_epochs=4, ramp_start=0.25, lr_factor=0.5)
    assert [warmup.lr_scale(epoch) for epoch in (0, 9.9, 10, 12, 14, 40)] == [1, 1, 0.125, 0.3125, 0.5, 0.5]
    assert [warmup.due(epoch) for epoch in (0, 9, 10, 11)] == [False, False, True, True]
    assert WarmUp(3).lr_scale(3) == 1


@pytest.mark.parametrize(
    "arguments, error",
    [
        ({"epochs": -1}, ValueError),
        ({"epochs": 1, "ramp_start": 2}, ValueError),
        ({"epochs": 1, "lr_factor": 0}, ValueError),
        ({"epochs": 1, "rank_ratio": 2}, ValueError),
        ({"epochs": 1, "rank_ration": 0.5}, TypeError),
    ],
)
def test_a_warm_up_that_would_fail_at_the_switch_fails_at_once(arguments, error):
    with pytest.raises(error):
        WarmUp(**arguments)
