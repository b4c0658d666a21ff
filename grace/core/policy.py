"""The abstract policy: frozen settings, and pure functions from one decision to the next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple

from grace.core import Compressor, name_of
from grace.core.communicator import Communicator
from grace.core.fields import checked
from grace.core.method import Method

Level = Mapping[str, Any]
"""A level: compressor fields and their values, such as ``{"compress_ratio": 0.1}``; empty: the compressor unchanged."""
MAIN = ("compress_ratio", "compress_rank", "bits", "quantum_num", "chunk_k")
"""Fields that a level may set by a bare number: it sets the first of them that the compressor has."""


@dataclass(frozen=True)
class Decision:
    """The settings until the next decision, and all that the policy remembers: plain data, saved as JSON."""

    levels: dict[str, int]
    """The index of each tensor's level, by tensor name."""
    micro_steps: int = 1
    """Number of batches whose gradients accumulate before an exchange."""
    lr_scale: float = 1.0
    """One-time factor for the learning rate."""
    memo: dict[str, Any] = field(default_factory=dict)
    """Data that the policy keeps for its next decision."""


class Noise(NamedTuple):
    """Squared norms of one tensor, summed over the measured steps; equal on all workers. Only their ratio matters."""

    error: float
    """The squared norm of the exchanged mean minus the wanted mean.

    The wanted mean is the exact mean plus the error that error feedback has held back in earlier steps.
    """
    wanted: float
    """The squared norm of the wanted mean."""


class Cost(NamedTuple):
    """What a level costs in a step, computed and measured on this machine without an exchange."""

    bytes: float
    """Bytes of one worker's payloads, of all tensors that a policy may compress."""
    seconds: float
    """Seconds to encode and decode them."""
    error: float
    """The squared error of decoded standard normal numbers, relative to them."""


class Forecast(NamedTuple):
    """The expected cost of a level."""

    noise_ratio: float
    """The noise that the level adds to the mean, relative to the mean (squared norms)."""
    seconds: float
    """Seconds that it takes to progress as far as one step with exact means."""


class Policy(ABC):
    """Decides at the end of each epoch. Subclasses are frozen dataclasses of settings.

    The functions are pure and take plain numbers, never arrays, so all toolkits decide alike. They run on worker 0, and
    all workers adopt its decision.
    """

    norm_source: str = ""
    """Which gradients to sum over a watched epoch: "rank0" (worker 0's own), "mean" (every worker's own; their squared
    norms are averaged), "aggregated" (the means that all workers receive); empty: none."""
    batch: ClassVar[bool] = False
    """Whether the policy decides on ``micro_steps``."""
    switches_methods: ClassVar[bool] = False
    """Whether levels are whole methods, each with its memory and communicator."""
    exact: ClassVar[int | None] = None
    """The level, with exact means, that replaces a level whose method does not apply to a tensor; None: a tensor is
    compressed only if the methods of all levels apply to it."""
    measures_noise: ClassVar[bool] = False
    """Whether `on_trial_end` receives the noise that the exchange added to the means."""
    predicts: ClassVar[bool] = False
    """Whether `on_trial_end` receives the cost of each level."""

    @property
    def first_level(self) -> int:
        """The level at which a training begins."""
        return 0

    @property
    def together(self) -> bool:
        """Whether all tensors always share one level."""
        return True

    def levels(self, compressor: Compressor) -> tuple[Level, ...]:
        """The levels of this compressor. ValueError, with the remedy, if it cannot have any."""
        return ({},)

    def ways(self, method: Method, communicator: Communicator) -> tuple[tuple[Method, Communicator], ...]:
        """The method and the communicator at each level. By default only the compressor changes."""
        compressors = (at_level(method.compressor, level) for level in self.levels(method.compressor))
        return tuple((replace(method, compressor=compressor), communicator) for compressor in compressors)

    def watches(self, epoch: int, decision: Decision) -> bool:
        """Return whether to record the norms of this epoch's summed gradients; epochs count from 0."""
        return False

    @abstractmethod
    def on_epoch_end(
        self, decision: Decision, epoch: int, lr: float | None, next_lr: float | None, norms: Mapping[str, float]
    ) -> Decision:
        """The decision from the next epoch on.

        ``lr``, ``next_lr``: learning rates of this epoch and the next, if known. ``norms``: by tensor, the norm of its
        gradients summed over the epoch; empty unless the epoch was watched.
        """

    def trial(self, decision: Decision, workers: int) -> int | None:
        """Number of steps to time now; 0: decide after this step; None: no trial.

        The first four steps of a process are not timed.
        """
        return None

    def on_trial_end(
        self,
        decision: Decision,
        workers: int,
        seconds: float,
        noise: Mapping[str, Noise] | None = None,
        costs: Sequence[Cost] | None = None,
    ) -> Decision:
        """The decision after a trial. ``seconds``: the median time of its steps on the slowest worker; of an even
        number of steps, the lower median.

        ``noise``: by tensor, over the timed steps; None unless the policy measures it. ``costs``: of each level; None
        unless the policy predicts. A policy that does neither may leave both parameters out.
        """
        return decision

    def trials(self, decision: Decision) -> dict[int, float]:
        """Seconds per step of each tried level, by level index, for the report."""
        return {}

    def forecasts(self, decision: Decision) -> dict[int, Forecast]:
        """The expected cost of each tried level, by level index, for the report."""
        return {}

    def why(self, decision: Decision, names: Sequence[str]) -> str:
        """The reason for the current level, for the report. ``names``: a description of each level."""
        return ""

    def remembers(self, memo: Mapping[str, Any]) -> bool:
        """Whether ``memo`` is valid as this policy's `Decision.memo`: it may come from a file or another worker."""
        return True


