"""A running policy: sums of gradients, the exchange of decisions, and the policy's state."""

from __future__ import annotations

import json
import math
import statistics
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from time import perf_counter
from typing import Any

from grace.backends.base import Backend
from grace.core import Array, Program
from grace.core.collectives import Broadcast, Collective, Reduce
from grace.core.communicator import Communicator
from grace.core.method import Method
from grace.core.policy import Cost, Decision, Policy
from grace.engine.policy_state import check_plain
from grace.engine.probe import NoiseProbe

MEASURED = 10
"""Number of steps at the end of a trial in which noise is measured, for levels without error feedback."""
WARM_UP = 4
"""Number of untimed steps at the start: a process allocates, compiles and fills caches, and may take a third longer."""


class StepClock:
    """Times the steps of a trial: each from the end of the previous one, or from the last decision.

    A process's first `WARM_UP` steps are not timed.
    """

    def __init__(self) -> None:
        self.last = 0
        """The last step that was counted."""
        self._cold = WARM_UP - 1  # the end of the last one is where the first timed step begins
        self._moments: list[tuple[float, int]] = []  # time and step number at the end of each step

    def __len__(self) -> int:
        return len(self._moments)

    def count(self, step: int) -> None:
        """Count the end of a step."""
        self.last = step
        if self._cold:
            self._cold -= 1
        else:
            self._moments.append((perf_counter(), step))

    def seconds(self) -> float:
        """The median seconds of a step, of an even number the lower one; 0 if none was timed."""
        steps = [(b - a) / (j - i) for (a, i), (b, j) in pairwise(self._moments)]
        return statistics.median_low(steps) if steps else 0.0

    def restart(self, step: int) -> None:
        """Time anew, from now, after step ``step``."""
        self._moments = [(perf_counter(), step)]


