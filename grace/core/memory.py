"""The abstract memory: error feedback, momentum, and other state beside a compressor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from grace.core.compressor import Compressor
from grace.core.context import Context
from grace.core.program import Steps
from grace.core.state import Array, Payload, Resize, State


class Memory(ABC):
    """State beside a compressor: what is added to a gradient before compression, and what is stored after it."""

    feedback: ClassVar[bool] = False
    """It has error feedback."""
    server: ClassVar[Memory | None] = None
    """The memory of a communicator's second compression; None: this one."""
    momentum_inside: ClassVar[bool] = False
    """Its results include momentum: the optimizer should have none."""
    reshard: ClassVar[Mapping[str, Resize]] = {}
    """As `Traits.reshard`."""
    plain: ClassVar[bool] = False
    """Standard error feedback: compresses x plus its state "residual", if it has one, and stores the new residual."""

    def check(self, compressor: Compressor) -> None:  # noqa: B027 - most fit every compressor
        """Raise ValueError, naming the remedy, for a compressor that does not fit."""

    def init(self, ctx: Context) -> State:
        """The initial state."""
        return {}

    @abstractmethod
    def compensate(self, x: Array, state: State, ctx: Context) -> Steps[tuple[Array, State]]:
        """float32[n] -> the vector to compress, and next state. x is donated."""

    @abstractmethod
    def update(self, x: Array, payload: Payload, compressor: Compressor, state: State, ctx: Context) -> State:
        """Next state, from the compressed vector (``x``, donated) and its payload."""

    def finish(self, mean: Array, compressor: Compressor, state: State, ctx: Context) -> tuple[Array, State]:
        """float32[n], the mean of all workers' payloads -> the result, and next state. By default the mean."""
        return mean, state

    def init_dense(self, ctx: Context) -> State:
        """The initial state of a tensor that goes dense, in ``ctx.dtype``."""
        return {}

    def finish_dense(self, mean: Array, state: State, ctx: Context) -> tuple[Array, State]:
        """As `finish`, for a tensor that goes dense."""
        return mean, state
