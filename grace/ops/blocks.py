"""Vectors cut into blocks, with one statistic per block; written over a backend.

``block`` None means a single block, the whole vector.
"""

from __future__ import annotations

from typing import Any

from grace.core import Array, Program
from grace.core.collectives import Gather
from grace.ops.validate import fitting

LARGEST = 2**24
"""Maximum block size: a whole block must fit into memory, even for a small tensor."""


def block_count(n: int, block: int | None) -> int:
    """Number of blocks in ``n`` elements; the last may be short."""
    return min(n, 1) if block is None else -(-n // block)


def rows(xp: Any, x: Array, block: int | None) -> Array:
    """[n] -> [m, block]: one row per block, the last one padded with zeros."""
    n = xp.shape(x)[0]
    m = block_count(n, block)
    width = n if block is None else block
    return xp.reshape(xp.pad(x, m * width), (m, max(width, 1)))


def flat(xp: Any, matrix: Array, n: int) -> Array:
    """[m, block] -> [n]: the inverse of `rows`."""
    return xp.reshape(matrix, (-1,))[:n]


def counts(xp: Any, n: int, block: int | None) -> Array:
    """Return float32[m], the number of elements in each block."""
    m = block_count(n, block)
    width = n if block is None else block
    if m == 0:
        return xp.zeros(0)
    return xp.concat([xp.full(m - 1, float(width)), xp.full(1, float(n - (m - 1) * width))])


def divisor(xp: Any, scale: Array) -> Array:
    """[m] -> [m, 1]: the scales as divisors for `rows`, with 1 in place of 0; divide, as 1 / scale may overflow."""
    return xp.reshape(xp.where(scale == 0, 1.0, scale), (-1, 1))


def largest_of_all(xp: Any, statistic: Array) -> Program[Array]:
    """[m] -> [m]: the elementwise maximum over all workers. Any NaN is kept; a max on the wire may lose it."""
    gathered = yield Gather((statistic,))
    return xp.max(xp.concat([xp.reshape(each, (1, -1)) for (each,) in gathered]), 0)


def norms(xp: Any, table: Array) -> Array:
    """[m, block] -> [m]: Euclidean norms of the rows.

    Elements are squared relative to the largest of their row, so that squares of 1e30 or 1e-30 stay in float32's range.
    """
    largest = xp.max(xp.abs(table), 1)
    relative = table / divisor(xp, largest)
    return largest * xp.sqrt(xp.sum(relative * relative, 1))


def scaled(xp: Any, values: Array, scale: Array, block: int | None) -> Array:
    """[n], float32[m] -> [n]: each value times the scale of its block. The values are donated."""
    scale = fitting(xp, scale, "float32", block_count(xp.shape(values)[0], block), "scales")
    return flat(xp, xp.inplace.multiply(rows(xp, values, block), xp.reshape(scale, (-1, 1))), xp.shape(values)[0])


def add_scaled(xp: Any, x: Array, signs: Array, scale: Array, block: int | None) -> Array:
    """[n]: x + signs * scale of its block, in one pass if possible. signs[n] are -1 and 1; scale[m]. x is donated."""
    n = xp.shape(x)[0]
    scale = xp.reshape(fitting(xp, scale, "float32", block_count(n, block), "scales"), (-1, 1))
    return flat(xp, xp.inplace.add_product(rows(xp, x, block), rows(xp, signs, block), scale), n)


def check_block(key: str, block: int) -> None:
    """Raise ValueError unless a block size is a multiple of 8 (whole bytes of bits), or 0 for the whole tensor."""
    if not 0 <= block <= LARGEST or block % 8:
        raise ValueError(f"{key}={block!r} must be a multiple of 8 up to {LARGEST}, or 0 for the whole tensor")
