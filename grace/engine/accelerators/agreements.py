"""Kernels and in-place versions of sparsifiers whose workers agree on the elements while they compress."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from grace.compressors.arctopk import ARCTopK
from grace.compressors.cltk import CLTopK
from grace.compressors.gtopk import GTopK
from grace.compressors.sketch_sgd import SketchSGD
from grace.core import Array, Context, MaybeProgram, Payload, Program, State
from grace.core.collectives import Gather
from grace.engine.accelerators.base import Accelerator, has
from grace.engine.accelerators.sparsifiers import SparseSums
from grace.engine.workspace import kernels


class LargestSums(SparseSums[GTopK]):
    """Accelerator of gtopk."""

    def compress(self, compressor: GTopK, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        if not has(ctx, "sparsifiers", "largest_sums"):
            return compressor.compress(x, state, ctx)
        return self._merged(compressor, x, state, ctx)

    def _merged(self, compressor: GTopK, x: Array, state: State, ctx: Context) -> Program[tuple[Payload, State]]:
        own, found = compressor.select(x, ctx), None
        payloads = yield Gather((ctx.xp.take(x, own), own))
        with suppress(ValueError):  # the plain function names the worker whose payload is malformed
            found = kernels(ctx).sparsifiers.largest_sums(payloads, ctx.size, compressor.count(ctx.size))
        sums, positions = compressor.merged(payloads, ctx) if found is None else found
        return (sums / ctx.world_size, positions, own), state


class RowSketches(Accelerator[ARCTopK]):
    """Accelerator of arctopk."""

    def compress(
        self, compressor: ARCTopK, x: Array, state: State, ctx: Context
    ) -> MaybeProgram[tuple[Payload, State]]:
        if not has(ctx, "sparsifiers", "signed_sums"):
            return compressor.compress(x, state, ctx)
        sketch = kernels(ctx).sparsifiers.signed_sums(x, compressor.words(ctx), compressor.row_size)
        return compressor.agree(x, sketch, state, ctx)


class CountSketches(SparseSums[SketchSGD]):
    """Accelerator of sketch_sgd."""

    def compress(
        self, compressor: SketchSGD, x: Array, state: State, ctx: Context
    ) -> MaybeProgram[tuple[Payload, State]]:
        if not has(ctx, "sparsifiers", "count_sketch"):
            return compressor.compress(x, state, ctx)
        n, native, words = ctx.size, kernels(ctx).sparsifiers, ctx.xp.concat(compressor.hashes(ctx))
        where = compressor.group(n), compressor.width(n)

        def estimate(table: Array) -> Array:
            return native.count_sketch_estimate(table, words, n, *where)

        return compressor.agree(x, native.count_sketch(x, words, *where), estimate, state, ctx)


ACCELERATORS: dict[type, Accelerator[Any]] = {
    GTopK: LargestSums(),
    ARCTopK: RowSketches(),
    SketchSGD: CountSketches(),
    CLTopK: SparseSums[CLTopK](),
}
