"""Deep gradient compression: top-k by a sampled threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from grace.compressors.sparse import CodedSparsifier, check_ratio, first, kept
from grace.core import Array, Context
from grace.registry import register

STEP, STEPS = 1.03, 32
"""Thresholds that are tried: the sample's times 1.03 ** -32 .. 1.03 ** 32, that is 0.39 .. 2.6."""


@register("dgc")
@dataclass(frozen=True)
class DGC(CodedSparsifier):
    """Send about the largest elements: those above a threshold that a sample of the elements suggests.

    Payload: values float32[K], positions int32[K], ascending; K is near k = floor(compress_ratio * n) and at most
    1.3 k. Zeros are not sent. Small tensors, for which the sample would be all, have the k largest.
    ``compress_ratio``: the share of elements to send, in (0, 1]. The paper comes down to 0.001 over four epochs.
    ``index_coding``: of the positions; "int32", or "bitmap" (n bits).
    The sample is 1% of the elements, at least 100 and at least 32 / compress_ratio, drawn at random. The paper then
    corrects its threshold in a loop; here what is above the lowest of 65 thresholds is counted in one pass, and the
    threshold that comes nearest to k is used. The paper's momentum correction, masking and clipping are the memory's,
    not the compressor's.
    Lin, Han, Mao, Wang and Dally, "Deep Gradient Compression", ICLR 2018, arXiv:1712.01887, sections 3 and 5.
    """

    compress_ratio: float = 0.001
    ragged = True
    memory = "dgc"

    def __post_init__(self) -> None:
        check_ratio(self.compress_ratio)
        super().__post_init__()

    def select(self, x: Array, ctx: Context) -> Array:
        xp, n, k = ctx.xp, ctx.size, kept(self.compress_ratio, ctx.size)
        # What is not finite is sent, and so is seen by every worker.
        finite = xp.isfinite(x)
        size = xp.where(finite, xp.abs(x), 0.0)
        sample = max(100, math.ceil(32 / self.compress_ratio), math.ceil(n / 100))
        if sample >= n:
            largest = xp.scatter(xp.zeros(n, "uint8"), xp.topk(size, k), 1) != 0
            return xp.nonzero(largest & (size > 0) | xp.invert(finite))
        candidates = self._threshold(size, sample, ctx) * xp.asarray(FACTORS, "float32")
        likely = xp.nonzero((size > candidates[0:1]) | xp.invert(finite))
        sent = self._nearest(xp, xp.take(size, likely), candidates, k) | xp.invert(xp.isfinite(xp.take(x, likely)))
        return xp.take(likely, xp.nonzero(sent))

    def _threshold(self, size: Array, sample: int, ctx: Context) -> Array:
        # float32[1]: what the wanted share of the sample reaches.
        xp = ctx.xp
        drawn = xp.bitwise_and(ctx.rng("sample").bits(sample), 0x7FFFFFFF) % ctx.size
        rank = sample - math.ceil(self.compress_ratio * sample)
        return xp.sort(xp.take(size, drawn))[rank : rank + 1]

    def _nearest(self, xp: Any, size: Array, candidates: Array, k: int) -> Array:
        # bool[K]: the elements above the candidate that about k elements exceed.
        many, most = len(FACTORS), math.ceil(1.3 * k)
        # For each element, how many candidates are below it; one zero more, so that there is always one to look for.
        below = xp.searchsorted(candidates, xp.concat([size, xp.zeros(1)]))[:-1]
        counts = xp.segment_sum(size * 0.0 + 1.0, below, many + 1)
        above = xp.sum(counts) - xp.cumsum(counts)[:-1]
        # Nearest to k, where too many count as the most that will be sent; of equals, the highest threshold.
        miss = xp.abs(xp.minimum(above, float(most)) - float(k))
        best = xp.topk(-(miss + xp.asarray([1e-3 * (many - j) for j in range(many)], "float32")), 1)
        # Of too many, the largest, and as many of those between this candidate and the next as there is room for.
        return first(xp, below > best + 1, below == best + 1, most)


FACTORS = [STEP**j for j in range(-STEPS, STEPS + 1)]
