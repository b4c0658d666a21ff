"""The abstract transport, which executes collectives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from grace.core.collectives import Collective
from grace.core.grid import Grid


class Transport(ABC):
    """Executes collectives. All workers must make the same calls in the same order."""

    rank: int = 0
    size: int = 1
    rooted: bool = True
    """Whether it supports messages to a single root."""
    elastic: bool = False
    """Whether workers may join a running job. If so, they exchange no messages before `grace.Grace.settle`."""
    lockstep: bool = False
    """Whether all workers share a process and run round by round, so that their steps never differ."""

    link: Any = None
    """Times of its messages, for the choice of a communicator: `grace.communicators.auto.LinkTimes`; None: unknown."""

    contents: Callable[[str], str] = staticmethod(lambda message: "")
    """Returns the names of a message's tensors, for errors; empty if unknown."""
    _timeout: float | None = None

    @property
    def timeout(self) -> float:
        """Seconds until a wait for other workers raises TimeoutError, where the library allows it.

        If it is set to None, `usual_timeout` applies.
        """
        return self.usual_timeout if self._timeout is None else self._timeout

    @timeout.setter
    def timeout(self, seconds: float | None) -> None:
        self._timeout = seconds

    @property
    def usual_timeout(self) -> float:
        """The timeout if none is set, in seconds: that of the library's group of workers, or 600."""
        return 600.0

    def told(self, name: str) -> str:
        """The text that names a message and its tensors in errors."""
        contents = self.contents(name)
        return f"{name!r} ({contents})" if contents else repr(name)

    @property
    def node_size(self) -> int:
        """Number of workers on this machine, as launched."""
        return self.size

    @property
    def local_rank(self) -> int:
        """This worker's number on its machine, as launched."""
        return 0

    @property
    def divides(self) -> bool:
        """Whether `split_grid` can create groups, if all workers call it."""
        return False

    @property
    def measurable(self) -> bool:
        """Whether its links can be measured, and the workers divided into groups as the result suggests."""
        return self.divides and not self.lockstep and not self.elastic

    @property
    def splits(self) -> bool:
        """Whether `split` can create groups: all machines have equally many workers, and the library allows it."""
        return False

    def split(self, node_size: int) -> None:
        """Create the groups "node" and "cross"; a machine has ``node_size`` consecutive ranks."""
        raise NotImplementedError(f"{type(self).__name__} has no groups of workers")

    def split_grid(self, grid: Grid, node_size: int = 0) -> None:
        """Create the groups of a grid's lines, named as `Grid.group`. A grid of a single axis needs none.

        ``node_size``: if set, the grid consists of machines with so many consecutive ranks, after `split`; each group
        has the workers of one local rank, and the prefix "cross." in its name.
        """
        if len(grid.dims) > 1:
            raise NotImplementedError(f"{type(self).__name__} has no groups of workers")

    def group_rank(self, group: str) -> int:
        """This worker's rank within a group."""
        return self.rank

    def bind(self, xp: Any) -> Transport:
        """The transport for arrays of this backend; raises if it does not support them."""
        return self

    @abstractmethod
    def start(self, collectives: Sequence[Collective], name: str) -> Callable[[], list[Any]]:
        """Begin one round of collectives in as few messages as possible; returns a function that awaits the results."""

    def exchange(self, text: str) -> list[str]:
        """Send a text to all workers; returns every worker's text, in rank order. For start-up checks."""
        return [text]
