"""The context of a call: what is known about a tensor without looking at its values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from grace.core.program import Calls
from grace.core.rng import Rng
from grace.core.state import Array


@dataclass(frozen=True)
class Context:
    """All that is known about a tensor without looking at its values."""

    xp: Any = field(repr=False)
    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    """What the exchange computes in."""
    rank: int = 0
    world_size: int = 1
    step: Any = 0
    """How many exchanges this tensor has had: an int, or an int64 scalar inside a graph."""
    seed: int = 0
    lr: Callable[[], Any] | None = field(default=None, repr=False)
    """Gives the learning rate that the mean will be applied with, a float or a scalar; None where nobody has said."""
    offset: int = 0
    """Where a piece begins in the flattened tensor; 0 for a whole one."""
    compile: bool = False
    """Pieces may be carried out by compiled forms (`grace.engine.compiled`)."""
    undo: list[tuple[Array, Array]] | None = field(default=None, repr=False, compare=False)
    """A kernel may write the next residual over the last one if it notes here the residual's array, and the array that
    has the last one now: the spent x, of as many elements. None: the last residual must stay as it is."""
    calls: Calls | None = field(default=None, repr=False, compare=False)
    """A kernel may leave its work here: an accelerator returns arrays that are filled then, and so must not look at
    them. None: it is done at once."""
    drawn: dict[Any, Array] = field(default_factory=dict, repr=False, compare=False)
    """What a method has drawn in this step and draws again when it decodes, by all that it depends on."""

    tail: list[Array] | None = field(default=None, repr=False, compare=False)
    """Where `accumulated` may leave ``xp.excess`` of its result and 0, for a method that begins with that. None: nobody
    asks."""

    wire: str = "float32"
    """What a gradient that is sent as it is travels in: its own dtype."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def kernels(self) -> Any:
        """The backend's kernels, which know of ``undo`` and ``calls``; None or empty where there are none."""
        kernels = self.xp.kernels
        if kernels and (self.undo is not None or self.calls is not None):
            return kernels.within(self.undo, self.calls)
        return kernels

    def accumulated(self, x: Array, last: Array, beta: float = 1.0, gamma: float = 1.0) -> Array:
        """float32[n] beta * last + gamma * x, in the memory of one of them.

        It is that of ``last``, an array of the state, where `undo` can tell where that went. x is spent.
        """
        xp = self.xp
        if xp.kernels and self.undo is not None and (kernel := self.kernels.accumulate):
            return kernel(x, last, beta, gamma, self.tail)
        if beta == gamma == 1.0:
            return xp.add_to(x, last)
        if not 0 < xp.piece < self.size:
            return xp.add_to(x * gamma, last * beta)
        for start in range(0, self.size, xp.piece):
            part = slice(start, min(start + xp.piece, self.size))
            xp.write(x[part], last[part] * beta + x[part] * gamma)
        return x

    def without_undo(self) -> Context:
        """The same, where the last residual must stay as it is."""
        return self._with(undo=None)

    def rng(self, label: str) -> Rng:
        """This worker's own numbers for this tensor and step."""
        return Rng(self.xp, self.seed, label, self.name, self.step, self.rank + 1, self.offset)

    def shared_rng(self, label: str) -> Rng:
        """Numbers that are the same on every worker."""
        return Rng(self.xp, self.seed, label, self.name, self.step, 0, self.offset)

    def piece(self, start: int, size: int) -> Context:
        """The context of elements ``start .. start + size`` of the flattened tensor."""
        return self._with(shape=(size,), offset=self.offset + start)

    def stage(self, name: str) -> Context:
        """The same elements at another point of the exchange: other random numbers, other state."""
        return self._with(name=f"{self.name}/{name}")

    def with_tail(self) -> Context:
        """The same, with a place for what a method begins with."""
        return self._with(tail=[])

    def with_calls(self, calls: Calls | None) -> Context:
        """The same, with or without a place for calls."""
        return self._with(calls=calls)

    def _with(self, **changes: Any) -> Context:
        # As dataclasses.replace, at a fifth of its time: a step makes thousands.
        context = object.__new__(type(self))
        context.__dict__.update(self.__dict__, **changes)
        return context
