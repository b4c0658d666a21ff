"""The costs of a policy's levels: bytes and errors of samples, and the seconds that this machine takes for them."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

from grace.backends.base import Backend
from grace.core import Array
from grace.core.policy import Cost
from grace.core.registry import triple
from grace.engine.codecs.table import Calls, calls_of
from grace.engine.levels import Way
from grace.engine.options import Options
from grace.engine.setup import Setup
from grace.transports.local import LocalTransport, World

SMALL, VECTOR, MATRIX = 2**16, 2**20, 2**22
"""Sizes of samples, in elements. Of methods of vectors: a quarter of all tensors, at least SMALL and at most VECTOR; of
methods of matrices: at most MATRIX for each shape.
"""
REPEATS = 3
"""Number of timed steps, of which the shortest counts."""


def level_costs(setup: Setup, make: Callable[..., Any]) -> list[Cost]:
    """The cost of each policy level, from steps of one worker on random numbers; [] if worker 0 predicts nothing.

    ``make``: the class `Grace`. All other workers wait, so samples are small, and a method with kernels runs on NumPy
    if the toolkit shares NumPy's kernels. Other methods run on the toolkit, whose own functions they may call.
    """
    if setup.rank != 0 or setup.policy is None or not setup.policy.predicts:
        return []
    kernels = [calls_of(type(way.method.compressor)) != Calls() for way in setup.ways]
    backends = [setup.xp.host or setup.xp if each else setup.xp for each in kernels]
    return [_cost(setup, level, xp, make) for level, xp in enumerate(backends)]


def _cost(setup: Setup, level: int, xp: Backend, make: Callable[..., Any]) -> Cost:
    way, sent, seconds, lost, norm = setup.ways[level], 0.0, 0.0, 0.0, 0.0
    shapes: Counter[tuple[int, ...]] = Counter()
    for unit in setup.table.compressed():
        if setup.ways.refused(unit.name, level) or way.method.compressor.traits.lossless:
            sent += 4 * math.prod(unit.shape)
        else:
            shapes[unit.shape] += 1
    for shape, scale in _samples(way, shapes):
        bytes_, taken, error, square = _step(way, shape, xp, make)
        sent, seconds = sent + scale * bytes_, seconds + scale * taken
        lost, norm = lost + scale * error, norm + scale * square
    return Cost(sent, seconds, lost / norm if norm else 0.0)


def _samples(way: Way, shapes: Counter[tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], float]]:
    # Yields shapes of samples, and the number of times that each stands for.
    if not way.method.compressor.traits.needs_shape:
        total = sum(math.prod(shape) * count for shape, count in shapes.items())
        if total:
            size = min(total, max(total // 4, SMALL), VECTOR)
            yield (size,), total / size
        return
    for (rows, *rest), count in shapes.items():
        size = min(rows, max(MATRIX // math.prod(rest), 1))
        yield (size, *rest), count * rows / size


def _step(way: Way, shape: tuple[int, ...], xp: Backend, make: Callable[..., Any]) -> tuple[float, float, float, float]:
    # Returns the bytes and seconds of a step of one worker, and the squared norms of its error and of its gradient.
    import numpy as np

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # already issued for the training itself
        grace = make(way.method, triple("none")[1], LocalTransport(World(1)), Options(min_numel=0))
    host = np.random.default_rng(0).standard_normal(shape, np.float32)

    def given() -> dict[str, Array]:
        return {"sample": xp.asarray(host.copy(), "float32")}

    grace.build(given())
    error = xp.to_numpy(grace.step(given())["sample"]) - host  # the first step may compile kernels
    taken = []
    for _ in range(REPEATS):
        again, began = given(), perf_counter()
        xp.to_numpy(grace.step(again)["sample"])
        taken.append(perf_counter() - began)
    sent = grace.report().bytes_sent / (1 + REPEATS)
    return sent, min(taken), float(np.vdot(error, error)), float(np.vdot(host, host))
