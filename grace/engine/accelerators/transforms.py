"""Kernels for rotations and cosine transforms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grace.compressors.demo import DeMo
from grace.compressors.eden import Eden
from grace.compressors.thc import CUT, THC
from grace.core import Array, Context, MaybeProgram, Payload, Program, State
from grace.engine.accelerators.base import Accelerator, has
from grace.engine.workspace import kernels
from grace.ops import blocks
from grace.ops.hadamard import STREAMS, width_of


class RotatedLevels(Accelerator[Eden]):
    """Accelerator of eden."""

    def encode(self, compressor: Eden, x: Array, residual: Array | None, ctx: Context) -> tuple[Payload, Array] | None:
        if not kernels(ctx).transforms.normal_encode:
            return None
        d, rng = width_of(ctx, compressor.block_size), ctx.shared_rng("rotation")
        divisor, stream = compressor.divisor(d) if compressor.biased else 0.0, ctx.rank % STREAMS
        how = compressor.levels(), compressor.middles(), divisor, stream
        return kernels(ctx).transforms.normal_encode(x, residual, d, *how, rng)

    def mean(self, compressor: Eden, payloads: Sequence[Payload], out: Array | None, ctx: Context) -> Array | None:
        if not kernels(ctx).transforms.normal_mean:
            return None
        d, rng = width_of(ctx, compressor.block_size), ctx.shared_rng("rotation")
        return kernels(ctx).transforms.normal_mean(payloads, out, ctx.size, d, compressor.levels(), rng)


class RotatedSums(Accelerator[THC]):
    """Accelerator of thc. Kernels add squares in another order, which may change the last bits of norms."""

    def compress(self, compressor: THC, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        if not has(ctx, "transforms", "steps_encode"):
            return compressor.compress(x, state, ctx)
        return self._rounds(compressor, x, state, ctx)

    def _rounds(self, compressor: THC, x: Array, state: State, ctx: Context) -> Program[tuple[Payload, State]]:
        d, top = width_of(ctx, compressor.block_size), compressor.top
        norm = yield from blocks.largest_of_all(ctx.xp, kernels(ctx).transforms.norms(x, d))
        how = top, compressor.dtype(ctx), CUT, top / (2 * CUT)
        own = kernels(ctx).transforms.steps_encode(x, norm, d, *how, ctx.shared_rng("rotation"), ctx.rng("round"))
        total = yield from compressor.total(own, ctx)
        return (total, norm, own), state

    def mean(self, compressor: THC, payloads: Sequence[Payload], out: Array | None, ctx: Context) -> Array | None:
        if not kernels(ctx).transforms.steps_encode:
            return None
        ((total, norm, _),) = payloads
        total, norm = compressor.checked(total, norm, ctx)
        d, step = width_of(ctx, compressor.block_size), compressor.step(ctx.world_size)
        return kernels(ctx).transforms.steps_mean(total, norm, out, ctx.size, d, CUT, step, ctx.shared_rng("rotation"))

    def residual(self, compressor: THC, x: Array, payload: Payload, ctx: Context) -> Array:
        if not has(ctx, "transforms", "steps_encode"):
            return compressor.residual(x, payload, ctx)
        self._split(compressor, x, None, payload, x, ctx)
        return x

    def split_residual(self, compressor: THC, x: Array, payload: Payload, residual: Array, ctx: Context) -> None:
        if not has(ctx, "transforms", "steps_encode"):
            return super().split_residual(compressor, x, payload, residual, ctx)
        return self._split(compressor, x, payload[0], payload, residual, ctx)

    def _split(
        self, compressor: THC, x: Array, total: Array | None, payload: Payload, residual: Array, ctx: Context
    ) -> None:
        own, norm = compressor.checked(payload[2], payload[1], ctx)
        total = None if total is None else compressor.checked(total, norm, ctx)[0]
        d, steps = width_of(ctx, compressor.block_size), (compressor.step(ctx.world_size), compressor.step(1))
        kernels(ctx).transforms.steps_part(x, total, own, norm, residual, d, CUT, steps, ctx.shared_rng("rotation"))


class Cosines(Accelerator[DeMo]):
    """Accelerator of demo. Kernels add in another order, which may change the last bits of results."""

    def compress(self, compressor: DeMo, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        if not self._runs(ctx):
            return compressor.compress(x, state, ctx)
        xp = ctx.xp
        return xp.kernels.transforms.cosines_encode(xp.buffers.contiguous(x), None, *self._sizes(compressor, ctx))[
            0
        ], state

    def encode(self, compressor: DeMo, x: Array, residual: Array | None, ctx: Context) -> tuple[Payload, Array] | None:
        return (
            kernels(ctx).transforms.cosines_encode(x, residual, *self._sizes(compressor, ctx))
            if self._runs(ctx)
            else None
        )

    def mean(self, compressor: DeMo, payloads: Sequence[Payload], out: Array | None, ctx: Context) -> Array | None:
        # A single payload may be the one that all workers agreed on, which the plain function decodes without signs.
        if not self._runs(ctx) or (compressor.sign and len(payloads) == 1):
            return None
        how = compressor.average == "senders", compressor.sign
        return kernels(ctx).transforms.cosines_mean(payloads, out, *self._sizes(compressor, ctx), *how)

    def residual(self, compressor: DeMo, x: Array, payload: Payload, ctx: Context) -> Array:
        if not self._runs(ctx):
            return compressor.residual(x, payload, ctx)
        return ctx.xp.kernels.transforms.cosines_left(x, payload, *self._sizes(compressor, ctx))

    def _runs(self, ctx: Context) -> bool:
        return bool(ctx.size) and has(ctx, "transforms", "cosines_encode")

    def _sizes(self, compressor: DeMo, ctx: Context) -> tuple[tuple[int, int, int, int], int]:
        # Sizes of the matrix and a chunk, and the number of coefficients per chunk.
        sizes = compressor.sizes(ctx)
        return sizes, min(compressor.chunk_k, sizes[2] * sizes[3])


ACCELERATORS: dict[type, Accelerator[Any]] = {Eden: RotatedLevels(), THC: RotatedSums(), DeMo: Cosines()}
