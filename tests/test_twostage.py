"""Two stages under their names in the literature: DoubleSqueeze and, in units of the parameters, EF21-P."""

import numpy as np
import pytest
from methods import normal

from grace import simulate
from grace.simulate import step, workers

SIZE, N = 4, 64  # each worker averages 16 elements


def signs(v):
    """Scaled signs in blocks of 8."""
    rows = v.reshape(-1, 8)
    return (np.abs(rows).mean(1, keepdims=True) * np.where(rows >= 0, 1, -1)).ravel()


def largest(v):
    """The two elements of largest magnitude of each shard."""
    rows = v.reshape(SIZE, -1)
    out, places = np.zeros_like(rows), np.argsort(-np.abs(rows), 1)[:, :2]
    np.put_along_axis(out, places, np.take_along_axis(rows, places, 1), 1)
    return out.ravel()


def nearest(v):
    """Nearest of 15 levels, in blocks of 8."""
    rows = v.reshape(-1, 8)
    scale = np.abs(rows).max(1, keepdims=True)
    return (np.round(rows / scale * 7) * scale / 7).ravel()


METHODS = {
    "efsignsgd": (signs, {"compressor": "efsignsgd", "block_size": 8}),
    "topk": (largest, {"compressor": "topk", "compress_ratio": 1 / 8}),
    "blockint": (nearest, {"compressor": "blockint", "bits": 4, "block_size": 8}),
}
methods = pytest.mark.parametrize("q, params", METHODS.values(), ids=METHODS)
TWO = {"communicator": "twostage", "min_numel": 0}


@methods
def test_residuals_in_both_stages_are_doublesqueeze(q, params):
    # Tang et al., ICML 2019, algorithm 1. Worker i: v_i = g_i + d_i, sends Q(v_i), d_i = v_i - Q(v_i). Server: v = mean
    # of Q(v_i) + d, sends Q(v), d = v - Q(v).
    gradients = [[{"w": normal(N, seed=10 * t + i)} for i in range(SIZE)] for t in range(6)]
    out = simulate({**params, **TWO, "memory": "residual"}, gradients)
    errors, error = np.zeros((SIZE, N)), np.zeros(N)
    for now, means in zip(gradients, out.history, strict=True):
        compensated = errors + [g["w"] for g in now]
        sent = np.array([q(v) for v in compensated])
        errors, v = compensated - sent, sent.mean(0) + error
        mean = q(v)
        error = v - mean
        for worker in means:
            np.testing.assert_allclose(worker["w"], mean, atol=2e-6)


def test_bytes_of_doublesqueeze_by_hand():
    # 6 steps. A worker sends 3 of 4 shards, each 16 signs and 2 scales, and then its mean as often as the library asks:
    # once to a gather.
    gradients = [{"w": normal(N, seed=i)} for i in range(SIZE)]
    report = simulate({**METHODS["efsignsgd"][1], **TWO, "memory": "residual"}, gradients, steps=6).report
    assert report.bytes_sent == 6 * (3 + 1) * (2 + 2 * 4)
    assert report.bytes_received == 6 * (3 + 3) * (2 + 2 * 4)


@methods
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_second_stage_is_ef21_p_for_sgd_without_momentum(q, params, momentum):
    # Gruntkowska et al., ICML 2023: the server steps from x, with the gradients at w, and sends p = C(x - w); all set
    # w = w + p. Its workers here: error feedback in units of the parameters (Karimireddy et al., 2019, algorithm 1).
    targets = [normal(N, seed=i) for i in range(SIZE)]  # worker i's gradient at w: w - targets[i]
    rates = [0.2, 0.2, 0.1, 0.05, 0.2, 0.1]
    graces = workers({**params, **TWO, "memory": "efsignsgd"}, SIZE)
    mine, mixed = np.zeros(N), np.zeros(N)
    x, w, moved, errors = np.zeros(N), np.zeros(N), np.zeros(N), np.zeros((SIZE, N))
    for rate in rates:
        for grace in graces:
            grace.learning_rate = lambda name, rate=rate: rate
        mean = step(graces, [{"w": (mine - target).astype(np.float32)} for target in targets])[0]["w"]
        mixed = momentum * mixed + mean
        mine = mine - rate * mixed

        compensated = errors + [rate * (w - target) for target in targets]
        sent = np.array([q(v) for v in compensated])
        errors, moved = compensated - sent, momentum * moved + sent.mean(0)
        x = x - moved
        w = w + q(x - w)
        assert momentum or np.allclose(mine, w, atol=2e-6)
    assert (np.abs(mine - w).max() > 1e-3) == (momentum > 0)  # with momentum they differ
