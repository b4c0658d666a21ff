"""When a step ends: backward passes, compressions and messages of all tensors on the resources that they share.

A tensor's gradient comes when its part of the backward pass has run; then its chain of operations follows, each on one
resource. A resource takes what is ready first, one operation at a time, and never interrupts it (the pool of CPU
threads: as many at a time as it has threads). Of what is ready at the same moment, chains go before the backward pass,
since a hook compresses before the next gradient is computed, and earlier tensors before later ones.

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
STRIDE = 8  # tensors between two moments from which a timeline can be played again
Chain = tuple[tuple[int, float], ...]
"""What follows a gradient: (resource, seconds) of each operation, in order."""


@dataclass(frozen=True)
class Span:
    """One operation in the timeline, in seconds."""

    tensor: int
    operation: int
    """Its number in the chain; -1: the backward pass."""
    resource: int
    began: float
    ended: float


@dataclass(frozen=True)
class _Moment:
    # All that is known when a tensor's part of the backward pass begins.
    ready: float
    free: tuple[float, ...]
    idle: tuple[float, ...]
    pool: tuple[float, ...]
    waiting: tuple[tuple[float, int, int], ...]
    late: tuple[tuple[float, int, int], ...]
    gaps: tuple[float, ...]


class Timeline:
    """The timeline of one chain for each tensor, and what becomes of it when some chains change.

    ``backward``: seconds of each tensor's part of the backward pass, in its order. ``chains``: what follows each.
    ``servers``: threads of the CPU pool. ``deferred``: what follows a chain's first message waits for the end of the
    backward pass, as where one thread does everything.

    A change is played from its tensor on, not from the beginning, and given up once it cannot be better. Where
    `grace.kernels` are built, C++ plays, with the same results.
    """

    def __init__(self, backward: Sequence[float], chains: Sequence[Chain], servers: int = 1, deferred: bool = False):
        if len(backward) != len(chains):
            raise ValueError(f"{len(backward)} backward times, but {len(chains)} chains: give one for each tensor")
        if servers < 1:
            raise ValueError(f"servers={servers}: the CPU pool has at least one thread")
        self.backward = [float(seconds) for seconds in backward]
        self.simulations = 0
        """How often a timeline was played, or begun to be."""
        self._chains = list(chains)
        self._player: _Player | NativePlayer = native_player(self.backward, servers, deferred, STRIDE) or _Player(
            self.backward, servers, deferred
        )
        self.seconds = 0.0
        self.set(dict(enumerate(chains)))

    @property
    def chains(self) -> tuple[Chain, ...]:
        """What follows each gradient now."""
        return tuple(self._chains)

    def set(self, changes: Mapping[int, Chain]) -> float:
        """Change the chains of some tensors; the step's new time, in seconds."""
        for tensor, chain in changes.items():
            self._chains[tensor] = chain
        if changes:
            self.simulations += 1
            self.seconds = self._player.set(changes)
        return self.seconds

    def tried(self, changes: Mapping[int, Chain], best: float = inf) -> float:
        """The step's time if some tensors had these chains; infinite if that is ``best`` or more."""
        self.simulations += 1
        seconds = self._player.tried(changes, best)
        return seconds if seconds < best else inf

    def hide(self, hidden: bytearray) -> None:
        """Set to 1 the byte of each tensor whose messages an idle gap follows on every link that it uses.

        Nothing later waits for those. Only gaps count that end with the first message of a tensor: what ends others may
        itself have waited for the link.
        """
        self._player.hide(hidden)

    def spans(self) -> list[Span]:
        """Everything that happens, in the order in which it is taken up."""
        player = _Player(self.backward, len(self._player.pool), self._player.deferred)
        found: list[Span] = []
        player.set(dict(enumerate(self._chains)), found)
        return found


class _Player:
    # What plays timelines, and remembers the moments from which to begin again.
    def __init__(self, backward: Sequence[float], servers: int, deferred: bool):
        self.backward, self.deferred, self.pool = backward, deferred, (0.0,) * servers
        self._chains: list[Chain] = [()] * len(backward)
        never = (-inf,) * 4
        self._moments = {0: _Moment(0.0, (0.0,) * 4, (0.0,) * 4, self.pool, (), (), never)}
        self._last: list[list[float]] = [[*never] for _ in backward]  # when its last operation on a link begins
        self._gaps: list[float] = [*never]  # when the last tensor's first message begins that finds the link idle
        self._totals = [sum(backward), 0.0, 0.0, 0.0]  # of all chains, on each resource

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
        # ``keep``: note moments and gaps. Else infinite once it must be ``best`` or more: no resource ends before it
        # has idled as long as it did so far, and done all that there is for it.
        begin -= begin % STRIDE
        on_device, _, on_intra, on_inter = self._totals
        backward, chains, deferred, last = self.backward, self._chains, self.deferred, self._last
        moment = self._moments[begin]
        ready, pool, gaps = moment.ready, list(moment.pool), list(moment.gaps)
        free, idle = list(moment.free), list(moment.idle)
        waiting, late = list(moment.waiting), list(moment.late)

        def take(upto: float) -> None:
            # All operations that are ready by then, in the order of readiness.
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
        take(ready)  # what a hook does with the last gradient, before all that was put off
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
    """Where a step's time goes; the three parts add up to it."""

    backward: float
    communication: float
    """Links are busy and the backward pass does not run."""
    compression: float
    """Compressions run, and neither the backward pass nor a link does."""


def overheads(spans: Sequence[Span]) -> Overheads:
    """What of communication and compression nothing hides."""
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

    ``names``: of the tensors. ``labels``: of each tensor's operations.
    """
    rows = []
    for span in spans:
        what = "backward" if span.operation < 0 else labels[span.tensor][span.operation]
        track = "backward" if span.operation < 0 else RESOURCES[span.resource]
        rows.append((track, Event(names[span.tensor], what, span.began, span.ended)))
    write(path, rows, "predicted")
