"""Arrays, payloads and states: what methods handle, as types, and states joined under prefixes."""

from __future__ import annotations

from enum import Enum
from typing import Any

Array = Any
Payload = tuple[Array, ...]
"""What one worker puts on the wire: arrays in wire dtypes, bits already packed."""
State = dict[str, Array]
"""What is kept of a tensor between steps. Keys, shapes and dtypes are fixed by ``init``."""


def name_of(part: Any) -> str:
    """The registered name of a compressor, memory or communicator; the class's own name if it has none."""
    return vars(type(part)).get("registered_name", type(part).__name__)


class Resize(Enum):
    """What becomes of an array of the state when the number of workers changes."""

    SAME = "same"
    """It is the same on all workers, and stays so."""
    SUM = "sum"
    """The sum over the workers is kept, and every worker has an equal part of it: nothing is lost."""
    MEAN = "mean"
    """Every worker gets the mean."""
    OWN = "own"
    """A worker's own affair: each takes one of the old workers' over, as they come."""
    TRACKED = "tracked"
    """All workers keep the mean of it as "mean", beside it: every worker goes on from that. So the two stay true to
    each other, also where what a worker had is lost."""


def apart(arrays: Payload, others: Payload, xp: Any) -> Payload:
    """The arrays in memory of their own, copied where they share some of the others'."""
    return tuple(xp.copy(x) if any(xp.overlap(x, other) for other in others) else x for x in arrays)


def scope(state: State, prefix: str) -> State:
    """The part of a state under ``prefix/``."""
    start = prefix + "/"
    return {key[len(start) :]: value for key, value in state.items() if key.startswith(start)}


def join(**parts: State) -> State:
    """Several states as one: ``join(memory=..., compressor=...)``; undone by `scope`."""
    return {f"{prefix}/{key}": value for prefix, state in parts.items() for key, value in state.items()}
