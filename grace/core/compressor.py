"""The abstract compressor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import ClassVar

from grace.core.context import Context
from grace.core.program import Steps
from grace.core.state import Array, Payload, Resize, State, apart


class Combine(Enum):
    """How the payloads of all workers become one gradient."""

    GATHER = "gather"
    """All payloads are needed: each is decoded, then averaged (or voted on)."""
    MEAN = "mean"
    """Payloads are linear in the gradient: they may be averaged on the wire."""
    AGREED = "agreed"
    """The workers agreed on one payload inside ``compress``: nothing is left to exchange."""


class Compressor(ABC):
    """Turns a gradient into a payload and a payload back into a gradient.

    Subclasses are frozen dataclasses of hyper-parameters. ``x`` is always float32[n] with n = ``ctx.size``.
    Only ``compress`` and ``decompress`` must be written. Native kernels lie apart (`grace.engine.accelerators`).
    """

    family: ClassVar[str] = ""
    """What kind of method it is: "quantisation", "sparsification", "hybrid" or "low rank"."""
    combine: ClassVar[Combine] = Combine.GATHER
    ragged: ClassVar[bool] = False
    """The payload's length depends on the values."""
    unbiased: ClassVar[bool] = False
    """The expectation of ``decompress(compress(x))`` is x."""
    largest: ClassVar[float] = 1e30
    """Magnitudes up to this give finite results; larger ones may become infinite."""
    shaped: ClassVar[bool] = False
    """It sees the tensor's shape, not only its size."""
    lossless: ClassVar[bool] = False
    """The payload is x itself, in ``ctx.wire``: float64 stays float64."""
    mask: ClassVar[bool] = False
    """Every element is sent as it is or kept as it is: `residual` is x with zeros where it was sent."""
    vote: ClassVar[bool] = False
    """The result is a vote, not a mean: error feedback has nothing to subtract from."""
    feedback: ClassVar[bool] = False
    """It keeps what it did not send in a state of its own."""
    memory: ClassVar[str] = "residual"
    """The memory that a user should have with this method."""
    resize: ClassVar[Mapping[str, Resize]] = {}
    """How arrays of its state follow the number of workers, by their keys; those that are not named: `Resize.SAME`."""
    marked: ClassVar[bool] = False
    """NaN and infinity in x show as such in the payload's float32 arrays: nothing need be decoded to see them."""

    tail: ClassVar[bool] = False
    """`compress` begins with ``xp.excess`` of x and 0, which may lie in ``ctx.tail``."""

    @property
    def summed(self) -> tuple[str, int] | None:
        """dtype and largest magnitude of an integer payload that is summed on the wire; None if payloads are floats."""
        return None

    @property
    def block(self) -> int | None:
        """Statistics are per block of so many elements, so that blocks may be compressed apart; None: per tensor.

        A promise: cut at whole blocks (and whole bytes), the payload arrays of the pieces concatenate to those
        of the whole.
        """
        return None

    def applies(self, ctx: Context) -> bool:
        """False: this tensor goes dense, and the report says so."""
        return True

    def contraction(self, n: int) -> float | None:
        """d with E|x - x̂|² <= (1 - d)|x|² for every x of n elements, if there is one."""
        return None

    def variance(self, n: int) -> float | None:
        """w with E|x - x̂|² <= w|x|² for every x of n elements, if the method is unbiased."""
        return None

    def init(self, ctx: Context) -> State:
        """The state before the first step."""
        return {}

    @abstractmethod
    def compress(self, x: Array, state: State, ctx: Context) -> Steps[tuple[Payload, State]]:
        """float32[n] -> payload and next state. A generator may ask for collectives."""

    @abstractmethod
    def decompress(self, payload: Payload, ctx: Context) -> Array:
        """Payload -> float32[n]. Sees only what every worker sees: any worker gets the same bits."""

    def residual(self, x: Array, payload: Payload, ctx: Context) -> Array:
        """float32[n]: x less the decoded payload. x is donated: its memory may be reused."""
        return ctx.xp.subtract_from(x, self.decompress(payload, ctx))

    def aggregate(self, payloads: Sequence[Payload], ctx: Context) -> Array:
        """All workers' payloads, in rank order -> float32[n], the mean. One dense buffer, whatever their number."""
        (total,) = apart((self.decompress(payloads[0], ctx),), payloads[0], ctx.xp)
        for payload in payloads[1:]:
            total = ctx.xp.add_to(total, self.decompress(payload, ctx))
        return ctx.xp.divide_in(total, len(payloads)) if len(payloads) > 1 else total

    def reduced(self, payload: Payload, ctx: Context) -> Array:
        """A payload reduced on the wire -> float32[n]. Floats come averaged, integers summed (combine MEAN)."""
        return self.decompress(payload, ctx)
