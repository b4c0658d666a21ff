"""A policy that chooses the method which is expected to reach a given quality first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from grace.core import Compressor, name_of
from grace.core.communicator import Communicator
from grace.core.method import Method
from grace.core.policy import Cost, Decision, Forecast, Level, Noise, Policy, number
from grace.core.registry import register, triple

DENSE, FLUSH, FIRST = 0, 1, 2
"""Level indices: dense gradients; dense gradients plus the residuals that memories still hold; the first candidate."""
MILD: Mapping[str, Any] = {"compressor": "blockint", "bits": 4, "rounding": "stochastic", "block_size": 64}
"""A candidate with which a training may begin: an eighth of the bytes, and noise of about 0.02."""
CANDIDATES = (
    "fp16",
    {"compressor": "blockint", "bits": 8, "rounding": "stochastic", "block_size": 64},
    MILD,
    {"compressor": "eden", "bits": 3, "block_size": 64},
    {"compressor": "powersgd", "compress_rank": 16},
)
"""Methods that stayed near the quality of dense gradients in docs/benchmarks-tasks.md and docs/noise.md."""
COARSE = (
    {"compressor": "eden", "bits": 2, "block_size": 64},
    {"compressor": "eden", "bits": 1, "block_size": 64},
    {"compressor": "powersgd", "compress_rank": 4},
    {"compressor": "topk", "compress_ratio": 0.1},
    {"compressor": "topk", "compress_ratio": 0.01},
)
"""Further candidates, only for effort "fast". Their noise exceeds the limits of the other efforts in nearly all
trainings, where trying them would cost progress for nothing."""
SAFE = ("bf16", "fp16")
"""Compressors whose noise is far below that of the gradients."""
EXACT = 1e-5
"""Errors below this one, such as those of 16 bits, say nothing about the noise of other methods."""
EFFORTS = {"safe": 0.05, "balanced": 0.1, "fast": 2.0}
"""The largest noise ratio that a method may have, by effort.

In five short trainings eden of 2 bits, with ratios of 0.12 to 0.21, ended up to 4.7 % below the quality of dense
gradients; of methods with ratios below 0.1 all but one stayed within 1.5 % (docs/noise.md).
"""
FACTOR = 0.5
"""A step with noise ratio r counts as 1 / (1 + FACTOR r) steps.

With the best learning rate the progress of a step is proportional to |G|² / (|G|² + the noise in the mean), G being the
gradient of the whole data (McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, arXiv:1812.06162,
section 2.2). The squared mean gradient is that denominator, so noise of r times its size divides progress by 1 + r:
FACTOR would be 1. Measured factors are 0 to 1.7 (docs/noise.md, `python -m benchmarks.noise`).
"""
DELAY_FACTOR = 0.15
"""FACTOR of methods with error feedback, whose noise ratio is a delay (`noise_ratio`).

