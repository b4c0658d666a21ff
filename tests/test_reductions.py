"""Collectives over torch.distributed and Horovod between real workers: GRACE's own, and gloo's."""

import functools

import numpy as np
import pytest
from launch import launch
from workers import swaps
from workers.reductions import BESIDE, DTYPES, GATHERED, SIZES, passed, values

pytestmark = pytest.mark.processes

COMBINE = {"sum": np.add, "min": np.minimum, "max": np.maximum}


@pytest.fixture(scope="module", params=[2, 3, 4])
def found(request, tmp_path_factory):
    return launch("torchrun", request.param, "reductions.py", tmp_path_factory.mktemp("out"))


@pytest.mark.parametrize("op", COMBINE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_workers_find_the_same_bits_and_the_sum_in_the_order_of_ranks(found, dtype, op):
    for index, size in enumerate(SIZES):
        mine, *others = (worker[dtype, op][index] for worker in found)
        assert all(np.array_equal(mine, other) for other in others)
        gradients = [values(rank, dtype, size) for rank in range(len(found))]
        want = functools.reduce(COMBINE[op], gradients)
        if mine.nbytes <= 2**18 or op != "sum" or dtype.startswith("int"):
            np.testing.assert_array_equal(mine, want)
        else:  # gloo's order of addition differs
            error = 8 * len(found) * float(np.finfo(dtype).eps)
            np.testing.assert_allclose(mine, want, rtol=error, atol=10 * error)


def test_gathers_that_are_under_way_together_do_not_mix(found):
    sizes = np.repeat(GATHERED, 2)  # each size twice: two optimizers share the group
    for worker in found:
        for size, buffers in zip(sizes, worker["gathered"], strict=True):
            assert len(buffers) == len(found)
            for rank, buffer in enumerate(buffers):
                np.testing.assert_array_equal(buffer, values(rank, "int8", size).view(np.uint8))


@pytest.mark.parametrize("number", range(len(BESIDE)))
def test_small_sums_travel_with_what_is_gathered(found, number):
    gathered, summed = BESIDE[number]
    codes = [values(rank, "int8", gathered).view(np.uint8) for rank in range(len(found))]
    numbers = [values(rank, "float32", summed) for rank in range(len(found))]
    total = functools.reduce(np.add, numbers)
    mean = total / np.float32(len(found))
    small = 8 * summed <= 2**18 and 8 * summed * (len(found) - 2) <= gathered / 4
    for worker in found:
        payloads, means, (whole,), messages = worker["carried"][number]
        for payload, sent, first in zip(payloads, codes, numbers, strict=True):
            np.testing.assert_array_equal(payload[0], sent)
            np.testing.assert_array_equal(payload[1], first[:3])
        for result, expected in ((whole, total), (means[0], mean[:7]), (means[1], mean[7:].reshape(-1, 2))):
            error = 0 if 8 * summed <= 2**18 else 1e-5  # gloo's order of addition differs
            np.testing.assert_allclose(result, expected, rtol=error, atol=10 * error)
        assert messages == (0 if small else 1)


def test_what_each_worker_is_sent_arrives_with_others_under_way(found):
    calls = np.repeat(range(len(GATHERED)), 2)
    for receiver, worker in enumerate(found):
        for call, buffers in zip(calls, worker["passed"], strict=True):
            assert len(buffers) == len(found)
            for sender, buffer in enumerate(buffers):
                np.testing.assert_array_equal(buffer, passed(call, sender, receiver))


@pytest.mark.parametrize("count, toolkit", [(2, "torch"), (3, "torch"), (2, "tensorflow"), (2, "graph")])
def test_two_workers_of_horovod_swap_what_they_gather(count, toolkit, tmp_path):
    for worker in launch("horovodrun", count, "swaps.py", tmp_path, toolkit):
        for size, buffers in zip(swaps.SIZES, worker["gathered"], strict=True):
            assert len(buffers) == count
            for rank, buffer in enumerate(buffers):
                np.testing.assert_array_equal(buffer, swaps.values(rank, size))
        assert worker["summed"] == (4 if count == 2 else 0)
