"""Random-k sparsification with shared positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from grace.compressors.sparse import Elements, Selector, Sparsifier, check_ratio, kept, poisoned
from grace.core import Array, Combine, Compressor, Context, MaybeProgram, Payload, State, Traits
from grace.core.registry import register
from grace.ops.validate import fitting


@register("randomk")
@dataclass(frozen=True)
class RandomK(Sparsifier, Selector):
    """Send the elements at random positions, which all workers draw alike, so that no position travels.

    Payload: values float32[k]; k = floor(compress_ratio * n), at least 1. Linear: values add up on the wire.
    ``compress_ratio``: the share of elements to send, in (0, 1].
    ``unbiased_scale``: multiply by n / k, which makes the expectation x (then use memory "none").
    Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018, arXiv:1809.07599, section 2.
    """

    compress_ratio: float = 0.01
    unbiased_scale: bool = False

    def __post_init__(self) -> None:
        check_ratio(self.compress_ratio)

    @cached_property
    def traits(self) -> Traits:
        return Traits(
            family="sparsification",
            combine=Combine.MEAN,
            unbiased=self.unbiased_scale,
            sends_exact_values=not self.unbiased_scale,
            nonfinite_in_payload=True,
            memory="none" if self.unbiased_scale else "residual",
        )

    def contraction(self, n: int) -> float | None:
        return None if self.unbiased_scale else kept(self.compress_ratio, n) / max(n, 1)

    def variance(self, n: int) -> float | None:
        return max(n, 1) / kept(self.compress_ratio, n) - 1 if self.unbiased_scale and n else None

    def count(self, n: int) -> int | None:
        return kept(self.compress_ratio, n)

    def choose(self, x: Array, state: State, ctx: Context) -> tuple[Array, State]:
        return self.positions(ctx), state

    @property
    def elements(self) -> Elements:
        return Shared(self)

    def positions(self, ctx: Context) -> Array:
        """int32[k]: this step's positions."""
        return ctx.shared_rng("positions").sample(ctx.size, kept(self.compress_ratio, ctx.size))

    def compress(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        return (self.sent(x, self.positions(ctx), ctx),), state

    def sent(self, x: Array, positions: Array, ctx: Context) -> Array:
        """float32[k]: the wire values of these positions."""
        values = ctx.xp.take(x, positions)
        if self.unbiased_scale:
            values = values * (ctx.size / max(1, kept(self.compress_ratio, ctx.size)))
        return poisoned(ctx.xp, values, x)

    def residual(self, x: Array, payload: Payload, ctx: Context) -> Array:
        return Compressor.residual(self, x, payload, ctx) if self.unbiased_scale else super().residual(x, payload, ctx)

    def aggregate(self, payloads: Sequence[Payload], ctx: Context) -> Array:
        return ctx.xp.inplace.scatter(ctx.xp.zeros(ctx.size), self.positions(ctx), self.values(payloads, ctx))

    def values(self, payloads: Sequence[Payload], ctx: Context) -> Array:
        """float32[k]: the mean of all workers' values."""
        xp, k = ctx.xp, kept(self.compress_ratio, ctx.size)
        total = xp.zeros(k)
        for (values,) in payloads:
            total = xp.inplace.add(total, fitting(xp, values, "float32", k, "values"))
        return xp.inplace.divide(total, len(payloads))


@dataclass(frozen=True)
class Shared(Elements):
    """Elements whose positions do not travel: every worker draws them."""

    selector: RandomK

    def arrays(self, n: int) -> int:
        return 0

    def write(self, positions: Array, ctx: Context) -> tuple[Array, ...]:
        return ()

    def read(self, sent: tuple[Array, ...], ctx: Context) -> Array:
        return self.selector.positions(ctx)
