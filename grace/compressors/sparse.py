"""Base classes of methods that send some elements with their positions."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from grace.core import Array, Compressor, Context, MaybeProgram, Payload, State, Traits
from grace.ops import index_coding as indices
from grace.ops.validate import fitting, matching, placed

LARGEST = 2.0**127 * (2 - 2.0**-23)
"""The largest number of float32."""
EXACT = Traits(family="sparsification", sends_exact_values=True, nonfinite_in_payload=True)
"""Traits of a method that sends some elements unchanged, with their positions."""


class Scattered(Compressor):
    """Sends values for some elements, with their positions."""

    @abstractmethod
    def _pairs(self, payload: Payload, ctx: Context) -> list[tuple[Array, Array]]:
        """Values float32[K] with positions int32[K], ascending; a pair for each group that a method sends."""

    def applies(self, ctx: Context) -> bool:
        return ctx.size < 2**31  # positions are int32

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        return scattered(ctx.xp, self._pairs(payload, ctx), ctx.size)

    def aggregate(self, payloads: Sequence[Payload], ctx: Context) -> Array:
        pairs = (pair for payload in payloads for pair in self._pairs(payload, ctx))
        return ctx.xp.inplace.divide(scattered(ctx.xp, pairs, ctx.size), len(payloads))


class Placed(Scattered):
    """Sends one value for each of some elements."""

    @abstractmethod
    def parts(self, payload: Payload, ctx: Context) -> tuple[Array, Array]:
        """Values float32[K] and positions int32[K] of a payload; whether positions ascend is checked later."""

    def residual(self, x: Array, payload: Payload, ctx: Context) -> Array:
        values, positions = self.parts(payload, ctx)
        return ctx.xp.inplace.scatter(x, positions, ctx.xp.take(x, positions) - values)

    def _pairs(self, payload: Payload, ctx: Context) -> list[tuple[Array, Array]]:
        return [self.parts(payload, ctx)]


class Selector(ABC):
    """Chooses elements of large magnitude, and all non-finite ones, so that every worker sees them."""

    def count(self, n: int) -> int | None:
        """Number of elements that are chosen of n; None if it depends on their values."""
        return None

    def contraction(self, n: int) -> float | None:
        """As `Compressor.contraction`."""
        return None

    def init(self, ctx: Context) -> State:
        """The initial state."""
        return {}

    @abstractmethod
    def choose(self, x: Array, state: State, ctx: Context) -> tuple[Array, State]:
        """float32[n] -> int32[K], the chosen positions, ascending; and next state."""


@dataclass(frozen=True)
class Elements:
    """A sparsifier's selection of elements, and the coding of their positions.

    ``index_coding``: "int32", "bitmap", "elias_fano", or "auto", the smallest of them (`grace.ops.index_coding`).
    """

    selector: Selector
    index_coding: str = "int32"

    def check(self) -> None:
        """Raise ValueError for an index coding that is unknown or does not suit the selector."""
        fixed = self.count(1) is not None
        known = (*indices.CODINGS, "auto") if fixed else indices.CODINGS[:2]
        if self.index_coding not in known:
            also = "" if fixed else ": the others need a fixed number of positions"
            raise ValueError(f"index_coding={self.index_coding!r}: choose one of {', '.join(map(repr, known))}{also}")

    def count(self, n: int) -> int | None:
        """K for n elements; None if it depends on their values."""
        return self.selector.count(n)

    def coding(self, n: int) -> str:
        """The index coding for a tensor of n elements."""
        k = self.count(n)
        return self.index_coding if k is None else indices.choose(self.index_coding, n, k)

    def arrays(self, n: int) -> int:
        """Number of arrays that `write` returns."""
        k = self.count(n)
        return 1 if k is None else indices.arrays(self.coding(n), n, k)

    def write(self, positions: Array, ctx: Context) -> tuple[Array, ...]:
        """int32[K] positions -> the wire arrays."""
        return indices.write(ctx.xp, self.coding(ctx.size), positions, ctx.size, self.count(ctx.size))

    def read(self, sent: tuple[Array, ...], ctx: Context) -> Array:
        """Return int32[K], the inverse of `write`."""
        return indices.read(ctx.xp, self.coding(ctx.size), sent, ctx.size, self.count(ctx.size))

    def parts(self, payload: Payload, ctx: Context) -> tuple[Array, Array]:
        """Values float32[K] and positions int32[K] of a payload; whether positions ascend is checked later."""
        return self.matched(payload[0], self.read(payload[1:], ctx), ctx)

    def matched(self, values: Array, positions: Array, ctx: Context) -> tuple[Array, Array]:
        """Return values and positions; ValueError for wrong numbers of elements or dtypes."""
        xp, k = ctx.xp, self.count(ctx.size)
        if k is not None:
            positions = fitting(xp, positions, "int32", k, "positions")
        return matching(xp, values, "float32", positions, "values"), positions


class Sparsifier(Scattered):
    """Sends unchanged elements: a selector chooses them, and an index coding writes their positions.

    Payload: values float32[K], positions int32[K], ascending, or their coding.
    """

    @property
    @abstractmethod
    def elements(self) -> Elements:
        """The selection of elements, and the coding of their positions."""

    @property
    def traits(self) -> Traits:
        return EXACT

    def compress(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        elements = self.elements
        positions, state = elements.selector.choose(x, state, ctx)
        return (ctx.xp.take(x, positions), *elements.write(positions, ctx)), state

    def residual(self, x: Array, payload: Payload, ctx: Context) -> Array:
        # The residual is exact, bit for bit: unsent elements stay unchanged.
        return ctx.xp.inplace.scatter(x, self.elements.read(payload[1:], ctx), 0.0)

    def _pairs(self, payload: Payload, ctx: Context) -> list[tuple[Array, Array]]:
        return [self.elements.parts(payload, ctx)]


def scattered(xp: Any, pairs: Iterable[tuple[Array, Array]], n: int) -> Array:
    """Return float32[n], the sum of values at their positions; ValueError unless positions ascend within 0 .. n-1."""
    total = xp.zeros(n)
    for values, positions in pairs:
        total = xp.scatter_add(total, placed(xp, positions, n), values)
    return total


def poisoned(xp: Any, values: Array, x: Array) -> Array:
    """The values, or NaN if any element of x is not finite, sent or not: every worker must see that."""
    return xp.where(xp.finite(x), values, float("nan"))


def first(xp: Any, above: Array, band: Array, count: Array) -> Array:
    """Return bool[n], True for all elements of ``above``, and for the first of ``band`` until there are ``count``."""
    room = count - xp.sum(xp.cast(above, "int32"))
    return above | (band & (xp.cumsum(xp.cast(band, "int32")) <= room))


def beyond(xp: Any, x: Array, threshold: Array) -> Array:
    """Return int32[K], ascending positions where |x| exceeds a threshold, float32[1]; if none, the largest element's.

    Non-finite elements exceed any threshold, so that every worker sees them.
    """
    found = xp.beyond(x, xp.where(xp.isfinite(threshold), threshold, LARGEST))
    none = xp.lengths([found]) == 0
    best = xp.mended(xp.invert(none), xp.zeros(1, "int32"), lambda: xp.topk_abs(x, 1))
    (extra,) = xp.integers(xp.cast(none, "int32"))
    return xp.concat([best[:extra], found])


def largest(xp: Any, x: Array, room: Any) -> Array:
    """Return int32[min(K, room)], ascending positions of the largest magnitudes of float32[K]; non-finite ones first.

    ``room``: a number, or an integer scalar that a graph knows only when it runs; so is K.
    """
    length = xp.shape(x)[0]
    if isinstance(length, int) and isinstance(room, int):
        return xp.topk_abs(x, room)
    size, many = xp.where(xp.isfinite(x), xp.abs(x), LARGEST), xp.lengths([x])
    room = xp.minimum(many, room)
    bound = xp.ranked(xp.concat([size, xp.full(1, float("inf"))]), xp.cast(many - room, "int32"))
    return xp.nonzero(first(xp, size > bound, size == bound, xp.cast(room, "int32")))


def signed(xp: Any, positions: Array, negative: Array) -> Array:
    """Return int32[K], positions that also encode a sign: -1 - position where ``negative``."""
    return xp.where(negative, -1 - positions, positions)


def unsigned(xp: Any, sent: Array) -> tuple[Array, Array]:
    """The inverse of `signed`: positions, and a mask of the negative ones."""
    sent = matching(xp, sent, "int32", sent, "positions")
    return xp.where(sent < 0, -1 - sent, sent), sent < 0


def kept(ratio: float, n: int) -> int:
    """Number of elements to keep of ``n``: floor(ratio * n), but at least one if there are any."""
    return min(n, max(1, math.floor(ratio * n)))


def check_ratio(ratio: float) -> None:
    """Raise ValueError unless 0 < ratio <= 1."""
    if not 0 < ratio <= 1:
        raise ValueError(f"compress_ratio={ratio!r} must lie in (0, 1]: 0.01 keeps 1% of the elements, 1 keeps all")
