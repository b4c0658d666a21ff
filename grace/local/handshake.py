"""The handshake before each exchange of local training: if the workers' progress differs, all raise."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from grace.core import Transport
from grace.core.collectives import Reduce
from grace.engine.handshake import OutOfStep
from grace.local.progress import Progress

EXACT = 2**24
"""float32 holds the integers below this exactly."""
REMEDY = (
    "Make the same number of steps on every worker, and call finish() on all of them after the same step or on none; "
    "then load a checkpoint of one step on all. Nothing of this exchange was kept"
)


class Change(IntEnum):
    """What a worker has to exchange in `DiLoCo.finish`, in ascending order; the largest decides for all workers."""

    NONE = 0
    BUFFERS = 1
    """Buffers moved."""
    STEPS = 2
    """The optimizer's steps moved the parameters."""
    WRITTEN = 3
    """Something else wrote the parameters after the last step or landing, such as a checkpoint or averaged weights."""


class Handshake:
    """Compares the workers' progress in one message, whose name and size are the same for every kind of exchange.

    Compared: the numbers of steps, ended slots and landings, and ``finish``, whether this worker is in `DiLoCo.finish`.
    If it differs, the workers raise here, before messages of different sizes meet. ``change``: see `Change`.
    """

    def __init__(self, transport: Transport, xp: Any, name: str, progress: Progress, finish: bool, change: Change):
        self._transport, self._name, self._finish, self._change = transport, name, finish, change
        self._place = [progress.steps, progress.turns, progress.landed, int(finish)]
        # The maximum over the workers of x plus that of -x is 0 if and only if x is equal on all workers.
        values = [float(each % EXACT) for each in self._place]
        self._sent = xp.asarray([*values, *(-each for each in values), float(change)], "float32")
        self._xp = xp
        self._wait: Any = None
        self.nbytes = int(xp.nbytes(self._sent))
        """Bytes of the message."""

    def start(self) -> None:
        """Send this worker's progress."""
        if self._transport.size > 1:
            self._wait = self._transport.start([Reduce((self._sent,), "max")], f"local.{self._name}.place")

    def check(self) -> Change:
        """Wait for the other workers; returns the largest change. Raises OutOfStep on all if progress differs."""
        if self._transport.size == 1:
            return self._change
        ((found,),) = self._wait()
        *ends, change = (round(each) for each in self._xp.to_numpy(found).tolist())
        count = len(self._place)
        spans = [(-low, high) for high, low in zip(ends[:count], ends[count:], strict=True)]
        if any(low != high for low, high in spans):
            raise OutOfStep(self._difference(spans))
        return Change(change)

    def _difference(self, spans: list[tuple[int, int]]) -> str:
        steps, turns, landed, finish = ("" if low == high else f"{low} to {high}" for low, high in spans)
        found = [
            finish and "some are in finish(), others in a regular exchange",
            steps and f"they have made different numbers of steps, {steps}",
            landed and f"they have landed different numbers of exchanges, {landed}",
            turns and f"they are in different turns, {turns}",
        ]
        mine = self._place
        doing = "in finish()" if self._finish else "in a regular exchange"
        return (
            f"the workers of local training do different things: {'; '.join(filter(None, found))}. Worker "
            f"{self._transport.rank} of {self._transport.size} is {doing} after step {mine[0]}, with {mine[2]} "
            f"landed. {REMEDY}"
        )
