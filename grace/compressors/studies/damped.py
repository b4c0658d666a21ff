"""Turns any unbiased method into a contraction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from grace.compressors.measured.qsgd import QSGD
from grace.core import Array, Compressor, Context, MaybeProgram, Payload, State, Traits, name_of
from grace.core.registry import register


@register("damped")
@dataclass(frozen=True)
class Damped(Compressor):
    """Scale an unbiased method's result by 1 / (1 + w), w its variance: this is a contraction and suits error feedback.

    Payload: as the method's.
    ``method``: an unbiased method of known variance, such as "qsgd", "wangni" or "randomk" with ``unbiased_scale``. Its
    keys are also keys of this compressor.
    Beznosikov, Horvath, Richtarik and Safaryan, "On Biased Compression for Distributed Learning", 2020,
    arXiv:2002.12410, on scaling.
    """

    method: Compressor = field(default=QSGD(quantum_num=7))

    def __post_init__(self) -> None:
        traits = self.method.traits
        if not traits.unbiased or traits.lossless or self.method.variance(2**20) is None:
            raise ValueError(
                f"method={name_of(self.method)!r}, as it is set, is not an unbiased one of known variance: use 'qsgd', "
                "'natural', 'wangni' or 'randomk' with unbiased_scale=True, or use it without 'damped'"
            )

    @cached_property
    def traits(self) -> Traits:
        return replace(self.method.traits, unbiased=False, sends_exact_values=False, memory="residual")

    def factor(self, n: int) -> float:
        """1 / (1 + w) for n elements; a blockwise method's w is that of a whole block, also for parts of a tensor."""
        return 1 / (1 + (self.method.variance(self.traits.block_size or n) or 0.0))

    def applies(self, ctx: Context) -> bool:
        return self.method.applies(ctx)

    def contraction(self, n: int) -> float | None:
        return self.factor(max(n, 1))

    def init(self, ctx: Context) -> State:
        return self.method.init(ctx)

    def compress(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        return self.method.compress(x, state, ctx)

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        return self.method.decompress(payload, ctx) * self.factor(ctx.size)

    def residual(self, x: Array, payload: Payload, ctx: Context) -> Array:
        sent = x - self.method.residual(ctx.xp.buffers.copy(x), payload, ctx)
        return x - sent * self.factor(ctx.size)

    def aggregate(self, payloads: Sequence[Payload], ctx: Context) -> Array:
        return self.method.aggregate(payloads, ctx) * self.factor(ctx.size)

    def reduced(self, payload: Payload, ctx: Context) -> Array:
        return self.method.reduced(payload, ctx) * self.factor(ctx.size)
