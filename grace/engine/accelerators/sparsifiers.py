"""Kernels and in-place versions of methods that send some elements with their positions."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

from grace.compressors.adacomp import AdaComp
from grace.compressors.adaq import AdaQ
from grace.compressors.chunktopk import ChunkTopK
from grace.compressors.dgc import DGC
from grace.compressors.randomk import RandomK
from grace.compressors.selectors import FACTORS, MISS, Sampled, SelectingSparsifier
from grace.compressors.sidco import SIDCo
from grace.compressors.sparse import Placed, Sparsifier, kept, poisoned
from grace.compressors.threshold import Threshold
from grace.compressors.topk import TopK
from grace.compressors.wangni import Wangni
from grace.core import Array, Compressor, Context, MaybeProgram, Payload, Program, State, as_program, run_local
from grace.core.gathered import GatheredPayloads
from grace.engine.accelerators.base import Accelerator, at_once_encoded, has
from grace.engine.workspace import accumulated, deferring, kernels, workspace
from grace.ops import index_coding
from grace.ops.validate import placed

C = TypeVar("C", bound=Compressor)
P = TypeVar("P", bound=Placed)
K = TypeVar("K", bound=Sparsifier)
E = TypeVar("E", bound=SelectingSparsifier)


class ScatteredSums(Accelerator[C]):
    """Adds payloads to a vector in place, one after the other."""

    @abstractmethod
    def parts(self, compressor: C, payload: Payload, ctx: Context) -> tuple[Array, Array]:
        """float32[K] values and int32[K] positions, which must ascend; the caller or a kernel checks them."""

    def add(self, compressor: C, total: Array, payload: Payload, ctx: Context) -> Array:
        """``total`` plus a decoded payload. total is donated."""
        values, positions = self.parts(compressor, payload, ctx)
        return ctx.xp.scatter_add(total, placed(ctx.xp, positions, ctx.size), values)

    def decode_into(self, compressor: C, out: Array, payload: Payload, ctx: Context) -> Array:
        return self.aggregate_into(compressor, out, [payload], ctx)

    def aggregate_into(self, compressor: C, out: Array, payloads: Sequence[Payload], ctx: Context) -> Array:
        ctx.xp.buffers.write(out, 0.0)
        total = out
        for payload in payloads:
            total = self.add(compressor, total, payload, ctx)
        total = ctx.xp.inplace.divide(total, len(payloads)) if len(payloads) > 1 else total
        if not ctx.xp.buffers.same_memory(total, out):
            ctx.xp.buffers.write(out, total)
        return out


class PlacedSums(ScatteredSums[P]):
    """Sums of payloads with a value for each position."""

    def parts(self, compressor: P, payload: Payload, ctx: Context) -> tuple[Array, Array]:
        return compressor.parts(payload, ctx)


class ElementSums(ScatteredSums[K]):
    """Sums of payloads of unmodified elements."""

    def parts(self, compressor: K, payload: Payload, ctx: Context) -> tuple[Array, Array]:
        return compressor.elements.parts(payload, ctx)


class SparseMean(ScatteredSums[C]):
    """Means by a kernel that adds up the values at each position."""

    def mean(self, compressor: C, payloads: Sequence[Payload], out: Array | None, ctx: Context) -> Array | None:
        if not kernels(ctx).sparsifiers.sparse_mean:
            return None
        pairs = [self.parts(compressor, payload, ctx) for payload in payloads]  # the kernel checks positions
        return kernels(ctx).sparsifiers.sparse_mean(pairs, out, ctx.size)


class SparseSums(ElementSums[K], SparseMean[K]):
    """Sums of unmodified elements, by a kernel."""


class DecodedSums(PlacedSums[P], SparseMean[P]):
    """Sums, means and residuals computed from `parts`, which a kernel may decode."""

    def decode(self, compressor: P, payload: Payload, ctx: Context) -> Array:
        return self.add(compressor, ctx.xp.zeros(ctx.size), payload, ctx)

    def aggregate(self, compressor: P, payloads: Sequence[Payload], ctx: Context) -> Array:
        total = ctx.xp.zeros(ctx.size)
        for payload in payloads:
            total = self.add(compressor, total, payload, ctx)
        return ctx.xp.inplace.divide(total, len(payloads))

    def residual(self, compressor: P, x: Array, payload: Payload, ctx: Context) -> Array:
        values, positions = self.parts(compressor, payload, ctx)
        return ctx.xp.inplace.scatter(x, positions, ctx.xp.take(x, positions) - values)


class CodedSums(SparseSums[K]):
    """Means of unmodified elements whose positions may be coded."""

    def uncoded(self, compressor: K, n: int) -> bool:
        """Whether positions travel uncoded, as one array."""
        return compressor.elements.coding(n) == "int32"

    def mean(self, compressor: K, payloads: Sequence[Payload], out: Array | None, ctx: Context) -> Array | None:
        k, kernel = compressor.elements.count(ctx.size), kernels(ctx).sparsifiers.sparse_mean
        if kernel and k is not None and isinstance(payloads, GatheredPayloads) and self.uncoded(compressor, ctx.size):
            return kernel(payloads, out, ctx.size, k)  # the kernel checks the positions
        return super().mean(compressor, payloads, out, ctx)


class Selection(ElementSums[K]):
    """Accelerator base of sparsifiers whose elements a kernel selects."""

    @abstractmethod
    def chosen(
        self, compressor: K, x: Array, residual: Array | None, ctx: Context
    ) -> tuple[tuple[Array, Array], Array] | None:
        """`encode` without index coding: (values float32[K], positions int32[K]), residual; None: no kernel."""

    @abstractmethod
    def uncoded(self, compressor: K, n: int) -> bool:
        """Whether positions travel uncoded, as one array."""

    def write(self, compressor: K, positions: Array, ctx: Context) -> tuple[Array, ...]:
        """`Elements.write`."""
        return compressor.elements.write(positions, ctx)

    def encode(self, compressor: K, x: Array, residual: Array | None, ctx: Context) -> tuple[Payload, Array] | None:
        if not self.uncoded(compressor, ctx.size):
            ctx = deferring(ctx, None)  # index coding reads the positions immediately
        if (done := self.chosen(compressor, x, residual, ctx)) is None:
            return None
        (values, positions), left = done
        return (values, *self.write(compressor, positions, ctx)), left


class Moments(CodedSums[SIDCo]):
    """Accelerator of sidco. The pass that adds the residual also computes the initial moments."""

    def compensated(
        self, compressor: SIDCo, x: Array, residual: Array, state: State, ctx: Context
    ) -> tuple[Array, Program[tuple[Payload, State]]] | None:
        if workspace(ctx).rollback_log is None or not has(ctx, "memories", "accumulate"):
            return None
        moments = ctx.xp.buffers.empty(3, "float64")
        total = kernels(ctx).memories.accumulate(x, residual, 1.0, 1.0, moments)
        return total, as_program(compressor.compress(total, state, ctx, moments))


class Thresholds(CodedSums[Threshold], Selection[Threshold]):
    """Accelerator of threshold."""

    def chosen(
        self, compressor: Threshold, x: Array, residual: Array | None, ctx: Context
    ) -> tuple[tuple[Array, Array], Array] | None:
        kernel = kernels(ctx).sparsifiers.threshold_encode
        return kernel(x, residual, compressor.threshold) if kernel else None


class Selectors(CodedSums[E], Selection[E]):
    """Accelerator of topk and dgc, for the selectors "exact" and "sampled" and the index coding "elias_fano"."""

    def chosen(
        self, compressor: E, x: Array, residual: Array | None, ctx: Context
    ) -> tuple[tuple[Array, Array], Array] | None:
        if compressor.selector != "exact":
            return None
        found: tuple[tuple[Array, Array], Array] = kernels(ctx).sparsifiers.topk_encode(
            x, residual, kept(compressor.compress_ratio, ctx.size)
        )
        return found

    def compress(self, compressor: E, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        if not has(ctx, "sparsifiers", "sampled"):
            return compressor.compress(x, state, ctx)
        selector = compressor.elements.selector
        if isinstance(selector, Sampled) and (sample := selector.sample(ctx.size)) < ctx.size:
            positions = _sampled(selector, x, sample, ctx)
        else:
            positions, state = selector.choose(x, state, ctx)
        return (ctx.xp.take(x, positions), *self.write(compressor, positions, ctx)), state

    def write(self, compressor: E, positions: Array, ctx: Context) -> tuple[Array, ...]:
        if not _elias_fano(compressor, ctx):
            return compressor.elements.write(positions, ctx)
        widths = index_coding.widths(ctx.size, kept(compressor.compress_ratio, ctx.size))
        return tuple(ctx.xp.kernels.sparsifiers.positions_write(positions, *widths))

    def read(self, compressor: E, sent: tuple[Array, ...], ctx: Context) -> Array:
        """`Elements.read`."""
        if _elias_fano(compressor, ctx):
            k = kept(compressor.compress_ratio, ctx.size)
            found = ctx.xp.kernels.sparsifiers.positions_read(sent, *index_coding.widths(ctx.size, k), k)
            if found is not None:  # otherwise the plain function raises the error
                return found
        return compressor.elements.read(sent, ctx)

    def parts(self, compressor: E, payload: Payload, ctx: Context) -> tuple[Array, Array]:
        if compressor.index_coding not in ELIAS_FANO:
            return super().parts(compressor, payload, ctx)
        return compressor.elements.matched(payload[0], self.read(compressor, payload[1:], ctx), ctx)

    def residual(self, compressor: E, x: Array, payload: Payload, ctx: Context) -> Array:
        return ctx.xp.inplace.scatter(x, self.read(compressor, payload[1:], ctx), 0.0)

    def for_memory(self, compressor: E) -> Any:
        return super().for_memory(compressor) if compressor.index_coding in ELIAS_FANO else compressor


ELIAS_FANO = ("elias_fano", "auto")
"""Index codings that may select Elias-Fano, which has kernels."""


def _elias_fano(compressor: SelectingSparsifier, ctx: Context) -> bool:
    wanted = compressor.index_coding in ELIAS_FANO and compressor.elements.coding(ctx.size) == "elias_fano"
    return wanted and has(ctx, "sparsifiers", "positions_write")


def _sampled(selector: Sampled, x: Array, sample: int, ctx: Context) -> Array:
    # int32[K]: `Sampled.select`, with a sample of ``sample`` elements.
    xp, k = ctx.xp, kept(selector.compress_ratio, ctx.size)
    rank, most = math.ceil(selector.compress_ratio * sample), math.ceil(1.3 * k)
    factors, miss = xp.asarray(FACTORS, "float32"), xp.asarray(MISS, "float32")
    return xp.kernels.sparsifiers.sampled(x, ctx.rng("sample"), sample, rank, factors, miss, selector.likely, k, most)


class SharedPositions(Selection[RandomK]):
    """Accelerator of randomk. It draws positions once per step, since a draw takes longer than a message."""

    def positions(self, compressor: RandomK, ctx: Context, last: bool = False) -> Array:
        """`RandomK.positions`. ``last``: whether this is the last use in this step."""
        draws, key = workspace(ctx).draws, (ctx.name, ctx.offset, ctx.size, compressor.compress_ratio, compressor.mode)
        found = draws.pop(key, None)
        if found is None:
            found = compressor.positions(ctx)
        if ctx.xp.mutable and not last:  # a traced array is valid only in its own part of the graph
            draws[key] = found
        return found

    def uncoded(self, compressor: RandomK, n: int) -> bool:
        return False

    def chosen(
        self, compressor: RandomK, x: Array, residual: Array | None, ctx: Context
    ) -> tuple[tuple[Array, Array], Array] | None:
        if compressor.unbiased_scale or residual is None:
            return None
        xp, positions = ctx.xp, self.positions(compressor, ctx)
        x = accumulated(ctx, x, residual)
        return (poisoned(xp, xp.take(x, positions), x), positions), xp.inplace.scatter(x, positions, 0.0)

    def compress(
        self, compressor: RandomK, x: Array, state: State, ctx: Context
    ) -> MaybeProgram[tuple[Payload, State]]:
        return (compressor.sent(x, self.positions(compressor, ctx), ctx),), state

    def parts(self, compressor: RandomK, payload: Payload, ctx: Context) -> tuple[Array, Array]:
        return compressor.elements.matched(payload[0], self.positions(compressor, ctx), ctx)

    def residual(self, compressor: RandomK, x: Array, payload: Payload, ctx: Context) -> Array:
        if compressor.unbiased_scale:
            return compressor.residual(x, payload, ctx)
        return ctx.xp.inplace.scatter(x, self.positions(compressor, ctx), 0.0)

    def decode(self, compressor: RandomK, payload: Payload, ctx: Context) -> Array:
        values, positions = self.parts(compressor, payload, ctx)
        return ctx.xp.scatter_add(ctx.xp.zeros(ctx.size), positions, values)

    def aggregate(self, compressor: RandomK, payloads: Sequence[Payload], ctx: Context) -> Array:
        return self._put(compressor, ctx.xp.zeros(ctx.size), payloads, ctx)

    def aggregate_into(self, compressor: RandomK, out: Array, payloads: Sequence[Payload], ctx: Context) -> Array:
        ctx.xp.buffers.write(out, 0.0)
        return self._put(compressor, out, payloads, ctx)

    def _put(self, compressor: RandomK, out: Array, payloads: Sequence[Payload], ctx: Context) -> Array:
        positions = self.positions(compressor, ctx, last=True)
        return ctx.xp.inplace.scatter(out, positions, compressor.values(payloads, positions, ctx))


class Chunks(DecodedSums[ChunkTopK]):
    """Accelerator of chunktopk."""

    def encode(
        self, compressor: ChunkTopK, x: Array, residual: Array | None, ctx: Context
    ) -> tuple[Payload, Array] | None:
        if kernels(ctx).sparsifiers.chunks_encode:
            found: tuple[Payload, Array] = kernels(ctx).sparsifiers.chunks_encode(
                x, residual, compressor.chunk_size, compressor.chunk_k
            )
            return found
        # Compress the whole vector at once: few elements are selected, so chunks would gain nothing.
        return at_once_encoded(
            compressor, lambda v: run_local(compressor.compress(v, {}, ctx), compressor)[0], x, residual, ctx
        )

    def parts(self, compressor: ChunkTopK, payload: Payload, ctx: Context) -> tuple[Array, Array]:
        if has(ctx, "sparsifiers", "chunks_encode"):
            found = ctx.xp.kernels.sparsifiers.chunks_values(
                payload, ctx.size, compressor.chunk_size, compressor.chunk_k
            )
            if found is not None:  # otherwise the plain function raises the error
                values, positions = found
                return values, positions
        return compressor.parts(payload, ctx)


class SignedMeans(PlacedSums[AdaQ]):
    """Accelerator of adaq."""

    def encode(self, compressor: AdaQ, x: Array, residual: Array | None, ctx: Context) -> tuple[Payload, Array] | None:
        kernel = kernels(ctx).sparsifiers.largest_of_signs
        return kernel(x, residual, compressor.compress_ratio) if kernel else None

    def mean(self, compressor: AdaQ, payloads: Sequence[Payload], out: Array | None, ctx: Context) -> Array | None:
        if not kernels(ctx).sparsifiers.largest_of_signs:
            return None
        return kernels(ctx).sparsifiers.sparse_sums(payloads, out, ctx.size, (True,))


class Bins(PlacedSums[AdaComp]):
    """Accelerator of adacomp."""

    def compress(
        self, compressor: AdaComp, x: Array, state: State, ctx: Context
    ) -> MaybeProgram[tuple[Payload, State]]:
        if not has(ctx, "sparsifiers", "bins_encode"):
            return compressor.compress(x, state, ctx)
        payload, left = kernels(ctx).sparsifiers.bins_encode(x, state["residual"], compressor.bin_size)
        return payload, {"residual": left}

    def mean(self, compressor: AdaComp, payloads: Sequence[Payload], out: Array | None, ctx: Context) -> Array | None:
        if not kernels(ctx).sparsifiers.bins_encode:
            return None
        return kernels(ctx).sparsifiers.bins_mean(payloads, out, ctx.size, compressor.bin_size)


class Chances(Accelerator[Wangni]):
    """Accelerator of wangni."""

    def encode(
        self, compressor: Wangni, x: Array, residual: Array | None, ctx: Context
    ) -> tuple[Payload, Array] | None:
        kernel, rng = kernels(ctx).sparsifiers.chances_encode, ctx.rng("keep")
        if not kernel:
            return None
        how = compressor.compress_ratio, compressor.iterations, rng
        return at_once_encoded(compressor, lambda v: kernel(v, *how), x, residual, ctx)

    def mean(self, compressor: Wangni, payloads: Sequence[Payload], out: Array | None, ctx: Context) -> Array | None:
        if not kernels(ctx).sparsifiers.chances_encode:
            return None
        xp, pairs = ctx.xp, []
        for certain, values, drawn, magnitude in payloads:
            pairs += [(values, certain), (xp.concat([magnitude, -magnitude]), drawn)]
        return kernels(ctx).sparsifiers.sparse_sums(pairs, out, ctx.size, (False, True))


ACCELERATORS: dict[type, Accelerator[Any]] = {
    TopK: Selectors[TopK](),
    DGC: Selectors[DGC](),
    Threshold: Thresholds(),
    SIDCo: Moments(),
    RandomK: SharedPositions(),
    ChunkTopK: Chunks(),
    AdaQ: SignedMeans(),
    AdaComp: Bins(),
    Wangni: Chances(),
}
