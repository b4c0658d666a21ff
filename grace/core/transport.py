"""The abstract transport: carries collectives out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from grace.core.collectives import Collective


class Transport(ABC):
    """Carries out collectives. All workers must make the same calls in the same order."""

    rank: int = 0
    size: int = 1
    rooted: bool = True
    """Whether it supports messages to a single root."""
    timeout: float = 600.0
    """Seconds until a wait for other workers raises TimeoutError, where the library allows it."""
    elastic: bool = False
    """Whether workers may join a running job. If so, they exchange no messages before `grace.Grace.settle`."""
    lockstep: bool = False
    """Whether all workers share a process and run round by round, so that their steps never differ."""

    @property
    def node_size(self) -> int:
        """Number of workers on this machine, as launched."""
        return self.size

    @property
    def splits(self) -> bool:
        """Whether `split` can create groups: all machines have as many workers, and the library allows it."""
        return False

    def split(self, node_size: int) -> None:
        """Create the groups "node" and "cross"; a machine has ``node_size`` consecutive ranks."""
        raise NotImplementedError(f"{type(self).__name__} has no groups of workers")

    def group_rank(self, group: str) -> int:
        """This worker's rank within a group."""
        return self.rank

    def bind(self, xp: Any) -> Transport:
        """The transport for arrays of this backend; raises if it cannot carry them."""
        return self

    @abstractmethod
    def start(self, collectives: Sequence[Collective], name: str) -> Callable[[], list[Any]]:
        """Begin one round of collectives in as few messages as possible; returns a function that awaits the results."""

    def exchange(self, text: str) -> list[str]:
        """Send a text to all workers; returns every worker's text, in rank order. For start-up checks."""
        return [text]
