"""State arrays with a second row, which keeps the state from before an undecided exchange."""

from __future__ import annotations

from typing import Any

import numpy as np

from grace.backends import Backend
from grace.core import Array
from grace.engine.groups.cells import RowCell

Indices = Any
"""Numbers of arrays in a `RowTable`, as int64[n] or a list."""


class RowTable:
    """State arrays, each with one row or two, of which one is current.

    `hold` preserves an array's row from before the first undecided exchange. That exchange writes to the other row, and
    later undecided exchanges overwrite that row. Without `hold` there is one row, which exchanges overwrite.
    """

    def __init__(self, xp: Backend):
        self._xp = xp
        self._arrays: list[list[Array | None]] = []
        self._addresses = np.zeros((2, 0), np.int64)
        self._at = np.zeros(0, np.int64)  # by array, the current row
        self._held = np.zeros(0, bool)
        self._moved = np.zeros(0, bool)  # by array, whether the other row holds the state from before
        self.flights: list[Any] = []
        """Unfinished exchanges that have overwritten rows. Each has a method ``before(number, row)``."""

    def add(self, array: Array) -> RowCell:
        """Add an array, float32[n]."""
        number = len(self._arrays)
        self._arrays.append([array, None])
        self._addresses = np.concatenate([self._addresses, [[self._xp.buffers.address(array)], [0]]], 1)
        self._at, self._held, self._moved = (
            np.append(each, each.dtype.type(0)) for each in (self._at, self._held, self._moved)
        )
        return RowCell(self, number)

    # -- an exchange of several arrays --------------------------------------------------------------------------------
    def hold(self, which: Indices) -> None:
        """Preserve the current state until `release` or `restore`. No effect on arrays that are held already."""
        which = np.asarray(which, np.int64)
        self._held[which] = True
        for number in which[self._addresses[1 - self._at[which], which] == 0].tolist():
            self._make_other(number)

    def old(self, which: Indices) -> Any:
        """Addresses of the current rows."""
        return self._addresses[self._at[which], which]

    def new(self, which: Indices) -> Any:
        """Addresses for the state after an exchange: the other row, or the current one if it may be overwritten."""
        return self._addresses[self._at[which] ^ self._apart(which), which]

    def arrays(self, which: Indices, after: bool) -> list[Array]:
        """The rows of `new` if ``after``, else those of `old`."""
        rows = self._at[which] ^ (self._apart(which) if after else False)
        return [self._arrays[number][row] for number, row in zip(which, rows, strict=True)]

    def advance(self, which: Indices) -> None:
        """Make the rows of `new` the current ones."""
        apart = self._apart(which)
        self._at[which] ^= apart
        self._moved[which] |= apart

    def release(self, which: Indices | None = None) -> None:
        """Drop the states from before the undecided exchanges; by default, of all arrays."""
        which = slice(None) if which is None else which
        self._held[which] = self._moved[which] = False

    def restore(self, which: Indices | None = None) -> None:
        """Make the states from before the undecided exchanges current again; by default, of all arrays."""
        which = slice(None) if which is None else which
        self._at[which] ^= self._moved[which]
        self.release(which)

    def choose(self, when: Array, which: Indices) -> None:
        """`release` if the flag, bool[], is true, else `restore`. Does not wait for a device."""
        for number in which:
            if self._moved[number]:
                row, before = (self._arrays[number][self._at[number] ^ moved] for moved in (0, 1))
                self._xp.buffers.write(row, self._xp.choose(when, row, before))
        self.release(which)

    def _apart(self, which: Indices) -> Any:
        return self._held[which] & ~self._moved[which]

    # -- a single array -----------------------------------------------------------------------------------------------
    def read(self, number: int) -> Array:
        """The current row."""
        return self._arrays[number][self._at[number]]

    def write(self, number: int, array: Array) -> None:
        """Set the state after an exchange: the array replaces the row of `new`, which becomes the current one."""
        at = self._at[number] ^ int(self._apart(number))
        self._arrays[number][at] = array = self._xp.buffers.contiguous(array)
        self._addresses[at, number] = self._xp.buffers.address(array)
        self.advance([number])

    def store(self, number: int, array: Array) -> None:
        """As `write`, but copies the array's values to the row."""
        self.advance([number])
        self._xp.buffers.write(self.read(number), array)

    def before(self, number: int) -> Array | None:
        """The state from before the undecided and unfinished exchanges; None if it is the current row."""
        if not self._held[number]:
            row = self.read(number)
            found = [each.before(number, row) for each in self.flights]
            return next((each for each in found if each is not None), None)
        return self._arrays[number][self._at[number] ^ int(self._moved[number])]

    def _make_other(self, number: int) -> None:
        xp, at = self._xp, 1 - self._at[number]
        other = self._arrays[number][at] = xp.buffers.empty(xp.shape(self.read(number)))
        self._addresses[at, number] = xp.buffers.address(other)
