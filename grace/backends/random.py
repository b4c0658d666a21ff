"""Random bits, for `grace.core.rng`, and tables that depend on random keys alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from grace.core import rng
from grace.core.rng import NOISE, recent

Array = Any
LARGE = 2**14
"""Minimum number of elements for computing a whole noise table, which all tensors of a step share."""


class Random(ABC):
    """A backend's random bits."""

    def __init__(self, xp: Any):
        self._xp = xp
        self._cached: dict[Any, Array] = {}
        self._tables: dict[Any, Array] = {}

    @abstractmethod
    def words(self, key0: Any, key1: Any, start: int, n: int) -> Array:
        """Return int32[n], mix(mix(lo(j) + key0) ^ (hi(j) + key1)) for j = start .. start+n-1 (`grace.core.rng`)."""

    def keys(self, stem: int, step: Any, worker: Any) -> tuple[Any, Any]:
        """`grace.core.rng.keys`, where step or worker is a scalar inside a graph."""
        return rng.keys(stem, step, worker)

    def sample(self, key0: Any, key1: Any, start: int, n: int, k: int) -> Array:
        """Return int32[k], ascending positions of the k smallest of the n `words`, as unsigned numbers; read-only."""
        return self._xp.topk(self._xp.bitwise_xor(self.words(key0, key1, start, n), 0x7FFFFFFF), k)

    def uniform(self, key0: Any, key1: Any, start: int, n: int) -> Array:
        """Return float32[n] in [0, 1): the upper 24 bits of each word."""
        xp = self._xp
        upper = xp.bitwise_and(xp.shift_right(self.words(key0, key1, start, n), 8), 0xFFFFFF)
        return xp.cast(upper, "float32") * 2.0**-24

    def noise(self, table: tuple[Any, Any], keys: tuple[Any, Any], start: int, n: int) -> Array:
        """Return float32[n] in (0, 1): `grace.core.rng.Rng.noise`, elements start .. start+n-1."""
        xp, first, rows = self._xp, start % NOISE, -(-(start % NOISE + n) // NOISE)
        if rows < 2:
            sums = self._upper(table, first, n) + self._upper(keys, start // NOISE, 1)
        else:
            offsets = xp.reshape(self._upper(keys, start // NOISE, rows), (-1, 1))
            sums = xp.reshape(offsets + xp.reshape(self._upper(table, 0, NOISE), (1, -1)), (-1,))
            sums = sums[first : first + n]
        return sums - xp.floor(sums) + 2.0**-17

    def cached(self, keys: tuple[int, int], make: Callable[[], Array]) -> Array:
        """The cached result of ``make()``, which depends on these keys alone; also valid while a graph is traced."""
        return recent(self._cached, keys, make)

    def _whole_table(self, keys: tuple[Any, Any]) -> Array:
        # The noise table, for eager toolkits: all tensors of a step share it. Each number is the centre of an interval
        # of length 2**-16.
        return recent(self._tables, keys, lambda: self._upper(keys, 0, NOISE) + 2.0**-17)

    def _upper(self, keys: tuple[Any, Any], start: int, n: int) -> Array:
        # The upper 16 bits of words, as fractions of 1.
        xp = self._xp
        upper = xp.bitwise_and(xp.shift_right(self.words(*keys, start, n), 16), 0xFFFF)
        return xp.cast(upper, "float32") * 2.0**-16
