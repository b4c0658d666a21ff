"""Whether a value given by a user is of the kind that a field wants."""

from __future__ import annotations

from typing import Any


def checked(key: str, value: Any, default: Any) -> Any:
    """The value, if it is of its default's kind; an int passes for a float, a bool for neither. Else ValueError."""
    kinds: dict[type, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (int, float), str: (str,)}
    allowed = kinds.get(type(default))
    if value is False and default == 0.0 and isinstance(default, float):
        return default  # switched off, as GRACE's first release says it
    if allowed and (not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed)):
        raise ValueError(f"{key}={value!r} must be of type {type(default).__name__}, such as {default!r}")
    return value
