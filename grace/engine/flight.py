"""A launched message: the programs of its units and groups, which the scheduler runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from grace.core import Array, Combine, Program
from grace.core.collectives import Reduce
from grace.core.method import Undecoded
from grace.engine.buckets import Unit
from grace.engine.groups.book import Joined, Layout
from grace.engine.scheduler import RoundScheduler
from grace.engine.setup import DENSE, PRESENT, SAMPLE, Setup

Vectors = Mapping[Unit, Array]


class Flight:
    """The units of one message, their gradients as vectors, and the exchange of these vectors.

    ``flat``: each unit's vector, whose memory may be reused for the mean. ``levels``: each unit's policy level.
    ``layout``: the groups among the units. ``presence``: header and gradient flags, to sum over the workers; may be
    empty. ``sample``: elements of some units, float32[n], to average exactly. ``last``: the previous message.
    ``donated``: the tensors whose gradients may be overwritten.
    """

    def __init__(
        self,
        setup: Setup,
        name: str,
        flat: Vectors,
        levels: Mapping[Unit, int],
        layout: Layout,
        presence: Sequence[float] = (),
        sample: Array | None = None,
        last: RoundScheduler | None = None,
        donated: Set[str] = frozenset(),
    ):
        self._setup, self.flat, self.levels, self.layout = setup, flat, levels, layout
        self._donated = donated
        self.step = setup.step.read()
        self.begun = 1
        """Number of rounds begun before the end of the backward pass."""
        self.plain = dict.fromkeys(unit for unit in layout.rest if setup.plain(unit, levels[unit]))
        """Units that are sent uncompressed, each as a separate array. The dictionary serves as an ordered set."""
        xp = setup.xp
        programs: dict[str, Program[Any]] = {}
        for each in layout.groups:
            programs[each.name] = each.group.exchange(each.places(flat), self.step)
        programs |= {unit.name: self._program(unit) for unit in layout.rest if unit not in self.plain}
        programs |= {each.name: self._joined(each) for each in layout.joined}
        if self.plain:
            sent = (xp.cast(flat[unit], setup.wire_dtype(unit, levels[unit])) for unit in self.plain)
            programs[DENSE] = _reduced(tuple(sent), "mean")
        if presence:
            programs[PRESENT] = _first(_reduced((xp.asarray(presence, "float32"),), "sum"))
        if sample is not None:
            programs[SAMPLE] = _reduced((sample,), "mean")
        with xp.quiet():
            before = None if last is None or last.depart() else last
            label = f"{name}.of{setup.number}" if setup.number else name  # a name that TensorFlow accepts
            try:
                self.scheduler = RoundScheduler(label, programs, setup.transport, setup.trace, setup.offload, before)
            except BaseException:
                self.undo()
                raise

    @property
    def rounds(self) -> int:
        """Minimum number of messages that it sends, one after the other."""
        layout, ways = self.layout, self._setup.ways
        each = [ways.at(unit.name, self.levels[unit]) for unit in layout.rest if unit not in self.plain]
        agreed = any(way.method.compressor.traits.combine is Combine.AGREED for way in each)
        rounds = [way.communicator.rounds for way in each] + [grouped.group.rounds for grouped in layout.groups]
        return max([1 + agreed, *rounds])

    def _program(self, unit: Unit) -> Program[Any]:
        setup, level = self._setup, self.levels[unit]
        way = setup.ways.at(unit.name, level)
        ctx = setup.context(unit, self.step, {})
        return way.communicator.reduce(self.flat[unit], way.encoder, setup.store.state(unit, level), ctx)

    def _joined(self, joined: Joined) -> Program[Array]:
        setup, way = self._setup, joined.way
        donated = self._donated >= set(joined.names)
        whole = setup.xp.buffers.joined([self.flat[unit] for unit in joined.units], donated)
        if way is None:
            return _first(_reduced((whole,), "mean", True))
        ctx = setup.context(joined.units[0], self.step)._with(name=joined.name, shape=tuple(whole.shape))
        return _decoded(way.communicator.reduce(whole, way.encoder, {}, ctx), whole)

    def undo(self) -> None:
        """Restore the groups' state from before the exchange, unless the exchange has been committed."""
        for each in self.layout.groups:
            each.group.undo()


def averaged(setup: Setup, name: str, sample: Array) -> tuple[Array, list[Any]]:
    """The exact mean of a sample, by a message of its own, and the counts of its bytes."""
    programs = {SAMPLE: _reduced((sample,), "mean")}
    scheduler = RoundScheduler(f"{name}.sample", programs, setup.transport, setup.trace)
    while not scheduler.advance():
        pass
    counts = setup.meter.count([SAMPLE], scheduler.asked, setup.transport.group_rank, {})
    return scheduler.results[SAMPLE][0], counts[SAMPLE]


def _reduced(arrays: tuple[Array, ...], op: Any, donated: bool = False) -> Program[tuple[Array, ...]]:
    found = yield Reduce(arrays, op, donated=donated)
    return found


def _first(program: Program[tuple[Array, ...]]) -> Program[Array]:
    (found,) = yield from program
    return found


def _decoded(program: Program[tuple[Any, Any]], out: Array) -> Program[Array]:
    # Returns the mean of a program without a state, decoded to ``out`` if it is not yet decoded.
    mean, _ = yield from program
    return mean.array(out) if isinstance(mean, Undecoded) else mean
