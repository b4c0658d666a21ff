"""Random-k sparsification with shared positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from grace.compressors.sparse import Elements, Selector, Sparsifier, check_ratio, kept, poisoned
from grace.core import Array, Combine, Compressor, Context, MaybeProgram, Payload, State, Traits
from grace.core.registry import register


@register("randomk")
@dataclass(frozen=True)
class RandomK(Sparsifier, Selector):
    """Send the elements at random positions, which all workers draw alike, so that no position travels.

    Payload: values float32[k]; k = floor(compress_ratio * n), at least 1. It is linear in the gradient, so values can
    be averaged on the wire.
    ``compress_ratio``: the share of elements to send, in (0, 1].
    ``unbiased_scale``: divide by the probability k / n, which makes the expectation x (then use memory "none").
    ``mode``: "fixed", or "bernoulli", which sends each element independently with probability compress_ratio, but at
    least one element; then k varies from step to step, but is the same on all workers.
    Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018, arXiv:1809.07599, section 2; for Bernoulli
    draws Beznosikov, Horvath, Richtarik and Safaryan, "On Biased Compression for Distributed Learning", 2020,
    arXiv:2002.12410.
    """

    compress_ratio: float = 0.01
    unbiased_scale: bool = False
    mode: str = "fixed"

    def __post_init__(self) -> None:
        check_ratio(self.compress_ratio)
        if self.mode not in ("fixed", "bernoulli"):
            raise ValueError(f"mode={self.mode!r}: choose 'fixed' or 'bernoulli'")

    @cached_property
    def traits(self) -> Traits:
        return Traits(
            family="sparsification",
            combine=Combine.MEAN,
            unbiased=self.unbiased_scale,
            variable_length=self.mode == "bernoulli",
            sends_exact_values=not self.unbiased_scale,
            nonfinite_in_payload=True,
            memory="none" if self.unbiased_scale else "residual",
        )

    def chance(self, n: int) -> float:
        """Probability with which an element is sent."""
        if self.mode == "fixed":
            return kept(self.compress_ratio, n) / n
        # If no element would be drawn, one is sent; each has the same chance to be this one.
        return self.compress_ratio + (1 - self.compress_ratio) ** n / n

    def contraction(self, n: int) -> float | None:
        return None if self.unbiased_scale else self.chance(max(n, 1))

    def variance(self, n: int) -> float | None:
        return 1 / self.chance(n) - 1 if self.unbiased_scale and n else None

    def count(self, n: int) -> int | None:
        return kept(self.compress_ratio, n) if self.mode == "fixed" else None

    def choose(self, x: Array, state: State, ctx: Context) -> tuple[Array, State]:
        return self.positions(ctx), state

    @property
    def elements(self) -> Elements:
        return Shared(self)

    def positions(self, ctx: Context) -> Array:
        """Return this step's positions, int32[k], drawn once per step, because a draw takes longer than a message."""
        return ctx.once((type(self), self.compress_ratio, self.mode), lambda: self._drawn(ctx))

    def _drawn(self, ctx: Context) -> Array:
        xp, n, stream = ctx.xp, ctx.size, ctx.shared_rng("positions")
        if self.mode == "fixed":
            return stream.sample(n, kept(self.compress_ratio, n))
        if n == 0:
            return xp.zeros(0, "int32")
        reverse = xp.bitwise_xor(stream.bits(n), 0x7FFFFFFF)  # the smallest unsigned word becomes the largest number
        bound = 2**31 - max(1, math.floor(self.compress_ratio * 2**32))
        return xp.nonzero((reverse >= bound) | (reverse >= xp.max(reverse)))

    def compress(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        return (self.sent(x, self.positions(ctx), ctx),), state

    def sent(self, x: Array, positions: Array, ctx: Context) -> Array:
        """Return float32[k], the wire values of these positions."""
        values = ctx.xp.take(x, positions)
        if self.unbiased_scale:
            values = values * (1 / self.chance(max(1, ctx.size)))
        return poisoned(ctx.xp, values, x)

    def residual(self, x: Array, payload: Payload, ctx: Context) -> Array:
        return Compressor.residual(self, x, payload, ctx) if self.unbiased_scale else super().residual(x, payload, ctx)

    def aggregate(self, payloads: Sequence[Payload], ctx: Context) -> Array:
        positions = self.positions(ctx)
        return ctx.xp.inplace.scatter(ctx.xp.zeros(ctx.size), positions, self.values(payloads, positions, ctx))

    def values(self, payloads: Sequence[Payload], positions: Array, ctx: Context) -> Array:
        """Return float32[k], the mean of all workers' values at these positions."""
        xp = ctx.xp
        total = xp.cast(positions * 0, "float32")  # zeros: a traced graph does not know k
        for (values,) in payloads:
            total = xp.inplace.add(total, self.elements.matched(values, positions, ctx)[0])
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
