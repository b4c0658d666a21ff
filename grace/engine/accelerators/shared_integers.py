"""Kernels for integers with a shared scale, which the wire sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grace.compressors.shared_int import SharedInt
from grace.core import Array, Context, MaybeProgram, Payload, Program, State
from grace.core.collectives import Reduce
from grace.engine.accelerators.base import Accelerator, has
from grace.engine.workspace import kernels


class SharedIntegers(Accelerator[SharedInt]):
    """Accelerator of shared_int."""

    def compress(
        self, compressor: SharedInt, x: Array, state: State, ctx: Context
    ) -> MaybeProgram[tuple[Payload, State]]:
        if not has(ctx, "quantisers", "shared_encode"):
            return compressor.compress(x, state, ctx)
        return self._rounds(compressor, x, state, ctx)

    def _rounds(self, compressor: SharedInt, x: Array, state: State, ctx: Context) -> Program[tuple[Payload, State]]:
        scale = yield from compressor.scale(x, ctx)
        how = compressor.block_size, compressor.top(ctx), compressor.dtype
        own = kernels(ctx).quantisers.shared_encode(x, scale, *how, ctx.rng("round"))
        (total,) = yield Reduce((own,), "sum")
        return (total, scale, own), state

    def residual(self, compressor: SharedInt, x: Array, payload: Payload, ctx: Context) -> Array:
        if not has(ctx, "quantisers", "shared_encode"):
            return compressor.residual(x, payload, ctx)
        own, scale = compressor.checked(payload[2], payload[1], ctx)
        return kernels(ctx).quantisers.shared_left(x, own, scale, compressor.block_size, compressor.top(ctx))

    def mean(self, compressor: SharedInt, payloads: Sequence[Payload], out: Array | None, ctx: Context) -> Array | None:
        if not kernels(ctx).quantisers.shared_encode:
            return None
        ((total, scale, _),) = payloads
        total, scale = compressor.checked(total, scale, ctx)
        steps = compressor.top(ctx) * ctx.world_size
        return kernels(ctx).quantisers.shared_mean(total, scale, out, compressor.block_size, steps)

    def decode_into(self, compressor: SharedInt, out: Array, payload: Payload, ctx: Context) -> Array:
        for start, stop, values in compressor.decoded(payload[0], payload[1], ctx.world_size, ctx):
            ctx.xp.buffers.write(out[start:stop], values)
        return out


ACCELERATORS: dict[type, Accelerator[Any]] = {SharedInt: SharedIntegers()}
