"""The bytes of every method on a fixed vector, so that a wire format never changes unnoticed.

Where a value is random, the stream's keys are (1, 2), whose first words are known (test_rng.py).
"""

from dataclasses import dataclass

import numpy as np
import pytest
from methods import alone, backend, context, host, lockstep, normal, workers
from table import ROWS
from table.row import X

from grace import grace_from_params
from grace.core import Context
from grace.core.registry import compressors
from grace.core.rng import Rng
from grace.transports.local import LocalTransport


class RawRng(Rng):
    """The stream of keys (1, 2), for any name."""

    def __init__(self, xp, offset):
        self._xp, self.keys, self.table, self.offset = xp, (1, 2), (1, 2), offset


@dataclass(frozen=True)
class RawContext(Context):
    """Draws from keys (1, 2)."""

    def rng(self, label):
        return RawRng(self.xp, self.offset)

    shared_rng = rng


def sent(xp, params, x=X, shape=None):
    compressor = grace_from_params(params, LocalTransport()).method.compressor
    ctx = RawContext(xp, "w", shape or x.shape)
    payload, _ = alone(lambda ctx: compressor.compress(xp.asarray(x.copy(), "float32"), compressor.init(ctx), ctx), ctx)
    return compressor, ctx, payload


GOLDEN = [row for row in ROWS if row.golden]


def test_every_method_has_golden_bytes():
    # Excluded: factors of matrices are unique only up to signs, and the cosine transform's last bits vary.
    assert {row.name for row in GOLDEN} | {"powersgd", "acpsgd", "gradzip", "atomo", "demo", "dion"} == set(compressors)


def test_golden_coefficients_of_demo(xp):
    # Two chunks of four: the transformed halves of X have their largest coefficients at 2, 3 and at 0, 3.
    _, _, payload = sent(xp, {"compressor": "demo", "chunk": 4, "chunk_k": 2})
    values, places = host(xp, payload)
    np.testing.assert_allclose(values, [0.625, 0.95190088, 1.3125, -2.23624591], rtol=1e-6)
    assert (places.tobytes().hex(), values.dtype) == ("02030003", np.float32)


def test_golden_factors_of_low_rank(xp):
    shapes = {"acpsgd": [(2, 1), (1, 4), (2, 1), (1, 4)], "gradzip": [(2, 1), (1, 4)]}
    for name, expected in shapes.items():
        _, _, payload = sent(xp, {"compressor": name, "compress_rank": 1, "min_rate": 0.5}, shape=(2, 4))
        assert [(array.shape, array.dtype.name) for array in host(xp, payload)] == [(s, "float32") for s in expected]
    _, _, payload = sent(xp, {"compressor": "atomo", "compress_rank": 2, "min_rate": 0.5}, shape=(2, 4))
    values, left, right = host(xp, payload)  # rank 2 of 2: every singular value is drawn with probability 1
    assert [array.shape for array in (values, left, right)] == [(2,), (2, 2), (2, 4)]
    np.testing.assert_allclose(values, np.linalg.svd(X.reshape(2, 4), compute_uv=False), rtol=1e-6)


def test_golden_update_of_dion(xp):
    compressor, ctx, payload = sent(xp, {"compressor": "dion", "rank_fraction": 0.5}, shape=(2, 4))
    assert [(array.shape, array.dtype.name) for array in host(xp, payload)] == [
        ((2, 1), "float32"),
        ((1, 4), "float32"),
    ]
    # One direction: p is M q with norm 1; the update p r, with r = pᵀ M scaled to norm 1, is scaled to sqrt(2 / 4).
    m, q = X.reshape(2, 4).astype(np.float64), host(xp, [compressor.init(ctx)["q"]])[0].astype(np.float64)
    p = m @ q.T / np.linalg.norm(m @ q.T)
    r = p.T @ m
    found = xp.to_numpy(compressor.decompress(payload, ctx)).reshape(2, 4)
    np.testing.assert_allclose(found, p @ r / np.linalg.norm(r) * 0.5**0.5, rtol=1e-5)


@pytest.mark.parametrize("row", GOLDEN, ids=str)
def test_golden_payload(xp, row):
    _, _, payload = sent(xp, row.params)
    assert tuple(array.tobytes().hex() for array in host(xp, payload)) == row.golden


