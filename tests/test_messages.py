"""Messages: the packing of arrays, and errors on arrival, which name the sender."""

import ctypes
import re

import numpy as np
import pytest
from methods import BACKENDS, backend, normal, workers

from grace.core.collectives import AllToAll, Gather, Reduce
from grace.core.gathered import GatheredPayloads
from grace.transports.local import LocalTransport, World
from grace.transports.packer import Packer


def packed(xp, ragged=True):
    """A packer, its message of two arrays, and their layout."""
    packer = Packer(xp, 0, 4)
    arrays = (xp.asarray([1.0, 2.0, 3.0], "float32"), xp.asarray([[7, 8], [9, 10]], "int32"))
    data, layout = packer.pack_ragged(arrays) if ragged else packer.pack(arrays)
    return packer, np.array(xp.to_numpy(data)), layout


def test_what_was_packed_comes_out(xp):
    for ragged in (True, False):
        packer, data, layout = packed(xp, ragged)
        unpack = packer.unpack_ragged if ragged else packer.unpack
        floats, numbers = unpack(xp.asarray(data, "uint8"), layout, 1)
        assert xp.to_numpy(floats).tolist() == [1, 2, 3]
        assert xp.to_numpy(numbers).tolist() == [[7, 8], [9, 10]]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("other", [Gather, AllToAll, None])
def test_sums_travel_with_the_other_messages_of_a_round_if_they_are_small(xp, other, size, monkeypatch):
    reduced = []
    reduce = LocalTransport.reduce
    monkeypatch.setattr(LocalTransport, "reduce", lambda self, *args: reduced.append(args) or reduce(self, *args))
    rows = [normal(4000, seed=rank) for rank in range(size)]
    matrices = [normal(12, seed=10 + rank).reshape(3, 4) for rank in range(size)]
    large = [normal(4000, seed=20 + rank) for rank in range(size)]
    for sums, alone in ((2, False), (4000, True)):
        world, waits = World(size), []
        for rank in range(size):
            transport = LocalTransport(world, rank).bind(xp)
            mine = xp.asarray(rows[rank], "float32")
            items = {Gather: [Gather((mine,))], AllToAll: [AllToAll(((mine,),) * size)], None: []}[other]
            means = tuple(xp.asarray(each, "float32") for each in (matrices[rank], large[rank][:sums], matrices[rank]))
            items += [Reduce(means, "mean"), Reduce((xp.asarray([rank, 1], "float32"),), "sum"), Reduce(means[:1])]
            waits.append(transport.start(items, "round"))
        for wait in waits:
            *_, (matrix, vector, again), (counts,), (last,) = [*wait()]
            for found in (matrix, again, last):
                np.testing.assert_allclose(xp.to_numpy(found), np.mean(matrices, 0), rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(xp.to_numpy(vector), np.mean(large, 0)[:sums], rtol=1e-5, atol=1e-6)
            assert xp.to_numpy(counts).tolist() == [size * (size - 1) / 2, size]
        carried = other is not None and xp.mutable and (not alone or size <= 2)
        assert bool(reduced) != carried
        reduced.clear()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_sums_travel_with_those_in_half_precision_if_they_add_few_bytes(xp, size, monkeypatch):
    reduced = []
    reduce = LocalTransport.reduce
    monkeypatch.setattr(LocalTransport, "reduce", lambda self, *args: reduced.append(args) or reduce(self, *args))
    bits = np.random.default_rng(size).integers(0, 2**32, (size, 100), dtype=np.uint32).view(np.float32)
    bits = np.where(np.isfinite(bits), bits, np.float32(-0.0))
    for sums, few, dtype in ((100, True, "float16"), (2000, False, "float16"), (100, True, "bfloat16")):
        if dtype == "bfloat16" and xp.name == "numpy":
            continue  # NumPy has no bfloat16
        world, waits = World(size), []
        terms = np.concatenate([bits, np.stack([normal(sums - 100, seed=rank) for rank in range(size)])], 1)
        total = terms[0]
        with np.errstate(over="ignore", invalid="ignore"):
            for row in terms[1:]:
                total = total + row  # in the order of the workers
        for rank in range(size):
            transport = LocalTransport(world, rank).bind(xp)
            half = xp.cast(xp.asarray([rank + 1.0] * 200_000, "float32"), dtype)
            mine = xp.asarray(terms[rank], "float32")
            items = [Reduce((mine[:50],), "sum"), Reduce((half,), "mean"), Reduce((mine[50:], mine[:2]), "sum")]
            waits.append(transport.start(items, "round"))
        for wait in waits:
            (first,), (mean,), (rest, again) = wait()
            np.testing.assert_allclose(xp.to_numpy(xp.cast(mean, "float32")), (size + 1) / 2, rtol=1e-2)
            found = np.concatenate([xp.to_numpy(first), xp.to_numpy(rest)])
            np.testing.assert_array_equal(found, total)
            np.testing.assert_array_equal(np.signbit(found), np.signbit(total))
            np.testing.assert_array_equal(xp.to_numpy(again), total[:2])
        saved = few and size > 1 and xp.can_read_values and xp.mutable
        assert len(reduced) == size * (1 if saved else 2)
        reduced.clear()


@pytest.mark.parametrize("change", [-1, -4, 1, 28, -28])
def test_messages_of_another_length_are_refused(xp, change):
    packer, data, layout = packed(xp, ragged=False)
    data = np.resize(data, len(data) + change)
    with pytest.raises(ValueError, match=rf"the message of worker 3, which has {28 + change} bytes, and not 28"):
        packer.unpack(xp.asarray(data, "uint8"), layout, 3)


def gathered(xp):
    """Worker 1's results, where both workers gather three payloads: two arrays, one empty array, one array."""
    world = World(2)
    transports = [LocalTransport(world, rank).bind(xp) for rank in range(2)]
    sent = [
        [
            (normal(5, seed=rank), np.arange(rank, rank + 3, dtype=np.uint8)),
            (np.zeros(0, np.int32),),
            (normal(7, seed=9 + rank),),
        ]
        for rank in range(2)
    ]
    items = [[Gather(tuple(xp.asarray(a, str(a.dtype)) for a in arrays)) for arrays in each] for each in sent]
    waits = [transport.start(each, "gather") for transport, each in zip(transports, items, strict=True)]
    return sent, [wait() for wait in waits][1]


def test_payloads_are_what_was_sent_whoever_looks_first(xp):
    sent, received = gathered(xp)
    for number in (2, 0, 1):
        payloads = received[number]
        assert len(payloads) == 2
        for worker, payload in enumerate(payloads):
            assert [xp.to_numpy(a).tolist() for a in payload] == [a.tolist() for a in sent[worker][number]]
    assert xp.to_numpy(received[0][-1][1]).tolist() == [1, 2, 3]
    assert len(received[0][:1]) == 1
    with pytest.raises(IndexError):
        received[0][2]


@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "tensorflow"])
def test_a_kernel_finds_payloads_where_they_lie(name):
    sent, received = gathered(backend(name))
    for number, payloads in enumerate(received):
        assert isinstance(payloads, GatheredPayloads)
        assert payloads.layout == tuple((str(a.dtype), a.shape) for a in sent[0][number])
        assert payloads.nbytes == sum(a.nbytes for a in sent[0][number])
        for column, arrays in zip(
            payloads.addresses(), zip(*(each[number] for each in sent), strict=True), strict=True
        ):
            assert [ctypes.string_at(at, a.nbytes) for at, a in zip(column, arrays, strict=True)] == [
                a.tobytes() for a in arrays
            ]


