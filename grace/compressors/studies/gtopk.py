"""Global top-k sparsification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grace.compressors.agreed import AgreedSparsifier, put_back
from grace.core import Array, Context, Payload, Program, State
from grace.core.collectives import Gather
from grace.core.errors import sent_by
from grace.core.registry import register
from grace.ops.validate import placed


@register("gtopk")
@dataclass(frozen=True)
class GTopK(AgreedSparsifier):
    """Use the k largest elements of the sum of all workers' top k: the mean has k elements for any number of workers.

    Payload: values of the mean float32[k], positions int32[k], ascending, agreed on by all workers; and this worker's
    own positions int32[k]. Elements that a worker sent, but that are not in the mean, stay in its residual.
    ``compress_ratio``: the share of elements to send and to use, in (0, 1].
    The paper merges pairs of workers in a tree and drops elements on the way; here all contributions are gathered and
    merged at once, so no element of the result is lost. Each worker therefore receives N k elements, as with "topk",
    instead of k log N.
    Shi, Wang, Zhao, Tang, Wang, Huang and Chu, "A Distributed Synchronous SGD Algorithm with Global Top-k
    Sparsification for Low Bandwidth Networks", ICDCS 2019, arXiv:1901.04359, algorithm 4.
    """

    def compress(self, x: Array, state: State, ctx: Context) -> Program[tuple[Payload, State]]:
        xp = ctx.xp
        own = self.select(x, ctx)
        sums, positions = self.merged((yield Gather((xp.take(x, own), own))), ctx)
        return (sums / ctx.world_size, positions, own), state

    def residual(self, x: Array, payload: Payload, ctx: Context) -> Array:
        return put_back(x, payload[1], payload[2], ctx)

    def merged(self, payloads: Sequence[Payload], ctx: Context) -> tuple[Array, Array]:
        """float32[k] and int32[k]: the largest elements of the sum of all payloads, and their positions."""
        xp = ctx.xp
        total = xp.zeros(ctx.size)
        for worker, payload in enumerate(payloads):
            with sent_by(worker, self, ctx):
                values, own = self.elements.parts(payload, ctx)
                total = xp.scatter_add(total, placed(xp, own, ctx.size), values)
        positions = self.select(total, ctx)
        return xp.take(total, positions), positions
