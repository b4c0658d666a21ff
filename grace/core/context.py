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
    """Dtype of the computation."""
    rank: int = 0
    world_size: int = 1
    step: Any = 0
    """How many exchanges this tensor has had: an int, or an int64 scalar inside a graph."""
    seed: int = 0
    lr: Callable[[], Any] | None = field(default=None, repr=False)
    """Returns the learning rate of the coming step, a float or a scalar; None if unknown."""
    offset: int = 0
    """Start of a chunk in the flattened tensor; 0 for a whole tensor."""
    compile: bool = False
    """Chunks may run as compiled by PyTorch (`grace.engine.compiled`)."""
    undo: list[tuple[Array, Array]] | None = field(default=None, repr=False, compare=False)
    """Rollback log. A kernel may overwrite the last residual if it appends (residual, array that holds the last one:
    the donated x). None: the last residual must stay intact."""
    calls: Calls | None = field(default=None, repr=False, compare=False)
    """Deferred kernels: an accelerator may return arrays that are filled later, and must not read them. None: run
    kernels at once."""
    drawn: dict[Any, Array] = field(default_factory=dict, repr=False, compare=False)
    """Cache of random draws that decoding repeats, by all that they depend on."""
    tail: list[Array] | None = field(default=None, repr=False, compare=False)
    """Where `accumulated` may put ``xp.excess(result, 0)`` for a method that begins with it; None: not wanted."""
    wire: str = "float32"
    """Dtype on the wire of a gradient that is sent uncompressed: its own."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def kernels(self) -> Any:
        """The backend's kernels, bound to ``undo`` and ``calls``; None or empty without kernels."""
        kernels = self.xp.kernels
        if kernels and (self.undo is not None or self.calls is not None):
            return kernels.within(self.undo, self.calls)
        return kernels

    def accumulated(self, x: Array, last: Array, beta: float = 1.0, gamma: float = 1.0) -> Array:
        """float32[n]: beta * last + gamma * x. x is donated; with `undo` the result overwrites ``last``."""
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
        """The same without a rollback log."""
        return self._with(undo=None)

    def rng(self, label: str) -> Rng:
        """Random stream of this worker, tensor and step."""
        return Rng(self.xp, self.seed, label, self.name, self.step, self.rank + 1, self.offset)

    def shared_rng(self, label: str) -> Rng:
        """Random stream that all workers share."""
        return Rng(self.xp, self.seed, label, self.name, self.step, 0, self.offset)

    def piece(self, start: int, size: int) -> Context:
        """The context of elements ``start .. start + size`` of the flattened tensor."""
        return self._with(shape=(size,), offset=self.offset + start)

    def stage(self, name: str) -> Context:
        """The same elements at another compression point: other random streams, other state."""
        return self._with(name=f"{self.name}/{name}")

    def with_tail(self) -> Context:
        """The same with an empty ``tail``."""
        return self._with(tail=[])

    def with_calls(self, calls: Calls | None) -> Context:
        """The same with other deferred kernels."""
        return self._with(calls=calls)

    def _with(self, **changes: Any) -> Context:
        # As dataclasses.replace, at a fifth of its time: a step makes thousands.
        context = object.__new__(type(self))
        context.__dict__.update(self.__dict__, **changes)
        return context
