"""Interchangeable selectors of the largest elements, exact or approximate."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import NormalDist
from typing import Any, ClassVar

from grace.compressors.sparse import EXACT, Elements, Selector, Sparsifier, beyond, check_ratio, first, kept
from grace.compressors.studies.sidco import SIDCo
from grace.core import Array, Context, State, Traits

CHUNK = 4096
"""Number of elements per chunk for selector "chunk", unless n / k is larger."""
STEP, STEPS = 1.03, 32
"""Candidate thresholds are the sample's estimate times 1.03 ** -32 .. 1.03 ** 32, that is 0.39 .. 2.6."""
FACTORS = [STEP**j for j in range(-STEPS, STEPS + 1)]
MISS = [1e-3 * (len(FACTORS) - j) for j in range(len(FACTORS))]
"""Penalty added to the distance between a candidate's count and k, so that among ties the highest threshold wins."""
SMALL = 100
"""Up to this size a tensor is too small for estimates: the largest elements are selected exactly."""


@dataclass(frozen=True)
class Largest(Selector):
    """Selects about k = floor(compress_ratio * n) elements of largest magnitude, and all non-finite ones."""

    compress_ratio: float

    def choose(self, x: Array, state: State, ctx: Context) -> tuple[Array, State]:
        return self.select(x, kept(self.compress_ratio, ctx.size), ctx), state

    @abstractmethod
    def select(self, x: Array, k: int, ctx: Context) -> Array:
        """float32[n] -> int32[K], the selected positions, ascending."""


@dataclass(frozen=True)
class Exact(Largest):
    """Selects the k largest elements; among ties, the first ones."""

    def count(self, n: int) -> int | None:
        return kept(self.compress_ratio, n)

    def contraction(self, n: int) -> float | None:
        return kept(self.compress_ratio, n) / n if n else 1.0

    def select(self, x: Array, k: int, ctx: Context) -> Array:
        return ctx.xp.topk_abs(x, k)


