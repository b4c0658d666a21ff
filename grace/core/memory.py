"""The abstract memory: error feedback, momentum, and other state that complements a compressor."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from grace.core.compressor import Compressor
from grace.core.context import Context
from grace.core.program import MaybeProgram
from grace.core.state import Array, Payload, Resize, State


class Memory(ABC):
    """State that complements a compressor: it is added to a gradient before compression and updated afterwards."""

    feedback: ClassVar[bool] = False
    """Whether it applies error feedback."""
    second_stage: ClassVar[Memory | None] = None
    """The memory of a communicator's second compression; None: this memory itself."""
    includes_momentum: ClassVar[bool] = False
    """Whether its results include momentum; if so, the optimizer should have none."""
    reshard: ClassVar[Mapping[str, Resize]] = {}
    """Reshard rule of each state array, by key; the default is `Resize.SAME`."""

    @property
    def standard_feedback(self) -> bool:
        """Whether the memory compresses x plus its state "residual" (if it has one) and stores the new residual."""
        return False

    def check(self, compressor: Compressor) -> None:  # noqa: B027 - most fit every compressor
        """Raise ValueError, naming the remedy, for a compressor that does not fit."""

    def init(self, ctx: Context) -> State:
        """The initial state."""
        return {}

    @abstractmethod
    def compensate(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Array, State]]:
        """Combine x, the gradient as float32[n], with the state: returns the vector to compress, and next state.

        x is donated.
        """

    @abstractmethod
    def update(self, x: Array, payload: Payload, compressor: Compressor, state: State, ctx: Context) -> State:
        """Return the next state, from the compressed vector (``x``, donated) and its payload."""

    def after_mean(self, mean: Array, compressor: Compressor, state: State, ctx: Context) -> tuple[Array, State]:
        """Return the exchange's result, given the mean of all workers' payloads, float32[n]; and next state.

        By default the result is the mean itself.
        """
        return mean, state

    def init_dense(self, ctx: Context) -> State:
        """The initial state of a tensor that goes dense, in ``ctx.dtype``."""
        return {}

    def after_dense_mean(self, mean: Array, state: State, ctx: Context) -> tuple[Array, State]:
        """As `after_mean`, for a tensor that goes dense."""
        return mean, state

    def __init_subclass__(cls, **options: Any) -> None:
        """Rename methods and attributes with former names, such as ``def finish``."""
        super().__init_subclass__(**options)
        for former, name in FORMER.items():
            if former in vars(cls) and name not in vars(cls):
                warnings.warn(f"{cls.__name__}.{former} is now {name}", DeprecationWarning, stacklevel=3)
                setattr(cls, name, vars(cls)[former])


FORMER = {
    "finish": "after_mean",
    "finish_dense": "after_dense_mean",
    "momentum_inside": "includes_momentum",
    "plain": "standard_feedback",
    "resize": "reshard",
    "server": "second_stage",
}
"""Former names of attributes and methods, deprecated, and their current names."""
