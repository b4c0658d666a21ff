"""Positions round-trip in every coding, with the promised number of bytes."""

import math

import numpy as np
import pytest
from support.kernels import Memory, Plain

from grace.ops import index_coding as indices
from grace.ops.packing import packed_size


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
    for k in (100, 1000, 10_000):  # about 2 + log2(n / k) bits per position
        assert 8 * indices.nbytes("elias_fano", 2**20, k) / k < 2.2 + math.log2(2**20 / k)


@pytest.mark.parametrize(
    "n, k", [(1, 1), (9, 9), (1000, 0), (1000, 999), (1000, 7), (70_000, 701), (2**31 - 1, 65), (2**31 - 1, 1)]
)
def test_kernels_write_and_read_the_same_bytes_and_no_others(lib, n, k):
    positions = np.unique(np.random.default_rng(n).integers(0, n, 2 * k))[:k] if 2 * k < n else np.arange(k)
    positions = positions.astype(np.int32)
    k = len(positions)
    expected = indices.write(Plain(), "elias_fano", positions, n, k)
    widths, marks = indices.widths(n, k)
    where, upper = Memory.of(positions, 3), Memory(packed_size(1, marks), np.uint8, 1)
    planes = [Memory(packed_size(bits, k), np.uint8, 1) for bits in widths]
    addresses = [plane.address for plane in planes], upper.address, marks
    assert lib.positions_write(where.address, k, sum(widths), *addresses) == k
    for one, other in zip([*planes, upper], expected, strict=True):
        np.testing.assert_array_equal(one.check(), other)
    found = Memory(k, np.int32, 5)
    assert lib.positions_read(*addresses, k, sum(widths), found.address) == k
    np.testing.assert_array_equal(found.check(), positions)
    if 0 < k < marks:
        upper.array[:] = 0xFF  # more marks than positions
        assert lib.positions_read(*addresses, k, sum(widths), found.address) == marks
        found.check()
        where.array[-1] = -1  # a position beyond the range of marks
        assert lib.positions_write(where.address, k, sum(widths), *addresses) == k - 1
        upper.check()


def test_codes_of_other_numbers_of_positions_are_refused(xp):
    n, k = 1000, 10
    *planes, upper = indices.write(xp, "elias_fano", xp.asarray(np.arange(k) * 90, "int32"), n, k)
    for wrong in ([*planes, upper[:-1]], [*planes, upper * 0], [planes[0][1:], *planes[1:], upper]):
        with pytest.raises(ValueError, match=r"positions|codes|arrays"):
            indices.read(xp, "elias_fano", tuple(wrong), n, k)
