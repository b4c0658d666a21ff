"""Vector quantisation by principal components of gradient slices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from grace.compressors.sparse import check_ratio
from grace.core import Array, Combine, Compressor, Context, Payload, Program, State, Traits
from grace.core.collectives import Reduce
from grace.core.registry import register
from grace.ops import blocks
from grace.ops.validate import fitting

FLAT = 1e-6
"""Directions with less than this share of the largest variance are not used: they may be rounding errors alone."""


@register("gradiveq")
@dataclass(frozen=True)
class GradiVeQ(Compressor):
    """Learn the principal components of gradient slices in some steps, and send coordinates along them in the next.

    A tensor is cut into slices of K elements. In ``train_steps`` steps the gradient is averaged uncompressed, and the
    mean and the covariance of the averaged slices are recorded, except in the last of these steps, which also sends the
    d leading eigenvectors of the covariance, as found by worker 0, to all others. In the following ``compressed_steps``
    steps a worker sends, for each slice, its coordinates along the eigenvectors, relative to the mean slice;
    coordinates are averaged on the wire. Then training begins again.
    Payload: this worker's x float32[n], or its coordinates float32[m * d] for m slices, averaged over the workers; as
    agreed on, the mean float32[n] and this worker's part of it float32[n]. State: moments float32[K + 1, K + 1], sums
    of products of slices, each with a 1 at its end; frame float32[d + 1, K], the mean slice and the eigenvectors.
    ``slice_size``: K, 1 .. 4096; the state has K² numbers and the eigenvectors take K³ operations in each cycle.
    ``compress_ratio``: d = ceil(compress_ratio * K), in (0, 1].
    ``train_steps``: steps of uncompressed averages in each cycle, at least 2.
    ``compressed_steps``: compressed steps that follow, at least 1.
    Tensors of fewer than K elements go dense. A short last slice is compressed, but not recorded. Departures from the
    paper: d is fixed, where the paper takes the smallest d whose loss stays below a bound; one worker finds the
    eigenvectors for all; all tensors are trained in the same steps; a direction without variance in the recorded
    slices is left out.
    Yu et al., "GradiVeQ: Vector Quantization for Bandwidth-Efficient Gradient Aggregation in Distributed CNN Training",
    NeurIPS 2018, arXiv:1811.03617.
    """

    slice_size: int = 512
    compress_ratio: float = 0.125
    train_steps: int = 100
    compressed_steps: int = 400

    traits = Traits(family="low rank", combine=Combine.AGREED, nonfinite_in_payload=True, max_magnitude=1e15)

    def __post_init__(self) -> None:
        check_ratio(self.compress_ratio)
        if not 1 <= self.slice_size <= 4096:
            raise ValueError(f"slice_size={self.slice_size!r} must lie in 1 .. 4096")
        for key, least in (("train_steps", 2), ("compressed_steps", 1)):
            if getattr(self, key) < least:
                raise ValueError(f"{key}={getattr(self, key)!r} must be at least {least}")

    @property
    def kept(self) -> int:
        """d, the number of coordinates of a slice."""
        return math.ceil(self.compress_ratio * self.slice_size)

    def applies(self, ctx: Context) -> bool:
        return ctx.size >= self.slice_size

    def init(self, ctx: Context) -> State:
        side = self.slice_size + 1
        return {"moments": ctx.xp.zeros((side, side)), "frame": ctx.xp.zeros((self.kept + 1, self.slice_size))}

    def compress(self, x: Array, state: State, ctx: Context) -> Program[tuple[Payload, State]]:
        xp, n, moments, frame = ctx.xp, ctx.size, state["moments"], state["frame"]
        at, last = ctx.step % (self.train_steps + self.compressed_steps), self.train_steps - 1
        if xp.traced:
            return (yield from self._either(x, state, ctx, at))
        if at < last:
            (mean,) = yield Reduce((x,), "mean")
            new = self._products(xp, mean)
            return (mean, x), {"moments": moments + new if at else new, "frame": frame}
        if at == last:
            learned = self._learned(xp, moments) if ctx.rank == 0 else xp.zeros(xp.shape(frame))
            (both,) = yield Reduce((xp.concat([x, xp.reshape(learned, (-1,))]),), "mean")
            return (both[:n], x), {"moments": moments, "frame": self._agreed(xp, both[n:], ctx)}
        own = self._coordinates(xp, x, frame)
        (mean,) = yield Reduce((own,), "mean")
        return tuple(self._decoded(xp, each, frame, n) for each in (mean, own)), state

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        return fitting(ctx.xp, payload[0], "float32", ctx.size, "means")

    def residual(self, x: Array, payload: Payload, ctx: Context) -> Array:
        return ctx.xp.inplace.subtract(x, payload[1])

    def _either(self, x: Array, state: State, ctx: Context, at: Any) -> Program[tuple[Payload, State]]:
        # One graph serves all kinds of steps: it pads what they send to the longest message.
        xp, n, moments, frame = ctx.xp, ctx.size, state["moments"], state["frame"]
        train, last = at < self.train_steps, at == self.train_steps - 1
        learns = last & xp.all(xp.zeros(1, "int64") + ctx.rank == 0)
        learned = xp.mended(xp.invert(learns), frame * 0.0, lambda: self._learned(xp, moments))
        own, wide = self._coordinates(xp, x, frame), xp.concat([x, xp.reshape(learned, (-1,))])
        room, count = n + (self.kept + 1) * self.slice_size, blocks.block_count(n, self.slice_size) * self.kept
        mine = xp.choose(train, wide, xp.pad(own, room))
        longest, usual, short = (xp.asarray(size, "int64") for size in (room, n, count))
        length: Any = xp.choose(train, xp.choose(last, longest, usual), short)
        (mean,) = yield Reduce((mine[:length],), "mean")
        mean = xp.reshape(xp.concat([mean, xp.zeros(room)])[:room], (room,))
        payload = tuple(
            xp.choose(train, dense, self._decoded(xp, coordinates, frame, n))
            for dense, coordinates in ((mean[:n], mean[:count]), (x, own))
        )
        new = self._products(xp, mean[:n]) + xp.where(at == 0, 0.0, moments)
        new = xp.choose(at < self.train_steps - 1, new, moments)
        return payload, {"moments": new, "frame": xp.choose(last, self._agreed(xp, mean[n:], ctx), frame)}

    def _agreed(self, xp: Any, mean: Array, ctx: Context) -> Array:
        # Returns worker 0's frame from the mean over all workers, whose others send zeros.
        return xp.reshape(mean, (self.kept + 1, self.slice_size)) * float(ctx.world_size)

    def _products(self, xp: Any, mean: Array) -> Array:
        # Returns float32[K + 1, K + 1]: sums of products of whole slices, their sum, and their number.
        size = self.slice_size
        count = xp.shape(mean)[0] // size
        rows = xp.concat([xp.reshape(mean[: count * size], (count, size)), xp.full((count, 1), 1.0)], 1)
        return xp.transpose(rows) @ rows

    def _learned(self, xp: Any, moments: Array) -> Array:
        # Returns float32[d + 1, K]: the mean slice, and the leading eigenvectors of the covariance. Double precision:
        # in single precision, near-equal variances give different eigenvectors on each toolkit.
        size, kept = self.slice_size, self.kept
        sums = xp.cast(xp.where(xp.finite(moments), moments, 0.0), "float64")
        sums = sums / xp.maximum(sums[size, size], 1.0)
        mean = xp.reshape(sums[size, :size], (1, size))
        variances, vectors = xp.linalg.eigh(sums[:size, :size] - xp.transpose(mean) @ mean)
        used = xp.reshape(variances[:kept] > FLAT * variances[0], (kept, 1))
        directions = xp.where(used, xp.transpose(vectors[:, :kept]), 0.0)
        return xp.cast(xp.concat([mean, directions]), "float32")

    def _coordinates(self, xp: Any, x: Array, frame: Array) -> Array:
        # Returns float32[m * d]. A short last slice is filled up with the mean slice, whose coordinates are zero.
        missing = -xp.shape(x)[0] % self.slice_size
        rows = xp.reshape(xp.concat([x, frame[0, self.slice_size - missing :]]), (-1, self.slice_size))
        return xp.reshape((rows - frame[:1]) @ xp.transpose(frame[1:]), (-1,))

    def _decoded(self, xp: Any, coordinates: Array, frame: Array, n: int) -> Array:
        return blocks.flat(xp, xp.reshape(coordinates, (-1, self.kept)) @ frame[1:] + frame[:1], n)