@dataclass(frozen=True)
class Chunk(Largest):
    """Selects the largest elements of each chunk, k in all. A chunk has 4096 elements, or n / k if that is larger."""

    def count(self, n: int) -> int | None:
        return kept(self.compress_ratio, n)

    def contraction(self, n: int) -> float | None:
        k = kept(self.compress_ratio, n)
        shares = [count / size for _, rows, size, count in self._parts(n, k) if rows]
        return min(shares, default=1.0)

    def select(self, x: Array, k: int, ctx: Context) -> Array:
        xp = ctx.xp
        found = []
        for start, rows, size, count in self._parts(ctx.size, k):
            if rows * count:
                table = xp.reshape(x[start : start + rows * size], (rows, size))
                places = xp.topk_abs(table, count) + xp.reshape(xp.arange(rows) * size + start, (-1, 1))
                found.append(xp.reshape(places, (-1,)))
        return xp.concat(found) if found else xp.zeros(0, "int32")

    def _parts(self, n: int, k: int) -> list[tuple[int, int, int, int]]:
        # Returns (start, chunks, elements per chunk, selected per chunk) of three groups: chunks that select one more
        # element, the other chunks, and the short last chunk. No chunk is skipped: it may hold a non-finite element.
        size = max(CHUNK, -(-n // k)) if k else CHUNK
        full, rest = divmod(n, size)
        last = max(1, k * rest // n) if rest else 0
        few, more = divmod(k - last, full) if full else (0, 0)
        parts = [(0, more, size, few + 1), (more * size, full - more, size, few), (full * size, 1, rest, last)]
        return parts if rest else parts[:2]


@dataclass(frozen=True)
class Sampled(Largest):
    """Selects elements above a threshold estimated from a sample (as method `dgc`): at most 1.3 k, no zeros."""

    likely: ClassVar[int] = STEPS - 12
    """Index of the candidate 0.70 times the sample's estimate; usually slightly more than 1.3 k elements exceed it."""

    def select(self, x: Array, k: int, ctx: Context) -> Array:
        xp, n = ctx.xp, ctx.size
        sample = self.sample(n)
        if sample >= n:
            finite = xp.isfinite(x)
            size = xp.where(finite, xp.abs(x), 0.0)
            largest = xp.scatter(xp.zeros(n, "uint8"), xp.topk(size, k), 1) != 0
            return xp.nonzero(largest & (size > 0) | xp.invert(finite))
        candidates = self._threshold(x, sample, ctx) * xp.asarray(FACTORS, "float32")
        # On a host, reading ``enough`` costs no wait. The likely candidate is usually low enough, and then fewer
        # elements need to be examined than with the lowest candidate.
        if xp.piece and self.likely:
            found, enough = self._above(xp, x, candidates, self.likely, k)
            if enough:
                return found
        return self._above(xp, x, candidates, 0, k)[0]

    def sample(self, n: int) -> int:
        """Number of elements to draw of n; if it reaches n, the largest are selected exactly."""
        return max(100, math.ceil(32 / self.compress_ratio), math.ceil(n / 100))

    def _threshold(self, x: Array, sample: int, ctx: Context) -> Array:
        # Returns float32[1]: the threshold that the wanted share of the sample reaches.
        xp = ctx.xp
        drawn = xp.bitwise_and(ctx.rng("sample").bits(sample), 0x7FFFFFFF) % ctx.size
        size = _magnitudes(xp, xp.take(x, drawn))
        largest = xp.take(size, xp.topk_abs(size, math.ceil(self.compress_ratio * sample)))
        return xp.reshape(-xp.max(-largest), (1,))

    def _above(self, xp: Any, x: Array, candidates: Array, start: int, k: int) -> tuple[Array, Array]:
        # Returns int32[K], positions of the elements above the candidate that is exceeded by about k elements; and
        # whether the list is complete, since only elements above the candidate at ``start`` are examined.
        likely = xp.beyond(x, candidates[start : start + 1])
        values = xp.take(x, likely)
        chosen, enough = self._nearest(xp, _magnitudes(xp, values), candidates, start, k)
        return xp.take(likely, xp.nonzero(chosen | xp.invert(xp.isfinite(values)))), enough

    def _nearest(self, xp: Any, size: Array, candidates: Array, start: int, k: int) -> tuple[Array, Array]:
        # As `_above`, for the magnitudes ``size`` of the examined elements: bool[K] and bool[1].
        many, most = len(FACTORS), math.ceil(1.3 * k)
        # For each element, the number of candidates below it; an appended zero avoids an empty search.
        below = xp.searchsorted(candidates, xp.concat([size, xp.zeros(1)]))[:-1]
        counts = xp.cast(xp.segment_sum(size * 0.0 + 1.0, below, many + 1), "int32")
        above = xp.cast(xp.sum(counts) - xp.cumsum(counts)[:-1], "float32")
        # The count nearest to k, after capping counts at the maximum to send; of ties, the highest threshold.
        miss = xp.abs(xp.minimum(above, float(most)) - float(k))
        best = xp.topk(-(miss + xp.asarray(MISS, "float32")), 1)
        # If more than ``most`` elements exceed the best candidate, take those above the next one, and fill up with the
        # first of those in between. If at least ``most`` exceed the first candidate examined, lower candidates give the
        # same result.
        enough = (above[start : start + 1] >= most) & (best >= start)
        return first(xp, below > best + 1, below == best + 1, most), enough


def _magnitudes(xp: Any, x: Array) -> Array:
    # Non-finite elements count as zero.
    return xp.where(xp.isfinite(x), xp.abs(x), 0.0)


@dataclass(frozen=True)
class Thresholded(Largest):
    """Selects elements above a threshold found by counting; the largest element if none exceeds it."""

    def select(self, x: Array, k: int, ctx: Context) -> Array:
        if k == ctx.size or ctx.size <= SMALL:
            return ctx.xp.topk_abs(x, k)
        return beyond(ctx.xp, x, self.threshold(x, k, ctx.xp))

    @abstractmethod
    def threshold(self, x: Array, k: int, xp: Any) -> Array:
        """Return float32[1], the threshold for x, which has more than `SMALL` elements."""

    def above(self, x: Array, threshold: Array, xp: Any) -> Array:
        """Return float64[1], the number of magnitudes in x above a threshold."""
        return xp.excess(x, threshold)[:1]


@dataclass(frozen=True)
class Gaussian(Thresholded):
    """Scales a normal quantile by 0.5 or 1.5, up to three times, until 2k/3 to 4k/3 elements exceed it.

    Shi, Chu, Cheung and See, "Understanding Top-k Sparsification in Distributed Deep Learning" (GaussianK-SGD), 2019,
    arXiv:1911.08772.
    """

    def threshold(self, x: Array, k: int, xp: Any) -> Array:
        n, zero = float(xp.shape(x)[0]), xp.zeros(1)
        mean = xp.cast(xp.reshape(xp.sum(x), (1,)), "float64") / n
        spread = xp.sqrt(xp.maximum(xp.excess(x, zero)[2:] / n - mean * mean, 0.0))
        start = xp.abs(mean) + spread * NormalDist().inv_cdf(1 - self.compress_ratio / 2)

        def outside(i: Array, threshold: Array, count: Array) -> Array:
            return (i < 3) & ((count < 2 * k / 3) | (count > 4 * k / 3))

        def corrected(i: Array, threshold: Array, count: Array) -> tuple[Array, ...]:
            threshold = threshold * xp.where(count < k, xp.full(1, 0.5), xp.full(1, 1.5))
            return i + 1, threshold, self.above(x, threshold, xp)

        start = xp.cast(start, "float32")
        return xp.loop(outside, corrected, (xp.zeros(1, "int32"), start, self.above(x, start, xp)))[1]


@dataclass(frozen=True)
class Ranged(Thresholded):
    """Searches for a threshold between the mean magnitude and the largest one."""

    def threshold(self, x: Array, k: int, xp: Any) -> Array:
        mean = xp.excess(x, xp.zeros(1))[1:2] / float(xp.shape(x)[0])
        width = xp.cast(xp.max_abs(xp.reshape(x, (1, -1))), "float64") - mean
        return self.search(k, lambda share: xp.cast(mean + share * width, "float32"), x, xp)

    @abstractmethod
    def search(self, k: int, at: Callable[[Array], Array], x: Array, xp: Any) -> Array:
        """Return a threshold, float32[1]. ``at`` maps a fraction, float64[1], of the range mean .. largest to one."""


@dataclass(frozen=True)
class Bisect(Ranged):
    """Halves the range until a fifth of it is left or k to 2 k elements are selected: at most three thresholds.

    Fang, Fu, Yang and Hsieh, "RedSync: Reducing Synchronization Bandwidth for Distributed Deep Learning Training
    System", JPDC 2019, arXiv:1808.04357: threshold binary search.
    """

    def search(self, k: int, at: Callable[[Array], Array], x: Array, xp: Any) -> Array:
        def wide(low: Array, high: Array, threshold: Array, count: Array) -> Array:
            return (high - low > 0.2) & ((count <= k) | (count >= 2 * k))

        def halved(low: Array, high: Array, threshold: Array, count: Array) -> tuple[Array, ...]:
            middle = 0.5 * (low + high)
            threshold = at(middle)
            count = self.above(x, threshold, xp)
            return xp.where(count > k, middle, low), xp.where(count > k, high, middle), threshold, count

        zero, one = xp.zeros(1, "float64"), xp.full(1, 1.0, "float64")
        return xp.loop(wide, halved, (zero, one, xp.zeros(1), zero))[2]


@dataclass(frozen=True)
class Trim(Ranged):
    """Lowers the threshold from 0.8 of the range in steps of 0.2 until k elements are selected.

    Source: as `Bisect`; trimmed top-k, using only the threshold.
    """

    def search(self, k: int, at: Callable[[Array], Array], x: Array, xp: Any) -> Array:
        def few(share: Array, threshold: Array, count: Array) -> Array:
            return (share > 0.1) & (count < k)

        def lower(share: Array, threshold: Array, count: Array) -> tuple[Array, ...]:
            share = share - 0.2
            threshold = at(share)
            return share, threshold, self.above(x, threshold, xp)

        return xp.loop(few, lower, (xp.full(1, 1.0, "float64"), xp.zeros(1), xp.zeros(1, "float64")))[1]


SELECTORS: dict[str, Callable[[float], Selector]] = {
    "exact": Exact,
    "sampled": Sampled,
    "sidco": SIDCo,
    "gaussian": Gaussian,
    "bisect": Bisect,
    "trim": Trim,
    "chunk": Chunk,
}


@dataclass(frozen=True)
class SelectingSparsifier(Sparsifier):
    """A sparsifier with a ratio, whose elements a selector chooses."""

    index_coding: str = field(default="int32", kw_only=True)
    compress_ratio: float = 0.01
    selector: str = field(default="exact", kw_only=True)

    def __post_init__(self) -> None:
        check_ratio(self.compress_ratio)
        if self.selector not in SELECTORS:
            raise ValueError(f"selector={self.selector!r}: choose one of {', '.join(map(repr, SELECTORS))}")
        if self.traits.variable_length and self.index_coding not in ("int32", "bitmap"):
            raise ValueError(
                f"index_coding={self.index_coding!r} needs a fixed number of positions, but with "
                f"selector={self.selector!r} it varies: use 'int32' or 'bitmap', or selector 'exact' or 'chunk'"
            )
        self.elements.check()

    @cached_property
    def traits(self) -> Traits:
        return replace(EXACT, variable_length=self.elements.count(1) is None)

    @cached_property
    def elements(self) -> Elements:
        return Elements(SELECTORS[self.selector](self.compress_ratio), self.index_coding)

    def contraction(self, n: int) -> float | None:
        return self.elements.selector.contraction(n)

    def init(self, ctx: Context) -> State:
        return self.elements.selector.init(ctx)
