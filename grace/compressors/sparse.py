"""What all methods share that send some elements with their positions."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from grace.core import Array, Combine, Compressor, Context, Payload, State, Steps, Traits
from grace.ops import index_coding as indices
from grace.ops.validate import fitting, matching, placed

LARGEST = 2.0**127 * (2 - 2.0**-23)
"""The largest number of float32."""
EXACT = Traits(family="sparsification", sends_exact_values=True, nonfinite_in_payload=True)
"""Traits of a method that sends some elements as they are, with their positions."""


class Scattered(Compressor):
    """Sends numbers for some elements, which are added up one payload after the other."""

    @abstractmethod
    def add(self, total: Array, payload: Payload, ctx: Context) -> Array:
        """``total`` plus a decoded payload. total is donated."""

    def applies(self, ctx: Context) -> bool:
        return ctx.size < 2**31  # positions are int32

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        return self.add(ctx.xp.zeros(ctx.size), payload, ctx)

    def aggregate(self, payloads: Sequence[Payload], ctx: Context) -> Array:
        total = ctx.xp.zeros(ctx.size)
        for payload in payloads:
            total = self.add(total, payload, ctx)
        return ctx.xp.divide_in(total, len(payloads))


class Placed(Scattered):
    """Sends numbers for some elements, for each of them one."""

    @abstractmethod
    def parts(self, payload: Payload, ctx: Context) -> tuple[Array, Array]:
        """float32[K] and int32[K]: the numbers, and where they belong, ascending; that they do is not checked yet."""

    def add(self, total: Array, payload: Payload, ctx: Context) -> Array:
        values, positions = self.parts(payload, ctx)
        return ctx.xp.scatter_add(total, placed(ctx.xp, positions, ctx.xp.shape(total)[0]), values)

    def residual(self, x: Array, payload: Payload, ctx: Context) -> Array:
        values, positions = self.parts(payload, ctx)
        return ctx.xp.put(x, positions, ctx.xp.take(x, positions) - values)


class Sparsifier(Placed):
    """Sends ``x[positions]`` and the positions. Subclasses choose them.

    Payload: values float32[K], positions int32[K], ascending.
    """

    @property
    def traits(self) -> Traits:
        return EXACT

    @abstractmethod
    def select(self, x: Array, ctx: Context) -> Array:
        """int32[K]: the positions to send, ascending."""

    def count(self, n: int) -> int | None:
        """K for n elements; None if it depends on their values."""
        return None

    def write(self, positions: Array, ctx: Context) -> tuple[Array, ...]:
        """Positions as they travel."""
        return (positions,)

    def read(self, sent: tuple[Array, ...], ctx: Context) -> Array:
        """int32[K]: the inverse of `write`."""
        return sent[0]

    def arrays(self, n: int) -> int:
        """How many arrays `write` makes."""
        return 1

    def compress(self, x: Array, state: State, ctx: Context) -> Steps[tuple[Payload, State]]:
        positions = self.select(x, ctx)
        return (ctx.xp.take(x, positions), *self.write(positions, ctx)), state

    def residual(self, x: Array, payload: Payload, ctx: Context) -> Array:
        # Exact, bit for bit: what was not sent stays as it is.
        return ctx.xp.put(x, self.read(payload[1:], ctx), 0.0)

    def parts(self, payload: Payload, ctx: Context) -> tuple[Array, Array]:
        return self.matched(payload[0], self.read(payload[1:], ctx), ctx)

    def matched(self, values: Array, positions: Array, ctx: Context) -> tuple[Array, Array]:
        """The arguments; ValueError unless there are as many as there must be, of these dtypes."""
        xp, k = ctx.xp, self.count(ctx.size)
        if k is not None:
            positions = fitting(xp, positions, "int32", k, "positions")
        return matching(xp, values, "float32", positions, "values"), positions


@dataclass(frozen=True)
class CodedSparsifier(Sparsifier):
    """A sparsifier whose positions may travel in fewer bits.

    ``index_coding``: "int32", "bitmap", "elias_fano", or "auto", the smallest of them (`grace.ops.index_coding`).
    """

    index_coding: str = field(default="int32", kw_only=True)

    def __post_init__(self) -> None:
        fixed = self.count(1) is not None
        known = (*indices.CODINGS, "auto") if fixed else indices.CODINGS[:2]
        if self.index_coding not in known:
            also = "" if fixed else ": the others need a number of positions that is known beforehand"
            raise ValueError(f"index_coding={self.index_coding!r}: choose one of {', '.join(map(repr, known))}{also}")

    def write(self, positions: Array, ctx: Context) -> tuple[Array, ...]:
        k = self.count(ctx.size)
        return indices.write(ctx.xp, self._coding(ctx.size, k), positions, ctx.size, k)

    def read(self, sent: tuple[Array, ...], ctx: Context) -> Array:
        k = self.count(ctx.size)
        return indices.read(ctx.xp, self._coding(ctx.size, k), sent, ctx.size, k)

    def arrays(self, n: int) -> int:
        k = self.count(n)
        return 1 if k is None else indices.arrays(self._coding(n, k), n, k)

    def coding(self, n: int) -> str:
        """The index coding for a tensor of n elements."""
        return self._coding(n, self.count(n))

    def _coding(self, n: int, k: int | None) -> str:
        return self.index_coding if k is None else indices.choose(self.index_coding, n, k)


@dataclass(frozen=True)
class AgreedSparsifier(Sparsifier):
    """A sparsifier whose workers agree, while they compress, on k elements and their mean."""

    compress_ratio: float = 0.01

    traits = replace(EXACT, combine=Combine.AGREED)

    def __post_init__(self) -> None:
        check_ratio(self.compress_ratio)

    def count(self, n: int) -> int:
        return kept(self.compress_ratio, n)

    def select(self, x: Array, ctx: Context) -> Array:
        return ctx.xp.topk_abs(x, self.count(ctx.size))


def poisoned(xp: Any, values: Array, x: Array) -> Array:
    """The values, or NaN if any element of x is not finite: every worker must see it, also where x is not sent."""
    return xp.where(xp.finite(x), values, float("nan"))


def first(xp: Any, above: Array, band: Array, count: Array) -> Array:
    """bool[n]: all that are ``above``, and of the ``band`` the first, ``count`` in all."""
    room = count - xp.sum(xp.cast(above, "int32"))
    return above | (band & (xp.cumsum(xp.cast(band, "int32")) <= room))


def beyond(xp: Any, x: Array, threshold: Array) -> Array:
    """int32[K]: where |x| exceeds a threshold, float32[1], ascending; if nowhere, where it is largest.

    What is not finite exceeds any threshold, and so is seen by every worker.
    """
    found = xp.beyond(x, xp.where(xp.isfinite(threshold), threshold, LARGEST))
    none = xp.lengths([found]) == 0
    best = xp.mended(xp.invert(none), xp.zeros(1, "int32"), lambda: xp.topk_abs(x, 1))
    (extra,) = xp.integers(xp.cast(none, "int32"))
    return xp.concat([best[:extra], found])


def signed(xp: Any, positions: Array, negative: Array) -> Array:
    """int32 positions with a sign: -1 - position where ``negative``."""
    return xp.where(negative, -1 - positions, positions)


def unsigned(xp: Any, sent: Array) -> tuple[Array, Array]:
    """The inverse of `signed`: positions, and where they are negative."""
    sent = matching(xp, sent, "int32", sent, "positions")
    return xp.where(sent < 0, -1 - sent, sent), sent < 0


def kept(ratio: float, n: int) -> int:
    """How many of ``n`` elements a ratio keeps: floor(ratio * n), at least one of a tensor that has any."""
    return min(n, max(1, math.floor(ratio * n)))


def check_ratio(ratio: float) -> None:
    """Raise ValueError unless 0 < ratio <= 1."""
    if not 0 < ratio <= 1:
        raise ValueError(f"compress_ratio={ratio!r} must lie in (0, 1]: 0.01 keeps 1% of the elements, 1 keeps all")
