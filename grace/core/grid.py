"""Arranges workers in a grid, whose lines are groups."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from grace.core.context import Context


@cache
def factors(workers: int, count: int) -> tuple[int, ...]:
    """Up to ``count`` factors of a number of workers, each at least 2, largest first, with the smallest sum.

    The smallest sum means the fewest messages, and factors as equal as possible. Fewer than ``count`` if the number has
    fewer prime factors: a prime number is its own single factor, and 1 has the factor 1.
    """
    found: list[tuple[int, ...]] = [(workers,)]
    if count > 1:
        smaller = (each for each in range(2, math.isqrt(workers) + 1) if workers % each == 0)
        found += [tuple(sorted((each, *factors(workers // each, count - 1)), reverse=True)) for each in smaller]
    longest = max(map(len, found))
    return min((each for each in found if len(each) == longest), key=sum)


@dataclass(frozen=True)
class Grid:
    """Workers in a grid. Consecutive ranks form a line along axis 0.

    ``dims``: the number of workers on a line along each axis. Cells are the positions of all workers; the cells behind
    a worker at an axis are those with its coordinates on all lower axes, sorted by their coordinates from that axis on.
    """

    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of workers."""
        return math.prod(self.dims)

    @property
    def messages(self) -> int:
        """Number of messages that a worker sends in an exchange with the others on its lines, there and back."""
        return 2 * sum(each - 1 for each in self.dims)

    def __str__(self) -> str:
        return " x ".join(map(str, self.dims))

    def group(self, axis: int) -> str:
        """The name of the group that consists of this worker's line along an axis, for collectives."""
        return "world" if len(self.dims) == 1 else f"{str(self).replace(' ', '')}.{axis}"

    def place(self, rank: int, axis: int) -> int:
        """The coordinate of a worker on an axis, which is also its rank in the group of its line."""
        return rank // self._stride(axis) % self.dims[axis]

    def line(self, rank: int, axis: int) -> range:
        """The ranks of the workers on a worker's line along an axis."""
        step = self._stride(axis)
        first = rank - self.place(rank, axis) * step
        return range(first, first + self.dims[axis] * step, step)

    def behind(self, rank: int, axis: int) -> list[int]:
        """The ranks of the cells behind a worker at an axis; at the number of axes, its own rank alone."""
        found = [rank]
        for other in reversed(range(axis, len(self.dims))):
            found = [cell + each - rank for each in self.line(rank, other) for cell in found]
        return found

    def shared(self, one: int, other: int, axis: int) -> bool:
        """Whether two workers have the same coordinates on all axes below ``axis``."""
        return (one - other) % self._stride(axis) == 0

    def sent_along(self, axis: int, ctx: Context) -> Context:
        """The context of payloads from the workers of a line, whose ranks there name the senders in errors."""
        if len(self.dims) == 1:
            return ctx
        workers = range(ctx.world_size) if ctx._workers is None else ctx._workers
        line = self.line(ctx.rank, axis)
        return ctx._with(_workers=range(workers[line[0]], workers.stop, workers.step * line.step))

    def _stride(self, axis: int) -> int:
        return math.prod(self.dims[:axis])
