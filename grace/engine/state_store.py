"""The state store: each unit's state at every policy level, and how it changes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from grace.backends import Backend
from grace.core import Array, Context, Resize, State, apart, name_of
from grace.engine.buckets import Unit
from grace.engine.groups.cells import RowCell
from grace.engine.levels import Way, Ways
from grace.engine.policy_runner import Schedule
from grace.engine.reshard import CARRIED, Points, parsed, sharing

if TYPE_CHECKING:
    from grace.engine.groups.rows import RowTable

IN_ROWS = ("memory/residual", "memory/momentum", "memory/estimate", "memory/mean", "compressor/p", "compressor/q")
"""Endings of the keys of arrays that a `RowTable` holds, if there is one."""
Cells = dict[str, Any]
"""A state's arrays by key, each in a cell of the backend."""


class Fitted(NamedTuple):
    """A checkpoint array and the cell that it goes to."""

    unit: str
    key: str
    cell: Any
    array: Array


class Snapshot:
    """Copies of state arrays from before an exchange that may be discarded.

    Mutable arrays are copied to memory that is reused; an immutable array serves as its own copy. A `RowTable` keeps
    the previous values of its own cells.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._memory: dict[int, Array] = {}
        self._taken: dict[int, tuple[Any, Array]] = {}  # cells with their copies

    def take(self, xp: Backend, cell: Any) -> None:
        """Copy a cell's array, unless it was copied since the last `release` or `restore`."""
        if isinstance(cell, RowCell):
            cell.hold()
            return
        if id(cell) in self._taken:
            return
        copy = value = cell.read()
        if xp.mutable:
            copy = self._memory.get(id(cell))
            if copy is None or xp.shape(copy) != xp.shape(value):
                copy = self._memory[id(cell)] = xp.buffers.copy(value)
            else:
                xp.buffers.write(copy, value)
        self._taken[id(cell)] = cell, copy

    def read(self, cell: Any) -> Array | None:
        """The copied array of a cell; None without a valid copy."""
        if isinstance(cell, RowCell):
            return cell.before()
        return self._taken[id(cell)][1] if id(cell) in self._taken else None

    def restore(self, xp: Backend, cells: Iterable[Any] | None = None) -> None:
        """Restore cells from their copies, by default all of them."""
        rows, others = self._apart(cells)
        if self._store.rows is not None:
            self._store.rows.restore(rows)
        for cell in others:
            if (copy := self.read(cell)) is not None:
                self._assign(xp, cell, copy)

    def choose(self, xp: Backend, when: Array, cells: Iterable[Any]) -> None:
        """Restore cells from their copies unless the flag, bool[], is true."""
        cells = list(cells)
        rows, others = self._apart(cells)
        if rows and xp.can_read_values:
            return self.release(cells) if when else self.restore(xp, cells)
        if rows and self._store.rows is not None:
            self._store.rows.choose(when, rows)
        for cell in others:
            if (copy := self.read(cell)) is not None:
                self._assign(xp, cell, xp.choose(when, cell.read(), copy))

    def release(self, cells: Iterable[Any] | None = None) -> None:
        """Invalidate copies, by default all of them."""
        rows, others = self._apart(cells)
        if self._store.rows is not None:
            self._store.rows.release(rows)
        for cell in others:
            self._taken.pop(id(cell), None)

    def _apart(self, cells: Iterable[Any] | None) -> tuple[list[int] | None, list[Any]]:
        # Returns the row numbers of the cells in the `RowTable` (None: all rows), and the other cells.
        if cells is None:
            return None, [cell for cell, _ in self._taken.values()]
        cells = list(cells)
        rows = [cell.number for cell in cells if isinstance(cell, RowCell)]
        return rows, [cell for cell in cells if not isinstance(cell, RowCell)]

    def _assign(self, xp: Backend, cell: Any, value: Array) -> None:
        if xp.mutable:
            xp.buffers.write(cell.read(), value)
        else:
            cell.assign(value)
        del self._taken[id(cell)]


