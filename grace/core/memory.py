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
    """What is added to a gradient before it is compressed, and what is kept afterwards."""

    feedback: ClassVar[bool] = False
    """It feeds back what the payload did not carry."""
    server: ClassVar[Memory | None] = None
    """The memory of a second compression, where a communicator has one; None: this one."""
    momentum_inside: ClassVar[bool] = False
    """Its results carry momentum: the optimizer should have none of its own."""
    resize: ClassVar[Mapping[str, Resize]] = {}
    """As of a `Compressor`."""
    plain: ClassVar[bool] = False
    """It compresses x plus its state "residual", if it has that, and keeps what was not sent: no more and no less."""

    def check(self, compressor: Compressor) -> None:  # noqa: B027 - most fit every compressor
        """Raise ValueError, naming the remedy, for a compressor that this memory cannot work with."""

    def init(self, ctx: Context) -> State:
        """The state before the first step."""
        return {}

    @abstractmethod
    def compensate(self, x: Array, state: State, ctx: Context) -> Steps[tuple[Array, State]]:
        """float32[n] -> what to compress instead, and next state. x is spent: its memory may be reused."""

    @abstractmethod
    def update(self, x: Array, payload: Payload, compressor: Compressor, state: State, ctx: Context) -> State:
        """Next state, from what was compressed (``x``, spent) and the payload that leaves this worker."""

    def finish(self, mean: Array, compressor: Compressor, state: State, ctx: Context) -> tuple[Array, State]:
        """float32[n], the mean of what all workers sent -> the result, and next state. By default the mean."""
        return mean, state

    def init_dense(self, ctx: Context) -> State:
        """The state before the first step of a tensor that goes dense; numbers are in ``ctx.dtype``."""
        return {}

    def finish_dense(self, mean: Array, state: State, ctx: Context) -> tuple[Array, State]:
        """As `finish`, for the exact mean of a tensor that goes dense."""
        return mean, state
