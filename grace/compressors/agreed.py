"""Sparsifiers whose workers agree on the elements while they compress."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from grace.compressors.selectors import Exact
from grace.compressors.sparse import EXACT, Elements, Sparsifier, check_ratio
from grace.core import Array, Combine, Context


@dataclass(frozen=True)
class AgreedSparsifier(Sparsifier):
    """A sparsifier whose workers agree, while they compress, on k elements and their mean."""

    compress_ratio: float = 0.01

    traits = replace(EXACT, combine=Combine.AGREED)

    def __post_init__(self) -> None:
        check_ratio(self.compress_ratio)

    @cached_property
    def elements(self) -> Elements:
        return Elements(Exact(self.compress_ratio))

    def count(self, n: int) -> int:
        """k for n elements."""
        k = self.elements.count(n)
        assert k is not None
        return k

    def select(self, x: Array, ctx: Context) -> Array:
        """Return int32[k], the positions of the largest elements, ascending."""
        return ctx.xp.topk_abs(x, self.count(ctx.size))


def put_back(x: Array, used: Array, own: Array, ctx: Context) -> Array:
    """Return x with zeros where this worker's elements ``own`` are among those ``used``, both int32 positions."""
    xp = ctx.xp
    mask = xp.inplace.scatter(xp.zeros(ctx.size, "uint8"), used, 1)
    return xp.inplace.scatter(x, own, xp.where(xp.take(mask, own) != 0, 0.0, xp.take(x, own)))
