"""Unique names of variables: a variable keeps its name in a Grace."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import keras
import tensorflow as tf

from grace.engine.reshard import matched
from grace.engine.session import Grace

EXCHANGED: set[Any] = set()
"""Identities of all variables in this process whose gradients were averaged, or that were mixed."""


def names_for(grace: Grace, variables: Sequence[Any]) -> list[str]:
    """The names of variables in a Grace: Keras paths or TensorFlow names, which reports and states use.

    A variable keeps its first name; another one with the same path gets a numeric suffix. After a state was loaded, and
    in `Grace.rebuild`, new variables take over the names of unused ones. Tensors that are not variables are named by
    their index among the sources.
    """
    keys = _keys(variables)
    names = [grace.bindings.get(key) for key in keys]
    grace.claimed.update(name for name in names if name is not None)
    paths = [path_of(variable) or f"source_{place}" for place, variable in enumerate(variables)]
    sizes = {path: tf.TensorShape(v.shape).num_elements() or 0 for path, v in zip(paths, variables, strict=True)}
    known = matched(grace.awaited, sizes) if grace.awaited else {}
    for place, (key, path) in enumerate(zip(keys, paths, strict=True)):
        if names[place] is None:
            path = known.get(path, path)
            name = next(name for name in _numbered(path) if name not in grace.claimed)
            grace.claimed.add(name)
            grace.bindings[key] = names[place] = name
    return [name for name in names if name is not None]


def names_of(variables: Sequence[Any]) -> list[str]:
    """Paths of variables that are always named together; repeated ones get a numeric suffix."""
    seen: dict[str, int] = {}
    names = []
    for variable in variables:
        path = path_of(variable)
        seen[path] = seen.get(path, 0) + 1
        names.append(path if seen[path] == 1 else f"{path}#{seen[path]}")
    EXCHANGED.update(map(identity, variables))
    return names


def path_of(variable: Any) -> str:
    """The path of a Keras variable, the name of a TensorFlow one; empty for other objects."""
    if isinstance(variable, keras.Variable):
        return str(variable.path)
    return str(variable.name).removesuffix(":0") if isinstance(variable, tf.Variable) else ""


def identity(variable: Any) -> Any:
    """An ID shared by a Keras variable and its TensorFlow variable, and never reused in this process."""
    inner = getattr(variable, "_value", None) if isinstance(variable, keras.Variable) else variable
    return getattr(inner, "_unique_id", None)


def _keys(variables: Sequence[Any]) -> list[Any]:
    # A variable may occur twice.
    seen: dict[Any, int] = {}
    keys = []
    for place, variable in enumerate(variables):
        key = identity(variable) or f"source {place}"
        seen[key] = seen.get(key, 0) + 1
        keys.append((key, seen[key]))
    return keys


def _numbered(path: str) -> Any:
    yield path
    for number in count(2):
        yield f"{path}#{number}"
