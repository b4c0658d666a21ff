"""Unique names of variables, which identify their state in a Grace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count
from typing import Any

from grace.engine.reshard import matched
from grace.engine.session import Grace
from grace.keras.toolkits import Toolkit

EXCHANGED: set[Any] = set()
"""Identities of all variables in this process whose gradients or values were averaged or mixed."""


def names_for(kit: Toolkit, grace: Grace, variables: Sequence[Any]) -> list[str]:
    """The names of variables in a Grace: Keras paths or TensorFlow names, which reports and states use.

    A variable keeps its first name; another one with the same path gets a numeric suffix. After a state was loaded, and
    in `Grace.rebuild`, new variables take over names that no variable uses any more. Tensors that are not variables are
    named by their index in ``variables``.
    """
    keys = _keys(kit, variables)
    names = [grace.bindings.get(key) for key in keys]
    grace.claimed.update(name for name in names if name is not None)
    paths = [kit.path_of(variable) or f"source_{place}" for place, variable in enumerate(variables)]
    sizes = {path: _size(v.shape) for path, v in zip(paths, variables, strict=True)}
    known = matched(grace.awaited, sizes) if grace.awaited else {}
    for place, (key, path) in enumerate(zip(keys, paths, strict=True)):
        if names[place] is None:
            path = known.get(path, path)
            name = next(name for name in _numbered(path) if name not in grace.claimed)
            grace.claimed.add(name)
            grace.bindings[key] = names[place] = name
    return [name for name in names if name is not None]


def names_of(kit: Toolkit, variables: Sequence[Any]) -> list[str]:
    """Paths of variables that are always named together; repeated ones get a numeric suffix."""
    seen: dict[str, int] = {}
    names = []
    for variable in variables:
        path = kit.path_of(variable)
        seen[path] = seen.get(path, 0) + 1
        names.append(path if seen[path] == 1 else f"{path}#{seen[path]}")
    EXCHANGED.update(map(kit.identity, variables))
    return names


def _keys(kit: Toolkit, variables: Sequence[Any]) -> list[Any]:
    # Pairs (identity, number of the occurrence), since a variable may occur twice.
    seen: dict[Any, int] = {}
    keys = []
    for place, variable in enumerate(variables):
        key = kit.identity(variable) or f"source {place}"
        seen[key] = seen.get(key, 0) + 1
        keys.append((key, seen[key]))
    return keys


def _numbered(path: str) -> Any:
    yield path
    for number in count(2):
        yield f"{path}#{number}"


def _size(shape: Any) -> int:
    # The number of elements; 0 if it is unknown, as a shape in a graph may be.
    dimensions = None if getattr(shape, "rank", 0) is None else list(shape)
    return 0 if dimensions is None or None in dimensions else math.prod(dimensions)
