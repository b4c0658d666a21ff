"""Means of pseudo-gradients that are averaged over their senders, or clipped to the workers' median norm, or both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from grace.core import Array, Combine, Compressor, Context, MaybeProgram, Payload, State, Traits, name_of

AVERAGES, CLIPS = ("workers", "senders"), ("none", "median")


@dataclass(frozen=True)
class PeerMean(Compressor):
    """Averages a compressor's payloads, over all workers or over the senders; optionally clips them to a median norm.

    ``average``: "workers" divides a sum by the number of workers; "senders" divides each element by the number of
    workers whose decoded payload is not zero there. ``clip``: "median" scales a decoded payload down to the median
    norm of the workers' payloads of the tensor if its norm is larger (for an even number, to the lower middle norm). A
    memory feeds back errors of compression alone, not those of clipping. Made for communicator "allgather"; with
    "twostage" the norms are those of shards. Raises ValueError for a compressor whose payloads are summed, agreed on or
    voted with.

    Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025, arXiv:2508.15706; ``average`` and
    ``clip`` come from the authors' training code, not from the paper. Averaging over senders makes steps longer where
    fewer workers send.
    """

    inner: Compressor
    average: str = "workers"
    clip: str = "none"

    def __post_init__(self) -> None:
        if self.average not in AVERAGES:
            raise ValueError(f"average={self.average!r}: choose {' or '.join(map(repr, AVERAGES))}")
        if self.clip not in CLIPS:
            raise ValueError(f"clip={self.clip!r}: choose {' or '.join(map(repr, CLIPS))}")
        traits = self.inner.traits
        if traits.combine is not Combine.GATHER or traits.majority_vote:
            raise ValueError(
                f"average and clip need each worker's payload, but those of {name_of(self.inner)!r} are summed, agreed "
                "on or voted with: leave them out, or take another compressor, such as 'chunktopk'"
            )

    @cached_property
    def traits(self) -> Traits:
        # a payload must not be split: its norm is that of the whole tensor
        return replace(self.inner.traits, block_size=None)

    def applies(self, ctx: Context) -> bool:
        return self.inner.applies(ctx)

    def contraction(self, n: int) -> float | None:
        return self.inner.contraction(n)

    def variance(self, n: int) -> float | None:
        return self.inner.variance(n)

    def init(self, ctx: Context) -> State:
        return self.inner.init(ctx)

    def compress(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        return self.inner.compress(x, state, ctx)

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        return self.inner.decompress(payload, ctx)

    def residual(self, x: Array, payload: Payload, ctx: Context) -> Array:
        return self.inner.residual(x, payload, ctx)

    def aggregate(self, payloads: Sequence[Payload], ctx: Context) -> Array:
        xp = ctx.xp
        factors = self._factors(payloads, ctx) if self.clip == "median" else [None] * len(payloads)
        total, senders = xp.zeros(ctx.size), xp.zeros(ctx.size)
        for payload, factor in zip(payloads, factors, strict=True):  # decoded again: one dense vector at a time
            x = self.decompress(payload, ctx)
            total = total + (x if factor is None else x * factor)
            if self.average == "senders":
                senders = senders + xp.cast(x != 0, "float32")
        return total / (xp.maximum(senders, 1.0) if self.average == "senders" else len(payloads))

    def _factors(self, payloads: Sequence[Payload], ctx: Context) -> list[Array]:
        # Returns the factor of each payload, float32[1].
        xp = ctx.xp
        decoded = (self.decompress(payload, ctx) for payload in payloads)
        norms = xp.concat([xp.reshape(xp.sqrt(xp.sum(x * x)), (1,)) for x in decoded])
        middle = (len(payloads) - 1) // 2
        median = xp.sort(norms)[middle : middle + 1]
        # A norm of NaN makes the mean NaN, so that all workers leave the tensor unchanged.
        factors = xp.where(norms <= median, 1.0, median / xp.where(norms == 0, 1.0, norms))
        return [factors[i : i + 1] for i in range(len(payloads))]
