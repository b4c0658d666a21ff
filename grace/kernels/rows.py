"""Calls one kernel for many tensors at once, with a table that has a row of arguments for each tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from grace.kernels import Library
from grace.kernels.schema import KERNELS

NUMBERS = {name: number for number, name in enumerate(KERNELS)}
"""The number of each kernel in the library's table."""


class Refused(ValueError):
    """A kernel rejected a payload."""

    def __init__(self, row: int, text: str):
        super().__init__(text)
        self.row = row
        """The row of the call."""


class Rows:
    """A table of calls of the kernel ``name``: ``many`` rows, with a column for each argument.

    Columns keep their values from call to call. Arrays are given by their addresses; `keep` also keeps the arrays
    alive.
    """

    def __init__(self, library: Library, name: str, many: int):
        self._library, self._kernel = library, KERNELS[name]
        self._columns = {argument.name: place for place, argument in enumerate(self._kernel.arguments)}
        self._floats = {argument.name for argument in self._kernel.arguments if argument.type == "float"}
        self._kept: list[Any] = []
        self.words = np.zeros((many, len(self._columns)), np.int64)
        self._results = np.zeros(many, np.int64)
        for argument in self._kernel.arguments:
            if argument.value:
                self.set(**{argument.name: argument.value})

    def set(self, **columns: Any) -> None:
        """Set columns, each to one number for all rows or to one number per row."""
        for name, values in columns.items():
            if name in self._floats:
                values = np.asarray(values, np.float32).view(np.int32)
            self.words[:, self._columns[name]] = values

    def keep(self, name: str, arrays: Sequence[Any]) -> None:
        """Set a column to the addresses of these NumPy arrays, one for each row, and keep them alive."""
        self._kept += arrays
        self.set(**{name: [array.ctypes.data for array in arrays]})

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def call(self, threads: int = 1, only: Any = None) -> Any:
        """Make all calls, or those of the rows in ``only``, bool[many]; returns their results, int64[many].

        ``threads``: number of threads that share the calls. Raises `Refused` for an invalid payload, and MemoryError.
        """
        kernel, words = self._kernel, self.words if only is None else self.words[only]
        many, width = words.shape
        results = self._results[:many]
        self._library.rows(NUMBERS[kernel.name], words.ctypes.data, width, many, results.ctypes.data, threads)
        if kernel.memory and (results == -2).any():
            raise MemoryError(f"no memory for {kernel.name}")
        if kernel.refusal and (results >= 0).any():
            row = int(np.argmax(results >= 0))
            given = dict(zip(self._columns, words[row].tolist(), strict=True))
            raise Refused(row, kernel.refusal(int(results[row]), **given))
        return results


class Copies:
    """Copies many float32 vectors, of these lengths, by one call."""

    def __init__(self, library: Library, lengths: Any):
        self._rows = Rows(library, "lowrank_product", len(lengths))
        self._rows.set(a=1, b=lengths, r=0, threads=1)  # out = x - P Q with P and Q of rank 0

    def call(self, source: Any, target: Any, threads: int = 1, only: Any = None) -> None:
        """Copy from the addresses ``source`` to the addresses ``target``; see `Rows.call`."""
        self._rows.set(x=source, out=target)
        self._rows.call(threads, only)
