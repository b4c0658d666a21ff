"""Simulates a step: backward passes, compressions and messages of all tensors on shared resources.

A tensor's gradient is ready after its part of the backward pass; then its chain of operations follows, each on one
resource. A resource runs operations in order of readiness, without preemption, one at a time (the pool of CPU threads:
one at a time per thread). Among operations that are ready at the same time, chains precede the backward pass, since a
hook compresses before the next gradient is computed, and earlier tensors precede later ones.

Espresso, section 4.3: F(S), the time of a step under the strategies S.
"""

from __future__ import annotations

import os
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from grace.engine.trace import Event, write
from grace.kernels.timeline import NativePlayer, native_player

DEVICE, CPU, INTRA, INTER = range(4)
RESOURCES = ("device", "CPU pool", "link within a machine", "link between machines")
STRIDE = 8  # number of tensors between two snapshots from which a timeline can be resumed
Chain = tuple[tuple[int, float], ...]
"""The operations after a gradient: (resource, seconds) of each, in order."""


@dataclass(frozen=True)
class Span:
    """One operation in the timeline, in seconds."""

    tensor: int
    operation: int
    """The operation's index in the tensor's chain; -1: the backward pass."""
    resource: int
    began: float
    ended: float


@dataclass(frozen=True)
class _Moment:
    # The state at the start of a tensor's part of the backward pass.
    ready: float
    free: tuple[float, ...]
    idle: tuple[float, ...]
    pool: tuple[float, ...]
    waiting: tuple[tuple[float, int, int], ...]
    late: tuple[tuple[float, int, int], ...]
    gaps: tuple[float, ...]


class Timeline:
    """The timeline of one chain per tensor, with fast updates when some chains change.

    ``backward``: seconds of each tensor's part of the backward pass, in order. ``chains``: the operations after each
    part.
    ``servers``: threads of the CPU pool. ``deferred``: a chain's operations after its first message wait for the end of
    the backward pass, as with a single thread.

    A change is simulated from its tensor on, and aborted once it cannot be better. If `grace.kernels` are built, C++
    runs the simulation, with the same results.
    """

    def __init__(self, backward: Sequence[float], chains: Sequence[Chain], servers: int = 1, deferred: bool = False):
        if len(backward) != len(chains):
            raise ValueError(f"{len(backward)} backward times, but {len(chains)} chains: give one for each tensor")
        if servers < 1:
            raise ValueError(f"servers={servers}: the CPU pool has at least one thread")
        self.backward = [float(seconds) for seconds in backward]
        self.simulations = 0
        """Number of simulated timelines, including aborted ones."""
        self._chains = list(chains)
        self._player: _Player | NativePlayer = native_player(self.backward, servers, deferred, STRIDE) or _Player(
            self.backward, servers, deferred
        )
        self.seconds = 0.0
        self.set(dict(enumerate(chains)))

    @property
    def chains(self) -> tuple[Chain, ...]:
        """The current chains."""
        return tuple(self._chains)

    def set(self, changes: Mapping[int, Chain]) -> float:
        """Change the chains of some tensors; returns the step's new time, in seconds."""
        for tensor, chain in changes.items():
            self._chains[tensor] = chain
        if changes:
            self.simulations += 1
            self.seconds = self._player.set(changes)
        return self.seconds

    def tried(self, changes: Mapping[int, Chain], best: float = inf) -> float:
        """The step's time with these chains instead; infinity if it is not below ``best``."""
        self.simulations += 1
        seconds = self._player.tried(changes, best)
        return seconds if seconds < best else inf

    def hide(self, hidden: bytearray) -> None:
        """Set the byte of each tensor to 1 if an idle gap follows its messages on every link that it uses.

        No later message waits for these messages. Only gaps that end with a tensor's first message count: other
        operations may have waited for the link themselves.
        """
        self._player.hide(hidden)

    def spans(self) -> list[Span]:
        """All operations, in the order of their start."""
        player = _Player(self.backward, len(self._player.pool), self._player.deferred)
        found: list[Span] = []
        player.set(dict(enumerate(self._chains)), found)
        return found


