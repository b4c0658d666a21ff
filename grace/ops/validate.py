"""Checks of payloads from other workers. They raise ValueError; `grace.core.errors.sent_by` adds the sender.

Dtypes and lengths are known without reading values, so checking them is nearly free; a length that a graph knows only
at run time is checked in the graph. Values used as indices are checked on hosts and in graphs. On devices the check
would need a synchronisation and is left out: a device's indexing operations check their indices themselves.
"""

from __future__ import annotations

from typing import Any

from grace.core import Array


def fitting(xp: Any, array: Array, dtype: str, shape: int | tuple[int, ...], what: str) -> Array:
    """Return the array if it has this dtype and shape; a number as ``shape`` is a vector's length."""
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
    """Return the array if it has this dtype, rows of shape ``row``, and ``times`` times as many rows as ``other``."""
    if xp.dtype(array) != dtype or xp.shape(array)[1:] != row:
        raise ValueError(f"its {what} are {dtype}{['?', *row]}, not {xp.dtype(array)}{list(xp.shape(array))}")
    found, wanted = xp.shape(array)[0], xp.shape(other)[0]
    if found is not None and wanted is not None:
        if found != times * wanted:
            raise ValueError(f"its {what} are {found}, not {times * wanted}")
        return array
    number = "the number that its other arrays ask for" if wanted is None else times * wanted
    message = f"the number of its {what} is not {number}"
    return xp.sound(array, lambda: xp.all(xp.lengths([array]) == times * xp.lengths([other])), message)


def typed(xp: Any, array: Array, dtype: str, what: str) -> Array:
    """Return the array if it is a vector of this dtype, of any length."""
    if xp.dtype(array) != dtype or len(xp.shape(array)) != 1:
        raise ValueError(f"its {what} are {dtype}[?], not {xp.dtype(array)}{list(xp.shape(array))}")
    return array


def placed(xp: Any, positions: Array, n: int) -> Array:
    """Return the positions, int32[K], if they are valid for n elements: strictly ascending in 0 .. n-1."""
    if xp.dtype(positions) != "int32":
        raise ValueError(f"its positions are int32, not {xp.dtype(positions)}")

    def ascending() -> Array:
        return xp.all(positions[1:] > positions[:-1]) & xp.all(positions[:1] >= 0) & xp.all(positions[-1:] < n)

    return xp.sound(positions, ascending, f"its positions do not ascend within 0 .. {n - 1}")