def test_golden_errors(xp):
    for params, square in (
        ({"compressor": "topk", "compress_ratio": 0.25}, 1.890625),
        ({"compressor": "efsignsgd"}, 8.140625 - 6.125**2 / 8),
        ({"compressor": "threshold", "threshold": 0.75}, 0.5**2 + 0.25**2 + 0.125**2),
    ):
        compressor, ctx, payload = sent(xp, params)
        error = X - xp.to_numpy(compressor.decompress(payload, ctx))
        assert float((error.astype(np.float64) ** 2).sum()) == pytest.approx(square, rel=1e-6)


def test_golden_rounding_of_bf16(xp):
    # 1 + 2**-8 lies half-way: to nearest rounds to even; at random rounds up if the word's lower half exceeds 0x7fff.
    x = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8, 1 + 2**-8, 1 + 2**-8, 1 + 2**-8, np.inf], np.float32)
    _, _, payload = sent(xp, {"compressor": "bf16"}, x)
    assert host(xp, payload)[0].view("<u2").tolist() == [0x3F80, 0x3F82, 0xBF80, *[0x3F80] * 4, 0x7F80]
    _, _, payload = sent(xp, {"compressor": "bf16", "rounding": "stochastic"}, x)
    # Lower halves of the words: cc10 7ab1 d57f fcec 1ed0 f794 c686.
    expected = [0x3F81, 0x3F81, 0xBF81, 0x3F81, 0x3F80, 0x3F81, 0x3F81, 0x7F80]
    assert host(xp, payload)[0].view("<u2").tolist() == expected


def test_golden_powersgd(xp):
    # Q starts with normal random numbers; P is the orthonormalised product, and the result a projection.
    params = {"compressor": "powersgd", "compress_rank": 1, "min_rate": 0.5}
    compressor, ctx, payload = sent(xp, params, shape=(2, 4))
    assert [(array.shape, array.dtype.name) for array in host(xp, payload)] == [
        ((2, 1), "float32"),
        ((1, 4), "float32"),
    ]
    q = np.array(xp.to_numpy(compressor.init(ctx)["q"]), np.float64)
    assert q.shape == (1, 4)
    matrix = X.reshape(2, 4).astype(np.float64)
    p = matrix @ q.T / np.linalg.norm(matrix @ q.T)
    np.testing.assert_allclose(
        xp.to_numpy(compressor.decompress(payload, ctx)).reshape(2, 4), p @ p.T @ matrix, atol=1e-5
    )


@pytest.mark.parametrize(
    "params, expected",
    [
        ({"compressor": "topk"}, {"memory/residual": (1200,)}),
        ({"compressor": "qsgd"}, {}),
        ({"compressor": "powersgd"}, {"memory/residual": (1200,), "compressor/q": (4, 30)}),
        (
            {"compressor": "efsignsgd", "block_size": 64, "communicator": "twostage"},
            {"worker/memory/residual": (1200,), "server/memory/residual": (640,)},
        ),
    ],
    ids=str,
)
def test_golden_state(xp, params, expected):
    graces = workers(params, 2)
    gradients = [{"w": xp.asarray(normal(40, 30, seed=rank), "float32")} for rank in range(2)]
    for grace in graces:
        grace.build(gradients[0])
    lockstep(graces, gradients)
    state = graces[0].state_dict()
    keys = ["format", "rank", "world_size", "step", "method", "points", "tensors", "strategies", "policy"]
    assert list(state) == keys
    assert (state["format"], state["rank"], state["world_size"], state["step"]) == (2, 0, 2, 1)
    found = {key: tuple(array.shape) for arrays in state["tensors"].values() for key, array in arrays.items()}
    assert found == expected
    del state["strategies"]  # as in states of older versions
    graces[0].load_state_dict(state)


STREAM = [0x275CD271, 0x81F39B40, 0x41DF41E1]
POSITIONS = [56, 254, 258, 649, 666]


def test_golden_stream_of_a_named_tensor():
    # A stream derived as in training: seed 0, label "round", tensor "layer1.weight", step 5, worker 3.
    xp = backend("numpy")
    ctx = context(xp, 8, name="layer1.weight", rank=3, step=5)
    assert ctx.rng("round").bits(3).view(np.uint32).tolist() == STREAM
    assert ctx.shared_rng("positions").sample(1000, 5).tolist() == POSITIONS
