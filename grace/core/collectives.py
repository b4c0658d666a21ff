"""Collective requests, as data.

A method or communicator yields a collective, or a tuple of collectives that share one message, and is resumed with the
result, or a tuple of results. Transports execute collectives.

``group`` names the participants: "world", all workers; "node", the workers of this machine; "cross", the workers with
the same local rank on every machine; or a line of a `grace.core.grid.Grid`. Ranks and sizes are relative to the group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Arrays = tuple[Any, ...]
Group = str


@dataclass(frozen=True)
class Reduce:
    """Combine the workers' arrays elementwise.

    Result: a tuple of arrays shaped as ``arrays``, bit-equal on all workers. Op "mean" is for floats; half-precision
    arrays are divided before the sum, which would overflow with many workers. For sums of integers, the caller must
    ensure that world_size times the largest magnitude fits the dtype. The length of a vector may change from step to
    step, but must be equal on all workers. ``donated``: the result may take the arrays' memory.
    """

    arrays: Arrays
    op: Literal["sum", "mean", "min", "max"] = "mean"
    group: Group = "world"
    donated: bool = False


@dataclass(frozen=True)
class Gather:
    """Collect every worker's arrays.

    Result: a sequence with one tuple of arrays per worker, in rank order. If ``ragged``, the first dimension may differ
    between workers. Otherwise arrays must have the same shapes on all workers, unless ``shapes`` lists each worker's
    array shapes; then all workers must pass the same ``shapes``.
    """

    arrays: Arrays
    ragged: bool = False
    group: Group = "world"
    shapes: tuple[tuple[Any, ...], ...] | None = None


@dataclass(frozen=True)
class Broadcast:
    """Send the arrays of worker ``root`` to all workers. Result: a tuple of these arrays.

    The other workers pass arrays of the same dtypes; their shapes may differ only if ``ragged``.
    """

    arrays: Arrays
    root: int
    ragged: bool = False
    group: Group = "world"


@dataclass(frozen=True)
class AllToAll:
    """Send ``parts[d]`` to worker d. Result: a sequence with the part that each worker sent to this one.

    By default, all workers' parts for one destination must have the same shapes. If ``mutual``, only the two parts that
    a pair of workers exchange must have the same shapes, so a worker may pass ``()`` for all but its neighbours. If
    ``ragged``, all workers' parts for one destination must have the same number of arrays, whose first dimensions may
    differ.
    """

    parts: tuple[Arrays, ...]
    group: Group = "world"
    mutual: bool = False
    ragged: bool = False


Collective = Reduce | Gather | Broadcast | AllToAll


def arrays_of(collective: Collective) -> Arrays:
    """All arrays that this worker passes to a collective, in a fixed order."""
    if isinstance(collective, AllToAll):
        return tuple(array for part in collective.parts for array in part)
    return collective.arrays
