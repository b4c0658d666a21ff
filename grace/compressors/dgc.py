"""Deep gradient compression: top-k by a sampled threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass

from grace.compressors.sparse import CodedSparsifier, check_ratio, first, kept
from grace.core import Array, Context
from grace.registry import register

STEP, STEPS = 1.03, 100
"""Thresholds that are tried: the sample's times 1.03 ** -100 .. 1.03 ** 100, that is 0.05 .. 19."""


@register("dgc")
@dataclass(frozen=True)
class DGC(CodedSparsifier):
    """Send about the largest elements: those above a threshold that a sample of the elements suggests.

    Payload: values float32[K], positions int32[K], ascending; K is near k = floor(compress_ratio * n) and at most
    1.3 k. Zeros are not sent. Small tensors, for which the sample would be all, have the k largest.
    ``compress_ratio``: the share of elements to send, in (0, 1]. The paper comes down to 0.001 over four epochs.
    ``index_coding``: of the positions; "int32", or "bitmap" (n bits).
    The sample is 1% of the elements, at least 100 and at least 2 / compress_ratio. The paper then corrects its
    threshold in a loop; here all elements are counted against 201 thresholds in one pass, and the one that comes
    nearest to k is used. The paper's momentum correction, masking and clipping are the memory's, not the compressor's.
    Lin, Han, Mao, Wang and Dally, "Deep Gradient Compression", ICLR 2018, arXiv:1712.01887, sections 3 and 5.
    """

    compress_ratio: float = 0.001
    ragged = True

    def __post_init__(self) -> None:
        check_ratio(self.compress_ratio)
        super().__post_init__()

    def select(self, x: Array, ctx: Context) -> Array:
        xp, n = ctx.xp, ctx.size
        finite = xp.isfinite(x)
        size = xp.where(finite, xp.abs(x), 0.0)
        sample = max(100, math.ceil(2 / self.compress_ratio), math.ceil(n / 100))
        if sample < n:
            chosen = self._above(size, self._threshold(size, sample, ctx), ctx)
        else:
            largest = xp.topk(size, kept(self.compress_ratio, n))
            chosen = (xp.scatter(xp.zeros(n, "uint8"), largest, 1) != 0) & (size > 0)
        # What is not finite is sent, and so is seen by every worker.
        return xp.nonzero(chosen | xp.invert(finite))

    def _threshold(self, size: Array, sample: int, ctx: Context) -> Array:
        # float32[1]: what the wanted share of the sample reaches. That is every so many elements, from a random one on.
        xp, stride = ctx.xp, ctx.size // sample
        start = xp.bitwise_and(ctx.rng("sample").bits(1), 0x7FFFFFFF) % stride
        ascending = xp.sort(xp.take(size, start + xp.arange(sample) * stride))
        rank = sample - math.ceil(self.compress_ratio * sample)
        return ascending[rank : rank + 1]

    def _above(self, size: Array, threshold: Array, ctx: Context) -> Array:
        # bool[n]: the elements above the candidate that about k elements exceed.
        xp, n, k = ctx.xp, ctx.size, kept(self.compress_ratio, ctx.size)
        most = math.ceil(1.3 * k)
        factors = [STEP**j for j in range(-STEPS, STEPS + 1)]
        below = xp.searchsorted(threshold * xp.asarray(factors, "float32"), size)  # so many candidates are below it
        counts = xp.segment_sum(xp.full(n, 1.0), below, len(factors) + 1)
        above = float(n) - xp.cumsum(counts)[:-1]
        # Nearest to k, where too many count as the most that will be sent; of equals, the highest threshold.
        miss = xp.abs(xp.minimum(above, float(most)) - float(k))
        order = xp.asarray([1e-3 * (len(factors) - j) for j in range(len(factors))], "float32")
        best = xp.topk(-(miss + order), 1)
        # Of too many, the largest, and as many of those between this candidate and the next as there is room for.
        return first(xp, below > best + 1, below == best + 1, most)
