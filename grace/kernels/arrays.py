"""Kernels that implement a backend's array functions, on host arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from grace.kernels.calls import Family

Array = Any


class Arrays(Family):
    """Selections, random words, low-rank products."""

    def topk_abs(self, x: Array, k: int) -> Array:
        """float32[n] -> int32[k], or float32[m, n] -> int32[m, k]: `grace.backends.base.Backend.topk_abs`."""
        xp, at, shape = self._xp, self._at, self._xp.shape(x)
        (x,), k = self._ready(x), min(k, shape[-1])
        if len(shape) == 2:
            places = xp.buffers.empty((shape[0], k), "int32")
            self.library.topk_rows(at(x), shape[0], shape[1], k, at(places), xp.threads)
            return places
        values, positions = xp.buffers.empty(k), xp.buffers.empty(k, "int32")
        self.library.topk_encode(at(x), None, None, at(values), at(positions), shape[0], k, xp.threads)
        return positions

    def beyond(self, x: Array, bound: float) -> Array:
        """float32[n] -> int32[K]: `grace.backends.base.Backend.beyond`."""
        xp, at, (x,) = self._xp, self._at, self._ready(x)
        (n,) = xp.shape(x)
        room = min(n, max(1024, n // 16))
        while True:
            values, positions = xp.buffers.empty(room), xp.buffers.empty(room, "int32")
            count = self.library.beyond(at(x), bound, at(values), at(positions), room, n, xp.threads)
            if count <= room:
                return positions[:count]
            room = count

    def excess(self, x: Array, bound: float) -> Array:
        """float32[n] -> float64[3]: `grace.backends.base.Backend.excess`."""
        xp, at, (x,) = self._xp, self._at, self._ready(x)
        found = xp.buffers.empty(3, "float64")
        self.library.excess(at(x), bound, at(found), xp.shape(x)[0], xp.threads)
        return found

    def sample(self, key0: int, key1: int, start: int, n: int, k: int) -> Array:
        """int32[k]: `grace.backends.random.Random.sample`."""
        positions = self._xp.buffers.empty(min(k, n), "int32")
        self.library.smallest_words(key0, key1, start, n, min(k, n), self._at(positions), self._xp.threads)
        return positions

    def words(self, key0: int, key1: int, start: int, n: int) -> Array:
        """int32[n]: `grace.backends.random.Random.words`."""
        out = self._xp.buffers.empty(n, "int32")
        self.library.words(key0, key1, start, n, self._at(out), self._xp.threads)
        return out

    def product(self, x: Array | None, p: Array, q: Array, out: Array) -> Array:
        """Write the vector x minus p[a, r] q[r, b], or the product if x is None, to ``out``, which may be x."""
        xp, at, (p, q) = self._xp, self._at, self._ready(p, q)
        (a, r), (rows, b) = xp.shape(p), xp.shape(q)
        if rows != r or any(xp.shape(each) != (a * b,) for each in (x, out) if each is not None):  # no kernel checks it
            raise ValueError(f"factors {(a, r)} and {(rows, b)} do not make the product {xp.shape(out)}")
        self.library.lowrank_product(at(x), at(p), at(q), at(out), a, b, r, xp.threads)
        return out

    def left_factor(self, matrix: Array, q: Array) -> Array:
        """m[a, b], q[r, b] -> m qᵀ, float32[a, r]."""
        xp, (matrix, q) = self._xp, self._ready(matrix, q)
        at, (a, b), (r, _) = self._at, xp.shape(matrix), xp.shape(q)
        p = xp.buffers.empty((a, r))
        self.library.lowrank_left(at(matrix), None, at(q), at(p), a, b, r, xp.threads)
        return p

    def right_factor(self, p: Array, matrix: Array) -> Array:
        """p[a, r], m[a, b] -> pᵀ m, float32[r, b]."""
        xp, (p, matrix) = self._xp, self._ready(p, matrix)
        at, (a, b), (_, r) = self._at, xp.shape(matrix), xp.shape(p)
        q = xp.buffers.empty((r, b))
        self.library.lowrank_right(at(matrix), at(p), at(q), a, b, r, xp.threads)
        return q

    @contextmanager
    def streaming_writes(self, n: int) -> Iterator[None]:
        """`grace.backends.buffers.Buffers.streaming_writes`."""
        before = self.library.gathered(n)
        try:
            yield
        finally:
            self.library.gathered(before)

    def finite(self, addresses: Sequence[int], counts: Sequence[int]) -> bool:
        """Whether the float32 vectors with these addresses and lengths are all finite."""
        return bool(self.library.finite(addresses, counts, len(counts)))
