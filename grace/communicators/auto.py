"""The default communicator, which chooses among the others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from grace.communicators.allgather import Allgather
from grace.communicators.allreduce import Allreduce
from grace.communicators.hierarchical import Hierarchical
from grace.communicators.twostage import TwoStage
from grace.core import Array, Combine, Context, Program, State, Transport, name_of
from grace.core.collectives import AllToAll, Reduce
from grace.core.communicator import Communicator
from grace.core.grid import Grid, factors
from grace.core.method import Method
from grace.core.registry import register

MIN_SHARD = 2**14
"""Minimum number of elements per shard: smaller shards take longer to handle than to send."""
MANY = 16
"""Number of workers, or of machines, from which two stages may have several levels. Below, a worker sends at most 28
messages."""
LEVELS = (2, 3, 4)
SAVED = 0.25
"""The least share of an exchange's time that a further level must save: it compresses once more."""
PAYLOAD = 25e6 / 8
"""Assumed bytes of a bucket's payload: 4 bits per element."""
REPEATS = 5
PROBE = 2**20
"""Bytes that a worker sends to measure the rate."""


class LinkTimes(NamedTuple):
    """Measured seconds of an all-to-all."""

    round: float
    """Until the first message has arrived."""
    message: float
    """For each message that a worker sends."""
    byte: float
    """For each byte that a worker sends."""


@register("auto")
@dataclass(frozen=True)
class Auto(Communicator):
    """Choose the communicator with the fewest bytes on the busiest link for this method and these workers; the default.

    Payloads that can be summed, or that the workers agreed on, go by ``allreduce``. Other payloads go by ``allgather``
    between two workers, and by ``twostage`` between more, with shards of at least 16,384 elements. If each of several
    machines has several workers, they go by ``hierarchical``, and this rule chooses the communicator between machines.
    Low-rank factors, and methods that ``twostage`` cannot carry, go by ``allgather``. All workers make the same choice;
    `Grace.report` names it. It depends only on the method and the workers, but from 16 workers (or machines) on the
    levels of ``twostage`` depend on the link: before the first exchange the workers measure its latency and rate, agree
    on the slowest, and add levels as long as each saves a quarter of the messages' time.
    """

    def measure(self, method: Method, transport: Transport) -> bool:
        per_machine = transport.node_size if transport.splits else 1
        chosen, _ = choose(method, transport.size, per_machine)
        outer = getattr(chosen, "outer", chosen)
        machines = transport.size // per_machine if outer is not chosen else transport.size
        if machines < MANY or not isinstance(outer, TwoStage) or transport.link is not None:
            return False
        xp = getattr(transport, "xp", None)
        if xp is None or xp.tracing or not transport.measurable:  # a graph takes no times
            return False
        if outer is not chosen:
            transport.split(per_machine)
        transport.link = measured(transport, machines, "world" if outer is chosen else "cross")
        return True

    def resolve(self, method: Method, transport: Transport) -> Communicator:
        chosen, _ = _among(method, transport)
        return chosen.resolve(method, transport)

    def choice(self, method: Method, transport: Transport) -> str:
        return _among(method, transport)[1]

    def reduce(self, x: Array, method: Method, state: State, ctx: Context) -> Program[tuple[Array, State]]:
        raise TypeError("communicator 'auto' is a choice among others: call resolve(method, transport) first")


def _among(method: Method, transport: Transport) -> tuple[Communicator, str]:
    return choose(method, transport.size, transport.node_size if transport.splits else 1, transport.link)


def choose(method: Method, workers: int, per_machine: int, link: LinkTimes | None = None) -> tuple[Communicator, str]:
    """The default communicator of a method, and the reason. ``workers``: in total; ``per_machine``: on each machine.

    ``link``: between machines, or workers; None: not measured, so two stages have one level.
    """
    name = name_of(method.compressor)
    if method.compressor.traits.combine is not Combine.GATHER:
        return Allreduce(), f"payloads of {name!r} are summed on the wire, or agreed on"
    if 1 < per_machine < workers and workers % per_machine == 0:
        outer, why = choose(method, workers // per_machine, 1, link)
        return Hierarchical(outer, per_machine), f"exact within each machine; between machines {why}"
    if workers < 3:
        return Allgather(), "one round of payloads is as few bytes as two"
    twostage = TwoStage(min_shard=MIN_SHARD)
    if method.compressor.traits.family == "low rank":
        return Allgather(), "the factors of shards are together larger than those of the tensor"
    if twostage.refusal(method):
        waits = method.compressor.traits.waits_for_steps
        part = repr(name) if waits else f"memory {name_of(method.memory)!r}"
        return Allgather(), f"{part} forbids a second compression"
    why = f"{2 * (workers - 1) / workers:.3g} payloads per worker instead of {workers - 1}"
    if link is None or (levels := levels_for(workers, link)) == 1:
        return twostage, why
    twostage = replace(twostage, levels=levels)
    return twostage, f"{why}; {twostage.described(workers)}, as the link's latency suggests"


def levels_for(workers: int, link: LinkTimes) -> int:
    """The levels of two stages among so many workers: 1 below `MANY`, and more as long as each saves `SAVED`."""
    if workers < MANY:
        return 1
    best, least = 1, seconds(workers, 1, link)
    for levels in LEVELS:
        found = seconds(workers, levels, link)
        if len(factors(workers, levels)) < levels or found > least * (1 - SAVED):
            break
        best, least = levels, found
    return best


def seconds(workers: int, levels: int, link: LinkTimes) -> float:
    """Predicted seconds of the messages of one bucket."""
    grid = Grid(factors(workers, levels))
    sent = 2 * (workers - 1) / workers * PAYLOAD
    return 2 * len(grid.dims) * link.round + grid.messages * link.message + sent * link.byte


def measured(transport: Transport, workers: int, group: str) -> LinkTimes:
    """Measure the links of a group of ``workers``, all at once: the slowest worker's times, equal on all workers."""
    xp: Any = getattr(transport, "xp", None)
    rank = transport.group_rank(group)
    small, large = xp.zeros((8,), "uint8"), xp.zeros((PROBE // workers,), "uint8")
    near = [small if (worker - rank) % workers in (1, workers - 1) else None for worker in range(workers)]
    probes = (
        AllToAll(tuple(() if part is None else (part,) for part in near), group, mutual=True),
        AllToAll(((small,),) * workers, group),
        AllToAll(((large,),) * workers, group),
    )
    taken = []
    for number, probe in enumerate(probes):
        times = []
        for _ in range(1 + REPEATS):  # the first one may open connections
            begun = perf_counter()
            received = transport.start([probe], f"measure.{number}")()
            xp.to_numpy(received[0][(rank + 1) % workers][0])  # wait for a device
            times.append(perf_counter() - begun)
        taken.append(median(times[1:]))
    ((slowest,),) = transport.start([Reduce((xp.asarray(taken, "float32"),), "max")], "measure.agree")()
    first, all_, much = (float(each) for each in xp.to_numpy(slowest))
    message = max(0.0, (all_ - first) / (workers - 3))
    sent = PROBE // workers * (workers - 1)
    return LinkTimes(max(0.0, first - 2 * message), message, max(0.0, (much - all_) / sent))
