"""Laws for communicators. Each takes the communicator, a compressor that it supports, and a backend."""

from __future__ import annotations

from typing import Any

import numpy as np

from grace.compressors.measured.none import NoCompression
from grace.core import Compressor
from grace.core.communicator import Communicator
from grace.testing import exchanges
from grace.testing.cases import Laws, lockstep, same, shape_of, spread, workers

LAWS = Laws(exchanges.LAWS)


@LAWS.add
def nothing_is_lost_without_compression(communicator: Communicator, compressor: Compressor, xp: Any) -> None:
    """The compressor "none" gives the mean, for any number of workers and elements."""
    for size in (1, 2, 3, 5):
        graces = workers(NoCompression(), None, communicator, size)
        for grace in graces:
            grace.build({str(n): xp.zeros(n) for n in (1, 7, 64, 1003)})
        tensors = [{str(n): spread(n, seed=rank) for n in (1, 7, 64, 1003)} for rank in range(size)]
        means = lockstep(graces, [{k: xp.asarray(g, "float32") for k, g in mine.items()} for mine in tensors])
        for name in tensors[0]:
            exact = np.mean([mine[name] for mine in tensors], 0, dtype=np.float64)
            for worker in means:
                np.testing.assert_allclose(xp.to_numpy(worker[name]), exact, rtol=1e-5, atol=1e-6)


@LAWS.add
def any_number_of_workers_agrees(communicator: Communicator, compressor: Compressor, xp: Any) -> None:
    """Test one, two, three and five workers, and tensors smaller than their number."""
    for size in (1, 2, 3, 5):
        graces = workers(compressor, None, communicator, size)
        names = {"small": (3,), "large": shape_of(compressor, 1003)}
        for grace in graces:
            grace.build({name: xp.zeros(shape) for name, shape in names.items()})
        for step in range(2):
            tensors = [
                {name: xp.asarray(spread(*shape, seed=10 * step + rank), "float32") for name, shape in names.items()}
                for rank in range(size)
            ]
            means = [[np.array(xp.to_numpy(mean)) for mean in w.values()] for w in lockstep(graces, tensors)]
            assert all(same(means[0], other) for other in means), f"{size} workers find different means"
