"""Checks of payloads from other workers. A misfit is a ValueError; `grace.core.errors.sent_by` adds whose it is.

dtypes and lengths are known without looking at values, so to check them costs next to nothing; where a graph knows a
length only when it runs, the graph checks it. Values that address memory are looked at on hosts and in graphs. A device
would have to be waited for: it checks the indices of its memory itself.
"""

from __future__ import annotations

from typing import Any

from grace.core import Array


def fitting(xp: Any, array: Array, dtype: str, shape: int | tuple[int, ...], what: str) -> Array:
    """The array itself, if it has this dtype and shape (a vector's: its length)."""
    wanted = (shape,) if isinstance(shape, int) else shape
    found = xp.shape(array)
    if xp.dtype(array) == dtype and found == wanted:
        return array
    message = f"its {what} are {dtype}{list(wanted)}, not {xp.dtype(array)}{list(found)}"
    known = len(found) == len(wanted) and all(n in (None, m) for n, m in zip(found, wanted, strict=True))
    if xp.dtype(array) != dtype or not known:
        raise ValueError(message)
    return xp.sound(array, lambda: xp.all(xp.lengths([array]) == wanted[0]), message)


def matching(
    xp: Any, array: Array, dtype: str, other: Array, what: str, times: int = 1, row: tuple[int, ...] = ()
) -> Array:
    """The array itself, if it has this dtype and as many rows of this shape as the other one, or ``times`` as many."""
    if xp.dtype(array) != dtype or xp.shape(array)[1:] != row:
        raise ValueError(f"its {what} are {dtype}{['?', *row]}, not {xp.dtype(array)}{list(xp.shape(array))}")
    found, wanted = xp.shape(array)[0], xp.shape(other)[0]
    if found is not None and wanted is not None:
        if found != times * wanted:
            raise ValueError(f"its {what} are {found}, not {times * wanted}")
        return array
    message = f"its {what} are not as many as they must be"
    return xp.sound(array, lambda: xp.all(xp.lengths([array]) == times * xp.lengths([other])), message)


def placed(xp: Any, positions: Array, n: int) -> Array:
    """int32[K] itself, if it may index n elements: ascending, each once, in 0 .. n-1."""
    if xp.dtype(positions) != "int32":
        raise ValueError(f"its positions are int32, not {xp.dtype(positions)}")
    return xp.sound(positions, lambda: xp.ascending(positions, n), f"its positions do not ascend within 0 .. {n - 1}")
