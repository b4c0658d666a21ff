"""Cells of a table of state rows."""

from __future__ import annotations

from typing import Any

from grace.core import Array


class RowCell:
    """One array of a `grace.engine.groups.rows.RowTable`, as a backend's cell."""

    def __init__(self, table: Any, number: int):
        self.table, self.number = table, number

    def read(self) -> Array:
        return self.table.read(self.number)

    def assign(self, value: Array) -> None:
        self.table.write(self.number, value)

    def store(self, value: Array) -> None:
        """As `assign`, but copies the array's values."""
        self.table.store(self.number, value)

    def hold(self) -> None:
        """See `RowTable.hold`."""
        self.table.hold([self.number])

    def before(self) -> Array | None:
        """See `RowTable.before`."""
        found: Array | None = self.table.before(self.number)
        return found
