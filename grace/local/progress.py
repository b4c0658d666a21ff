"""A worker's progress in local training, and comparisons of it with other workers and saved states."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grace.core import Transport
from grace.core.local_training import Settings
from grace.local.names import Shapes, under_own_names

FORMAT = 1
"""Format version of `DiLoCo.state_dict`."""
State = Mapping[str, Any]

REMEDIES = {
    "inner steps": "Load checkpoints of one step",
    "parameters": "Begin from the same: grace.torch.broadcast_parameters or BroadcastCallback",
}
"""Remedies for differences between workers; the default is "Use the same on every worker"."""


@dataclass
class Progress:
    """A worker's counters. A slot is the time from one landing to the next."""

    steps: int = 0
    """Number of inner steps, across resumed runs."""
    first_step: int = 0
    """Number of inner steps before those that `DiLoCo.report` counts."""
    inner: int = 0
    """Number of inner steps in the current slot."""
    turns: int = 0
    """Number of ended slots. It selects the next fragment, so workers agree even if an exchange failed on some."""
    landed: int = 0
    """Number of landed exchanges."""
    apart: bool = False
    """Whether parameters may differ from the base."""
    rounds: int = 0
    """Number of rounds per exchange, once known."""

    def step(self) -> None:
        """Count an inner step."""
        self.steps += 1
        self.inner += 1
        self.apart = True

    def end_slot(self) -> None:
        """Begin the next slot."""
        self.inner = 0
        self.turns += 1

    def take(self, state: State) -> None:
        """Continue from a state, in a new slot."""
        self.first_step += state["step"] - self.steps
        self.steps, self.turns, self.landed = state["step"], state["turns"], state["landed"]
        self.rounds, self.inner, self.apart = state["rounds"], 0, True


def compare(transport: Transport, mine: dict[str, str]) -> None:
    """Raise ValueError on all workers, naming the difference, unless all have the same texts."""
    texts = [json.loads(text) for text in transport.exchange(json.dumps(mine))]
    for worker, theirs in enumerate(texts):
        for key, value in texts[0].items():
            if theirs[key] != value:
                raise ValueError(
                    f"worker 0 and worker {worker} differ in their {key}: {value} and {theirs[key]}. "
                    + REMEDIES.get(key, "Use the same on every worker")
                )


def check_states(states: Sequence[State], settings: Settings, shapes: Shapes, lost: bool) -> tuple[State, ...]:
    """States under the model's own names; ValueError, naming the difference, if they are unsuitable.

    ``shapes``: the parameters' shapes by name, empty if they are not known yet. ``lost``: workers may have missed the
    last landing.
    """
    for state in states:
        if state.get("format") != FORMAT or "base" not in state:
            raise ValueError(
                f"this state has format {state.get('format')!r} or is none of local training, of which this "
                f"version of grace reads format {FORMAT}"
            )
    found = tuple(under_own_names(state, shapes) for state in states) if shapes else tuple(states)
    for state in found:
        if state["settings"] != repr(settings):
            raise ValueError(
                f"this state belongs to {state['settings']}, but this is {settings!r}: use the same settings"
            )
        if state["step"] != states[0]["step"] or not (lost or state["landed"] == states[0]["landed"]):
            raise ValueError(
                f"states of steps {states[0]['step']} and {state['step']}: load states that were saved together"
            )
    return found
