"""Resharding: converts the state of one number of workers to another number."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import Any

from grace.core import Context, Resize
from grace.core.method import Method

Points = Mapping[str, tuple[Method, Context]]
"""The method and context of each compression point, by the point's name."""
Places = Mapping[str, Sequence[int]]
"""Offset in the tensor and number of elements, by compression point."""
Tensors = dict[str, dict[str, Any]]
"""State arrays, by unit and then by key."""

RESIDUAL = "residual"
CARRIED = "carried"
"""The key of the residual left by a change of strategy; it is added to the worker's next gradient."""


def complete(states: Sequence[Mapping[str, Any]], lost: bool = False) -> list[Mapping[str, Any]]:
    """The states of all workers of a run, in rank order. Raises ValueError if they are not from one run.

    ``lost``: some states may be missing.
    """
    ordered = sorted(states, key=lambda state: state["rank"])
    ranks, first = [state["rank"] for state in ordered], ordered[0]
    count = first["world_size"]
    whole = len(ranks) == count and ranks == list(range(len(ranks)))
    if not whole and not (lost and len(set(ranks)) == len(ranks) and ranks[0] >= 0 and ranks[-1] < count):
        raise ValueError(
            f"these are the states of workers {ranks}, but the run had {first['world_size']}: give those of all of them"
        )
    for state in ordered:
        for key in ("format", "step", "world_size", "method"):
            if state[key] != first[key]:
                raise ValueError(
                    f"worker {state['rank']}'s state has {key} {state[key]!r} where worker 0's has {first[key]!r}: "
                    "they were not saved together"
                )
        if absent := sorted(set(state["tensors"]) - set(state["points"])):
            raise ValueError(
                f"worker {state['rank']}'s state does not say where {absent} were cut: if you renamed a key in "
                "state['tensors'], rename it in state['points'] too"
            )
    return ordered


