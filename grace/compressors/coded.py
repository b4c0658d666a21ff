"""What methods share that kernels carry out: those for codes of a few bits, and what is left by the plain functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from grace.core import Array, Compressor, Context, Payload
from grace.core.rng import Rng
from grace.kernels import Codes


def coded(
    x: Array, residual: Array | None, codes: Codes, block: int, rng: Rng | None, ctx: Context
) -> tuple[Payload, Array] | None:
    """`Compressor.fused` by kernels that know such codes; ``rng``: what they are rounded with at random."""
    encode = ctx.kernels.codes_encode
    return encode(x, residual, block, codes, rng) if encode else None


def coded_mean(payloads: Sequence[Payload], out: Array | None, codes: Codes, block: int, ctx: Context) -> Array | None:
    """`Compressor.fused_mean` by kernels that know such codes."""
    mean = ctx.kernels.codes_mean
    return mean(payloads, out, ctx.size, block, codes) if mean else None


def encoded(
    compressor: Compressor, encode: Callable[[Array], Payload], x: Array, residual: Array | None, ctx: Context
) -> tuple[Payload, Array]:
    """`Compressor.fused` by what makes the payload of a vector, and at once."""
    if residual is None:
        return encode(x), x
    x = ctx.accumulated(x, residual)
    payload = encode(x)
    return payload, compressor.residual(x, payload, ctx)
