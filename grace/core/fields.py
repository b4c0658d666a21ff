"""Type checks for field values that users give."""

from __future__ import annotations

from typing import Any


def checked(key: str, value: Any, default: Any) -> Any:
    """Return the value of field ``key`` if it has the type of its default; else raise ValueError.

    A float field also accepts ints, but no bools, except False if its default is 0.
    """
    kinds: dict[type, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (int, float), str: (str,)}
    allowed = kinds.get(type(default))
    if value is False and default == 0.0 and isinstance(default, float):
        return default  # False turned a setting off in GRACE's first release
    if allowed and (not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed)):
        raise ValueError(f"{key}={value!r} must be of type {type(default).__name__}, such as {default!r}")
    return value
