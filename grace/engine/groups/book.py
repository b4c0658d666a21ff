"""Divides the units of a message into groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from grace.backends import Backend
from grace.core import Context, Memory
from grace.engine.buckets import Unit
from grace.engine.groups.cells import RowCell
from grace.engine.levels import Way
from grace.kernels.host import HostKernels

KEPT = 64
"""Maximum number of cached layouts: one for each set of units sent together, at each combination of their levels."""
SMALL, MANY = 2**14, 16
"""Elements below which tensors in a switch form a group, and from how many such tensors on: their own operations are
faster, but take longer to trace at each level.
"""


class Grouped(NamedTuple):
    """Units that form one group."""

    name: str
    """The name of the group's program."""
    group: Any
    """A `Group`, or a `HostedGroup` if ``hosted``."""
    units: tuple[Unit, ...]
    counts: dict[str, list[int]]
    """By unit, the counts of one exchange for `Meter`: bytes sent, bytes received, and 1."""
    names: tuple[str, ...]
    """The name of each unit's tensor; empty unless every unit is a single float32 tensor."""
    name_set: frozenset[str]
    hosted: bool = False

    def places(self, flat: Mapping[Unit, Any]) -> Any:
        """Return the units' vectors in the form that the group's `exchange` takes: see `Group.places`."""
        return self.group.places([flat[unit] for unit in self.units])


class Joined(NamedTuple):
    """Stateless units of one tensor each, sent as one concatenated float32 vector: see `kinds.elementwise`."""

    name: str
    """The name of the vector's program."""
    way: Way | None
    """Method and communicator of the vector; None if it is sent uncompressed."""
    units: tuple[Unit, ...]
    names: tuple[str, ...]
    """The name of each unit's tensor."""
    counts: dict[str, list[int]]
    """As `Grouped.counts`; for a compressed vector, empty until the first exchange."""


class Layout(NamedTuple):
    """How the units of a message are divided into groups."""

    groups: Sequence[Grouped] = ()
    joined: Sequence[Joined] = ()
    rest: tuple[Unit, ...] = ()
    """The units that are exchanged one by one."""


class Parts(Protocol):
    """The parts of a `Setup` that a `GroupBook` uses."""

    ways: Any
    store: Any
    offload: Any
    method: Any
    options: Any

    @property
    def xp(self) -> Backend: ...
    def plain(self, unit: Unit, level: int) -> bool: ...
    def wire_dtype(self, unit: Unit, level: int) -> str: ...
    def context(self, unit: Unit, step: Any) -> Context: ...


