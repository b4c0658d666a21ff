"""Positions survive their way in every coding, and take the bytes that were promised."""

import math

import numpy as np
import pytest

from grace import indices


@pytest.mark.parametrize("coding", [*indices.CODINGS, "auto"])
@pytest.mark.parametrize("n", [1, 7, 8, 9, 1000, 70_000])
def test_positions_survive(xp, coding, n):
    rng = np.random.default_rng(n)
    for k in sorted({0, 1, 2, n // 100, n // 3, n - 1, n} & set(range(n + 1))):
        for positions in (np.arange(k), n - k + np.arange(k), np.sort(rng.permutation(n)[:k])):
            chosen = indices.choose(coding, n, k)
            sent = indices.write(xp, chosen, xp.asarray(positions, "int32"), n, k)
            found = indices.read(xp, chosen, sent, n, k)
            assert (xp.dtype(found), np.asarray(xp.to_numpy(found)).tolist()) == ("int32", positions.tolist())
            assert sum(np.asarray(xp.to_numpy(array)).nbytes for array in sent) == indices.nbytes(chosen, n, k)
            assert len(sent) == indices.arrays(chosen, n, k)
            if chosen != "elias_fano":
                found = indices.read(xp, chosen, indices.write(xp, chosen, xp.asarray(positions, "int32"), n), n)
                assert np.asarray(xp.to_numpy(found)).tolist() == positions.tolist()


def test_the_smallest_coding_is_chosen():
    assert [indices.choose("auto", 10_000, k) for k in (1, 100, 5000)] == ["int32", "elias_fano", "bitmap"]
    for k in (100, 1000, 10_000):  # about 2 + log2(n / k) bits each
        assert 8 * indices.nbytes("elias_fano", 2**20, k) / k < 2.2 + math.log2(2**20 / k)
