"""What methods share whose elements have codes of their own: kernels for all of them."""

from __future__ import annotations

from collections.abc import Sequence

from grace.core import Array, Context, Payload
from grace.kernels import Codes
from grace.rng import Rng


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
