"""Cyclic local top-k sparsification."""

from __future__ import annotations

from dataclasses import dataclass, replace

from grace.compressors.agreed import AgreedSparsifier
from grace.compressors.sparse import poisoned
from grace.core import Array, Context, Payload, Program, State
from grace.core.collectives import Reduce
from grace.core.registry import register
from grace.ops.validate import placed


@register("cltk", "scalecom")
@dataclass(frozen=True)
class CLTopK(AgreedSparsifier):
    """Send the elements that are largest on one worker, a different worker in each step.

    Two rounds: first the positions, which only the leader, worker step modulo N, contributes; then all workers' values
    there, averaged on the wire. Traffic does not grow with the number of workers.
    Payload: values of the mean float32[k], positions int32[k], ascending, agreed on by all workers.
    ``compress_ratio``: the share of elements to send, in (0, 1].
    The method relies on residuals that are similar on all workers; for that purpose the paper low-pass filters them, as
    does memory "lowpass", the default. The paper searches for the largest elements in chunks; here the search covers
    the whole tensor.
    Chen et al., "ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient Distributed Training",
    NeurIPS 2020, arXiv:2104.11125, section 2.
    """

    traits = replace(AgreedSparsifier.traits, memory="lowpass")

    def compress(self, x: Array, state: State, ctx: Context) -> Program[tuple[Payload, State]]:
        xp = ctx.xp
        # A graph may not know the step when it is traced, so there is no root: the other workers add zeros to the
        # leader's positions.
        leader = xp.zeros(1, "int64") + ctx.step % ctx.world_size
        if isinstance(ctx.step, int) and ctx.step % ctx.world_size != ctx.rank:
            own = xp.zeros(self.count(ctx.size), "int32")
        else:
            own = self.select(x, ctx) * xp.cast(leader == ctx.rank, "int32")
        (positions,) = yield Reduce((own,), "sum")
        positions = placed(xp, positions, ctx.size)
        (values,) = yield Reduce((poisoned(xp, xp.take(x, positions), x),), "mean")
        return (values, positions), state
