"""Groups of a toolkit whose arrays cannot be written to: NumPy's kernels run them, by one operation for each round."""

from __future__ import annotations

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
"""Alignment in bytes of results, which TensorFlow then takes without a copy."""


class GivenRows:
    """Does for arrays that come with each exchange, and go with its end, what a `RowTable` does for its own."""

    def __init__(self) -> None:
        self.flights: list[Any] = []
        self._old: list[Any] = []
        self._new: list[Any] = []
        self._kept = np.zeros(0, bool)

    def begin(self, arrays: Sequence[Any]) -> None:
        """Take the state before an exchange, float32 arrays, which keep their values."""
        self.flights.clear()  # of an exchange that has failed
        self._old, self._new = list(arrays), _empty([array.shape for array in arrays])
        self._kept = np.zeros(len(arrays), bool)

    def end(self) -> list[Any]:
        """The state after the exchange."""
        found = [new if kept else old for old, new, kept in zip(self._old, self._new, self._kept, strict=True)]
        self._old, self._new = [], []
        return found

    def old(self, which: Any) -> Any:
        return _addresses(self._old)[which]

    def new(self, which: Any) -> Any:
        return _addresses(self._new)[which]

    def advance(self, which: Any) -> None:
        self._kept[which] = True


class HostedGroup:
    """A `Group` of NumPy's backend that exchanges the arrays of another toolkit on this host, eagerly or in a graph.

    The arguments are those of a `Group`, with ``make``, its class, whose work between two messages becomes one
    operation. The state comes from ``cells`` in each exchange and returns there. In a graph it serves one exchange.
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
        self._xp, self._rows, host = xp, GivenRows(), xp.host
        self._cells = [cell for each in cells for cell in each.values()]
        numbers = iter(range(len(self._cells)))
        rows = [{key: RowCell(self._rows, next(numbers)) for key in each} for each in cells]
        self._group = make(host, library, method, communicator, [ctx._with(xp=host) for ctx in contexts], rows)
        self.rounds, self.traffic = self._group.rounds, self._group.traffic
        self._shapes = [(ctx.size,) for ctx in contexts]
        self._forms: list[tuple[str, Any]] = []  # of the state's arrays
        self._program: Any = None  # of the exchange that runs
        self._x: list[Any] = []  # its vectors, which receive the means

    def hold(self) -> None:
        """The cells' snapshots keep the state before an exchange."""

    def undo(self) -> None:
        """The state is only written at the end of an exchange."""

    def places(self, vectors: Sequence[Array]) -> Sequence[Array]:
        """What `exchange` takes: the vectors themselves."""
        return vectors

    def exchange(self, x: Sequence[Array], step: Any) -> Program[list[Array]]:
        """Encode float32 arrays of any shape, and send them; returns what `finish` needs."""
        xp, state = self._xp, [cell.read() for cell in self._cells]
        self._forms = [("float32", xp.shape(array)) for array in state]
        given, work = [xp.asarray(step, "int64"), *x, *state], self._begin
        for asked in self._group.asked:
            sent = xp.hosted(work, given, [(form.dtype, form.shape) for form in arrays_of(asked)])
            received = yield filled(asked, sent)
            given = list(received) if isinstance(asked, Reduce) else [array for (array,) in received]
            work = partial(self._go_on, asked)
        return given

    def finish(
        self, landed: list[Array], held: Sequence[bool] | None, judged: bool, zero: bool, shapes: Sequence[Any]
    ) -> tuple[list[Array], Array, list[Array]]:
        """The units' means in these shapes, whether each is finite, bool[units], and the new state for `store`.

        ``held``: which units keep their new state if their means are finite. Unless ``judged``, all count as finite;
        ``zero``: means that are not become zeros.
        """

        def work(*received: Any) -> list[Any]:
            landed = self._returned(received)
            finite = self._group.finite(landed) if judged else None
            ok = np.ones(len(shapes), bool) if finite is None else np.array(finite)
            kept = ok if held is None else ok & np.array(held)
            means = _empty(shapes)
            if self._group.overwrites:
                means = [x.reshape(shape) for x, shape in zip(self._x, shapes, strict=True)]
            self._group.finish(landed, _addresses(means).tolist(), None if kept.all() else kept.tolist())
            for number in np.flatnonzero(~ok).tolist() if zero else ():
                means[number][...] = 0
            self._x, self._program = [], None
            return [*means, ok, *self._rows.end()]

        count = len(shapes)
        forms = [*(("float32", shape) for shape in shapes), ("bool", (count,)), *self._forms]
        found = self._xp.hosted(work, landed, forms)
        return found[:count], found[count], found[count + 1 :]

    def store(self, state: Sequence[Array]) -> None:
        """Commit the new state."""
        for cell, array in zip(self._cells, state, strict=True):
            cell.assign(array)

    # -- when it runs: NumPy arrays ------------------------------------------------------------------------------------
    def _begin(self, step: Any, *arrays: Any) -> list[Any]:
        count = len(self._shapes)
        self._x = list(arrays[:count])
        if self._group.overwrites:
            self._x = _empty(self._shapes)
            for mine, x in zip(self._x, arrays, strict=False):
                mine[...] = x.reshape(-1)
        self._rows.begin(arrays[count:])
        self._program = self._group.exchange(_addresses(self._x).tolist(), int(step))
        return list(arrays_of(next(self._program)))

    def _go_on(self, asked: Collective, *received: Any) -> list[Any]:
        return list(arrays_of(self._program.send(_answer(asked, received))))

    def _returned(self, received: Sequence[Any]) -> Any:
        # What the group's program returns after its last message.
        try:
            self._program.send(_answer(self._group.asked[-1], received))
        except StopIteration as stop:
            return stop.value
        raise AssertionError("a group sends no more messages than it says")


def _answer(asked: Collective, received: Sequence[Any]) -> Any:
    # Sums may be written to; messages are only read.
    return tuple(map(np.array, received)) if isinstance(asked, Reduce) else [(array,) for array in received]


def _addresses(arrays: Sequence[Any]) -> Any:
    return np.array([array.__array_interface__["data"][0] for array in arrays], np.int64)


def _empty(shapes: Sequence[Any]) -> list[Any]:
    # Uninitialised float32 arrays in one piece of memory.
    sizes = [int(np.prod(shape)) for shape in shapes]
    each = ALIGNED // 4
    ends = np.cumsum([0, *(-(-size // each) * each for size in sizes)]).tolist()
    memory = np.empty(ends[-1] + each, np.float32)
    begin = -memory.ctypes.data % ALIGNED // 4
    return [
        memory[begin + start : begin + start + size].reshape(shape)
        for start, size, shape in zip(ends, sizes, shapes, strict=False)
    ]
