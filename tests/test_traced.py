"""Rank and step may be scalars of a graph: one graph serves all workers and steps, as in SPMD programs."""

import numpy as np
import pytest
from methods import ROWS, backend, context, host, parts, rows, spread, together

from grace.core.method import Method
from grace.testing.cases import shape_of

WORLD, STEP = 2, 5
FIRST = {row.name: row for row in reversed(ROWS)}
"""A row per compressor."""


@rows(lambda row: FIRST[row.name] is row)
def test_a_graph_of_any_rank_and_step_gives_what_a_graph_of_known_ones_gives(row):
    xp, method = backend("tensorflow"), Method(parts(row).compressor, parts(row).memory)
    tf = pytest.importorskip("tensorflow")
    shape = shape_of(method.compressor)
    gradients = [xp.asarray(spread(*shape, seed=rank).reshape(-1), "float32") for rank in range(WORLD)]

    def exchanged(ranks, step):
        contexts = [context(xp, shape, world_size=WORLD, rank=rank, step=step) for rank in ranks]
        pairs = zip(gradients, contexts, strict=True)
        encoded, _ = together(xp, [method.encode(x, method.init(ctx), ctx) for x, ctx in pairs])
        mean = method.mean([payload for payload, _ in encoded], contexts[1])
        return [mean, *(array for payload, state in encoded for array in (*payload, *state.values()))]

    known = tf.function(lambda: exchanged(range(WORLD), STEP), autograph=False)
    traced = tf.function(lambda ranks, step: exchanged(tf.unstack(ranks), step), autograph=False)
    given = tf.range(WORLD, dtype=tf.int64), tf.constant(STEP, tf.int64)
    for mine, expected in zip(host(xp, traced(*given)), host(xp, known()), strict=True):
        assert mine.dtype == expected.dtype
        np.testing.assert_allclose(mine, expected, 1e-6, 1e-6)
