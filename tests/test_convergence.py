"""Every method trains: four workers with different data, an ill-conditioned quadratic, and handwritten digits."""

import functools
import math

import numpy as np
import pytest
from methods import SETTINGS, VOTES, lockstep, workers
from sklearn.datasets import load_digits

from grace.core.registry import compressors, memories

SIZE = 4
SMALL = {"min_numel": 0}
STEADY = (*VOTES, "dion")
"""Methods whose updates have one size, whatever the gradient's."""
RATES = {**dict.fromkeys(VOTES, 0.01), "dion": 0.05}
"""Their learning rates on the digits; others have 0.5."""


def params_of(name):
    return {"compressor": name, **SMALL, **SETTINGS.get(name, {})}


def train(params, gradients, start, steps, lr):
    """Gradient descent with the exchanged means; yields the parameters after each step."""
    graces, x = workers(params, SIZE), {name: array.copy() for name, array in start.items()}
    for grace in graces:
        grace.build(x)
    for step in range(steps):
        mean = lockstep(graces, gradients(x, step))[0]
        x = {name: (array - lr(step) * mean[name]).astype(np.float32) for name, array in x.items()}
        yield x


# -- a quadratic ---------------------------------------------------------------------------------------------------
@functools.cache
def quadratic():
    """f_i(x) = (x - b_i)ᵀ A_i (x - b_i) / 2 of 20 x 10 parameters, condition 100; minima differ between workers."""
    rng = np.random.default_rng(0)
    n = 200
    basis = np.linalg.qr(rng.standard_normal((n, n)))[0]
    curvature = np.geomspace(0.01, 1, n)
    a = [basis @ np.diag(curvature * rng.uniform(0.5, 1, n)) @ basis.T for _ in range(SIZE)]
    b = [rng.standard_normal(n) for _ in range(SIZE)]
    minimum = np.linalg.solve(sum(a), sum(m @ v for m, v in zip(a, b, strict=True)))

    def loss(x):
        d = x["w"].reshape(-1).astype(np.float64) - minimum
        return d @ (sum(a) / SIZE) @ d / 2

    def gradients(x, step):
        v = x["w"].reshape(-1).astype(np.float64)
        return [{"w": (m @ (v - c)).astype(np.float32).reshape(20, 10)} for m, c in zip(a, b, strict=True)]

    return loss, gradients, {"w": (minimum + 3 * rng.standard_normal(n)).astype(np.float32).reshape(20, 10)}


def steps_to_a_tenth(params, most):
    loss, gradients, start = quadratic()
    for step, x in enumerate(train(params, gradients, start, most, lambda _: 0.5), 1):
        if loss(x) <= 0.1 * loss(start):
            return step
    return math.inf


DENSE = 14
"""Steps that the dense gradient takes to a tenth of the starting loss."""
BUDGETS = {"adaptive_random": 70, "randomk": 70}
"""Steps that a method may take, where it is more than twice DENSE: if positions are random, each element waits, ten
steps long."""


def test_the_dense_gradient():
    assert steps_to_a_tenth({"compressor": "none"}, 100) == DENSE


@pytest.mark.parametrize("name", sorted(set(compressors) - set(STEADY)))
def test_every_method_comes_down_a_quadratic(name):
    budget = BUDGETS.get(name, 2 * DENSE)
    assert steps_to_a_tenth(params_of(name), budget) <= budget


@pytest.mark.parametrize("name", sorted(set(memories) - {"none", "momentum", "diana", "onebit_adam", "decoupled"}))
def test_every_feedback_comes_down_a_quadratic(name):
    loss, gradients, start = quadratic()
    lr = 0.05 if name == "dgc" else 0.5  # dgc's momentum makes larger steps at the same learning rate
    *_, x = train({**params_of("topk"), "memory": name}, gradients, start, 4 * DENSE, lambda _: lr)
    assert loss(x) <= 0.1 * loss(start)


@pytest.mark.parametrize("name", STEADY)
def test_steps_of_one_size_descend_at_a_decaying_rate(name):
    loss, gradients, start = quadratic()
    *_, x = train(params_of(name), gradients, start, 300, lambda step: 0.3 / math.sqrt(1 + step))
    assert loss(x) <= 0.5 * loss(start)


