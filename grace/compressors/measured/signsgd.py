"""Signs and a majority vote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from grace.core import Array, Combine, Compressor, Context, MaybeProgram, Payload, State, Traits
from grace.core.registry import register
from grace.ops.blocks import block_count, rows
from grace.ops.validate import fitting

CHECKED = 8192  # number of elements that share a flag byte, which adds 0.1% to the one bit per element


@register("signsgd")
@dataclass(frozen=True)
class SignSGD(Compressor):
    """Send the signs; the result is the majority's sign, not a mean.

    Payload: bits uint8[ceil(n/8)], 1 where x >= 0, and uint8[ceil(n/8192)], which flags blocks that hold NaN or
    infinity. A tie and a zero count as plus. Use a learning rate about ten times smaller than SGD's.
    ``packed``: False sends votes int8[n], -1 or 1, and the flags as int8, which an allreduce can sum for up to 127
    workers.
    Bernstein et al., "signSGD with majority vote", ICLR 2019, arXiv:1810.05291, algorithm 1.
    """

    packed: bool = True

    @cached_property
    def traits(self) -> Traits:
        return Traits(
            family="quantisation",
            combine=Combine.GATHER if self.packed else Combine.MEAN,
            block_size=CHECKED,
            majority_vote=True,
            memory="none",
            wire_sum=None if self.packed else ("int8", 1),
        )

    def compress(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        xp = ctx.xp
        if not self.packed:
            return (xp.cast(x >= 0, "int8") * 2 - 1, xp.cast(_flags(xp, x), "int8")), state
        return (xp.bits.pack_signs(x), _flags(xp, x)), state

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        xp, n, m = ctx.xp, ctx.size, block_count(ctx.size, CHECKED)
        if self.packed:
            signs = xp.bits.unpack_signs(fitting(xp, payload[0], "uint8", -(-n // 8), "bits"), n)
        else:
            signs = xp.cast(fitting(xp, payload[0], "int8", n, "votes"), "float32")
        flags = fitting(xp, payload[1], "uint8" if self.packed else "int8", m, "flags")
        poison = xp.where(flags != 0, float("nan"), xp.zeros(m))
        return xp.reshape(rows(xp, signs, CHECKED) + xp.reshape(poison, (-1, 1)), (-1,))[:n]

    def aggregate(self, payloads: Sequence[Payload], ctx: Context) -> Array:
        return _majority(ctx.xp, super().aggregate(payloads, ctx))

    def reduced(self, payload: Payload, ctx: Context) -> Array:
        return _majority(ctx.xp, self.decompress(payload, ctx))


def _majority(xp: Any, total: Array) -> Array:
    # ``total``: the sum or the mean of the votes. total - total is 0, or NaN if a worker's block was not finite.
    return xp.cast(total >= 0, "float32") * 2.0 - 1.0 + (total - total)


def _flags(xp: Any, x: Array) -> Array:
    if xp.shape(x)[0] == 0:
        return xp.zeros(0, "uint8")
    return xp.cast(xp.invert(xp.isfinite(xp.max_abs(rows(xp, x, CHECKED)))), "uint8")