class _Player:
    # Simulates timelines, with snapshots to resume from.
    def __init__(self, backward: Sequence[float], servers: int, deferred: bool):
        self.backward, self.deferred, self.pool = backward, deferred, (0.0,) * servers
        self._chains: list[Chain] = [()] * len(backward)
        never = (-inf,) * 4
        self._moments = {0: _Moment(0.0, (0.0,) * 4, (0.0,) * 4, self.pool, (), (), never)}
        # start of each tensor's last operation on each link
        self._last: list[list[float]] = [[*never] for _ in backward]
        self._gaps: list[float] = [*never]  # by link: the last time that a tensor's first message ended a gap
        self._totals = [sum(backward), 0.0, 0.0, 0.0]  # total work of all chains, by resource

    def _put(self, tensor: int, chain: Chain) -> None:
        before, after = _loads(self._chains[tensor]), _loads(chain)
        for resource in range(len(RESOURCES)):
            self._totals[resource] += after[resource] - before[resource]
        self._chains[tensor] = chain

    def set(self, changes: Mapping[int, Chain], spans: list[Span] | None = None) -> float:
        for tensor, chain in changes.items():
            self._put(tensor, chain)
        return self._play(min(changes, default=0), inf, True, spans)

    def tried(self, changes: Mapping[int, Chain], best: float) -> float:
        kept, totals = {tensor: self._chains[tensor] for tensor in changes}, list(self._totals)
        for tensor, chain in changes.items():
            self._put(tensor, chain)
        seconds = self._play(min(changes), best, False)
        for tensor, chain in kept.items():
            self._chains[tensor] = chain
        self._totals = totals
        return seconds

    def hide(self, hidden: bytearray) -> None:
        for tensor, last in enumerate(self._last):
            if max(last) > -inf and all(b < gap for b, gap in zip(last, self._gaps, strict=True) if b > -inf):
                hidden[tensor] = 1

    def _play(self, begin: int, best: float, keep: bool, spans: list[Span] | None = None) -> float:
        # ``keep``: record snapshots and gaps. If false, return infinity as soon as the step is certain to take at least
        # ``best``, because no resource can finish earlier than its idle time so far plus its total work.
        begin -= begin % STRIDE
        on_device, _, on_intra, on_inter = self._totals
        backward, chains, deferred, last = self.backward, self._chains, self.deferred, self._last
        moment = self._moments[begin]
        ready, pool, gaps = moment.ready, list(moment.pool), list(moment.gaps)
        free, idle = list(moment.free), list(moment.idle)
        waiting, late = list(moment.waiting), list(moment.late)

        def take(upto: float) -> None:
            # Run all operations that are ready by ``upto``, in order of readiness.
            while waiting and waiting[0][0] <= upto:
                at, tensor, number = heappop(waiting)
                chain = chains[tensor]
                resource, seconds = chain[number]
                if resource == CPU:
                    began = max(at, pool.pop(0))
                    ended = began + seconds
                    insort(pool, ended)
                else:
                    since = free[resource]
                    began = at if at > since else since
                    free[resource] = ended = began + seconds
                    idle[resource] += began - since
                    if keep and resource != DEVICE:
                        if began > since and max(last[tensor]) == -inf:
                            gaps[resource] = began
                        last[tensor][resource] = began
                if spans is not None:
                    spans.append(Span(tensor, number, resource, began, ended))
                number += 1
                if number < len(chain):
                    if deferred and resource >= INTRA and upto < inf:
                        late.append((ended, tensor, number))
                    else:
                        heappush(waiting, (ended, tensor, number))

        for tensor in range(begin, len(backward)):
            if keep:
                if tensor % STRIDE == 0:
                    resources = (tuple(free), tuple(idle), tuple(pool))
                    self._moments[tensor] = _Moment(ready, *resources, tuple(waiting), tuple(late), tuple(gaps))
                last[tensor] = [-inf] * 4
            elif idle[DEVICE] + on_device >= best or idle[INTRA] + on_intra >= best or idle[INTER] + on_inter >= best:
                return inf
            take(ready)
            since = free[DEVICE]
            began = max(ready, since)
            idle[DEVICE] += began - since
            free[DEVICE] = ready = began + backward[tensor]
            if spans is not None:
                spans.append(Span(tensor, -1, DEVICE, began, ready))
            take(ready)
            if chains[tensor]:
                heappush(waiting, (ready, tensor, 0))
        take(ready)  # the work of the hook for the last gradient precedes all deferred operations
        for at, tensor, number in late:
            heappush(waiting, (max(at, ready), tensor, number))
        take(inf)
        if keep:
            self._gaps = gaps
        return max(*free, pool[-1])


def _loads(chain: Chain) -> list[float]:
    loads = [0.0] * len(RESOURCES)
    for resource, seconds in chain:
        loads[resource] += seconds
    return loads


@dataclass(frozen=True)
class Overheads:
    """Breakdown of a step's time into three parts."""

    backward: float
    communication: float
    """Time in which links are busy, but the backward pass does not run."""
    compression: float
    """Time in which compressions run, but neither the backward pass nor a link is busy."""


def overheads(spans: Sequence[Span]) -> Overheads:
    """The unhidden parts of communication and compression."""
    backward = [(s.began, s.ended) for s in spans if s.operation < 0]
    links = [(s.began, s.ended) for s in spans if s.resource in (INTRA, INTER)]
    everything = [(s.began, s.ended) for s in spans]
    alone, both, all_ = _length(backward), _length(backward + links), _length(everything)
    return Overheads(alone, both - alone, all_ - both)


def _length(intervals: list[tuple[float, float]]) -> float:
    total, reached = 0.0, -inf
    for began, ended in sorted(intervals):
        if ended > reached:
            total += ended - max(began, reached)
            reached = ended
    return total


def save_trace(
    path: str | os.PathLike[str], spans: Sequence[Span], names: Sequence[str], labels: Sequence[Sequence[str]]
) -> None:
    """Write a predicted timeline in Chrome's trace format.

    ``names``: those of the tensors. ``labels``: those of each tensor's operations.
    """
    rows = []
    for span in spans:
        what = "backward" if span.operation < 0 else labels[span.tensor][span.operation]
        track = "backward" if span.operation < 0 else RESOURCES[span.resource]
        rows.append((track, Event(names[span.tensor], what, span.began, span.ended)))
    write(path, rows, "predicted")
