"""What a program may ask of all workers together, as data.

A method or communicator yields one of these (or a tuple of them, to travel in one message) and is resumed
with the result (or a tuple of results). Nothing here knows how a collective is carried out.

``group`` says among whom: "world", all workers; "node", those of this worker's machine; "cross", those with this
worker's place on their machines. Ranks and numbers of workers are then the group's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Arrays = tuple[Any, ...]
Group = Literal["world", "node", "cross"]


@dataclass(frozen=True)
class Reduce:
    """Combine the workers' arrays elementwise.

    Result: a tuple of arrays shaped as ``arrays``, bit-equal on all workers. ``mean`` is for floats; half
    precision is divided before it is summed, so that many workers cannot overflow it. For integers that are summed, the
    asker sees to it that world_size times the largest magnitude fits the dtype. The length of a vector may depend on
    the step, if it is the same on all workers.
    """

    arrays: Arrays
    op: Literal["sum", "mean", "min", "max"] = "mean"
    group: Group = "world"


@dataclass(frozen=True)
class Gather:
    """Collect every worker's arrays.

    Result: a sequence with one tuple of arrays per worker, in rank order. ``ragged`` says that the first
    dimension may differ between workers; otherwise shapes must agree, or be those of ``shapes``, by worker, which all
    workers know.
    """

    arrays: Arrays
    ragged: bool = False
    group: Group = "world"
    shapes: tuple[tuple[Any, ...], ...] | None = None


@dataclass(frozen=True)
class Broadcast:
    """Send the arrays of worker ``root`` to everybody. Result: a tuple of arrays, as ``root`` had them.

    The other workers pass arrays of the same dtypes; their shapes may differ only if ``ragged``.
    """

    arrays: Arrays
    root: int
    ragged: bool = False
    group: Group = "world"


@dataclass(frozen=True)
class AllToAll:
    """Send ``parts[d]`` to worker d. Result: a sequence with the part that each worker sent to this one.

    What the workers send to one destination must have the same shapes. Or, if ``mutual``, what two workers send to each
    other: so a worker may have nothing, ``()``, for all but its neighbours. Or, if ``ragged``, the same number of
    arrays, whose first dimensions may differ.
    """

    parts: tuple[Arrays, ...]
    group: Group = "world"
    mutual: bool = False
    ragged: bool = False


Collective = Reduce | Gather | Broadcast | AllToAll


def arrays_of(collective: Collective) -> Arrays:
    """Every array that a collective hands over, in a fixed order."""
    if isinstance(collective, AllToAll):
        return tuple(array for part in collective.parts for array in part)
    return collective.arrays
