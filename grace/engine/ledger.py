"""The ledger: keeps exchanges until they are decided, and counts the steps that were applied."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from grace.engine.reporter import Reporter
from grace.engine.setup import Setup


class Ledger:
    """Commits or discards the exchanges of a Grace, tensor by tensor, and counts its steps."""

    def __init__(self, setup: Setup, reporter: Reporter):
        self._setup, self._reporter = setup, reporter
        self._late: list[tuple[int, Callable[[], Any]]] = []  # steps counted before a device's flag was known

    def enter(self, names: list[str]) -> None:
        """Enter an exchange of these tensors: as undecided with `defer_commit`; otherwise count it as a step."""
        if self._setup.defer_commit:
            self._setup.windows.add(names)
        else:
            self._setup.snapshot.release()
            self._count(1)

    def decide(self, applied: Iterable[str], discarded: Iterable[str], when: Any) -> None:
        """See `Averager.decide`."""
        windows, known = self._setup.windows, self._setup.windows.names
        tracing = self._setup.bound and self._setup.xp.tracing
        kept = list(dict.fromkeys(name for name in applied if name in known))
        undone = list(dict.fromkeys(name for name in discarded if name in known).keys() - set(kept))
        if kept:
            self._keep(kept, when)
            self._count(windows.close(kept, True, tracing), when)
        if undone:
            self._undo(undone)
            self._reporter.discarded += windows.close(undone, False, tracing)

    def fail(self, names: Iterable[str]) -> None:
        """Restore the state before a failed exchange, and before the undecided ones of its tensors."""
        windows = self._setup.windows
        if names := list(dict.fromkeys(names)):
            windows.close([name for name in names if name in windows], False)
            self._undo(names)

    def _undo(self, names: list[str]) -> None:
        setup = self._setup
        setup.snapshot.restore(setup.xp, self._cells(names))
        setup.store.note_carried()
        if setup.defer_commit and not setup.keeps_base:
            for unit in dict.fromkeys(map(setup.table.unit, names)):
                setup.store.zero_residuals(unit, setup.level(unit))
                self._reporter.notes[unit.name] = "its residuals were zeroed where a step's means were discarded"

    def _keep(self, names: list[str], when: Any) -> None:
        setup = self._setup
        if when is not None:
            setup.snapshot.choose(setup.xp, when, self._cells(names))
        elif len(names) == len(setup.windows):
            setup.snapshot.release()
        else:
            setup.snapshot.release(self._cells(names))

    def _cells(self, names: list[str]) -> list[Any]:
        units = dict.fromkeys(map(self._setup.table.unit, names))
        return [cell for unit in units for cell in self._setup.cells(unit)]

    def _count(self, steps: int, when: Any = None) -> None:
        # In a graph, steps count if the flag is true. On a device, `look_back` corrects the count.
        setup = self._setup
        if not steps:
            return
        setup.attempt = 0
        count: Any = steps
        if when is not None and setup.xp.traced:
            count = steps * setup.xp.cast(when, "int64")
        elif when is not None:
            self._late.append((steps, setup.xp.buffers.fetch(when)))
        setup.step.assign(setup.step.read() + count)
        setup.trace.end_step()
        self._reporter.step_passed()

    def look_back(self) -> None:
        """Uncount steps whose device flag is false. Called before each exchange: random streams use the step number."""
        for steps, flag in self._late:
            if not flag():
                self._setup.step.assign(self._setup.step.read() - steps)
                self._reporter.discarded += steps
        self._late.clear()
