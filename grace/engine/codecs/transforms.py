"""Kernel calls for rotations and cosine transforms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grace.compressors.measured.eden import Eden
from grace.compressors.studies.demo import DeMo
from grace.compressors.studies.thc import CUT, THC
from grace.core import Array, Context, Payload, Program, State
from grace.engine.codecs.table import Calls, with_kernel
from grace.ops import blocks
from grace.ops.hadamard import STREAMS, width_of


# -- eden -------------------------------------------------------------------------------------------------------------
@with_kernel("transforms", "eden_encode")
def _rotated_encode(call: Any, compressor: Eden, x: Array, residual: Array | None, ctx: Context) -> Any:
    d = width_of(ctx, compressor.block_size)
    divisor, stream = compressor.divisor(d) if compressor.biased else 0.0, ctx.rank % STREAMS
    levels = compressor.levels(), compressor.middles()
    return call(x, residual, d, *levels, divisor, stream, ctx.shared_rng("rotation"))


@with_kernel("transforms", "eden_mean")
def _rotated_mean(call: Any, compressor: Eden, payloads: Sequence[Payload], out: Array | None, ctx: Context) -> Any:
    d = width_of(ctx, compressor.block_size)
    return call(payloads, out, ctx.size, d, compressor.levels(), ctx.shared_rng("rotation"))


# -- thc: kernels add squares in another order, which may change the last bits of norms -------------------------------
@with_kernel("transforms", "thc_encode")
def _summed_compress(
    call: Any, compressor: THC, x: Array, state: State, ctx: Context
) -> Program[tuple[Payload, State]]:
    d, top = width_of(ctx, compressor.block_size), compressor.top
    norm = yield from blocks.largest_of_all(ctx.xp, ctx.xp.kernels.transforms.thc_norms(x, d))
    how = top, compressor.dtype(ctx), CUT, top / (2 * CUT)
    own = call(x, norm, d, *how, ctx.shared_rng("rotation"), ctx.rng("round"))
    total = yield from compressor.total(own, ctx)
    return (total, norm, own), state


@with_kernel("transforms", "thc_mean")
def _summed_mean(call: Any, compressor: THC, payloads: Sequence[Payload], out: Array | None, ctx: Context) -> Any:
    ((total, norm, _),) = payloads
    total, norm = compressor.checked(total, norm, ctx)
    d, step = width_of(ctx, compressor.block_size), compressor.step(ctx.world_size)
    return call(total, norm, out, ctx.size, d, CUT, step, ctx.shared_rng("rotation"))


@with_kernel("transforms", "thc_left")
def _summed_residual(call: Any, compressor: THC, x: Array, payload: Payload, ctx: Context) -> Any:
    own, norm = compressor.checked(payload[2], payload[1], ctx)
    d = width_of(ctx, compressor.block_size)
    return call(x, own, norm, d, CUT, compressor.step(1), ctx.shared_rng("rotation"))


# -- demo: kernels add in another order, which may change the last bits of results ------------------------------------
def _sizes(compressor: DeMo, ctx: Context) -> tuple[tuple[int, int, int, int], int]:
    # Returns the sizes of the matrix and of a chunk, and the number of coefficients per chunk.
    sizes = compressor.sizes(ctx)
    return sizes, min(compressor.chunk_k, sizes[2] * sizes[3])


@with_kernel("transforms", "demo_encode")
def _cosines_encode(call: Any, compressor: DeMo, x: Array, residual: Array | None, ctx: Context) -> Any:
    return call(x, residual, *_sizes(compressor, ctx)) if ctx.size else None


@with_kernel("transforms", "demo_encode")
def _cosines_compress(call: Any, compressor: DeMo, x: Array, state: State, ctx: Context) -> Any:
    return (call(ctx.xp.buffers.contiguous(x), None, *_sizes(compressor, ctx))[0], state) if ctx.size else None


@with_kernel("transforms", "demo_mean")
def _cosines_mean(call: Any, compressor: DeMo, payloads: Sequence[Payload], out: Array | None, ctx: Context) -> Any:
    # A single payload may be the one that all workers agreed on, which the plain function decodes without signs.
    if not ctx.size or (compressor.sign and len(payloads) == 1):
        return None
    return call(payloads, out, *_sizes(compressor, ctx), compressor.average == "senders", compressor.sign)


@with_kernel("transforms", "demo_left")
def _cosines_residual(call: Any, compressor: DeMo, x: Array, payload: Payload, ctx: Context) -> Any:
    return call(x, payload, *_sizes(compressor, ctx)) if ctx.size else None


CALLS: dict[type, Calls] = {
    Eden: Calls(_rotated_encode, mean=_rotated_mean),
    THC: Calls(compress=_summed_compress, residual=_summed_residual, mean=_summed_mean),
    DeMo: Calls(_cosines_encode, _cosines_compress, _cosines_residual, _cosines_mean),
}
