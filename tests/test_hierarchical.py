"""Exact within a machine, compressed between machines: every method, over every communicator that fits it."""

import math

import numpy as np
import pytest
from methods import BACKENDS, EXCHANGES, backend, lockstep, normal, same, spread, states, workers
from table import ROWS

from grace import grace_from_params
from grace.transports.local import LocalTransport, World


def built(xp, params, shape, size=4, **settings):
    graces = workers({"communicator": "hierarchical", **params, **settings}, size)
    for grace in graces:
        grace.build({"w": xp.zeros(shape)})
    return graces


def exchanged(xp, graces, gradients):
    means = lockstep(graces, [{"w": xp.asarray(g, "float32")} for g in gradients])
    return [np.array(xp.to_numpy(worker["w"])) for worker in means]


EVERY = {"numpy": 1, "torch": 6, "tensorflow": 18}
"""The stride through the table of methods, by toolkit; laws compare the toolkits."""
CASES = [
    pytest.param(row, outer, name, marks=[] if row in ROWS[:: EVERY[name]] else pytest.mark.exhaustive)
    for name in BACKENDS
    for row, outer in EXCHANGES
]


@pytest.mark.parametrize("row, outer, name", CASES, ids=lambda value: str(value)[:60])
def test_every_method_travels_between_machines(row, outer, name):
    xp, shape = backend(name), (40, 30) if row.matrix else (1203,)
    graces = built(xp, row.params, shape, size=6, outer=outer, node_size=2)
    for step in range(2):
        gradients = [spread(*shape, seed=10 * step + rank) for rank in range(6)]
        before = [g.copy() for g in gradients]
        found = exchanged(xp, graces, gradients)
        assert all(same(found[:1], [other]) for other in found)
        assert found[0].shape == shape
        assert np.isfinite(found[0]).all()
        assert same(gradients, before)
    kept = states(graces)
    gradients[3].reshape(-1)[77] = np.nan
    assert not any(np.isfinite(mean).all() for mean in exchanged(xp, graces, gradients))
    for old, new in zip(kept, states(graces), strict=True):
        assert same(old.values(), new.values())


def shards(n, size, unit):
    full = math.ceil(n / (unit * size)) * unit
    return [slice(min(i * full, n), min((i + 1) * full, n)) for i in range(size)]


@pytest.mark.parametrize("size, node_size", [(4, 2), (6, 3), (6, 2), (4, 4), (4, 1)])
@pytest.mark.parametrize("n", [1, 30, 1003])
def test_shards_are_compressed_between_machines(xp, size, node_size, n):
    # The oracle: top-k with error feedback, for each shard of each machine's mean.
    graces = built(xp, {"compressor": "topk", "compress_ratio": 0.1}, n, size, outer="allgather", node_size=node_size)
    machines = size // node_size
    residuals = np.zeros((machines, n), np.float32)
    for step in range(3):
        gradients = [spread(n, seed=10 * step + rank) for rank in range(size)]
        found = exchanged(xp, graces, gradients)
        x = np.mean(np.reshape(gradients, (machines, node_size, n)), 1, dtype=np.float64) + residuals
        sent = np.zeros_like(x)
        for part in shards(n, node_size, 8):
            for machine in range(machines):
                mine = x[machine, part]
                k = min(len(mine), max(1, int(0.1 * len(mine))))
                best = np.argsort(-abs(mine), kind="stable")[:k]
                sent[machine, part][best] = mine[best]
        residuals = x - sent
        np.testing.assert_allclose(found[0], sent.mean(0), rtol=1e-4, atol=1e-5)


def test_nothing_is_lost_without_compression(xp):
    graces = built(xp, {"compressor": "none"}, (7, 11), 6, node_size=3)
    gradients = [spread(7, 11, seed=rank) for rank in range(6)]
    np.testing.assert_allclose(exchanged(xp, graces, gradients)[0], np.mean(gradients, 0), rtol=1e-5, atol=1e-6)


def test_each_byte_leaves_the_machine_once(xp):
    n = 1000
    graces = built(xp, {"compressor": "signsgd"}, n, 4, node_size=2)
    exchanged(xp, graces, [spread(n, seed=rank) for rank in range(4)])
    first, second = (part.stop - part.start for part in shards(n, 2, 8192))
    assert (first, second) == (1000, 0)  # shards are cut at whole blocks of 8192
    report = graces[0].report()
    # Sent to the neighbour: its shard (empty); to the other machine: bits and a flag; to the neighbour: the result.
    assert report.bytes_sent == 4 * second + (125 + 1) + 4 * first


def test_matrices_are_cut_along_their_first_axis():
    graces = built(
        backend("numpy"), {"compressor": "powersgd", "compress_rank": 2, "min_rate": 1.0}, (41, 30), node_size=2
    )
    shapes = [{key: array.shape for (_, key), array in state.items()} for state in states(graces)]
    assert [shape["memory/residual"] for shape in shapes] == [(21 * 30,), (20 * 30,)] * 2
    # If one shard would not shrink, the whole tensor is sent dense.
    graces = built(backend("numpy"), {"compressor": "powersgd", "compress_rank": 2}, (8, 30), node_size=2)
    assert not graces[0].state_dict()["tensors"]


def test_the_outer_communicator_follows_from_the_method():
    for name, outer in (("topk", "Allgather"), ("randomk", "Allreduce"), ("powersgd", "Allreduce")):
        grace = grace_from_params({"compressor": name, "communicator": "hierarchical"}, LocalTransport(World(4), 0))
        assert type(grace.communicator.outer).__name__ == outer
        assert grace.communicator.node_size == 4  # workers of one process share a machine


@pytest.mark.parametrize(
    "params, message",
    [
        ({"node_size": 3}, r"node_size=3 does not divide 4 workers: set node_size"),
        ({"outer": "allreduce"}, r"communicator 'allreduce' cannot carry 'topk'"),
        ({"outer": "twostage", "memory": "ef21"}, r"communicator 'twostage' cannot carry memory 'ef21'"),
        ({"outer": "hierarchical"}, r"cannot be its own outer"),
        ({"outer": "alreduce"}, r"unknown communicator 'alreduce' \(did you mean 'allreduce'"),
    ],
)
def test_refusals_name_the_remedy(params, message):
    with pytest.raises(ValueError, match=message):
        grace_from_params({"compressor": "topk", "communicator": "hierarchical", **params}, LocalTransport(World(4), 0))


def test_int8_sums_are_limited_by_the_number_of_machines():
    params = {"compressor": "signsgd", "packed": False, "communicator": "hierarchical", "node_size": 8}
    grace = grace_from_params(params, LocalTransport(World(800), 0))
    assert type(grace.communicator.outer).__name__ == "Allreduce"
    with pytest.raises(ValueError, match="200 workers times 1 exceed 127"):
        grace_from_params({**params, "node_size": 4}, LocalTransport(World(800), 0))


def test_a_graph_carries_both_groups():
    xp = backend("tensorflow")
    import tensorflow as tf

    (grace,) = built(xp, {"compressor": "topk", "compress_ratio": 0.5}, 100, 1)
    graph = tf.function(lambda g: grace.step({"w": g})["w"], autograph=False)
    x = normal(100)
    found = graph(tf.constant(x)).numpy()
    assert np.array_equal(np.flatnonzero(found), np.sort(np.argsort(-abs(x), kind="stable")[:50]))


def test_state_is_of_the_shard():
    graces = built(backend("numpy"), {"compressor": "topk"}, 1003, 4, node_size=2)
    sizes = [state["w", "memory/residual"].shape for state in states(graces)]
    assert sizes == [(504,), (499,)] * 2
