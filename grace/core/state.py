"""Types of arrays, payloads and states, and helpers that join states under prefixes."""

from __future__ import annotations

from enum import Enum
from typing import Any

Array = Any
Payload = tuple[Array, ...]
"""One worker's data on the wire: arrays in wire dtypes, bits already packed."""
State = dict[str, Array]
"""A tensor's state between steps. Keys, shapes and dtypes are fixed by ``init``."""


def name_of(part: Any) -> str:
    """The registered name of a compressor, memory or communicator, or else its class name."""
    return vars(type(part)).get("registered_name", type(part).__name__)


class Resize(Enum):
    """How a state array follows a change in the number of workers."""

    SAME = "same"
    """Equal on all workers, and copied to new ones."""
    SUM = "sum"
    """The sum over the workers is preserved: every worker gets an equal part of it."""
    MEAN = "mean"
    """Every worker gets the mean."""
    OWN = "own"
    """Private to a worker: each new worker takes over one old worker's array, in rank order."""
    TRACKED = "tracked"
    """An estimate whose mean over the workers is in the same state, under key "mean": every worker restarts from the
    mean. So estimates and mean stay consistent even if some workers' estimates are lost."""


def apart(arrays: Payload, others: Payload, xp: Any) -> Payload:
    """The arrays, with a copy of each one that overlaps any of ``others`` in memory."""
    return tuple(xp.buffers.copy(x) if any(xp.buffers.overlap(x, other) for other in others) else x for x in arrays)


def scope(state: State, prefix: str) -> State:
    """The arrays of a state whose keys begin with ``prefix/``, under their keys without this prefix."""
    start = prefix + "/"
    return {key[len(start) :]: value for key, value in state.items() if key.startswith(start)}


def join(**parts: State) -> State:
    """Join states under prefixes: ``join(memory=..., compressor=...)``; the inverse of `scope`."""
    return {f"{prefix}/{key}": value for prefix, state in parts.items() for key, value in state.items()}