HEADS = {  # correct: [3, 2], for 3 elements of 4 bytes and 2 of 8
    "too many": [4, 2],
    "too few": [3, 1],
    "less than none": [5, -1],
    "none": [0, 0],
    "a product that wraps": [3 + 2**62, 2],
    "two that wrap": [3 + 2**62, 2 + 2**61],
    "the largest": [2**63 - 1, 2],
    "the smallest": [3, -(2**63)],
}


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_lengths_that_do_not_add_up_are_refused(xp, heads):
    packer, data, layout = packed(xp)
    data[:16] = np.array(heads, np.int64).view(np.uint8)
    with pytest.raises(ValueError, match="the message of worker 2, which has other lengths than it says"):
        packer.unpack_ragged(xp.asarray(data, "uint8"), layout, 2)
    with pytest.raises(ValueError, match="which has 15 bytes, which are too few"):
        packer.unpack_ragged(xp.asarray(data[:15], "uint8"), layout, 2)


def test_a_graph_refuses_them_when_it_runs():
    xp = backend("tensorflow")
    import tensorflow as tf

    packer, data, layout = packed(xp)

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None], tf.uint8)])
    def unpacked(buffer):
        return packer.unpack_ragged(buffer, layout, 2)

    assert unpacked(tf.constant(data))[1].numpy().tolist() == [[7, 8], [9, 10]]
    for heads in HEADS.values():
        data[:16] = np.array(heads, np.int64).view(np.uint8)
        with pytest.raises(tf.errors.InvalidArgumentError, match="worker 2, which has other lengths"):
            unpacked(tf.constant(data))


# Settings with which a message ends with a position; the test replaces it in worker 1's message.
SPOILT = {
    "topk": {"compressor": "topk", "communicator": "allgather", "compress_ratio": 0.1},
    "threshold": {"compressor": "threshold", "communicator": "allgather", "threshold": 1.0},
    "gtopk": {"compressor": "gtopk", "compress_ratio": 0.1},
    "hierarchical": {
        "compressor": "topk",
        "communicator": "hierarchical",
        "outer": "allgather",
        "node_size": 1,
        "compress_ratio": 0.1,
    },
    "broadcast": {"compressor": "topk", "communicator": "broadcast", "compress_ratio": 0.1},
}


@pytest.mark.parametrize("kernels", ["", "off"])
@pytest.mark.parametrize("name", SPOILT)
@pytest.mark.parametrize("toolkit", BACKENDS)
def test_all_workers_refuse_a_position_and_name_its_worker(toolkit, name, kernels, monkeypatch):
    monkeypatch.setenv("GRACE_KERNELS", kernels)
    xp = backend(toolkit)
    post = World.post

    def spoilt(self, key, rank, value):
        if rank == 1 and key[1].startswith("grace.") and not isinstance(value, list):
            data = np.array(xp.to_numpy(value))
            data[-4:] = np.array([500], np.int32).view(np.uint8)  # the last position, of 500 elements
            value = xp.asarray(data, "uint8")
        return post(self, key, rank, value)

    graces = workers(SPOILT[name], 3)
    for rank, grace in enumerate(graces):
        grace.build({"w": xp.asarray(normal(500, seed=rank), "float32")})
    monkeypatch.setattr(World, "post", spoilt)
    gradients = [{"w": xp.asarray(normal(500, seed=rank), "float32")} for rank in range(3)]
    for grace, mine in zip(graces, gradients, strict=True):
        grace.launch(mine)
    waiting, said = list(graces), []
    while waiting:  # in lockstep, until each has ended or failed
        for grace in list(waiting):
            try:
                if grace.advance():
                    grace.land()
                    waiting.remove(grace)
            except ValueError as error:
                said.append(str(error))
                waiting.remove(grace)
    assert len(said) == 3
    for text in said:
        assert re.search(r"worker 1 of 3 sent a payload for 'w' that '\w+' cannot have made.*ascend", text)
