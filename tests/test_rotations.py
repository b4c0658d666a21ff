"""Random rotations, and what EDEN promises of them."""

import math

import numpy as np
import pytest
from methods import alone, backend, context, host, normal

from grace import grace_from_params
from grace.ops.hadamard import hadamard, signs, width_of
from grace.transports.local import LocalTransport


def matrix(d):
    """Walsh-Hadamard by its definition: the sign is the parity of the bits that both numbers have."""
    return np.array([[(-1) ** (i & j).bit_count() for j in range(d)] for i in range(d)])


@pytest.mark.parametrize("d", [1, 2, 8, 64])
@pytest.mark.parametrize("m", [0, 1, 3])
def test_hadamard_is_the_product_with_its_matrix(xp, m, d):
    x = np.random.default_rng(0).integers(-99, 99, (m, d)).astype(np.float32)
    found = hadamard(xp, xp.asarray(x, "float32"))
    assert np.array_equal(xp.to_numpy(found), x @ matrix(d))
    assert np.array_equal(xp.to_numpy(hadamard(xp, found)), d * x)


def test_hadamard_gives_the_same_bits_everywhere():
    x = normal(3, 4096)
    found = [np.array(xp.to_numpy(hadamard(xp, xp.asarray(x, "float32")))) for xp in map(backend, ("numpy", "torch"))]
    assert found[0].tobytes() == found[1].tobytes()


def test_each_bit_of_a_word_is_a_stream_of_signs(xp):
    words = np.array([1, -1, -(2**31), 2**30, 5, 0, 7, -2], np.int32)
    found = xp.to_numpy(signs(xp, xp.asarray(words, "int32"), xp.asarray([0, 31], "uint8"), 4))
    assert found.tolist() == [[1, -1, -1, 1], [-1, 1, -1, 1]]


def eden(**params):
    return grace_from_params({"compressor": "eden", **params}, LocalTransport()).method.compressor


def decoded(compressor, x, rank=0, step=0):
    xp = backend("numpy")
    ctx = context(xp, len(x), rank=rank, step=step)
    payload, _ = alone(lambda ctx: compressor.compress(x, {}, ctx), ctx)
    return compressor.decompress(payload, context(xp, len(x), rank=3, step=step))


@pytest.mark.parametrize(
    "params, error",
    [
        ({"bits": 1}, math.pi / 2 - 1),
        ({"bits": 2}, 0.1333),
        ({"bits": 3}, 0.0358),
        ({"bits": 4}, 0.0096),
        ({"bits": 1, "biased": True}, 1 - 2 / math.pi),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["normal", "one-sided", "smooth"])
def test_eden_has_the_error_of_the_papers(params, error, kind):
    x = normal(4096)
    x = {"normal": x, "one-sided": abs(x), "smooth": np.sin(np.arange(4096, dtype=np.float32))}[kind]
    errors = [((decoded(eden(**params), x, step=step) - x) ** 2).sum() / (x**2).sum() for step in range(10)]
    assert np.mean(errors) == pytest.approx(error, rel=0.05)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_eden_is_right_on_average_and_along_the_gradient(bits):
    # Right on average for elements of about one size; along x for any x and draw: that is what the scale is for.
    x, draws = normal(64), 2000
    found = np.array([decoded(eden(bits=bits), x, step=step) for step in range(draws)], np.float64)
    square = (x.astype(np.float64) ** 2).sum()
    np.testing.assert_allclose(found @ x, square, rtol=1e-5)
    variance = ((found - x) ** 2).sum(1).mean()
    assert ((found.mean(0) - x) ** 2).sum() <= 3 * variance / draws


def test_eden_gives_lone_elements_back(xp):
    # One spike becomes signs of one size, which one bit for each element holds exactly.
    x = np.zeros(1000, np.float32)
    x[77] = -3
    compressor, ctx = eden(bits=1), context(xp, 1000)
    payload, _ = compressor.compress(xp.asarray(x, "float32"), {}, ctx)
    np.testing.assert_allclose(xp.to_numpy(compressor.decompress(payload, ctx)), x, atol=1e-5)


def test_workers_rotate_independently(xp):
    # The mean over N workers of one and the same gradient has an N-th of the error: 32 of them, then they repeat.
    x, compressor = normal(4096), eden(bits=2)
    payloads = [
        compressor.compress(xp.asarray(x, "float32"), {}, context(xp, 4096, rank=rank))[0] for rank in range(33)
    ]
    assert host(xp, payloads[0])[0].tobytes() == host(xp, payloads[32])[0].tobytes()
    mean = xp.to_numpy(compressor.aggregate(payloads[:32], context(xp, 4096)))
    assert ((mean - x) ** 2).sum() / (x**2).sum() == pytest.approx(0.1333 / 32, rel=0.1)


def test_only_a_tensor_of_its_own_has_a_narrow_block():
    # The end of a longer tensor, cut off for another worker, is a whole block on the wire.
    ctx = context(backend("numpy"), 4096 + 20)
    widths = [width_of(part, 4096) for part in (ctx, ctx.piece(0, 4096), ctx.piece(4096, 20), ctx.piece(4116, 0))]
    assert widths == [4096] * 4
    assert [width_of(context(backend("numpy"), n), 4096) for n in (1, 8, 9, 20, 4095)] == [8, 8, 16, 32, 4096]


@pytest.mark.parametrize(
    "params, message",
    [
        ({"bits": 5}, "bits=5 must lie in 1 .. 4"),
        ({"bits": 2, "biased": True}, "biased=True is for bits=1"),
        ({"block_size": 0}, "block_size=0 must be a power of two"),
        ({"block_size": 4}, "block_size=4 must be a power of two"),
        ({"block_size": 96}, "block_size=96 must be a power of two"),
    ],
    ids=str,
)
def test_eden_refuses(params, message):
    with pytest.raises(ValueError, match=message):
        eden(**params)
