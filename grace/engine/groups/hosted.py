"""Groups for a toolkit with immutable arrays: NumPy's kernels run each round of an exchange as one operation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from grace.backends import Backend
from grace.core import Array, Context, Program
from grace.core.collectives import Collective, Reduce, arrays_of
from grace.engine.groups.cells import RowCell
from grace.engine.groups.exchanges import Group, filled

ALIGNED = 64
"""Alignment of results in bytes; TensorFlow uses arrays with this alignment without a copy."""


class GivenRows:
    """Stands in for a `RowTable`: each exchange is given the state as one vector, and returns the new state."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.flights: list[Any] = []
        self._ends = np.cumsum([0, *sizes])
        self._old = self._new = np.zeros(0, np.float32)
        self._kept = np.zeros(len(sizes), bool)

    def begin(self, state: Any) -> None:
        """Begin an exchange with this state, float32[n], which is not modified."""
        self.flights.clear()  # left over if the last exchange failed
        self._old, self._new = state, _empty(int(self._ends[-1]))
        self._kept[:] = False

    def end(self) -> Any:
        """Return the state after the exchange, with old values for arrays that did not `advance`."""
        found = self._new
        for number in np.flatnonzero(~self._kept).tolist():
            part = slice(self._ends[number], self._ends[number + 1])
            found[part] = self._old[part]
        self._old = self._new = np.zeros(0, np.float32)
        return found

    def old(self, which: Any) -> Any:
        return _addresses(self._old, self._ends)[which]

    def new(self, which: Any) -> Any:
        return _addresses(self._new, self._ends)[which]

    def advance(self, which: Any) -> None:
        self._kept[which] = True


class HostedGroup:
    """A `Group` of NumPy's backend that exchanges the arrays of another toolkit on this host, eagerly or in a graph.

    ``make`` builds NumPy's group; the other arguments are those of `Group`. Its work between two messages runs as one
    operation of the toolkit. Each exchange reads the state from ``cells``, and `store` writes it back. A graph needs a
    new object for each exchange.
    """

    def __init__(
        self,
        make: Callable[..., Group],
        xp: Backend,
        library: Any,
        method: Any,
        communicator: Any,
        contexts: Sequence[Context],
        cells: Sequence[Mapping[str, Any]],
    ):
        self._xp, host = xp, xp.host
        self._cells = [cell for each in cells for cell in each.values()]
        self._forms = [xp.shape(cell.read()) for cell in self._cells]  # shapes of the state's arrays
        self._rows = GivenRows([math.prod(form) for form in self._forms])
        numbers = iter(range(len(self._cells)))
        rows = [{key: RowCell(self._rows, next(numbers)) for key in each} for each in cells]
        self._group = make(host, library, method, communicator, [ctx._with(xp=host) for ctx in contexts], rows)
        self.rounds, self.traffic = self._group.rounds, self._group.traffic
        self._ends = np.cumsum([0, *(ctx.size for ctx in contexts)])
        self._program: Any = None  # the program of the current exchange
        self._x: Any = None  # its vectors, concatenated; with `overwrites`, finally the means

    def hold(self) -> None:
        """Do nothing: snapshots of the cells keep the state from before an exchange."""

    def undo(self) -> None:
        """Do nothing: the state is written only at the end of an exchange."""

    def places(self, vectors: Sequence[Array]) -> Sequence[Array]:
        """Return the vectors themselves, which `exchange` takes."""
        return vectors

    def exchange(self, x: Sequence[Array], step: Any) -> Program[list[Array]]:
        """Encode and send float32 arrays of any shape; return the argument ``landed`` of `finish`."""
        xp, joined = self._xp, self._xp.buffers.joined
        given, work = [xp.asarray(step, "int64"), joined(x)], self._begin
        if self._cells:
            given.append(joined([cell.read() for cell in self._cells]))
        for asked in self._group.asked:
            sent = xp.hosted(work, given, [(form.dtype, form.shape) for form in arrays_of(asked)])
            received = yield filled(asked, sent)
            given = list(received) if isinstance(asked, Reduce) else [array for (array,) in received]
            work = partial(self._go_on, asked)
        return given

    def finish(
        self, landed: list[Array], held: Sequence[bool] | None, judged: bool, zero: bool, shapes: Sequence[Any]
    ) -> tuple[list[Array], Array, list[Array]]:
        """Return the units' means in these shapes, whether each is finite, bool[units], and the new state for `store`.

        ``held``: the units that keep their new state if their means are finite; None: all. ``judged``: check the means;
        otherwise all count as finite. ``zero``: replace non-finite means by zeros.
        """

        count, xp = len(shapes), self._xp

        def work(*received: Any) -> list[Any]:
            landed = self._returned(received)
            finite = self._group.finite(landed) if judged else None
            ok = np.ones(count, bool) if finite is None else np.array(finite)
            kept = ok if held is None else ok & np.array(held)
            means = self._x if self._group.overwrites else _empty(int(self._ends[-1]))
            self._group.finish(landed, _addresses(means, self._ends).tolist(), None if kept.all() else kept.tolist())
            for number in np.flatnonzero(~ok).tolist() if zero else ():
                means[self._ends[number] : self._ends[number + 1]] = 0
            self._x = self._program = None
            return [means, ok, self._rows.end()]

        lengths = int(self._ends[-1]), sum(map(math.prod, self._forms))
        forms = [("float32", lengths[:1]), ("bool", (count,)), ("float32", lengths[1:])]
        means, ok, state = xp.hosted(work, landed, forms)
        parts = xp.split(means, np.diff(self._ends).tolist())
        found = [xp.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]
        new = xp.split(state, [math.prod(form) for form in self._forms]) if self._cells else []
        return found, ok, [xp.reshape(part, form) for part, form in zip(new, self._forms, strict=True)]

    def store(self, state: Sequence[Array]) -> None:
        """Commit the new state."""
        for cell, array in zip(self._cells, state, strict=True):
            cell.assign(array)

    # -- when it runs: NumPy arrays ------------------------------------------------------------------------------------
    def _begin(self, step: Any, x: Any, *state: Any) -> list[Any]:
        self._x = x
        if self._group.overwrites:
            self._x = _empty(len(x))
            self._x[...] = x
        if state:
            self._rows.begin(state[0])
        self._program = self._group.exchange(_addresses(self._x, self._ends).tolist(), int(step))
        return list(arrays_of(next(self._program)))

    def _go_on(self, asked: Collective, *received: Any) -> list[Any]:
        return list(arrays_of(self._program.send(_answer(asked, received))))

    def _returned(self, received: Sequence[Any]) -> Any:
        # Passes the last message to the group's program, and returns the program's result.
        try:
            self._program.send(_answer(self._group.asked[-1], received))
        except StopIteration as stop:
            return stop.value
        raise AssertionError("a group sends no more messages than it says")


def _answer(asked: Collective, received: Sequence[Any]) -> Any:
    # Copies sums, because the group may overwrite them; messages are only read.
    return tuple(map(np.array, received)) if isinstance(asked, Reduce) else [(array,) for array in received]


def _addresses(vector: Any, ends: Any) -> Any:
    # Returns int64[parts], the address of each part.
    return vector.ctypes.data + vector.itemsize * ends[:-1]


def _empty(size: int) -> Any:
    # Returns an uninitialised vector, float32[size], with `ALIGNED` memory.
    memory = np.empty(size + ALIGNED // 4, np.float32)
    begin = -memory.ctypes.data % ALIGNED // 4
    return memory[begin : begin + size]
