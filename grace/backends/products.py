"""Products of low-rank factors, as NumPy arrays, in groups of rows that fit a cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

Array = Any
FEW = 2**17
"""Number of elements per group of rows. A group fits into a core's own cache. On AVX-512, OpenBLAS multiplies small
matrices two to three times as fast as OpenBLAS or MKL multiply large ones.
"""


def unit_rows(x: Array) -> tuple[Array, Array]:
    """`Linalg.unit_rows`: for the few rows of a factor, two NumPy calls cost less than six PyTorch calls."""
    largest = np.abs(x).max(1, keepdims=True)
    alive = largest > 0
    largest[largest == 0] = 1
    return x / largest, alive


def left_factor(matrix: Array, q: Array) -> Array:
    """m[a, b], q[r, b] -> m qᵀ, float32[a, r]; in groups of rows."""
    p = np.empty((matrix.shape[0], q.shape[0]), np.float32)
    for rows in _rows(*matrix.shape):
        np.matmul(matrix[rows], q.T, out=p[rows])
    return p


def right_factor(p: Array, matrix: Array) -> Array:
    """p[a, r], m[a, b] -> pᵀ m, float32[r, b]; in groups of rows, large enough to amortise adding up their products."""
    q = np.zeros((p.shape[1], matrix.shape[1]), np.float32)
    for rows in _rows(matrix.shape[0], matrix.shape[1], least=4 * p.shape[1]):
        q += p[rows].T @ matrix[rows]
    return q


def room(p: Array, q: Array) -> int:
    """Number of elements of the buffer that `products` needs."""
    return min(p.shape[0], _height(q.shape[1])) * q.shape[1]


def products(p: Array, q: Array, out: Array) -> Iterator[tuple[slice, Array]]:
    """The product p[a, r] q[r, b] in groups of rows: the slice of the flattened product, and its values.

    Each group is written to ``out``, float32[`room`], and overwritten by the next.
    """
    b = q.shape[1]
    for rows in _rows(p.shape[0], b):
        part = out[: (rows.stop - rows.start) * b]
        np.matmul(p[rows], q, out=part.reshape(-1, b))
        yield slice(rows.start * b, rows.stop * b), part


def write_product(out: Array, p: Array, q: Array) -> None:
    """Write the product p[a, r] q[r, b] to the vector ``out``, with the same bits as `products`."""
    b = q.shape[1]
    for rows in _rows(p.shape[0], b):
        np.matmul(p[rows], q, out=out[rows.start * b : rows.stop * b].reshape(-1, b))


def _height(b: int) -> int:
    return max(1, FEW // max(1, b))


def _rows(a: int, b: int, least: int = 1) -> list[slice]:
    height = max(least, _height(b))
    return [slice(start, min(start + height, a)) for start in range(0, a, height)]