class GroupBook:
    """Builds the groups of a Grace when their units are first exchanged together, and caches them."""

    def __init__(self, setup: Parts):
        self._setup = setup
        self._known: dict[Any, Layout] = {}
        self._triton: Any = None

    def of(self, levels: Mapping[Unit, int], switched: bool = False) -> Layout:
        """Return the layout of these units at their policy levels.

        ``switched``: the graph contains the exchange at every level, so many small tensors form a group.
        """
        xp = self._setup.xp
        host = xp if xp.mutable else xp.host
        kernels = None if host is None else host.kernels
        library = self._device_groups() or (kernels.library if isinstance(kernels, HostKernels) else None)
        if xp.tracing:
            return self._laid_out(levels, library, switched)  # not cached: a graph needs new groups per exchange
        key = (library, *levels.items())
        found = self._known.pop(key, None)
        if found is None:
            found = self._laid_out(levels, library)
        self._known[key] = found  # the most recently used last
        if len(self._known) > KEPT:
            del self._known[next(iter(self._known))]
        return found

    def _device_groups(self) -> Any:
        # Returns Triton's group kernels; None if there are none. They stay cached even if they fail: groups then use
        # plain functions, because the other workers still expect their messages.
        if self._triton is None and self._setup.store.rows is not None:
            self._triton = getattr(self._setup.xp.kernels, "groups", None)
        return self._triton

    def clear(self) -> None:
        """Drop all groups. Called when the tensors change."""
        self._known.clear()

    def _laid_out(self, levels: Mapping[Unit, int], library: Any, switched: bool = False) -> Layout:
        setup = self._setup
        alike: dict[Any, list[Unit]] = {}
        for unit, level in levels.items() if library is not None else ():
            if (key := self._kind(unit, level)) is not None:
                alike.setdefault(key, []).append(unit)
        hosted = not setup.xp.mutable
        groups = []
        for number, ((kind, level), units) in enumerate(alike.items()):
            method, communicator = setup.ways[level].method, setup.ways[level].communicator
            if hosted and setup.xp.kernels.whole(method.compressor):  # the toolkit's own operations copy less
                small = [unit for unit in units if switched and unit.size < SMALL]
                units = small if len(small) >= MANY else []
            if hosted and len(units) < 2:
                continue
            contexts = [setup.context(unit, 0) for unit in units]
            cells = [setup.store.cells_by_key(unit, levels[unit]) for unit in units]
            parts = (setup.xp, library, method, communicator, contexts, cells)
            group = _hosted(kind.make, *parts) if hosted else kind.make(*parts)
            counts = {unit.name: [*traffic, 1] for unit, traffic in zip(units, group.traffic, strict=True)}
            names = _names(units) if all(map(_simple, units)) else ()
            groups.append(Grouped(f"(group {number})", group, tuple(units), counts, names, frozenset(names), hosted))
        joined = self._joined(levels)
        together = {unit for each in groups for unit in each.units}
        together.update(unit for each in joined for unit in each.units)
        return Layout(groups, joined, tuple(unit for unit in levels if unit not in together))

    def _joined(self, levels: Mapping[Unit, int]) -> list[Joined]:
        setup, found = self._setup, []
        dense = tuple(unit for unit, level in levels.items() if self._joins_dense(unit, level))
        if dense:
            counts = {unit.name: [4 * unit.size, 4 * unit.size, 1] for unit in dense}
            found.append(Joined("(joined)", None, dense, _names(dense), counts))
        alike: dict[int, list[Unit]] = {}
        for unit, level in levels.items():
            if self._joins(unit, level):
                alike.setdefault(setup.ways.level(unit.name, level), []).append(unit)
        for level, units in alike.items():
            if len(units) > 1:
                found.append(Joined(f"(joined {level})", setup.ways[level], tuple(units), _names(units), {}))
        return found

    def _joins_dense(self, unit: Unit, level: int) -> bool:
        # Returns whether a unit is sent uncompressed, as float32, and has no state.
        setup = self._setup
        if not _simple(unit) or not setup.plain(unit, level) or setup.wire_dtype(unit, level) != "float32":
            return False
        if setup.ways.at(unit.name, level).communicator.reduce_scatters:
            return False
        memory = type(setup.method.memory)
        return memory.after_dense_mean is Memory.after_dense_mean and not setup.store.cells_by_key(unit, level)

    def _joins(self, unit: Unit, level: int) -> bool:
        # Returns whether a unit is compressed element by element, and has no state.
        from grace.engine.groups.kinds import elementwise  # deferred, since it imports methods

        setup = self._setup
        if not _simple(unit) or not self._compresses(unit, level) or setup.store.cells_by_key(unit, level):
            return False
        way = setup.ways.at(unit.name, level)
        return elementwise(way.method, way.communicator)

    def _compresses(self, unit: Unit, level: int) -> bool:
        # Returns whether a unit is compressed, by this thread rather than the pool, and without float16 means.
        offload = self._setup.offload
        return not (
            self._setup.plain(unit, level) or unit.narrow or (offload is not None and unit.name in offload.units)
        )

    def _kind(self, unit: Unit, level: int) -> Any:
        # Returns a key that is equal for all units of a group; None for a unit that is exchanged by itself.
        setup = self._setup
        if self._triton is None:
            from grace.engine.groups.kinds import kind_of  # deferred, since it imports the methods with kernels
        else:
            from grace.engine.groups.device_kinds import device_kind as kind_of

        if not self._compresses(unit, level) or unit.dtype != "float32":
            return None
        way, cells = setup.ways.at(unit.name, level), setup.store.cells_by_key(unit, level)
        judged = setup.store.any(unit, level) or setup.options.nonfinite != "poison"
        kind = kind_of(way.method, way.communicator, setup.context(unit, 0), cells, judged)
        if kind is None or (setup.xp.mutable and any(not isinstance(cell, RowCell) for cell in cells.values())):
            return None
        return kind, setup.ways.level(unit.name, level)


def _hosted(*parts: Any) -> Any:
    from grace.engine.groups.hosted import HostedGroup  # deferred, since it imports NumPy

    return HostedGroup(*parts)


def _simple(unit: Unit) -> bool:
    return len(unit.tensors) == 1 and unit.tensors[0].dtype == "float32"


def _names(units: Sequence[Unit]) -> tuple[str, ...]:
    return tuple(unit.tensors[0].name for unit in units)
