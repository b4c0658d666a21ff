"""The settings, workers and tensors of a Grace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grace.backends import Backend
from grace.core import Transport
from grace.core.communicator import Communicator
from grace.core.method import Method
from grace.engine.options import Options
from grace.engine.policy_runner import Schedule
from grace.engine.setup import Setup


class Facts:
    """A Grace's method, workers and tensors, and the settings that the integrations change."""

    def __init__(self, setup: Setup):
        self.setup = setup
        """The parts that all exchanges share, and the settings of the integrations."""

    @property
    def method(self) -> Method:
        """The compressor with its memory, as given: a policy's changes are not included."""
        return self.setup.method

    @property
    def options(self) -> Options:
        """The settings common to all methods."""
        return self.setup.options

    @property
    def communicator(self) -> Communicator:
        """The communicator, resolved for the workers."""
        return self.setup.communicator

    @property
    def schedule(self) -> Schedule | None:
        """The running policy, if there is one."""
        return self.setup.schedule

    @property
    def track_missing(self) -> bool:
        """Whether gradients may be absent (None) on some workers, which costs 4 bytes per tensor and step."""
        return self.setup.track_missing

    @track_missing.setter
    def track_missing(self, value: bool) -> None:
        self.setup.track_missing = value

    @property
    def defer_commit(self) -> bool:
        """Whether an exchange is undecided until `commit` or `discard`, which restores the state before it.

        For integrations that see whether the optimizer applies the means. Costs a copy of the state.
        """
        return self.setup.defer_commit

    @defer_commit.setter
    def defer_commit(self, value: bool) -> None:
        self.setup.defer_commit = value

    @property
    def learning_rate(self) -> Callable[[str], Any] | None:
        """A function from a tensor's name to its learning rate, for memories that need it. The integrations set it."""
        return self.setup.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Callable[[str], Any] | None) -> None:
        self.setup.learning_rate = value

    @property
    def xp(self) -> Backend:
        """The backend; known once `build` has seen a tensor."""
        return self.setup.xp

    @property
    def transport(self) -> Transport:
        """The transport. If none was given, the group of workers is looked up when this is first read.

        Raises RuntimeError if the launcher asks for several workers and there is no group.
        """
        return self.setup.transport

    @property
    def rank(self) -> int:
        return self.setup.rank

    @property
    def world_size(self) -> int:
        return self.setup.world_size

    @property
    def names(self) -> list[str]:
        """Names of all tensors, in the order in which they were built."""
        return list(self.setup.table.tensors)
