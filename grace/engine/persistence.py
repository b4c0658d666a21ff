"""State dictionaries: export, checks, and loading, even from another number of workers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from grace.core import name_of
from grace.engine.reshard import (
    CARRIED,
    Points,
    check_form,
    check_kind,
    check_names,
    complete,
    parsed,
    renamed,
    resized,
    stages,
)
from grace.engine.setup import LAYOUTS, Setup
from grace.engine.state_store import Fitted

FORMAT = 2
"""Format version of `state_dict`."""
State = Mapping[str, Any]


class Checked(NamedTuple):
    """Checked states, ready to be loaded."""

    states: tuple[State, ...]
    """The states, under this worker's names of units."""
    fitted: list[Fitted]
    """The arrays that `load` sets; empty before there are tensors."""
    step: int


def export(setup: Setup) -> dict[str, Any]:
    """All state of this worker; if an exchange is not committed, the state before it."""
    levels = setup.schedule.decision.levels if setup.schedule is not None else {}
    tensors = setup.store.export(levels, setup.snapshot)
    units = {name: unit for name, unit in setup.table.by_name().items() if name in tensors}
    points = {name: setup.store.points(unit, setup.level(unit), setup.context(unit, 0)) for name, unit in units.items()}
    return {
        "format": FORMAT,
        "rank": setup.rank,
        "world_size": setup.world_size,
        "step": setup.step_number(),
        "method": repr(setup.method),
        "points": {
            unit: {name: [ctx.offset, ctx.size] for name, (_, ctx) in each.items()} for unit, each in points.items()
        },
        "tensors": tensors,
        "strategies": setup.store.strategies(levels, units),
        "policy": _export_policy(setup),
        **({"transposed": True} if setup.transposed else {}),
    }


def _export_policy(setup: Setup) -> dict[str, Any] | None:
    if setup.schedule is None:
        return None
    state = setup.schedule.state_dict()
    books: dict[str, Any] = {key: state[key] for key in ("sums", "held") if key in state}
    arrays: dict[str, Any] = {
        key: {name: setup.xp.exported(x) for name, x in book.items()} for key, book in books.items()
    }
    return {**state, **arrays}


def layout(states: Sequence[State]) -> bool | None:
    """Whether states hold arrays of transposed kernels; None if they hold no arrays. ValueError if they disagree."""
    found = {state.get("transposed", False) for state in states if any(_by_position(state))}
    if len(found) > 1:
        raise ValueError(
            f"some of these states hold Keras's kernels as {LAYOUTS[0]}, and others as {LAYOUTS[1]}: load states that "
            "were saved together"
        )
    return next(iter(found), None)


def _by_position(state: State) -> list[Any]:
    # Returns the arrays that are laid out element by element like a gradient.
    return [*state["tensors"].values(), (state.get("policy") or {}).get("sums")]


def _under_own_names(setup: Setup, states: Sequence[State]) -> tuple[State, ...]:
    levels = setup.schedule.decision.levels if setup.schedule is not None else {}
    units = list(setup.store.held(levels)) if setup.bound else []
    return tuple(renamed(state, units) for state in states)


class OthersState(ValueError):
    """The state is another worker's."""


def agreed(setup: Setup, states: Sequence[State], lost: bool) -> Checked:
    """As `checked`, but all workers raise if one does. Every worker must make this call.

    Before there are tensors, workers cannot exchange messages, so another worker's state is then no error yet.
    """
    together = setup.world_size > 1 and not setup.transport.lockstep and not setup.transport.elastic
    try:
        found, problem = checked(setup, states, lost), ""
    except Exception as error:  # of any kind, as the other workers wait for this one
        if not together or not (setup.bound or isinstance(error, OthersState)):
            raise
        step = states[0]["step"] if isinstance(error, OthersState) else 0
        told = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        found, problem = Checked(tuple(states), [], step), told
    for rank, text in enumerate(setup.transport.exchange(problem) if together and setup.bound else ()):
        if text:
            raise ValueError(problem or f"worker {rank} cannot load its state: {text}")
    return found


def checked(setup: Setup, states: Sequence[State], lost: bool) -> Checked:
    """The data that `load` needs from these states; raises as `Grace.load_state_dict`."""
    given = states = _under_own_names(setup, states)
    for state in states:
        _check_form(setup, state)
    saved_layout = layout(states)
    if setup.bound and saved_layout not in (None, setup.transposed):
        raise ValueError(
            f"this state holds Keras's kernels as {LAYOUTS[not setup.transposed]}, but this Grace exchanges them as "
            f"{LAYOUTS[setup.transposed]}: load the state before the first step (and before grace.keras.build), and "
            "this Grace takes over its layout"
        )
    whose = [(state["rank"], state["world_size"]) for state in states]
    moved = lost or whose != [(setup.rank, setup.world_size)]
    if moved:
        if len(states) == 1 and whose[0][1] != 1 and not lost:
            raise OthersState(
                f"this is the state of worker {whose[0][0]} of {whose[0][1]}, but this is worker {setup.rank} of "
                f"{setup.world_size}: load each worker's own, or give the states of all {whose[0][1]} workers (for "
                "trainers that save one file for all workers: grace.torch.GatheredState(grc))"
            )
        if setup.communicator.reduce_scatters:
            raise ValueError(
                f"communicator {name_of(setup.communicator)!r} cuts tensors differently for another number of "
                f"workers: this is the state of {whose[0][1]} workers, so resume with as many"
            )
        states = tuple(complete(states, lost))
    step = states[0]["step"]
    if not setup.bound:
        return Checked(given, [], step)
    saved: Any = _taken_over(setup, states).get("policy")
    if setup.schedule is not None:
        setup.schedule.check_state(saved)
    levels = saved["levels"] if saved else {}
    return Checked(given, _fitted(setup, states, levels, moved), step)


