"""Renames a state of local training to the model's own parameter names, which a wrapper or a file may have changed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from grace.engine.reshard import matched

Shapes = Mapping[str, tuple[int, ...]]
WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
"""Parts of names that PyTorch's wrappers insert anywhere."""
BY_NAME = ("base", "momentum", "sent")
"""Keys of a state of local training that hold arrays by parameter name."""
BY_UNIT = ("tensors", "points", "strategies", "policy")
"""Keys of a Grace's state below which parameters' names are keys."""


def under_own_names(state: Mapping[str, Any], mine: Shapes) -> Mapping[str, Any]:
    """A state of local training under the model's names. ``mine``: the parameters' shapes by name.

    Two names match if their shapes are equal, one name ends with the other (compared part by part), and neither matches
    a third name; or if they differ only in numbers that Keras assigns. Otherwise raises ValueError, naming the remedy.
    """
    theirs = {name: tuple(array.shape) for name, array in state["base"].items()}
    if theirs == mine:
        return state
    names = _by_number(theirs, mine) or _by_suffix(theirs, mine)
    if names is None:
        (name, shape), *_ = sorted(theirs.items() ^ mine.items())
        raise ValueError(
            f"this state belongs to another model: {name!r} of shape {list(shape)} is in one of them only, and the "
            "names do not match by their ends either. If parameters were renamed, build with the old names, as "
            "named_parameters, or rename the keys of state['base'], state['momentum'], state['sent'] and, in "
            "state['grace'], of 'tensors' and 'points'"
        )
    settings = state["settings"]
    for old, new in names.items():  # listed fragments
        settings = settings.replace(repr(old), repr(new))
    grace = {key: _renamed(value, names) if key in BY_UNIT else value for key, value in state["grace"].items()}
    return {**state, **{key: _renamed(state[key], names) for key in BY_NAME}, "settings": settings, "grace": grace}


def _by_number(theirs: Shapes, mine: Shapes) -> dict[str, str] | None:
    found = matched(_sizes(theirs), _sizes(mine))
    names = {old: new for new, old in found.items()}
    fits = len(names) == len(mine) == len(theirs) and all(theirs[old] == mine[new] for old, new in names.items())
    return names if fits else None


def _sizes(shapes: Shapes) -> dict[str, int]:
    return {name: math.prod(shape) for name, shape in shapes.items()}


def _by_suffix(theirs: Shapes, mine: Shapes) -> dict[str, str] | None:
    if len(theirs) != len(mine):
        return None
    names: dict[str, str] = {}
    ends: dict[tuple[Any, ...], list[tuple[str, list[str]]]] = {}
    for old, shape in theirs.items():
        parts = _parts(old)
        ends.setdefault((shape, parts[-1]), []).append((old, parts))
    for new, shape in mine.items():
        parts = _parts(new)
        alike = [(old, other) for old, other in ends.get((shape, parts[-1]), ()) if _end(parts, other)]
        alike = [pair for pair in alike if pair[1] == parts] or alike
        if len(alike) != 1 or alike[0][0] in names:
            return None
        names[alike[0][0]] = new
    return names


def _parts(name: str) -> list[str]:
    return [part for part in re.split(r"[./]", name) if part not in WRAPPERS] or [name]


def _end(one: list[str], other: list[str]) -> bool:
    count = min(len(one), len(other))
    return one[-count:] == other[-count:]


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {names.get(key, key): _renamed(each, names) for key, each in value.items()}
