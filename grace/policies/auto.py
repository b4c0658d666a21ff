"""The method with the shortest measured step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from grace.core import Compressor, name_of
from grace.core.communicator import Communicator
from grace.core.method import Method
from grace.core.policy import Decision, Level, Policy, number
from grace.core.registry import communicators, register, triple, usual_communicator

DENSE, FLUSH, FIRST = 0, 1, 2
"""Levels: gradients as they are; the same, and with them what memories still hold; the first candidate."""
CANDIDATES = ("fp16", "powersgd", "topk", {"compressor": "efsignsgd", "block_size": 512})


@register("auto")
@dataclass(frozen=True)
class Auto(Policy):
    """Try methods on the first steps of a training, and go on with the one whose steps are shortest.

    Steps are timed whole, with the model's own work, and the slowest worker counts. Every trial trains: candidates
    share one error-feedback memory, and what it holds is sent before gradients go on dense. Another number of workers
    is another question: the trials begin anew.

    ``candidates``: names of compressors, or settings as for `grace.grace_from_params` (compressor, memory,
    communicator and their parameters). Their memory is "residual" or "none", their communicator "allreduce" or
    "allgather".
    ``trial_steps``: timed steps of each; two before them are not timed. The median counts.
    ``margin``: by what part of its time a step must be shorter than a dense one for dense gradients to be given up.
    """

    candidates: tuple[Any, ...] = CANDIDATES
    trial_steps: int = 5
    margin: float = 0.03
    switches_methods: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.candidates, (str, Mapping)) or not self.candidates:
            raise ValueError(f"candidates={self.candidates!r}: give a list of compressors or settings")
        object.__setattr__(self, "candidates", tuple(self.candidates))
        if self.trial_steps < 1:
            raise ValueError(f"trial_steps={self.trial_steps!r} must be at least 1")
        if not 0 <= self.margin < 1:
            raise ValueError(f"margin={self.margin!r} must lie in [0, 1)")
        for settings in self.candidates:
            self._fits(settings)

    def _fits(self, settings: Any) -> None:
        method, communicator = _one_round(settings)
        if (kind := name_of(communicator)) not in ("allreduce", "allgather"):
            raise ValueError(f"candidate {settings!r}: communicator {kind!r} has memories of its own, which would rest "
                             "with what they hold; candidates use allreduce or allgather")  # fmt: skip
        if (kind := name_of(method.memory)) not in ("none", "residual"):
            raise ValueError(f"candidate {settings!r}: memory {kind!r} is not shared with other methods; candidates "
                             "use residual or none")  # fmt: skip

    def levels(self, compressor: Compressor) -> tuple[Level, ...]:
        each = ({"compressor": c} if isinstance(c, str) else dict(c) for c in self.candidates)
        return {"compressor": "none"}, {"compressor": "none", "memory": "residual"}, *each  # DENSE, FLUSH, FIRST ...

    def ways(self, method: Method, communicator: Communicator) -> tuple[tuple[Method, Communicator], ...]:
        return tuple(_one_round(level) for level in self.levels(method.compressor))

    def trial(self, decision: Decision, workers: int) -> int | None:
        memo = decision.memo
        if memo.get("workers") != workers or _current(decision) == FLUSH:
            return 0
        return self.trial_steps if memo["chosen"] is None else None

    def on_trial_end(self, decision: Decision, workers: int, seconds: float) -> Decision:
        memo, level = decision.memo, _current(decision)
        if memo.get("workers") != workers:
            return _at(decision, DENSE, {"workers": workers, "seconds": {}, "chosen": None})
        if level == FLUSH:
            return _at(decision, memo["chosen"], memo)
        times = {**memo["seconds"], str(level): seconds}
        memo = {**memo, "seconds": times}
        following = FIRST if level == DENSE else level + 1
        if following < FIRST + len(self.candidates):
            return _at(decision, following, memo)
        best = int(min(times, key=lambda each: times[each]))
        if times[str(best)] > (1 - self.margin) * times[str(DENSE)]:
            best = DENSE
        memo = {**memo, "chosen": best}
        feeds_back = best != DENSE and triple(self.candidates[best - FIRST])[0].memory.feedback
        return _at(decision, best if feeds_back else FLUSH, memo)

    def trials(self, decision: Decision) -> dict[int, float]:
        return {int(level): seconds for level, seconds in decision.memo.get("seconds", {}).items()}

    def remembers(self, memo: Mapping[str, Any]) -> bool:
        if not memo:
            return True
        levels = [DENSE, *range(FIRST, FIRST + len(self.candidates))]
        seconds, chosen = memo.get("seconds"), memo.get("chosen")
        return (
            set(memo) == {"workers", "seconds", "chosen"}
            and type(memo["workers"]) is int
            and isinstance(seconds, Mapping)
            and set(seconds) <= set(map(str, levels))
            and all(map(number, seconds.values()))
            and (chosen is None or (type(chosen) is int and chosen in levels))
        )

    def on_epoch_end(
        self, decision: Decision, epoch: int, lr: float | None, next_lr: float | None, norms: Mapping[str, float]
    ) -> Decision:
        return decision


def _one_round(settings: Any) -> tuple[Method, Communicator]:
    # Methods share one memory, so each is compressed at one point.
    method, communicator = triple(settings)
    if name_of(communicator) == "auto":
        communicator = communicators.find(usual_communicator(method.compressor))()
    return method, communicator


def _current(decision: Decision) -> int:
    return next(iter(decision.levels.values()), DENSE)


def _at(decision: Decision, level: int, memo: dict[str, Any]) -> Decision:
    return replace(decision, levels=dict.fromkeys(decision.levels, level), memo=memo)