class StateStore:
    """The state of all units. In a step, `commit` and `commit_carried` change it, and groups write to `rows`."""

    def __init__(self, ways: Ways, schedule: Schedule | None):
        self._ways, self._schedule = ways, schedule
        self._xp: Backend | None = None
        self.rows: RowTable | None = None
        """Holds the arrays of `IN_ROWS`, on hosts and on devices with kernels."""
        self._cells: dict[str, list[Cells]] = {}  # each unit's state, by unit and level
        self._carrying: set[str] = set()  # units that may carry a residual, as far as the host knows

    def bind(self, xp: Backend) -> None:
        """Set the backend, before any unit is added."""
        self._xp = xp
        if xp.mutable and (xp.can_read_values or xp.kernels):
            from grace.engine.groups.rows import RowTable  # imports NumPy

            self.rows = RowTable(xp)

    @property
    def xp(self) -> Backend:
        """The backend."""
        assert self._xp is not None, "bind first"
        return self._xp

    @property
    def switches(self) -> bool:
        """Whether the levels are different methods instead of one method with different fields."""
        return self._schedule is not None and self._schedule.policy.switches_methods

    def strategy(self, unit: Unit, level: int) -> str:
        """The strategy of a unit in a plan; empty without a plan."""
        return "" if unit.dense else self._ways.at(unit.name, level).communicator.strategy(unit.name)

    def _layout(self, unit: Unit, level: int) -> str:
        # Returns a text. Levels with equal texts share the state that outlasts a change of level; between levels with
        # different texts, the residual is carried to the next gradient.
        return self._ways.at(unit.name, level).layout if self.switches else self.strategy(unit, level)

    def _alike(self, unit: Unit, level: int) -> list[Cells]:
        # Returns the existing cells of all levels with the same layout as this one.
        cells = self._cells[unit.name]
        layout = self._layout(unit, level)
        return [held for each, held in enumerate(cells) if self._layout(unit, each) == layout]

    def strategies(self, levels: Mapping[str, int], names: Iterable[str]) -> dict[str, str]:
        """Strategies by name, including those of dense units; omits units without a plan."""
        each = {name: self._ways.at(name, levels.get(name, 0)).communicator.strategy(name) for name in names}
        return {name: text for name, text in each.items() if text}

    # -- units ------------------------------------------------------------------------------------------------------
    def add(self, unit: Unit, states: Sequence[State]) -> None:
        """Add a unit, with its initial state at each level."""
        self._cells[unit.name] = []
        for level, state in enumerate(states):
            self._cells[unit.name].append(self._made(unit, level, state))
        if not unit.dense and len({self._layout(unit, level) for level in range(len(self._ways))}) > 1:
            carried = self.xp.cell(self.xp.zeros(math.prod(unit.shape)))
            for cells in self._cells[unit.name]:
                cells[CARRIED] = carried

    def _made(self, unit: Unit, level: int, state: State) -> Cells:
        # State that outlasts a change of level is shared with the earlier levels of the same layout.
        xp, cells, way, before = self.xp, {}, self._ways.at(unit.name, level), self._alike(unit, level)
        for number, (key, value) in enumerate(state.items()):
            old = next((held[key] for held in before if key in held), None)
            if before and _lasting(key, way) and not (old is None and self.switches):
                if old is None or xp.shape(old.read()) != xp.shape(value):
                    policy = self._schedule and name_of(self._schedule.policy)
                    raise ValueError(
                        f"{key!r} of {unit.name!r} outlasts a change of level, but its shape differs between levels of "
                        f"policy {policy!r}: use levels whose fields do not affect it"
                    )
                cells[key] = old
            else:  # it will be written to, so it must not share memory with an earlier array
                (own,) = apart((value,), tuple(state.values())[:number], xp)
                in_rows = self.rows is not None and key.endswith(IN_ROWS) and xp.dtype(own) == "float32"
                cells[key] = self.rows.add(own) if self.rows is not None and in_rows else xp.cell(own)
        return cells

    def detach(self, units: Iterable[Unit]) -> dict[Unit, list[Cells]]:
        """The state of these units, for `attach`; all other state is dropped."""
        cells, self._cells = self._cells, {}
        return {unit: cells[unit.name] for unit in units}

    def attach(self, unit: Unit, cells: list[Cells]) -> None:
        """Set a unit's state to a detached one."""
        self._cells[unit.name] = cells

    # -- a step -----------------------------------------------------------------------------------------------------
    def any(self, unit: Unit, level: int) -> bool:
        """Return whether a unit has state at this level."""
        return bool(self._cells[unit.name][level])

    def cells(self, unit: Unit, level: int | None) -> list[Any]:
        """The cells of a unit's state at a level (None: at all levels); empty for a dense tensor without state."""
        levels = self._cells[unit.name]
        chosen = levels if level is None else levels[level : level + 1]
        return list(dict.fromkeys(cell for cells in chosen for cell in cells.values()))

    @property
    def carries(self) -> bool:
        """Whether a change of strategy has left a residual that is yet to be sent."""
        return bool(self._carrying)

    def cells_by_key(self, unit: Unit, level: int) -> Cells:
        """The cells of a unit's state at a level, without the carried residual."""
        return {key: cell for key, cell in self._cells[unit.name][level].items() if key != CARRIED}

    def note_carried(self) -> None:
        """Mark all units with a carried residual again, after cells were restored."""
        self._carrying |= {name for name, levels in self._cells.items() if levels and CARRIED in levels[0]}

    def state(self, unit: Unit, level: int) -> State:
        """The current arrays."""
        return {key: cell.read() for key, cell in self._cells[unit.name][level].items()}

    def with_carried(self, unit: Unit, x: Array) -> Array:
        """A gradient plus the residual that a change of strategy left."""
        cell = self.carried(unit)
        return x if cell is None else x + cell.read()  # not in place: for a dense tensor, x may be the user's gradient

    def commit(self, unit: Unit, level: int, state: State, ok: Array, x: Array) -> None:
        """Commit a step's new state if ``ok``, bool[]. State in x, which receives the mean, is copied."""
        for key, cell in self._cells[unit.name][level].items():
            if key != CARRIED:
                self._assign(cell, ok, state[key], x)
        self.commit_carried(unit, ok, x)

    def commit_carried(self, unit: Unit, ok: Array, x: Array) -> None:
        """If ``ok``, bool[], zero the residual that a change of strategy left: x includes it, so it has been sent."""
        if (carried := self.carried(unit)) is not None:
            self._assign(carried, ok, self.xp.zeros(self.xp.shape(x)[0], unit.dtype), x)
            if not self.xp.traced and ok:
                self._carrying.discard(unit.name)

    def zero_residuals(self, unit: Unit, level: int) -> None:
        """Zero a unit's residuals."""
        for key, cell in self._cells[unit.name][level].items() if self._cells[unit.name] else ():
            if key == CARRIED or parsed(key)[2] == "residual":
                cell.assign(self.xp.zeros(self.xp.shape(cell.read()), self.xp.dtype(cell.read())))

    def carried(self, unit: Unit) -> Any:
        """The cell of the residual that a change of strategy left, if it may be non-zero; else None."""
        cell = self._cells[unit.name][0].get(CARRIED)
        return cell if self.xp.traced or unit.name in self._carrying else None

    def _assign(self, cell: Any, ok: Array, new: Array, x: Array) -> None:
        xp, old = self.xp, cell.read()
        if new is old:
            return
        inside = xp.buffers.overlap(new, x)
        if isinstance(cell, RowCell) and xp.can_read_values:
            if ok:
                (cell.store if inside else cell.assign)(new)
        elif isinstance(cell, RowCell):
            cell.assign(xp.choose(ok, new, old))
        elif inside:
            xp.buffers.write(old, xp.choose(ok, new, old))
        else:
            cell.assign(xp.choose(ok, new, old))

    def _last(self, cell: Any, snapshot: Snapshot) -> Array:
        # Returns a state array as it was at the beginning of the current step.
        before = snapshot.read(cell)
        return cell.read() if before is None else before

    # -- a change of level ------------------------------------------------------------------------------------------
    def enter(self, unit: Unit, before: int, level: int, state: State, ctx: Context) -> None:
        """Move a unit to another level. State that does not survive the change is reset to ``state``.

        ``ctx``: the unit's context on this worker. The residual of an abandoned strategy is carried to the next
        gradient.
        """
        elsewhere = self._layout(unit, before) != self._layout(unit, level)
        if elsewhere:
            self._carry(unit, before, ctx)
        for key, value in state.items():
            if elsewhere or not _lasting(key, self._ways.at(unit.name, level)):
                self._cells[unit.name][level][key].assign(self.xp.buffers.copy(value))

    def _carry(self, unit: Unit, level: int, ctx: Context) -> None:
        # Add the residuals of all compression points of the old level to this worker's next gradient. In the mean, such
        # a residual has weight 1 / holders, but a gradient has 1 / workers: scale by workers / holders.
        xp = self.xp
        cells = {key: cell for held in self._alike(unit, level) for key, cell in held.items()}
        everybody = [self.points(unit, level, replace(ctx, rank=rank)) for rank in range(ctx.world_size)]
        places = [{name: (at.offset, at.size) for name, (_, at) in points.items()} for points in everybody]
        total = cells[CARRIED].read()
        for key, cell in cells.items():
            point, part, field = parsed(key)
            if key == CARRIED or point not in everybody[ctx.rank]:  # another level's compressor may have other points
                continue
            if everybody[ctx.rank][point][0].reshard(part).get(field) is not Resize.SUM:
                continue
            start, size = places[ctx.rank][point]
            share = ctx.world_size / sharing(point, (start, size), places)
            rest = math.prod(unit.shape) - start - size
            total = total + xp.concat([xp.zeros(start), cell.read() * share, xp.zeros(rest)])
            cell.assign(xp.zeros(size, xp.dtype(cell.read())))
        cells[CARRIED].assign(total)
        self._carrying.add(unit.name)

    def points(self, unit: Unit, level: int, ctx: Context) -> Points:
        """The points at which the worker of ``ctx`` compresses a unit, with the method and context of each.

        A dense unit has one point, which holds only the memory's state.
        """
        way = self._ways.at(unit.name, level)
        if self.switches and not way.layout:  # all levels share one memory
            memories = (each.method.memory for each in self._ways)
            memory = next((memory for memory in memories if memory.feedback), way.method.memory)
            return {"": (replace(way.method, memory=memory), ctx)}
        return {"": (way.method, ctx)} if unit.dense else way.communicator.compression_points(way.method, ctx)

    # -- checkpoints ------------------------------------------------------------------------------------------------
    def export(self, levels: Mapping[str, int], snapshot: Snapshot) -> dict[str, dict[str, Any]]:
        """All state at these levels for a checkpoint, as it was before an unfinished step."""
        return {
            unit: {key: self.xp.exported(self._last(cell, snapshot)) for key, cell in cells.items()}
            for unit, cells in self.held(levels).items()
        }

    def held(self, levels: Mapping[str, int]) -> dict[str, Cells]:
        """The cells of each unit with state at these levels, including those that survive a change of method."""
        held = {unit: cells[levels.get(unit, 0)] for unit, cells in self._cells.items()}
        if self.switches:
            for unit, cells in self._cells.items():
                layout, ways = self._ways.at(unit, levels.get(unit, 0)).layout, self._ways.of(unit)
                pairs = [(way, each) for way, each in zip(ways, cells, strict=False) if way.layout == layout]
                lasting = {key: cell for way, each in pairs for key, cell in each.items() if _lasting(key, way)}
                held[unit] = {**lasting, **held[unit]}
        return {unit: cells for unit, cells in held.items() if cells}

    def load(self, fitted: Iterable[Fitted]) -> None:
        """Replace the state with these arrays."""
        xp = self.xp
        for unit, levels in self._cells.items() if self.switches else ():
            # Zero the lasting state of all levels first: the checkpoint may have none for levels of another layout.
            for way, cells in zip(self._ways.of(unit), levels, strict=False):
                for cell in (cell for key, cell in cells.items() if _lasting(key, way)):
                    cell.assign(xp.zeros(xp.shape(cell.read()), xp.dtype(cell.read())))
        for unit, key, cell, array in fitted:
            cell.assign(array)
            if key == CARRIED:  # the cell is new if the tensor goes dense now
                for cells in self._cells[unit]:
                    cells[CARRIED] = cell
                self._carrying.add(unit)

    # -- report -----------------------------------------------------------------------------------------------------
    def norms(self, units: Iterable[Unit], levels: Mapping[str, int], snapshot: Snapshot) -> dict[str, float]:
        """The L2 norm of each unit's residuals, if it has any; waits for a device once."""
        xp, held, squares = self.xp, self.held(levels), {}
        for unit in units:
            cells = held.get(unit.name, {})
            arrays = [self._last(cell, snapshot) for key, cell in cells.items() if key.endswith("memory/residual")]
            if arrays:
                squares[unit.name] = sum(xp.sum(array * array) for array in arrays)
        if not squares:
            return {}
        found = xp.to_numpy(xp.concat([xp.reshape(square, (1,)) for square in squares.values()])).tolist()
        return {name: square**0.5 for name, square in zip(squares, found, strict=True)}


def _lasting(key: str, way: Way) -> bool:
    # Returns whether an array survives a change of level: those of a memory, or of a compressor with its own feedback.
    return parsed(key)[1] == "memory" or way.method.compressor.traits.internal_feedback