def _fitted(setup: Setup, states: Sequence[State], levels: Mapping[str, int], moved: bool) -> list[Fitted]:
    # Returns the arrays that `load` sets. ``moved``: whether the states are those of all workers of another run.
    xp, store, units = setup.xp, setup.store, setup.table.by_name()
    strategies = store.strategies(levels, units) if moved else {}
    before = states[0].get("strategies", {})
    changed = {name for name, text in strategies.items() if before.get(name, text) != text}
    mine = store.held(levels)

    def points(name: str, rank: int) -> Points:
        return store.points(units[name], levels.get(name, 0), replace(setup.context(units[name], 0), rank=rank))

    for name in mine.keys() & states[0]["points"].keys():
        # With more workers, or another version, a gather may have become a two-stage exchange.
        gone = stages(point for state in states for point in state["points"].get(name, ()))
        for rank in range(setup.world_size):
            if not gone:
                break
            gone -= stages(points(name, rank))
        if gone:
            changed.add(name)
    carried = {name for state in states for name, cells in state["tensors"].items() if CARRIED in cells}
    changed |= {name for name in carried & mine.keys() if CARRIED not in mine[name]}  # all levels have one layout now
    for name in sorted((changed | carried & units.keys()) - mine.keys()):  # the tensor is dense now, or was before
        mine[name] = {CARRIED: xp.cell(xp.zeros(math.prod(units[name].shape), units[name].dtype))}
    for state in states:
        check_names(mine.keys() - strategies, state["tensors"].keys() - strategies)
    theirs = states[0]["tensors"]
    if moved or changed:
        fresh = {
            name: {key: xp.exported(cell.read()) for key, cell in cells.items()}
            for name, cells in mine.items()
            if moved or name in changed
        }
        rank, size = (setup.rank, setup.world_size) if moved else (setup.rank, 1)
        theirs = {**theirs, **resized(states, fresh, points, rank, size, changed)}
    found = []
    for name, cells in mine.items():
        if set(cells) != set(theirs[name]):
            if _stages_of(cells) != _stages_of(theirs[name]):
                raise ValueError(
                    f"this state of {name!r} was saved with another communicator or other levels, whose residuals are "
                    "cut differently: give the states of all workers, or use the same settings"
                )
            raise ValueError(f"state of {name!r} has {sorted(theirs[name])}, but this method keeps {sorted(cells)}")
        for key, cell in cells.items():
            old, new = cell.read(), theirs[name][key]
            if tuple(getattr(new, "shape", (None,))) != xp.shape(old):
                shapes = f"{getattr(new, 'shape', None)}, but the model needs {xp.shape(old)}"
                raise ValueError(f"state {key!r} of {name!r} has shape {shapes}")
            check_kind(new, xp.dtype(old), f"state {key!r} of {name!r}")
            found.append(Fitted(name, key, cell, xp.buffers.copy(xp.asarray(new, xp.dtype(old)))))
    return found


def _stages_of(keys: Iterable[str]) -> set[str]:
    return stages(parsed(key)[0] for key in keys)


def load(setup: Setup, found: Checked) -> None:
    """Load the result of `checked`. With a policy, all workers must call this."""
    states, fitted, step = found
    setup.store.load(fitted)
    setup.step.assign(step)
    if setup.schedule is not None:
        setup.schedule.load_state_dict(_taken_over(setup, states)["policy"])
        texts = setup.transport.exchange(setup.schedule.text())
        if any(text != texts[0] for text in texts):
            raise ValueError("the workers' states have different levels: load states that were saved together")


def _taken_over(setup: Setup, states: Sequence[State]) -> State:
    # Returns the state of the old worker whose policy state this worker adopts.
    state = states[setup.rank % len(states)]
    if setup.schedule is None or not state.get("policy") or state["rank"] == setup.rank:
        return state
    return {**state, "policy": setup.schedule.taken_over(state["policy"])}


def _check_form(setup: Setup, state: State) -> None:
    if state.get("format") != FORMAT:
        raise ValueError(f"this state has format {state.get('format')!r}, but this version of grace reads {FORMAT}")
    if not isinstance(state.get("transposed", False), bool):
        raise ValueError(f"this is no state of grace: its 'transposed' is {state['transposed']!r}")
    check_form(state, {unit.name: math.prod(unit.shape) for unit in setup.table.units})
    if state["method"] != repr(setup.method):
        raise ValueError(
            f"this state belongs to {state['method']}, but this is {setup.method!r}: use the same settings"
        )
    saved: Any = state.get("policy")
    settings = saved.get("settings", "?") if isinstance(saved, Mapping) else saved
    if settings != (setup.schedule and repr(setup.policy)):
        raise ValueError(
            f"this state belongs to policy {settings}, but this is {setup.policy!r}: use the same settings"
        )
