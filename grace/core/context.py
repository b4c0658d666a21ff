"""The context of a tensor: its metadata, without its values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from grace.core.rng import Rng

Array = Any


@dataclass(frozen=True)
class Context:
    """Metadata of a tensor in one step, without the tensor's values."""

    xp: Any = field(repr=False)
    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    """Dtype of the computation."""
    rank: Any = 0
    """This worker's number: an int, or an int64 scalar inside a graph that all workers share."""
    world_size: int = 1
    step: Any = 0
    """Number of earlier steps: an int, or an int64 scalar inside a graph."""
    seed: int = 0
    lr: Callable[[], Any] | None = field(default=None, repr=False)
    """A function that returns the learning rate of the coming step, a float or a scalar; None if unknown."""
    offset: int = 0
    """Position of a chunk's first element in the flattened tensor; 0 for a whole tensor."""
    wire: str = "float32"
    """Wire dtype of the gradient if it is sent uncompressed: its original dtype."""
    _draws: dict[Any, Array] | None = field(default=None, repr=False, compare=False)
    """The cache of `once` for this step; None: no cache."""
    _workers: range | None = None
    """The ranks of the workers that exchange the tensor; None: all. If set, ``rank`` is an index into it."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def rng(self, label: str) -> Rng:
        """The random stream of this name for this worker, tensor and step."""
        return Rng(self.xp, self.seed, label, self.name, self.step, self.rank + 1, self.offset)

    def shared_rng(self, label: str) -> Rng:
        """As `rng`, but the same stream on all workers."""
        return Rng(self.xp, self.seed, label, self.name, self.step, 0, self.offset)

    def once(self, label: Any, draw: Callable[[], Array]) -> Array:
        """Return ``draw()``. If the engine caches the draws of a step, only the first call of a step draws.

        For random numbers that encoding and decoding share. ``label`` must be unique among a tensor's draws in a step.
        """
        if self._draws is None or self.xp.traced:  # a traced array is valid only in its own part of the graph
            return draw()
        key = label, self.name, self.offset, self.shape
        if key not in self._draws:
            self._draws[key] = draw()
        return self._draws[key]

    def piece(self, start: int, size: int) -> Context:
        """The context of elements ``start .. start + size`` of the flattened tensor."""
        return self._with(shape=(size,), offset=self.offset + start)

    def stage(self, name: str) -> Context:
        """The same elements at another compression point, with separate random streams and state."""
        return self._with(name=f"{self.name}/{name}")

    def _with(self, **changes: Any) -> Context:
        # Does what dataclasses.replace does, at a fifth of the cost: a step makes thousands of contexts.
        context = object.__new__(type(self))
        context.__dict__.update(self.__dict__, **changes)
        return context
