"""Local training by workers of this process, whose parameters are moved directly."""

import itertools

import numpy as np
from methods import normal

import grace
from grace.local import in_turn
from grace.transports.local import LocalTransport, World


class Worker:
    """A worker's parameters, which `move` changes directly, and their local training."""

    def __init__(self, xp, start, make, transport, dtype="float32", buffers=()):
        self.xp, self.local = xp, make(transport)
        self.dtype = dtype
        self.values = {name: xp.buffers.copy(xp.asarray(value, dtype)) for name, value in start.items()}
        self.buffers = {
            name: xp.buffers.copy(xp.asarray(value, str(value.dtype))) for name, value in dict(buffers).items()
        }
        access = grace.local.Access(lambda name: self._of(name)[name], self._put)
        self.local.build({name: name for name in self.values}, {name: name for name in self.buffers}, access)

    def _of(self, name):
        return self.values if name in self.values else self.buffers

    def _put(self, name, value):
        assert self.xp.dtype(value) == self.xp.dtype(self._of(name)[name])
        self._of(name)[name] = self.xp.buffers.copy(value)

    def move(self, changes):
        """An inner step: subtract ``changes`` from the parameters."""
        for name, change in changes.items():
            self.values[name] = self.values[name] - self.xp.asarray(np.asarray(change), self.dtype)

    def numpy(self, name):
        return np.array(self.xp.to_numpy(self._of(name)[name]))


def team(xp, size, starts, make, **options):
    """Workers of a world in this process. ``starts``: parameters of all, or of each."""
    world = World(size)
    starts = starts if isinstance(starts, list) else [starts] * size
    return [Worker(xp, start, make, LocalTransport(world, rank), **options) for rank, start in enumerate(starts)]


def step(workers, changes):
    """An inner step of all workers. ``changes(rank)``: the arrays to subtract."""
    for rank, worker in enumerate(workers):
        worker.move(changes(rank))
    in_turn([worker.local.stepping() for worker in workers])


def finish(workers):
    in_turn([worker.local.finishing() for worker in workers])


def drift(t, rank, shapes):
    """The movement of a worker's parameters in an inner step."""
    return {
        name: 0.1 * normal(*shape, seed=1000 * t + 10 * rank + number)
        for number, (name, shape) in enumerate(shapes.items())
    }


SHAPES = {"a": (40, 60), "b": (1500,), "c": (30, 50), "d": (7,)}
START = {name: normal(*shape, seed=number) for number, (name, shape) in enumerate(SHAPES.items())}
METHODS = {
    "topk": {"compressor": "topk", "compress_ratio": 0.05},
    "chunktopk": {"compressor": "chunktopk", "memory": "residual", "beta": 0.95, "min_numel": 0},
    "qsgd": {"compressor": "qsgd"},
    "powersgd": {"compressor": "powersgd", "compress_rank": 2},
}


def equal(one, other):
    """Whether states are equal to the bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(itertools.starmap(equal, zip(one, other, strict=True)))
    return (
        np.array_equal(np.asarray(one), np.asarray(other), equal_nan=False) if hasattr(one, "shape") else one == other
    )
