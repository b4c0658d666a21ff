"""Integers summed on the wire: properties beyond the laws of all methods."""

import numpy as np
import pytest
from methods import context, handed_over, lockstep, normal, together, workers

from grace.backends import get_backend


def compressor(**params):
    (grace,) = workers(params, 1)
    return grace.method.compressor


@pytest.mark.parametrize("dtype, levels, size", [("int8", 0, 127), ("int8", 127, 1), ("int8", 7, 18), ("int32", 0, 9)])
def test_sums_never_leave_their_dtype(xp, dtype, levels, size):
    # All workers have the largest and smallest elements, with the largest possible number of workers.
    made = compressor(compressor="shared_int", dtype=dtype, levels=levels)
    x = np.array([1, -1] * 4 + [0], np.float32)
    contexts = [context(xp, 9, rank=rank, world_size=size) for rank in range(size)]
    found, _ = together(xp, [made.compress(xp.asarray(x, "float32"), {}, ctx) for ctx in contexts])
    assert {xp.dtype(array) for array in (found[0][0][0], found[0][0][2])} == {dtype}
    np.testing.assert_allclose(xp.to_numpy(made.decompress(found[0][0], contexts[0])), x, rtol=1e-6)


@pytest.mark.parametrize(
    "params, size, message",
    [
        ({}, 128, "128 workers times 1 exceed 127. Use dtype='int32' or fewer levels"),
        ({"levels": 64}, 2, "2 workers times 64 exceed 127. Use dtype='int32' or fewer levels"),
        ({"levels": 2**24, "dtype": "int32"}, 128, "128 workers times 16777216 exceed 2147483647. Use fewer levels"),
    ],
    ids=str,
)
def test_too_many_workers_are_refused_before_the_first_step(params, size, message):
    with pytest.raises(ValueError, match=message):
        workers({"compressor": "shared_int", **params}, size)


@pytest.mark.parametrize("levels", [-1, 2**24 + 1])
def test_levels_that_floats_cannot_count_are_refused(levels):
    with pytest.raises(ValueError, match=f"levels={levels}"):
        compressor(compressor="shared_int", levels=levels, dtype="int32")


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="dtype='int16': choose 'int8' or 'int32'"):
        compressor(compressor="shared_int", dtype="int16")


@pytest.mark.parametrize("params", [{"compressor": "shared_int", "levels": 1}, {"compressor": "thc"}], ids=str)
def test_workers_round_independently_and_keep_what_they_did_not_send(xp, params):
    # With equal gradients, the mean of 16 workers has a 16th of each one's noise. thc also clips large elements,
    # equally on all workers; its noise is that of rounding to steps of 4.31 / 15: their square / 6.
    n, size = 4096, 16
    x, made = normal(n).clip(-2, 2), compressor(**params)
    contexts = [context(xp, n, rank=rank, world_size=size) for rank in range(size)]
    found, _ = together(xp, [made.compress(xp.asarray(x, "float32"), {}, ctx) for ctx in contexts])
    mean = np.array(xp.to_numpy(made.decompress(found[0][0], contexts[3])))
    left = [
        xp.to_numpy(made.residual(xp.asarray(x.copy(), "float32"), payload, ctx))
        for (payload, _), ctx in zip(found, contexts, strict=True)
    ]
    np.testing.assert_allclose(x - np.mean(left, 0), mean, atol=1e-5)
    each = np.mean([(e.astype(np.float64) ** 2).sum() for e in left])
    noise = each if made.traits.unbiased else (2 * 2.1539 / 15) ** 2 / 6 * (x**2).sum()
    assert ((mean - x) ** 2).sum() == pytest.approx(each - noise + noise / size, rel=0.1)


def test_a_weak_worker_is_not_lost(xp):
    # The weak worker's elements are far below one step of the common scale, but arrive on average.
    n, made = 20_000, compressor(compressor="shared_int", levels=1)
    gradients = np.ones(n, np.float32), np.full(n, 0.01, np.float32)
    contexts = [context(xp, n, rank=rank, world_size=2) for rank in range(2)]
    pairs = zip(gradients, contexts, strict=True)
    found, _ = together(xp, [made.compress(xp.asarray(x, "float32"), {}, ctx) for x, ctx in pairs])
    mean = xp.to_numpy(made.decompress(found[0][0], contexts[0]))
    assert mean.mean() == pytest.approx(0.505, abs=5 * 0.5 * 0.1 / n**0.5)


def check_thc_sums(xp, bits, size, dtype, sent):
    """``dtype`` and ``sent``: of the sums on the wire, for 64 elements."""
    made, x = compressor(compressor="thc", bits=bits, block_size=64), xp.asarray(normal(64), "float32")
    norms, codes = handed_over(lambda ctx: made.compress(x, {}, ctx), context(xp, 64, world_size=size))
    assert (xp.dtype(norms), xp.dtype(codes), *xp.shape(codes)) == ("float32", dtype, sent)
    graces = workers({"compressor": "thc", "bits": bits, "block_size": 64}, size)
    for grace in graces:
        grace.build({"w": xp.zeros(64)})
    for worker in lockstep(graces, [{"w": x} for _ in graces]):
        assert abs(xp.to_numpy(worker["w"]) - xp.to_numpy(x)).max() < 1.5


@pytest.mark.parametrize("bits, size, dtype, sent", [(4, 17, "uint8", 64), (4, 18, "int32", 32), (8, 1, "uint8", 64)])
def test_thc_sums_in_as_few_bits_as_hold_the_sums(xp, bits, size, dtype, sent):
    check_thc_sums(xp, bits, size, dtype, sent)


@pytest.mark.parametrize("size, sent", [(128, 32), (129, 64)])
def test_thc_sums_of_many_workers_fit(size, sent):
    check_thc_sums(get_backend("numpy"), 8, size, "int32", sent)


@pytest.mark.parametrize("params", [{"bits": 1}, {"bits": 9}, {"block_size": 0}, {"block_size": 100}], ids=str)
def test_thc_refuses(params):
    with pytest.raises(ValueError, match=f"{next(iter(params))}="):
        compressor(compressor="thc", **params)
