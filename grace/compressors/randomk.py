"""Random-k sparsification with shared positions."""

from __future__ import annotations

from dataclasses import dataclass

from grace.compressors.sparse import check_ratio, kept
from grace.core import Array, Combine, Compressor, Context, Payload, State, Steps
from grace.registry import register


@register("randomk")
@dataclass(frozen=True)
class RandomK(Compressor):
    """Send the elements at random positions that all workers draw alike, so that no position travels.

    Payload: values float32[k]; k = floor(compress_ratio * n), at least 1. Linear: values add up on the wire.
    ``compress_ratio``: the share of elements to send, in (0, 1].
    ``unbiased_scale``: multiply by n / k, which makes the expectation x (then use memory "none").
    Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018, arXiv:1809.07599, section 2.
    """

    compress_ratio: float = 0.01
    unbiased_scale: bool = False
    combine = Combine.MEAN

    def __post_init__(self) -> None:
        check_ratio(self.compress_ratio)

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        return self.unbiased_scale

    @property
    def memory(self) -> str:  # type: ignore[override]
        return "none" if self.unbiased_scale else "residual"

    def applies(self, ctx: Context) -> bool:
        return ctx.size < 2**31  # positions are int32

    def contraction(self, n: int) -> float | None:
        return None if self.unbiased_scale else kept(self.compress_ratio, n) / max(n, 1)

    def variance(self, n: int) -> float | None:
        return max(n, 1) / kept(self.compress_ratio, n) - 1 if self.unbiased_scale and n else None

    def positions(self, ctx: Context) -> Array:
        """int32[k], ascending: the same on every worker, other ones at every step."""
        return ctx.shared_rng("positions").sample(ctx.size, kept(self.compress_ratio, ctx.size))

    def compress(self, x: Array, state: State, ctx: Context) -> Steps[tuple[Payload, State]]:
        values = ctx.xp.take(x, self.positions(ctx))
        if self.unbiased_scale:
            values = values * (ctx.size / max(1, kept(self.compress_ratio, ctx.size)))
        # A non-finite element that was not drawn must still be seen by every worker.
        return (ctx.xp.where(ctx.xp.finite(x), values, float("nan")),), state

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        return ctx.xp.scatter_add(ctx.xp.zeros(ctx.size), self.positions(ctx), payload[0])

    def residual(self, x: Array, payload: Payload, ctx: Context) -> Array:
        if self.unbiased_scale:
            return x - self.decompress(payload, ctx)
        return ctx.xp.scatter(x, self.positions(ctx), 0.0)
