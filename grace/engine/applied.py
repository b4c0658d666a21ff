"""The rule by which all integrations decide whether the means of an exchange were applied to the parameters.

1. A parameter's means are applied if an optimizer that holds the parameter steps while they are its gradient, and the
   step changes a parameter or the optimizer's state. Clamping, decay or averaging by hand is no step. A step of one
   optimizer says nothing about another's parameters.
2. If no optimizer has stepped a parameter yet, its means are applied when its weights are written, or when an
   optimizer over copies of it steps.
3. Means that are removed, zeroed or replaced before they are applied are discarded, as if the exchange had not
   happened. A backward pass that adds to undecided means is decided together with them.
4. If it cannot be known whether means are applied, they count as applied, and a warning says so once.
   `Grace.commit`, `Grace.discard` and `no_sync` decide explicitly.

This module knows no toolkit: the integrations observe steps, gradients and weights, and report them to a `Rule`.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Collection, Iterable, Set
from typing import Any, Protocol

BY_HAND = (
    "the means of {!r} and others count as applied, as their weights changed and no optimizer has stepped them yet: "
    "call grc.discard() after passes that you throw away"
)
OTHERS = (
    "the means of {!r} and others count as applied, as an optimizer stepped that may hold copies of them: call "
    "grc.discard() after passes that you throw away"
)
NOT_STEPPED = (
    "the means of three exchanges were discarded, as the optimizer that holds {!r} did not step, although its weights "
    "were written: call grc.commit() after an update by hand"
)
PATIENCE = 3
"""Number of consecutive windows, discarded although their weights were written, after which a warning follows."""


class Window:
    """Exchanges that are decided together. They count as one step as soon as one of their tensors is applied."""

    __slots__ = ("counted", "names")

    def __init__(self) -> None:
        self.names: set[str] = set()
        """Its undecided tensors."""
        self.counted = False


class Windows:
    """The tensors whose last exchange is undecided, and the window of each."""

    def __init__(self) -> None:
        self._of: dict[str, Window] = {}
        self._digests: dict[str, int] = {}
        self._latest = Window()
        self.digest = 0
        """A checksum of all decisions, independent of their order, which the workers compare."""
        self.recent: dict[str, str] = {}
        """The decisions since the last exchange, by tensor, for an error message."""

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, name: object) -> bool:
        return name in self._of

    @property
    def names(self) -> Set[str]:
        """The undecided tensors."""
        return self._of.keys()

    def add(self, names: Collection[str]) -> None:
        """Add the tensors of an exchange. Undecided tensors of earlier exchanges share the decision."""
        if self._latest.counted or not self._latest.names:
            self._latest = Window()
        for name in names:
            if (held := self._of.get(name)) is not None and held is not self._latest:
                held.names.discard(name)
            self._of[name] = self._latest
            if name not in self._digests:
                self._digests[name] = zlib.crc32(name.encode())
        self._latest.names.update(names)
        self.recent = {}

    def close(self, names: Collection[str], applied: bool, tracing: bool = False) -> int:
        """Decide undecided tensors; return the number of windows that now count as applied, or as discarded.

        ``tracing``: whether a graph is being traced. The digest is then unchanged, because workers may trace a graph a
        different number of times.
        """
        windows, number = dict.fromkeys(map(self._of.pop, names)), 0
        self.recent.update(dict.fromkeys(names, "applied" if applied else "discarded"))
        for window in windows:
            window.names.difference_update(names)
            if applied:
                number += not window.counted
                window.counted = True
            else:
                number += not window.counted and not window.names
        if not tracing:
            factor = 2 if applied else 3
            self.digest = (self.digest + factor * sum(map(self._digests.__getitem__, names))) & 0xFFFFFFFF
        return number

    def note(self, names: Iterable[str], what: str) -> None:
        """Add the event ``what`` of these tensors to the digest that the workers compare."""
        for name in names:
            self.recent[name] = what
            self.digest = (self.digest + zlib.crc32(f"{name} {what}".encode())) & 0xFFFFFFFF

    def restart(self, step: int) -> None:
        """Forget all decisions, as at the start of a run or after a state of this step was loaded."""
        self._of, self._latest, self.recent = {}, Window(), {}
        self.digest = step * 97 & 0xFFFFFFFF


class Decides(Protocol):
    """The part of a Grace that `Rule` uses."""

    @property
    def undecided(self) -> Set[str]: ...
    def decide(self, applied: Iterable[str] = (), discarded: Iterable[str] = (), when: Any = None) -> None: ...


class Rule:
    """The rule for one Grace. Tensors are given by name; those that are already decided are ignored."""

    def __init__(self, grace: Decides):
        self._grace = grace
        self.owned: set[str] = set()
        """The tensors held by an optimizer that has completed a step."""
        self.others = False
        """Whether an optimizer without tensors of this Grace has stepped since the last exchange."""
        self.dropped = 0
        """Number of exchanges since the last step that were discarded because their means were removed."""
        self._said: set[str] = set()
        self._by_hand = 0  # consecutive discarded windows whose weights were written by hand

    @property
    def unowned(self) -> set[str]:
        """Undecided tensors that no optimizer has stepped yet."""
        return set(self._grace.undecided) - self.owned

    def exchanged(self) -> None:
        """An exchange has ended."""
        self.others = False

    def stepped(self, held: Set[str], present: Set[str], changed: bool, when: Any = None) -> None:
        """An optimizer has completed a step.

        ``held``: the optimizer's tensors. ``present``: those whose gradients were the means. ``changed``: whether the
        step changed a parameter or the optimizer's state. If only a device knows this, ``changed`` is True, and
        ``when`` is the device's flag, bool[].
        """
        self.owned |= held
        undecided = self._grace.undecided & held
        if undecided and changed:
            self._grace.decide(undecided & present, undecided - present, when)
            self._by_hand = self.dropped = 0

    def copies_stepped(self, loose: Set[str]) -> None:
        """An optimizer over copies of all parameters, such as float32 masters, has completed a step.

        ``loose``: tensors that no living optimizer holds.
        """
        self._grace.decide(self.unowned & loose)

    def passed(self, removed: Set[str], written: Set[str], loose: Set[str] = frozenset()) -> None:
        """A backward pass begins, or the state is requested.

        ``removed``: tensors whose means were removed or zeroed; ``written``: those whose weights were written since
        the exchange; ``loose``: those that no living optimizer holds.
        """
        applied = self.unowned & written
        if applied:
            self._say(BY_HAND, applied)
        if self.others and (doubtful := (self.unowned & removed & loose) - applied):
            self._say(OTHERS, doubtful)
            applied |= doubtful
        discarded = (self._grace.undecided & removed) - applied
        self.dropped += bool(discarded)
        if by_hand := discarded & written:
            self._by_hand += 1
            if self._by_hand == PATIENCE:
                self._say(NOT_STEPPED, by_hand)
        self._grace.decide(applied, discarded)

    def _say(self, message: str, names: Iterable[str]) -> None:
        if message not in self._said:
            self._said.add(message)
            warnings.warn(message.format(min(names)), stacklevel=6)