# -- negative controls: what must fail without its memory ----------------------------------------------------------
def three_workers(memory):
    """Top-1 on f_i(x) = <a_i, x>² + |x|² / 4: each worker's largest element points away from the common minimum, 0."""
    a = np.array([[-3, 2, 2], [2, -3, 2], [2, 2, -3]], np.float64)
    graces, x = workers({"compressor": "topk", "compress_ratio": 0.34, **memory, **SMALL}, 3), np.ones(3)
    for grace in graces:
        grace.build({"w": x.astype(np.float32)})
    for _ in range(2000):
        gradients = [{"w": (2 * (v @ x) * v + x / 2).astype(np.float32)} for v in a]
        x = x - 0.02 * lockstep(graces, gradients)[0]["w"].astype(np.float64)
        if abs(x).max() > 1e9:
            break
    return np.linalg.norm(x)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*without error feedback")
def test_topk_needs_its_memory():
    assert three_workers({"memory": "none"}) > 1e6
    assert three_workers({"memory": "residual"}) < 1e-6
    assert three_workers({"memory": "ef21"}) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ef21", "econtrol"])
def test_a_refreshed_mean_descends_below_the_rounding_of_the_first_gradients(name):
    assert three_workers({"memory": name}) > 1e-8
    assert three_workers({"memory": name, "refresh": 100}) < 1e-19


def rare_and_large(compressor):
    """The final x in [-1, 1]. The gradient is 4 in one step of four, else -1: its mean, 0.25, drives x to -1."""
    (grace,), x, places = workers({"compressor": compressor, **SMALL}, 1), np.zeros(1), []
    grace.build({"w": x.astype(np.float32)})
    rng = np.random.default_rng(0)
    for _ in range(3000):
        g = np.array([4.0 if rng.uniform() < 0.25 else -1.0], np.float32)
        x = np.clip(x - 0.01 * lockstep([grace], [{"w": g}])[0]["w"], -1, 1)
        places.append(x[0])
    return np.mean(places[1000:])


def test_signs_at_a_fixed_step_go_the_wrong_way():
    assert rare_and_large("signsgd") > 0.8
    assert rare_and_large("efsignsgd") < -0.6


# -- digits --------------------------------------------------------------------------------------------------------
@functools.cache
def digits():
    """A network of 64, 32 and 10 units on scikit-learn's digits, a quarter of them on each worker."""
    data = load_digits()
    x, y = (data.images.reshape(-1, 64) / 16).astype(np.float32), np.eye(10, dtype=np.float32)[data.target]
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order], y[order]
    rng = np.random.default_rng(1)
    start = {"a": rng.standard_normal((64, 32)) / 8, "b": rng.standard_normal((32, 10)) / 6, "c": np.zeros(10)}
    start = {name: array.astype(np.float32) for name, array in start.items()}

    def forward(p, x):
        hidden = np.maximum(x @ p["a"], 0)
        scores = hidden @ p["b"] + p["c"]
        scores = np.exp(scores - scores.max(1, keepdims=True))
        return hidden, scores / scores.sum(1, keepdims=True)

    def gradient(p, x, y):
        hidden, chances = forward(p, x)
        d = (chances - y) / len(x)
        return {"a": x.T @ ((d @ p["b"].T) * (hidden > 0)), "b": hidden.T @ d, "c": d.sum(0)}

    def gradients(p, step):
        picked = [(step * 32 + np.arange(32)) % 440 + 440 * rank for rank in range(SIZE)]
        return [gradient(p, x[rows], y[rows]) for rows in picked]

    def loss(p):
        return float(-np.log((forward(p, x)[1] * y).sum(1) + 1e-9).mean())

    return loss, gradients, start


@functools.cache
def digits_after(name):
    loss, gradients, start = digits()
    params = {**params_of(name), **({"memory": "residual"} if name in ("dgc", "demo") else {})}
    rate = RATES.get(name, 0.5)
    *_, p = train(params, gradients, start, 150, lambda _: rate)
    return loss(p)


@pytest.mark.parametrize("name", sorted(compressors))
def test_every_method_learns_digits(name):
    loss, _, start = digits()
    assert digits_after("none") < 0.06 * loss(start)
    assert digits_after(name) <= 1.25 * digits_after("none")


def test_onebit_adam_learns_digits():
    loss, gradients, start = digits()
    params = {"compressor": "efsignsgd", "block_size": 64, "memory": "onebit_adam", "freeze_step": 50, **SMALL}
    trained = list(train({**params, "communicator": "twostage"}, gradients, start, 150, lambda _: 0.005))
    assert loss(trained[-1]) <= 1.25 * digits_after("none")
    assert loss(trained[-1]) < 0.5 * loss(trained[49])  # also after the second moment was frozen