class Schedule:
    """One worker's state of a policy: every tensor's level, its history, and the sums of this epoch's gradients."""

    def __init__(self, policy: Policy, method: Method, communicator: Communicator):
        self.policy = policy
        self.levels = policy.levels(method.compressor)
        self.ways = policy.ways(method, communicator)
        self.decision = Decision({})
        self.epoch = 0
        """Number of ended epochs."""
        self.step = 0
        """Number of steps at the end of the last epoch."""
        self.history: dict[str, list[tuple[int, int]]] = {}
        """By tensor, pairs (epoch, level): the level was in use from this epoch on. With trials, steps take the
        place of epochs.
        """
        self._clock = StepClock()
        self._lr: float | None = None
        self._xp: Any = None
        self._sums: dict[str, Any] = {}
        self._cells: dict[str, Any] = {}  # by tensor, a cell with its level, which graphs read
        self._flag: Any = None  # a cell with `watching`, which graphs read
        self._feeding: Any = None  # `_feeds_back` as an array, for graphs
        self.probe = NoiseProbe() if policy.measures_noise else None
        """Measures the noise of exchanges, if the policy needs it."""
        self.costs: list[Cost] = []  # by level, once worker 0's policy predicts for these tensors

    def extend(self, sizes: Mapping[str, int], xp: Backend, rank: int) -> None:
        """Add tensors with their numbers of elements; known ones stay unchanged."""
        self._xp, self.costs = xp, []
        known = self.decision.levels
        first = self.policy.first_level
        if self.policy.together:
            first = next(iter(known.values()), first)
        for name, size in sizes.items():
            if name in known:
                continue
            known[name] = first
            self.history[name] = [(self.epoch, first)]
            if self.policy.norm_source == "mean" or (self.policy.norm_source and rank == 0):
                self._sums[name] = xp.cell(xp.zeros(size))
        if self.probe is not None:
            self.probe.extend({name: size for name, size in sizes.items() if name not in self.probe.held}, xp)
        if xp.traced:
            for name in known:
                self._cells[name] = self._cells.get(name) or xp.cell(xp.asarray(known[name], "int32"))
            self._flag = self._flag or xp.cell(xp.asarray(int(self.watching), "int32"))
            if self.probe is not None:
                self._feeding = xp.asarray(self._feeds_back, "float32")

    def forget(self, names: Iterable[str]) -> None:
        """Drop removed tensors."""
        for name in names:
            for book in (self.decision.levels, self.history, self._sums, self._cells):
                book.pop(name, None)
            if self.probe is not None:
                self.probe.forget([name])

    @property
    def told(self) -> bool:
        """Whether a step was ever counted by `trial_over`."""
        return bool(self._clock.last or self.decision.memo)

    @property
    def watching(self) -> bool:
        """Whether to sum this epoch's gradients."""
        return bool(self.policy.norm_source) and self.policy.watches(self.epoch, self.decision)

    def level(self, name: str) -> int:
        """The index of a tensor's level."""
        return self.decision.levels[name]

    def index(self, name: str) -> Array:
        """The index of a tensor's level, as an int32 scalar that a graph reads at run time."""
        return self._cells[name].read()

    # -- within an epoch --------------------------------------------------------------------------------------------
    def cells(self, name: str, measured: bool) -> list[Any]:
        """The cells of a tensor that this step changes: its sum of the epoch's gradients, and the probe's cells.

        ``measured``: whether the step's noise is measured.
        """
        sums = [self._sums[name]] if (self.watching or self._xp.tracing) and name in self._sums else []
        return [*sums, *self.probe.cells(name)] if self.probe is not None and measured else sums

    def feeds_back(self, names: Sequence[str]) -> Sequence[float] | Array:
        """1 if error feedback adds the error of a tensor's mean to later steps, else 0.

        Graphs read it at run time, as float32[1], for tensors that share a level.
        """
        if self._feeding is not None:
            return self._xp.take(self._feeding, self._xp.reshape(self.index(names[0]), (1,)))
        return [self._feeds_back[self.level(name)] for name in names]

    @cached_property
    def _feeds_back(self) -> list[float]:
        return [float(method.feeds_back) for method, _ in self.ways]

    def on_gradient(self, gradients: Mapping[str, Array]) -> None:
        """Add gradients, float32[n], to the sums; the caller may change them afterwards."""
        mine = {name: x for name, x in gradients.items() if name in self._sums}

        def add() -> Array:
            for name, x in mine.items():
                self._sums[name].add(x)
            return self._xp.asarray(0, "int32")

        if self._xp.tracing:
            # Build the switch on every worker, even without sums: Horovod matches messages by the names of graph nodes,
            # and these names count the preceding switches.
            self._xp.switch(self._flag.read(), [lambda: self._xp.asarray(0, "int32"), add])
        elif self.watching:
            add()

    # -- between epochs ---------------------------------------------------------------------------------------------
    def on_epoch_end(self, lr: float | None, next_lr: float | None, step: int, rank: int) -> Program[list[str]]:
        """Let worker 0 decide for all workers; returns the tensors whose level changed.

        Raises RuntimeError, on every worker, if the workers disagree before or after the decision.
        """
        xp = self._xp
        lr = self._lr if lr is None else lr
        next_lr = lr if next_lr is None else next_lr
        before = dict(self.decision.levels)
        watched = self.watching
        squares = self._squares(before) if watched else xp.zeros(0)
        wanted = (Reduce((squares,), "mean"),) if watched and self.policy.norm_source == "mean" else ()
        event = "this epoch ended: every worker must end the same epochs, and load its state"
        rest = yield from self._agreed(wanted, event)
        if rest:
            ((squares,),) = rest
        if rank == 0:
            norms = {}
            if watched:
                norms = {name: math.sqrt(s) for name, s in zip(before, xp.to_numpy(squares).tolist(), strict=True)}
            decision = self.policy.on_epoch_end(self.decision, self.epoch, lr, next_lr, norms)
            self.epoch, self.step, self._lr = self.epoch + 1, step, next_lr
            self._adopt(decision, self.epoch)
        changed = yield from self._spread(before)
        for cell in self._sums.values() if watched else ():
            cell.assign(xp.zeros(xp.shape(cell.read())))
        self._publish()
        return changed

    # -- between steps ----------------------------------------------------------------------------------------------
    def on_trial(self, workers: int) -> bool:
        """Return whether a trial is in progress."""
        return self.policy.trial(self.decision, workers) is not None

    def measures(self, workers: int) -> bool:
        """Return whether this step's noise is measured: in the last `MEASURED` steps of a trial of a lossy method.

        With error feedback, noise is measured in every step of a trial, since the probe must follow the held error. A
        graph is traced once: it reads `NoiseProbe.wanted`.
        """
        if self.probe is None or self._xp.tracing:
            return self.probe is not None
        wanted, levels = self.policy.trial(self.decision, workers), set(self.decision.levels.values())
        if wanted is None or all(self.ways[level][0].compressor.traits.lossless for level in levels):
            return False
        return len(self._clock) >= wanted + 1 - MEASURED or any(self._feeds_back[level] for level in levels)

    def trial_over(self, step: int, workers: int) -> bool:
        """Count step ``step`` of a trial; True when the trial is over, on all workers at the same step."""
        wanted = self.policy.trial(self.decision, workers) or 0
        if step == self._clock.last:
            return False
        self._clock.count(step)
        if self.probe is not None and len(self._clock) == 1:
            self.probe.reset()  # like their time, the noise of the first steps does not count
        if self.probe is not None and self._xp.traced:
            self.probe.announce(self.measures(workers))
        return len(self._clock) > wanted

    def on_trial_end(self, step: int, rank: int, workers: int) -> Program[list[str]]:
        """Let worker 0 decide for all workers; returns the tensors whose level changed. Raises as `on_epoch_end`."""
        xp, before = self._xp, dict(self.decision.levels)
        wanted = (Reduce((xp.asarray([self._clock.seconds()], "float32"),), "max"),)
        event = "this trial ended: every worker must make the same steps"
        ((slowest,),) = yield from self._agreed(wanted, event)
        if rank == 0:
            (seconds,) = xp.to_numpy(slowest).tolist()
            told: dict[str, Any] = {"noise": self.probe.noise()} if self.probe else {}
            told |= {"costs": self.costs} if self.costs else {}
            self._adopt(self.policy.on_trial_end(self.decision, workers, seconds, **told), step)
        changed = yield from self._spread(before)
        self._clock.restart(step)
        if self.probe is not None:
            self.probe.reset()
            self.probe.announce(self.measures(workers))
        self._publish()
        return changed

    # -- agreement --------------------------------------------------------------------------------------------------
    def _agreed(self, wanted: tuple[Collective, ...], event: str) -> Program[list[Any]]:
        # Returns the results of the ``wanted`` collectives; raises unless all workers have the same state.
        (least,), (most,), *rest = yield (*self._check(), *wanted)
        self._compare(least, most, f"before {event}")
        return rest

    def _spread(self, before: Mapping[str, int]) -> Program[list[str]]:
        # Broadcast worker 0's decision; returns the tensors whose level changed.
        text = self._xp.asarray(list(self.text().encode()), "uint8")
        (received,) = yield Broadcast((text,), 0, ragged=True)
        self._read(json.loads(bytes(self._xp.to_numpy(received).tolist())))
        (least,), (most,) = yield self._check()
        self._compare(least, most, "after worker 0's decision was sent to all")
        return [name for name, level in self.decision.levels.items() if level != before[name]]

    def _squares(self, names: Iterable[str]) -> Array:
        # Returns the squared norm of each of this worker's sums.
        xp = self._xp
        sums = [self._sums[name].read() for name in names if name in self._sums]
        return xp.concat([xp.reshape(xp.sum(each * each), (1,)) for each in sums]) if sums else xp.zeros(0)

    def _check(self) -> tuple[Collective, Collective]:
        facts = self._xp.asarray([self.epoch, zlib.crc32(self.text().encode()) & 0x7FFFFFFF], "int32")
        return Reduce((facts,), "min"), Reduce((facts,), "max")

    def _compare(self, least: Array, most: Array, when: str) -> None:
        least, most = (self._xp.to_numpy(each).tolist() for each in (least, most))
        if least != most:
            what = f"epochs {least[0]} to {most[0]} are under way" if least[0] != most[0] else "their states differ"
            raise RuntimeError(f"the workers' policies did not agree {when} ({what})")

    def _adopt(self, decision: Decision, now: int) -> None:
        last = len(self.levels) - 1
        levels = {name: min(level, last) for name, level in decision.levels.items()}
        for name, level in levels.items():
            if self.history[name][-1][1] != level:
                self.history[name].append((now, level))
        self.decision = Decision(levels, decision.micro_steps, decision.lr_scale, decision.memo)

    def _publish(self) -> None:
        for name, cell in self._cells.items():
            cell.assign(self._xp.asarray(self.level(name), "int32"))
        if self._flag is not None:
            self._flag.assign(self._xp.asarray(int(self.watching), "int32"))

    # -- state ------------------------------------------------------------------------------------------------------
    def _plain(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "step": self.step,
            "lr": self._lr,
            "levels": self.decision.levels,
            "micro_steps": self.decision.micro_steps,
            "lr_scale": self.decision.lr_scale,
            "memo": self.decision.memo,
            "history": self.history,
        }

    def _read(self, plain: Mapping[str, Any]) -> None:
        check_plain(plain, self.policy, len(self.levels), self.decision.levels)
        self.epoch, self.step, self._lr = plain["epoch"], plain["step"], plain["lr"]
        self.decision = Decision(dict(plain["levels"]), plain["micro_steps"], plain["lr_scale"], dict(plain["memo"]))
        self.history = {name: [(e, level) for e, level in past] for name, past in plain["history"].items()}

    def state_dict(self) -> dict[str, Any]:
        """Plain data, and the toolkit arrays of an unfinished epoch's sums (not copied)."""
        sums = {name: cell.read() for name, cell in self._sums.items()} if self.watching else {}
        held = {} if self.probe is None else {"held": self.probe.held}
        return {"settings": repr(self.policy), **json.loads(self.text()), "sums": sums, **held}

    def taken_over(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Another worker's state, without sums that this worker does not collect."""
        return {**state, "sums": {name: array for name, array in state["sums"].items() if name in self._sums}}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if `load_state_dict` cannot continue from this state."""
        check_plain(state, self.policy, len(self.levels), self.decision.levels)
        if not isinstance(state.get("sums"), Mapping):
            raise ValueError(f"this is no state of a policy: its 'sums' are {state.get('sums')!r}")
        for name, array in state["sums"].items():
            if not hasattr(array, "shape"):
                raise ValueError(f"the sum of gradients of {name!r} is no array but {array!r}")
            have, want = tuple(array.shape), self._xp.shape(self._sums[name].read()) if name in self._sums else None
            if have != want:
                raise ValueError(f"the sum of gradients of {name!r} has shape {have}, but this worker keeps {want}")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self._read(state)
        self._clock = StepClock()  # time a running trial again
        for name, cell in self._sums.items():
            old = cell.read()
            saved = state["sums"].get(name)
            cell.assign(
                self._xp.zeros(self._xp.shape(old))
                if saved is None
                else self._xp.buffers.copy(self._xp.asarray(saved, "float32"))
            )
        if self.probe is not None:
            held = state.get("held")
            self.probe.load(held if isinstance(held, Mapping) else {})
        self._publish()

    def text(self) -> str:
        """All plain data as JSON, equal on all workers."""
        return json.dumps(self._plain())
