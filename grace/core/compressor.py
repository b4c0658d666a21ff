"""The abstract compressor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import ClassVar

from grace.core.context import Context
from grace.core.program import MaybeProgram
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
    """The kind of method: "quantisation", "sparsification", "hybrid" or "low rank"."""
    combine: ClassVar[Combine] = Combine.GATHER
    ragged: ClassVar[bool] = False
    """The payload's length depends on the values."""
    unbiased: ClassVar[bool] = False
    """The expectation of ``decompress(compress(x))`` is x."""
    largest: ClassVar[float] = 1e30
    """Largest magnitude whose result is certainly finite."""
    shaped: ClassVar[bool] = False
    """It sees the tensor's shape, not only its size."""
    lossless: ClassVar[bool] = False
    """The payload is x itself, in ``ctx.wire``: float64 stays float64."""
    mask: ClassVar[bool] = False
    """Exact values are sent: `residual` is x with zeros where elements were sent."""
    vote: ClassVar[bool] = False
    """The result is a majority vote, so there is no residual."""
    feedback: ClassVar[bool] = False
    """It has error feedback of its own, in its state."""
    memory: ClassVar[str] = "residual"
    """The default memory."""
    resize: ClassVar[Mapping[str, Resize]] = {}
    """How its state follows a change of the number of workers, by key; by default `Resize.SAME`."""
    marked: ClassVar[bool] = False
    """NaN and infinity in x appear in the payload's float32 arrays."""

    @property
    def summed(self) -> tuple[str, int] | None:
        """dtype and largest magnitude of integers that are summed on the wire; None for floats."""
        return None

    @property
    def block(self) -> int | None:
        """Elements per block, if statistics are per block; None: per tensor.

        A promise: payloads of chunks, cut at whole blocks and bytes, concatenate to the payload of the whole.
        """
        return None

    def applies(self, ctx: Context) -> bool:
        """False: the tensor goes dense, as the report says."""
        return True

    def contraction(self, n: int) -> float | None:
        """d with E|x - x̂|² <= (1 - d)|x|² for every x of n elements, if there is one."""
        return None

    def variance(self, n: int) -> float | None:
        """w with E|x - x̂|² <= w|x|² for every x of n elements, if the method is unbiased."""
        return None

    def init(self, ctx: Context) -> State:
        """The initial state."""
        return {}

    @abstractmethod
    def compress(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        """float32[n] -> payload and next state. A generator may request collectives."""

    @abstractmethod
    def decompress(self, payload: Payload, ctx: Context) -> Array:
        """Payload -> float32[n], bit-equal on every worker."""

    def residual(self, x: Array, payload: Payload, ctx: Context) -> Array:
        """float32[n]: x less the decoded payload. x is donated: its memory may be reused."""
        return ctx.xp.subtract_from(x, self.decompress(payload, ctx))

    def aggregate(self, payloads: Sequence[Payload], ctx: Context) -> Array:
        """All workers' payloads, in rank order -> float32[n], the mean, in one dense buffer."""
        (total,) = apart((self.decompress(payloads[0], ctx),), payloads[0], ctx.xp)
        for payload in payloads[1:]:
            total = ctx.xp.add_to(total, self.decompress(payload, ctx))
        return ctx.xp.divide_in(total, len(payloads)) if len(payloads) > 1 else total

    def reduced(self, payload: Payload, ctx: Context) -> Array:
        """A payload reduced on the wire (combine MEAN) -> float32[n]. Floats are averaged, integers summed."""
        return self.decompress(payload, ctx)
