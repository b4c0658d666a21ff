"""Linear algebra: factorisations, and products of low-rank factors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

Array = Any


class Linalg(ABC):
    """A backend's linear algebra."""

    def __init__(self, xp: Any):
        self._xp = xp

    @abstractmethod
    def qr(self, x: Array) -> Array:
        """The orthonormal factor Q[a, r] of a tall matrix x[a, r]; completed arbitrarily if x is rank-deficient."""

    @abstractmethod
    def eigh(self, x: Array) -> tuple[Array, Array]:
        """Eigenvalues w[n], descending, and eigenvectors, the columns of v[n, n], of a symmetric and finite x[n, n]."""

    @abstractmethod
    def solve(self, a: Array, b: Array) -> Array:
        """Return x[n, m] with a x = b, for an invertible a[n, n] and b[n, m]."""

    def unit_rows(self, x: Array) -> tuple[Array, Array]:
        """[m, n] -> rows divided by their largest magnitudes (by 1 for 0), and bool[m, 1]: whether those exceed 0."""
        xp = self._xp
        largest = xp.reshape(xp.max_abs(x), (-1, 1))
        return x / xp.where(largest == 0, 1.0, largest), largest > 0

    def left_factor(self, matrix: Array, q: Array) -> Array:
        """matrix[a, b] qᵀ for q[r, b]: float32[a, r]."""
        return matrix @ self._xp.transpose(q)

    def right_factor(self, p: Array, matrix: Array) -> Array:
        """pᵀ matrix[a, b] for p[a, r]: float32[r, b]."""
        return self._xp.transpose(p) @ matrix

    def product_into(self, out: Array, p: Array, q: Array) -> Array:
        """Write the product p[a, r] q[r, b] to the vector ``out``, if `mutable`; returns out."""
        self._xp.buffers.write(out, self._xp.reshape(p @ q, (-1,)))
        return out

    def subtract_product(self, x: Array, p: Array, q: Array) -> Array:
        """The vector x minus the product p[a, r] q[r, b]. x is donated: the result may reuse its memory."""
        return self._xp.inplace.subtract(x, self._xp.reshape(p @ q, (-1,)))

    def part_product(self, x: Array, p: Array, q: Array, rest: Array, taken: tuple[Array, Array] | None = None) -> None:
        """Write x minus the product p[a, r] q[r, b] to ``rest``, and the product to the vector x; if `mutable`.

        ``taken``: two factors of the same shapes, whose product is subtracted instead.
        """
        self._xp.buffers.write(rest, x)
        self.subtract_product(rest, *(taken or (p, q)))
        self.product_into(x, p, q)