def check_form(state: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Raise ValueError unless a state, which may come from a file, has the form that `Grace.state_dict` returns.

    ``sizes``: numbers of elements of the known units.
    """
    wanted = {"rank": int, "world_size": int, "step": int, "method": str, "tensors": Mapping, "points": Mapping}
    for key, kind in wanted.items():
        if not isinstance(state.get(key), kind) or isinstance(state[key], bool):
            raise ValueError(f"this is no state of grace: its {key!r} is {state.get(key)!r}")
    rank, size, step = state["rank"], state["world_size"], state["step"]
    if not 0 <= rank < size or not 0 <= step < 2**63:
        raise ValueError(f"this is no state of grace: worker {rank} of {size} at step {step}")
    if not isinstance(state.get("strategies", {}), Mapping):
        raise ValueError(f"this is no state of grace: its 'strategies' are {state['strategies']!r}")
    for unit, cells in state["tensors"].items():
        if not isinstance(cells, Mapping):
            raise ValueError(f"this is no state of grace: of {unit!r} it has {cells!r}")
        places = state["points"].get(unit, {})  # `complete` needs them for another number of workers
        if not isinstance(places, Mapping) or not all(_place(each, sizes.get(unit)) for each in places.values()):
            raise ValueError(f"this is no state of grace: the places of {unit!r} are {places!r}")


def _place(value: Any, size: int | None) -> bool:
    # Returns whether a value is (offset, number of elements) of a part of a tensor.
    numbers = isinstance(value, (list, tuple)) and [type(each) for each in value] == [int, int]
    return numbers and min(value) >= 0 and (size is None or sum(value) <= size)


def check_names(mine: Set[str], theirs: Set[str]) -> None:
    """Raise ValueError unless the model's units and the state's have the same names."""
    absent, extra = sorted(mine - theirs), sorted(theirs - mine)
    if absent or extra:
        raise ValueError(
            f"the state and the model name different tensors: the model's {absent or 'none'} are not in the state, "
            f"the state's {extra or 'none'} are not in the model. If a parameter was renamed, rename its key in "
            "state['tensors'] and state['points'] to the model's name before you load"
        )


NUMBERED = re.compile(r"_(\d+)(?=/|#|$)")  # the suffix of an automatic layer name, except the first layer's


def matched(theirs: Mapping[str, int], mine: Mapping[str, int]) -> dict[str, str]:
    """Map names of ``mine`` to those of ``theirs`` if Keras renamed the same variables; empty if it did not.

    Both arguments map names, which are paths, to numbers of elements. A model loaded from a file names its variables
    without the model ('dense/kernel' for 'sequential/dense/kernel'), and another process numbers automatic names
    differently but in the same order. Everything else must be equal. ``mine`` may have further names.
    """
    if theirs.keys() <= mine.keys():
        return {}
    for their_first, my_first in ((0, 0), (1, 0), (0, 1)):
        wanted, here = _alike(theirs, their_first), _alike(mine, my_first)
        if all(len(here.get(key, ())) == len(names) for key, names in wanted.items()):
            return {own: name for key, names in wanted.items() for own, name in zip(here[key], names, strict=True)}
    return {}


def _alike(names: Mapping[str, int], first: int) -> dict[tuple[str, int], list[str]]:
    # Returns groups of names that differ only in their numbers, in ascending order of the numbers. ``first``: number
    # of leading path parts to ignore.
    groups: dict[tuple[str, int], list[str]] = {}
    for name in sorted(names, key=lambda name: [int(each or 0) for each in _numbers(name)]):
        parts = NUMBERED.sub("", name).split("/")
        if len(parts) - first > 1:  # a bare name is ambiguous
            groups.setdefault(("/".join(parts[first:]), names[name]), []).append(name)
        else:
            groups.setdefault((f"/{name}", names[name]), []).append(name)
    return groups


def _numbers(name: str) -> list[str]:
    found = [NUMBERED.search(part) for part in name.split("/")]
    return [each.group(1) if each else "" for each in found]


def renamed(state: Mapping[str, Any], units: Iterable[str]) -> Mapping[str, Any]:
    """A state under the model's current unit names if `matched` finds all of them; else unchanged."""
    tensors, units = state.get("tensors"), list(units)
    if not isinstance(tensors, Mapping) or state.get("policy") or len(tensors) != len(units):
        return state
    names = {theirs: mine for mine, theirs in matched(dict.fromkeys(tensors, 0), dict.fromkeys(units, 0)).items()}
    keys = [key for key in ("tensors", "points", "strategies") if isinstance(state.get(key), Mapping)]
    return {**state, **{key: {names.get(name, name): each for name, each in state[key].items()} for key in keys}}


def sizes_of(state: Mapping[str, Any]) -> dict[str, int]:
    """Numbers of elements that this state holds of its tensors, by name."""
    return {name: sum(size for _, size in state["points"].get(name, {}).values()) for name in state["tensors"]}


def check_kind(found: Any, wanted: str, what: str) -> None:
    """Raise ValueError unless an array is of the same kind as dtype ``wanted``: floats or integers."""
    dtype = str(found.dtype).removeprefix("torch.")
    if ("float" in dtype) != ("float" in wanted):
        raise ValueError(f"{what} is {dtype}, but the model needs {wanted}")


def resized(
    states: Sequence[Mapping[str, Any]],
    fresh: Tensors,
    points: Callable[[str, int], Points],
    rank: int,
    size: int,
    changed: Collection[str] = (),
) -> Tensors:
    """The state of worker ``rank`` of ``size``, from the states of all workers of a run with another number of workers.

    ``states``: those of lost workers may be missing; their data is lost.
    ``fresh``: the initial state, by unit and key. ``points``: a unit's compression points on a worker. Each array
    follows the rule of its memory or compressor (`grace.core.Resize`). Arrays with rule SUM are added up over the old
    workers, element by element of the tensor, and divided evenly among the new workers that hold the element.
    Arrays with rule SAME are copied where the elements are cut alike, and start fresh where they are not, or where
    their shape depends on the number of workers.
    ``changed``: units whose strategy has changed. Their residuals are added to the first compression point of the new
    strategy, or carried to the next gradient if it has no such point. The means of the first compression move too; all
    other arrays start fresh.
    """
    return {
        unit: (
            _moved(states, unit, cells, points, rank, size)
            if unit in changed
            else {key: _follow(states, unit, key, value, points, rank, size) for key, value in cells.items()}
        )
        for unit, cells in fresh.items()
    }


def _follow(
    states: Sequence[Mapping[str, Any]],
    unit: str,
    key: str,
    value: Any,
    points: Callable[[str, int], Points],
    rank: int,
    size: int,
    was: str | None = None,
) -> Any:
    # ``was``: the former name of the stage, if it has changed.
    import numpy as np

    if key == CARRIED:
        held = [host(state["tensors"][unit][key]) for state in states if key in state["tensors"].get(unit, {})]
        return (sum(held, np.zeros(len(value))) / size).astype(host(value).dtype)
    point, part, field = parsed(key)
    method, ctx = points(unit, rank)[point]
    rule = rule_of(method, key)
    if rule is Resize.TRACKED:
        return _follow(states, unit, key.removesuffix(field) + "mean", value, points, rank, size)
    start, stop = ctx.offset, ctx.offset + ctx.size
    held = [
        (place, state["tensors"][unit][other])
        for state in states
        for other in state["tensors"].get(unit, {})
        if (place := _place_of(state, unit, other, stage(point) if was is None else was, (part, field))) is not None
    ]
    if rule is Resize.OWN:
        theirs = [array for place, array in held if tuple(place) == (start, ctx.size)]
        return host(theirs[rank % len(theirs)] if theirs else value)
    if rule is Resize.SAME:
        alike = (host(array) for place, array in held if tuple(place) == (start, ctx.size))
        return next((array for array in alike if array.shape == value.shape or array.dtype == object), host(value))
    reach = max([stop, *(first + count for (first, count), _ in held)])
    total, holders = np.zeros(reach), np.zeros(reach)
    for (first, count), array in held:
        total[first : first + count] += _elements(array, count, unit, key)
        holders[first : first + count] += 1
    if rule is Resize.SUM:
        holders = np.zeros(reach)
        for each in range(size):
            for name, (_, other) in points(unit, each).items():
                if stage(name) == stage(point):
                    holders[other.offset : other.offset + other.size] += 1
    share = total[start:stop] / np.maximum(holders[start:stop], 1)
    return share.astype(host(value).dtype)


def _place_of(state: Mapping[str, Any], unit: str, key: str, wanted: str, of: tuple[str, str]) -> Any:
    # Returns (offset, number of elements) of an array; None if it belongs to another stage, part or field.
    point, part, field = parsed(key)
    return state["points"].get(unit, {}).get(point) if (stage(point), (part, field)) == (wanted, of) else None


def _moved(
    states: Sequence[Mapping[str, Any]],
    unit: str,
    cells: Mapping[str, Any],
    points: Callable[[str, int], Points],
    rank: int,
    size: int,
) -> dict[str, Any]:
    # Moves residuals, and the means of the old strategy's first compression, to the first compression of the new
    # strategy. Other arrays cannot be moved.
    unnamed = any("/" in key for key in cells)  # False for a dense tensor
    first = next((stage(name) for each in range(size) for name in points(unit, each) if name or unnamed), None)
    found = {}
    for key, value in cells.items():
        point, part, field = parsed(key)
        if key == CARRIED:
            found[key] = host(value) if first is not None else _summed(states, unit, 0, len(value)) / size
        elif field == RESIDUAL and stage(point) == first:
            ctx = points(unit, rank)[point][1]
            found[key] = _summed(states, unit, ctx.offset, ctx.size) / size
        elif stage(point) == first and rule_of(points(unit, rank)[point][0], key) is Resize.MEAN:
            before = (parsed(other) for state in states for other in state["tensors"].get(unit, {}))
            was = next((stage(old) for old, *which in before if which == [part, field]), stage(point))
            found[key] = _follow(states, unit, key, value, points, rank, size, was)
        else:
            found[key] = host(value)
    return {key: array.astype(host(cells[key]).dtype) for key, array in found.items()}


def _summed(states: Sequence[Mapping[str, Any]], unit: str, start: int, count: int) -> Any:
    # Returns float64[count], the contribution of all workers' residuals and carried arrays to the sum of all
    # gradients, at elements start .. start+count-1.
    import numpy as np

    workers, total = states[0]["world_size"], np.zeros(start + count)
    everybody = [state["points"].get(unit, {}) for state in states]
    for state, places in zip(states, everybody, strict=True):
        for key, array in state["tensors"].get(unit, {}).items():
            point, _, field = parsed(key)
            if key == CARRIED:
                first, size, share = 0, host(array).size, 1.0
            elif field == RESIDUAL and point in places:
                first, size = places[point]
                holders = sharing(point, places[point], everybody)
                # if all remaining workers hold the elements, so did the lost ones
                share = workers / (workers if holders == len(states) else holders)
            else:
                continue
            part = _elements(array, size, unit, key)[: max(0, start + count - first)]
            total[first : first + len(part)] += share * part
    return total[start:]


def sharing(point: str, place: Sequence[int], everybody: Iterable[Places]) -> int:
    """Number of workers that hold the same elements at the same stage; each has weight 1 / number in the mean."""
    return sum(
        any(stage(name) == stage(point) and tuple(other) == tuple(place) for name, other in places.items())
        for places in everybody
    )


def stage(point: str) -> str:
    """The name of a compression point without its shard number: the same for all shards of one tensor."""
    return point.partition(".")[0]


def rule_of(method: Method, key: str) -> Resize:
    """The rule for an array of a method's state, by its key."""
    _, part, field = parsed(key)
    return method.reshard(part).get(field, Resize.SAME)


def stages(points: Iterable[str]) -> set[str]:
    """The stages of several points."""
    return {stage(point) for point in points}


def _elements(array: Any, count: int, unit: str, key: str) -> Any:
    if host(array).shape != (count,):
        raise ValueError(f"state {key!r} of {unit!r} has shape {host(array).shape}, but is of {count} elements")
    return host(array)


def host(array: Any) -> Any:
    """A state array in NumPy; PyTorch's bfloat16, which NumPy lacks, as float32."""
    import numpy as np

    return np.asarray(array.float() if str(getattr(array, "dtype", "")) == "torch.bfloat16" else array)


def parsed(key: str) -> tuple[str, str, str]:
    """Split a state key into the compression point, "memory" or "compressor", and the array's name.

    A dense tensor's state belongs to its memory.
    """
    steps = key.split("/")
    for index, step in enumerate(steps):
        if step in ("memory", "compressor"):
            return "/".join(steps[:index]), step, "/".join(steps[index + 1 :])
    return "", "memory", key