It roughly fits short trainings of the same Transformer (docs/noise.md, `python -m benchmarks.noise`): powersgd of rank
16 and 4 and topk of 10 % and 1 % had ratios of 0.26, 1.9, 0.48 and 9.4, and took 1.01, 1.33, 1.26 and 2.25 times as
many steps as dense gradients.
"""
EARLY = 10
"""Number of steps after which a chosen method's noise and seconds are measured for the first time. The interval doubles
after each measurement, up to ``watch_steps``."""
CHECKS = 4
"""Number of measurements of the chosen method after which the best other one is timed again, for EARLY steps."""
CLOSE = 1.2
"""The largest cost, relative to the chosen method's, of a rival that is timed again: a trial of two steps may be off by
a fifth."""
WORST = 1e9
"""The largest noise ratio; it also replaces NaN."""


def relative_error(noise: Mapping[str, Noise]) -> float:
    """The squared error of the exchanged mean relative to the squared wanted mean; at most WORST."""
    error, wanted = sum(each.error for each in noise.values()), sum(each.wanted for each in noise.values())
    return _quotient(error, wanted) if error else 0.0


def noise_ratio(error: float, feeds_back: bool) -> float:
    """The noise that an exchange adds to the mean gradient, relative to the squared mean; at most WORST.

    For a method with error feedback it is instead the squared norm of the part held back over that of the part sent.
    This models the number of steps by which a gradient is late on average: (1 - d) / d if a fraction d is sent in each
    step. For long trainings this model is too strict. Errors that are sent later do not add up as noise does, and in
    theory 1 / d appears only in a term that vanishes faster than the noise term (Stich and Karimireddy, "The
    Error-Feedback Framework: Better Rates for SGD with Delayed Gradients and Compressed Communication", 2019,
    arXiv:1909.05350). ``effort`` bounds both kinds of ratio alike. ``error``: see `relative_error`.
    """
    return _quotient(error, 1 - error) if feeds_back else error


def _quotient(share: float, whole: float) -> float:
    ratio = share / whole if whole > 0 else WORST
    return ratio if ratio < WORST else WORST


@register("auto")
@dataclass(frozen=True)
class Auto(Policy):
    """Predict each method's cost from a few steps, and continue with the one that promises most progress per second.

    Whole steps are timed, including the model's computation, on the slowest worker; in the same steps the noise that
    the exchange adds is measured (`noise_ratio`). The cost of a method is the time of its step times (1 + f r), with
    noise ratio r and f = FACTOR, or DELAY_FACTOR with error feedback; the cheapest method is chosen. Its noise is
    measured again later, and the policy chooses again. Errors of independent rotations or roundings average out better
    where the workers' gradients agree, so noise rises as the gradients become mostly sampling noise.

    The training begins with `MILD`, if that is a candidate, and tries 16 bits next, or dense gradients if no candidate
    has 16 bits; without `MILD` it begins with these. Two timed methods give the seconds per byte; with it, and with the
    bytes, the error and the seconds of compression of a sample (`Cost`), the other methods are predicted. A method is
    tried only while its prediction promises more than the best tried method. Noise and rates that are not known yet are
    taken in its favour, so no better method is left out.

    After each of the first checks of the chosen method (`CHECKS`), the best other method is timed again for ten steps
    (`EARLY`), if its cost is close (`CLOSE`): early steps may be slower than later ones.

    Trials are part of the training: before a switch from a method with error feedback to one without, its residuals are
    sent. Methods without error feedback are tried first. After a change of the number of workers the trials start
    again.

    ``candidates``: names of compressors, or settings as for `grace.grace_from_params` (compressor, memory,
    communicator and their parameters). Their memory is "residual" or "none". None: `CANDIDATES`, and with effort "fast"
    `COARSE`, too.
    ``effort``: "safe", "balanced" or "fast": noise ratios of at most 0.05, 0.1 or 2.
    ``trial_steps``: steps per method; their median counts (of two the shorter: the first may include a warm-up).
    ``watch_steps``: steps between two measurements of the chosen method's noise and seconds, fewer at first (`EARLY`);
    0: none.
    ``margin``: the fraction by which a method must be cheaper than dense gradients, and than 16 bits, to be chosen.
    """

    candidates: Any = None
    effort: str = "balanced"
    trial_steps: int = 2
    watch_steps: int = 100
    margin: float = 0.03
    switches_methods: ClassVar[bool] = True
    exact: ClassVar[int | None] = FLUSH
    measures_noise: ClassVar[bool] = True
    predicts: ClassVar[bool] = True

    @cached_property
    def first_level(self) -> int:
        return FIRST + self.candidates.index(MILD) if MILD in self.candidates else self._careful

    @cached_property
    def _careful(self) -> int:
        # The level of 16 bits, or of dense gradients.
        return next((level for level, name in self._names.items() if name in SAFE), DENSE)

    def __post_init__(self) -> None:
        if self.effort not in EFFORTS:
            raise ValueError(f"effort={self.effort!r}: choose {', '.join(map(repr, EFFORTS))}")
        if self.candidates is None:
            object.__setattr__(self, "candidates", CANDIDATES + COARSE * (self.effort == "fast"))
        if isinstance(self.candidates, (str, Mapping)) or not self.candidates:
            raise ValueError(f"candidates={self.candidates!r}: give a list of compressors or settings")
        object.__setattr__(self, "candidates", tuple(self.candidates))
        if self.trial_steps < 1:
            raise ValueError(f"trial_steps={self.trial_steps!r} must be at least 1")
        if self.watch_steps < 0:
            raise ValueError(f"watch_steps={self.watch_steps!r} must be a number of steps, or 0 for none")
        if not 0 <= self.margin < 1:
            raise ValueError(f"margin={self.margin!r} must lie in [0, 1)")
        for settings in self.candidates:
            self._fits(settings)

    def _fits(self, settings: Any) -> None:
        method, communicator = triple(settings)
        if communicator.reduce_scatters or name_of(communicator) == "planned":
            raise ValueError(f"candidate {settings!r}: communicator {name_of(communicator)!r} is not for whole means "
                             "of any method; leave it out, or use allreduce, allgather or twostage")  # fmt: skip
        if (kind := name_of(method.memory)) not in ("none", "residual"):
            raise ValueError(f"candidate {settings!r}: memory {kind!r} cannot be shared with other methods; "
                             "candidates use residual or none")  # fmt: skip

    def levels(self, compressor: Compressor) -> tuple[Level, ...]:
        each = ({"compressor": c} if isinstance(c, str) else dict(c) for c in self.candidates)
        return {"compressor": "none"}, {"compressor": "none", "memory": "residual"}, *each  # DENSE, FLUSH, FIRST ...

    def ways(self, method: Method, communicator: Communicator) -> tuple[tuple[Method, Communicator], ...]:
        return tuple(triple(level) for level in self.levels(method.compressor))

    # -- trials ------------------------------------------------------------------------------------------------------
    def trial(self, decision: Decision, workers: int) -> int | None:
        memo, level = decision.memo, _current(decision)
        if level == FLUSH or (memo and memo["workers"] != workers):
            return 0
        if not memo or memo["chosen"] is None:
            return self.trial_steps
        if not self.watch_steps:
            return None
        return min(self.watch_steps, EARLY << (memo.get("watched", 0) if level == memo["chosen"] else 0))

    def on_trial_end(
        self,
        decision: Decision,
        workers: int,
        seconds: float,
        noise: Mapping[str, Noise] | None = None,
        costs: Sequence[Cost] | None = None,
    ) -> Decision:
        memo, level = decision.memo, _current(decision)
        if memo.get("workers") != workers:
            anew = {"workers": workers, "seconds": {}, "chosen": None, "errors": {}}
            if memo:  # the number of workers changed: first send the residuals that memories hold
                return _at(decision, FLUSH, anew)
            memo = anew
        if level == FLUSH:
            return _at(decision, self.first_level if memo["chosen"] is None else memo["chosen"], memo)
        error = memo["errors"].get(str(level), 0.0)
        if level != DENSE and noise and any(each.wanted for each in noise.values()):  # some gradient was finite
            error = relative_error(noise)
        current, watched = memo["chosen"], memo.get("watched", 0)
        errors = self._risen(memo["errors"], level, error) if level == current else memo["errors"]
        memo = {**memo, "errors": {**errors, str(level): error}}
        memo["seconds"] = {**memo["seconds"], str(level): seconds}
        if level == current:  # no trial, and no rival
            memo["watched"] = watched + (watched < CHECKS or EARLY << watched < self.watch_steps)
        # Try more methods while none is chosen, or after the noise of the chosen one has passed the limit.
        if current is None or not self._allowed(memo, current):
            following = self._next(memo, costs)
            if following is not None:
                return self._go(decision, following, {**memo, "chosen": None})
        best = self._best(memo, self._careful if current is None else current)
        rival = self._rival(memo, best) if level == best == current and watched < CHECKS else None
        return self._go(decision, best if rival is None else rival, {**memo, "chosen": best})

    def _risen(self, errors: Mapping[str, float], level: int, error: float) -> dict[str, float]:
        # The errors of all levels after that of one was measured again: noise rises alike without error feedback.
        before = errors.get(str(level), 0.0)
        rise = error / before if before > EXACT and level not in self._feedback else 1.0
        return {key: old if int(key) in self._feedback else min(rise * old, WORST) for key, old in errors.items()}

    def _ratio(self, memo: Mapping[str, Any], level: int) -> float:
        # The noise ratio of a level when it was last measured.
        return noise_ratio(memo["errors"][str(level)], level in self._feedback)

    def _go(self, decision: Decision, level: int, memo: dict[str, Any]) -> Decision:
        flush = _current(decision) in self._feedback and level not in self._feedback
        return _at(decision, FLUSH if flush else level, memo)

    def _next(self, memo: Mapping[str, Any], costs: Sequence[Cost] | None) -> int | None:
        # The next level to try: of those that promise more than the best tried one, the one that promises most; None if
        # there is none. Those with error feedback come last, since their residuals would count as noise of a later
        # method without it; the finest setting of each compressor comes first, since its noise rules out coarser ones.
        untried = [level for level in self._order if str(level) not in memo["seconds"]]
        if costs is None or self._careful in untried:
            return next(iter(untried), None)
        best = min(self._costs(memo).values(), default=math.inf)
        promising: dict[int, float] = {}
        for level in untried:
            ratio, seconds = self._predicted(memo, costs, level)
            # Dense gradients stay unless the best method is cheaper by the margin; other methods must be cheaper by it.
            factor = 1 - self.margin if level == DENSE else 1 / (1 - self.margin)
            if ratio <= EFFORTS[self.effort] and seconds * factor < best:
                promising[level] = seconds
        finest: dict[str, int] = {}
        for level in promising.keys() & self._feedback:
            other = finest.setdefault(self._names[level], level)
            finest[self._names[level]] = min(level, other, key=lambda each: costs[each].error)
        rest = {level for level in promising if level not in self._feedback} or finest.values()
        return min(rest, key=promising.__getitem__, default=None)

    def _predicted(self, memo: Mapping[str, Any], costs: Sequence[Cost], level: int) -> Forecast:
        # The least that an untried level may cost, by the tried levels.
        tried = {int(key): seconds for key, seconds in memo["seconds"].items()}
        rest = {each: seconds - costs[each].seconds for each, seconds in tried.items()}  # without compression
        low, high = (pick(tried, key=lambda each: costs[each].bytes) for pick in (min, max))
        moved = costs[high].bytes - costs[low].bytes
        most = rest[high] / costs[high].bytes if costs[level].bytes < costs[high].bytes else 0.0  # of an unknown rate
        rate = (rest[high] - rest[low]) / moved if moved else most
        near = min(tried, key=lambda each: abs(costs[each].bytes - costs[level].bytes))
        seconds = rest[near] + max(rate, 0.0) * (costs[level].bytes - costs[near].bytes) + costs[level].seconds
        ratio = self._expected(memo, costs, level)
        return Forecast(ratio, max(seconds, 0.0) * (1 + self._factor(level) * ratio))

    def _expected(self, memo: Mapping[str, Any], costs: Sequence[Cost], level: int) -> float:
        # The noise ratio of an untried level: without error feedback, in proportion to the sample's errors; with it,
        # at least that of a finer setting of the same compressor. Unknown: 0.
        known = [int(key) for key in memo["errors"] if costs[int(key)].error > EXACT]
        if level not in self._feedback:
            known = [each for each in known if each not in self._feedback]
            near = min(known, key=lambda each: abs(costs[level].error - costs[each].error), default=None)
            return 0.0 if near is None else costs[level].error / costs[near].error * self._ratio(memo, near)
        name = self._names[level]
        finer = (each for each in known if self._names[each] == name and costs[each].error <= costs[level].error)
        return max((self._ratio(memo, each) for each in finer), default=0.0)

    def _factor(self, level: int) -> float:
        return DELAY_FACTOR if level in self._feedback else FACTOR

    @cached_property
    def _names(self) -> dict[int, str]:
        # The compressor's name at each candidate's level.
        return {level: name_of(method.compressor) for level, method in self._methods.items()}

    @cached_property
    def _order(self) -> list[int]:
        # All levels but FLUSH: the first one, the careful one, then those without error feedback.
        early = (self.first_level, self._careful)
        return sorted(
            (DENSE, *self._methods),
            key=lambda level: (level != early[0], level != early[1], level in self._feedback),
        )

    @cached_property
    def _methods(self) -> dict[int, Method]:
        return {level: triple(each)[0] for level, each in enumerate(self.candidates, FIRST)}

    @cached_property
    def _feedback(self) -> frozenset[int]:
        # The levels with error feedback.
        return frozenset(level for level, method in self._methods.items() if method.feeds_back)

    # -- the choice --------------------------------------------------------------------------------------------------
    def _best(self, memo: Mapping[str, Any], current: int | None = None) -> int:
        # The cheapest allowed level: cheaper by the margin than ``current`` and than dense gradients, or one of these.
        costs = self._costs(memo)
        if current in costs:
            costs[current] *= 1 - self.margin
        best = min(costs, key=lambda level: costs[level], default=DENSE)
        return best if DENSE not in costs or costs[best] <= (1 - self.margin) * costs[DENSE] else DENSE

    def _rival(self, memo: Mapping[str, Any], chosen: int) -> int | None:
        # The best of the other methods if it is close; not one before which residuals would have to be sent.
        costs = self._costs(memo)
        limit = CLOSE * costs.pop(chosen, 0.0)
        rivals = [level for level in costs if level in self._feedback or chosen not in self._feedback]
        best = min(rivals, key=costs.__getitem__, default=None)
        return best if best is not None and costs[best] <= limit else None

    def _costs(self, memo: Mapping[str, Any]) -> dict[int, float]:
        # The seconds per effective step of the tried levels that are allowed.
        return {level: each.seconds for level, each in self._forecasts(memo).items() if self._allowed(memo, level)}

    def _allowed(self, memo: Mapping[str, Any], level: int) -> bool:
        return self._ratio(memo, level) <= EFFORTS[self.effort]

    def trials(self, decision: Decision) -> dict[int, float]:
        return {int(level): seconds for level, seconds in decision.memo.get("seconds", {}).items()}

    def forecasts(self, decision: Decision) -> dict[int, Forecast]:
        return self._forecasts(decision.memo)

    def _forecasts(self, memo: Mapping[str, Any]) -> dict[int, Forecast]:
        found = {}
        for level, seconds in ((int(key), value) for key, value in memo.get("seconds", {}).items()):
            ratio = self._ratio(memo, level)
            found[level] = Forecast(ratio, seconds * (1 + self._factor(level) * ratio))
        return found

    def why(self, decision: Decision, names: Sequence[str]) -> str:
        memo = decision.memo
        if not memo or memo["chosen"] is None:
            return ""
        chosen, forecasts = memo["chosen"], self._forecasts(memo)
        bound = f"a noise ratio of at most {EFFORTS[self.effort]:g} (effort {self.effort!r})"
        allowed = [level for level in forecasts if self._allowed(memo, level)]
        told = f"{names[chosen]}: the least seconds per effective step of {len(allowed)} that have {bound}"
        if chosen == DENSE and len(allowed) > 1:
            told = f"{names[chosen]}: none of {len(allowed)} that have {bound} is {self.margin:.0%} cheaper"
        elif chosen == DENSE:
            told = f"{names[chosen]}: no other has {bound}"
        return told

    # -- state -------------------------------------------------------------------------------------------------------
    def remembers(self, memo: Mapping[str, Any]) -> bool:
        if not memo:
            return True
        levels = self._order
        chosen = memo.get("chosen")

        def numbers(key: str, known: set[str]) -> bool:
            found = memo.get(key)
            return isinstance(found, Mapping) and set(found) <= known and all(map(_sound, found.values()))

        known = set(map(str, levels))
        return (
            set(memo) - {"watched", "signal"} == {"workers", "seconds", "chosen", "errors"}  # "signal": once written
            and type(memo["workers"]) is int
            and type(memo.get("watched", 0)) is int
            and 0 <= memo.get("watched", 0) <= 32
            and all(numbers(key, known) for key in ("seconds", "errors"))
            and set(memo["seconds"]) == set(memo["errors"])
            and (chosen is None or (type(chosen) is int and str(chosen) in {*memo["seconds"], str(DENSE)}))
        )

    def on_epoch_end(
        self, decision: Decision, epoch: int, lr: float | None, next_lr: float | None, norms: Mapping[str, float]
    ) -> Decision:
        return decision


def _sound(value: Any) -> bool:
    return number(value) and math.isfinite(value) and value >= 0


def _current(decision: Decision) -> int:
    return next(iter(decision.levels.values()), DENSE)


def _at(decision: Decision, level: int, memo: dict[str, Any]) -> Decision:
    return replace(decision, levels=dict.fromkeys(decision.levels, level), memo=memo)
