"""Makes the vectors of gradients that an exchange compresses and may overwrite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from grace.core import Array
from grace.engine.buckets import Unit
from grace.engine.groups.book import Grouped, Joined


def flattened(xp: Any, unit: Unit, gradients: Mapping[str, Array | None], donated: Set[str]) -> Array:
    """A unit's gradients as one vector in the dtype of its computation; zeros where one is absent.

    ``donated``: the tensors whose gradients may be overwritten; others are copied, if arrays are mutable.
    """
    parts, owned = [], False
    for tensor in unit.tensors:
        gradient = gradients.get(tensor.name)
        if gradient is None:
            parts.append(xp.zeros(tensor.size, unit.dtype))
            owned = True
        else:
            flat = xp.buffers.contiguous(xp.cast(xp.reshape(gradient, (-1,)), unit.dtype))
            owned = tensor.name in donated or not xp.buffers.same_memory(flat, gradient)
            parts.append(flat)
    owned = owned or len(parts) > 1 or unit.dense != ""
    return xp.concat(parts) if owned else xp.buffers.copy(parts[0])


def of_group(xp: Any, grouped: Grouped, gradients: Mapping[str, Array | None], donated: Set[str]) -> list[Array] | None:
    """The vectors of a group's units, as contiguous float32 arrays of any shape; None if `flattened` must make them."""
    found = _present(grouped.names, gradients)
    if found is None or not xp.mutable:
        return found
    if xp.buffers.addresses(found) is None:
        return None
    return found if grouped.name_set <= donated else list(xp.buffers.copies(found)[1])


def of_joined(joined: Joined, gradients: Mapping[str, Array | None]) -> list[Array] | None:
    """The gradients, of any shape and read-only, of units that are sent as one vector; None if one is absent."""
    return _present(joined.names, gradients)


def _present(names: Sequence[str], gradients: Mapping[str, Array | None]) -> list[Array] | None:
    found = [each for name in names if (each := gradients.get(name)) is not None]
    return found if found and len(found) == len(names) else None


def joined(xp: Any, unit: Unit, means: Mapping[str, Array | None]) -> Array | None:
    """The mean of a unit as float32[n]; None if one of its tensors has no mean."""
    parts = [means.get(tensor.name) for tensor in unit.tensors]
    if any(part is None for part in parts):
        return None
    flat = [xp.cast(xp.reshape(part, (-1,)), "float32") for part in parts]
    return xp.concat(flat) if len(flat) > 1 else flat[0]


def whole(xp: Any, unit: Unit, means: Mapping[str, Array | None]) -> Array | None:
    """The mean of a unit: as `joined`, but a single tensor's mean is returned unchanged."""
    return means.get(unit.tensors[0].name) if len(unit.tensors) == 1 else joined(xp, unit, means)
