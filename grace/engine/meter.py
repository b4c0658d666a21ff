"""Counts bytes of the arrays that are sent and received."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from grace.backends.base import Array, Backend
from grace.core.collectives import AllToAll, Broadcast, Collective, Gather, arrays_of
from grace.core.gathered import GatheredPayloads


class Meter:
    """Counts by unit: bytes sent, bytes received, and exchanges."""

    def __init__(self, xp: Backend):
        self._xp = xp
        self._totals: dict[str, list[int]] = {}
        self._repeated: dict[int, tuple[Mapping[str, Sequence[int]], int]] = {}  # by id: counts, number of exchanges
        # in graphs: lists of units, each with a cell of their counts, int64[units, 3]
        self._segments: list[tuple[list[str], Any]] = []

    def extend(self, names: list[str]) -> None:
        """Start counting for these units."""
        self._totals.update({name: [0, 0, 0] for name in names})
        if self._xp.traced:
            # A graph counts when it runs; its cell remains in use if units are added later.
            self._segments.append((names, self._xp.cell(self._xp.zeros((len(names), 3), "int64"))))

    def count(
        self,
        units: Iterable[str],
        exchanged: Iterable[tuple[str, Collective, Any]],
        rank_in: Callable[[str], int],
        dense: Mapping[str, int],
    ) -> dict[str, list[Any]]:
        """The counts of one exchange of these units, from each unit's collectives and their results.

        ``rank_in``: this worker's rank in a group, by the group's name. ``dense``: bytes of units that were averaged
        uncompressed.
        """
        counts: dict[str, list[Any]] = {unit: [dense.get(unit, 0), dense.get(unit, 0), 1] for unit in units}
        for unit, collective, result in exchanged:
            rank = rank_in(collective.group)
            counts[unit][0] += self._sent(collective, rank)
            counts[unit][1] += self._received(collective, result, rank)
        return counts

    def add(self, counts: Mapping[str, Sequence[Any]]) -> None:
        """Add the counts of an exchange to the totals."""
        for names, cell in self._segments:
            if any(name in counts for name in names):
                rows = [counts.get(name, [0, 0, 0]) for name in names]
                cell.assign(cell.read() + self._xp.asarray(rows, "int64"))
        if not self._segments:
            for unit, row in counts.items():
                self._totals[unit] = [a + b for a, b in zip(self._totals[unit], row, strict=True)]

    def add_rows(self, names: Sequence[str], rows: Array) -> None:
        """`add`, in a graph: the counts are int64[names, 3]."""
        xp, place = self._xp, {name: number for number, name in enumerate(names)}
        rows = xp.concat([rows, xp.zeros((1, 3), "int64")])  # the last row: zeros for all other units
        for known, cell in self._segments:
            if any(name in place for name in known):
                which = xp.asarray([place.get(name, len(names)) for name in known], "int32")
                cell.assign(cell.read() + xp.take(rows, which))

    def repeat(self, counts: Mapping[str, Sequence[int]]) -> None:
        """As `add`, for counts that are the same object in each exchange; `read` multiplies them."""
        _, times = self._repeated.get(id(counts), (counts, 0))
        self._repeated[id(counts)] = counts, times + 1

    def read(self) -> dict[str, list[int]]:
        """Totals by unit."""
        totals = {name: list(total) for name, total in self._totals.items()}
        for counts, times in self._repeated.values():
            for name, row in counts.items():
                totals[name] = [a + times * b for a, b in zip(totals[name], row, strict=True)]
        for names, cell in self._segments:
            totals.update(zip(names, self._xp.to_numpy(cell.read()).tolist(), strict=True))
        return totals

    def _sent(self, collective: Collective, rank: int) -> Any:
        if isinstance(collective, Broadcast) and collective.root != rank:
            return 0
        if isinstance(collective, AllToAll):  # a worker keeps its own part
            return self._bytes(a for to, part in enumerate(collective.parts) if to != rank for a in part)
        return self._bytes(arrays_of(collective))

    def _received(self, collective: Collective, result: Any, rank: int) -> Any:
        if isinstance(result, GatheredPayloads):
            return result.nbytes * (len(result) - 1)
        if isinstance(collective, (Gather, AllToAll)):
            return self._bytes(a for source, part in enumerate(result) if source != rank for a in part)
        if isinstance(collective, Broadcast) and collective.root == rank:
            return 0
        return self._bytes(result)

    def _bytes(self, arrays: Iterable[Array]) -> Any:
        return sum(map(self._xp.nbytes, arrays))