def number(value: Any) -> bool:
    """Return whether a JSON value is a number."""
    return type(value) in (int, float)


def at_level(compressor: Compressor, level: Level) -> Compressor:
    """Return the compressor with a level's fields changed, in the compressor itself or in its nested compressors.

    ValueError for an unknown field.
    """
    known = _fields(compressor)
    for key, value in level.items():
        if key not in known:
            has = f"it has {', '.join(sorted(known))}" if known else "it has none"
            raise ValueError(f"level {dict(level)}: compressor {name_of(compressor)!r} has no field {key!r}; {has}")
        checked(key, value, known[key][1])
    return _replaced(compressor, level)


def level_of(key: str, value: Any, compressor: Compressor) -> Level:
    """A level, given as a mapping or as a number for the method's main field.

    ``key``: the parameter's name, for the error.
    """
    if isinstance(value, Mapping):
        return dict(value)
    known = _fields(compressor)
    main = next((name for name in MAIN if name in known), None)
    if main is None:
        raise ValueError(
            f"{key}={value!r}: compressor {name_of(compressor)!r} has none of the fields {', '.join(MAIN)} that a "
            f"number could stand for. Name the field, as in {key}={{'field': {value!r}}}; it has "
            f"{', '.join(sorted(known)) or 'none'}"
        )
    return {main: value}


def own_level(keys: Iterable[str], compressor: Compressor) -> Level:
    """The compressor's current values of the fields ``keys``, as a level; fields that it does not have are left out."""
    known = _fields(compressor)
    return {key: known[key][0] for key in keys if key in known}


def _fields(compressor: Compressor) -> dict[str, tuple[Any, Any]]:
    # Returns (value, default) of each field, by name: those of the compressor and of its nested compressors.
    found: dict[str, tuple[Any, Any]] = {}
    for each in fields(compressor):  # type: ignore[arg-type]
        value = getattr(compressor, each.name)
        if isinstance(value, Compressor):
            found |= _fields(value)
        else:
            found[each.name] = value, value if each.default is MISSING else each.default
    return found


def _replaced(compressor: Compressor, level: Level) -> Compressor:
    new: dict[str, Any] = {}
    for each in fields(compressor):  # type: ignore[arg-type]
        value = getattr(compressor, each.name)
        if isinstance(value, Compressor):
            new[each.name] = _replaced(value, level)
        elif each.name in level:
            new[each.name] = level[each.name]
    return replace(compressor, **new)  # type: ignore[type-var]
