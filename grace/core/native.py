"""A compressor carried out by the kernels of a context's backend, where they exist."""

from __future__ import annotations

from collections.abc import Sequence

from grace.core.compressor import Compressor
from grace.core.context import Context
from grace.core.errors import Unavailable
from grace.core.program import Calls
from grace.core.state import Array, Payload


def fused(compressor: Compressor, x: Array, residual: Array | None, ctx: Context) -> tuple[Payload, Array] | None:
    """``compress(x + residual)`` and the residual, by a kernel; None if there is none."""
    try:
        return compressor.fused(x, residual, ctx) if ctx.xp.kernels else None
    except Unavailable:
        return None


def fused_mean(
    compressor: Compressor, payloads: Sequence[Payload], out: Array | None, ctx: Context, calls: Calls | None = None
) -> Array | None:
    """`Compressor.aggregate` by a kernel, written to ``out`` if given; None if there is none."""
    ctx = ctx if ctx.calls is calls else ctx.with_calls(calls)
    try:
        return compressor.fused_mean(payloads, out, ctx) if ctx.xp.kernels else None
    except Unavailable:
        return None


def decode(compressor: Compressor, payload: Payload, ctx: Context) -> Array:
    """`Compressor.decompress`, by a kernel if there is one."""
    found = fused_mean(compressor, [payload], None, ctx) if ctx.size else None
    return compressor.decompress(payload, ctx) if found is None else found
