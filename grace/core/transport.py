"""The abstract transport: carries collectives out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from grace.core.collectives import Collective


class Transport(ABC):
    """Carries collectives out. Calls must come in the same order on every worker."""

    rank: int = 0
    size: int = 1
    rooted: bool = True
    """Messages may go to one worker alone, to which the others give without getting."""
    timeout: float = 600.0
    """Seconds after which a wait for other workers raises TimeoutError, where the library lets us look."""
    elastic: bool = False
    """Workers may join others that train already: nothing is said to them before `grace.Grace.settle`."""

    lockstep: bool = False
    """The workers share a process and run round by round, so that they cannot be at different steps."""

    @property
    def node_size(self) -> int:
        """How many workers share this machine, as they were launched."""
        return self.size

    def split(self, node_size: int) -> None:
        """Make the groups "node" and "cross", machines being ``node_size`` consecutive workers each."""
        raise NotImplementedError(f"{type(self).__name__} has no groups of workers")

    def group_rank(self, group: str) -> int:
        """This worker's rank within a group."""
        return self.rank

    def bind(self, xp: Any) -> Transport:
        """The transport for arrays of this backend; raises if it cannot carry them."""
        return self

    @abstractmethod
    def start(self, collectives: Sequence[Collective], name: str) -> Callable[[], list[Any]]:
        """Begin one round of collectives as few messages; the returned function waits for the results."""

    def exchange(self, text: str) -> list[str]:
        """Every worker's text, in rank order (for start-up checks, not for the hot path)."""
        return [text]
