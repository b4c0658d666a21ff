"""Adaptive residual compression."""

from __future__ import annotations

from dataclasses import dataclass

from grace.compressors.sparse import Placed
from grace.core import Array, Context, MaybeProgram, Payload, Resize, State, Traits
from grace.core.registry import register
from grace.ops import blocks
from grace.ops.validate import fitting, typed


@register("adacomp")
@dataclass(frozen=True)
class AdaComp(Placed):
    """In each bin, send the elements that would exceed the bin's maximum if the last gradient were added again.

    With residual e, gradient g and G = e + g: an element is sent if the magnitude of G + g reaches the largest
    magnitude of G in its bin. It is sent as the sign of G times the mean of the bins' largest magnitudes. The number of
    sent elements adapts to the gradient.
    Payload: counts uint8[m], of the elements sent in each bin; places uint8[K], in the bin, with the sign in the top
    bit; scale float32[1]. State: residual float32[n] (e), so use memory "none", the default.
    ``bin_size``: elements per bin, 2 .. 128, so that a place takes seven bits; the paper uses 500 for fully connected
    layers, with two bytes per element.
    Chen et al., "AdaComp: Adaptive Residual Gradient Compression for Data-Parallel Distributed Training", AAAI 2018,
    arXiv:1712.02679, algorithm 2.
    """

    bin_size: int = 50

    traits = Traits(
        family="sparsification",
        variable_length=True,
        nonfinite_in_payload=True,
        internal_feedback=True,
        memory="none",
        reshard={"residual": Resize.SUM},
    )

    def __post_init__(self) -> None:
        if not 2 <= self.bin_size <= 128:
            raise ValueError(f"bin_size={self.bin_size!r} must lie in 2 .. 128")

    def init(self, ctx: Context) -> State:
        return {"residual": ctx.xp.zeros(ctx.size)}

    def compress(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        xp, n, size = ctx.xp, ctx.size, self.bin_size
        total = state["residual"] + x
        largest = xp.max(xp.abs(blocks.rows(xp, total, size)), 1)
        reach = blocks.rows(xp, xp.abs(total + x), size)
        bound = xp.reshape(largest, (-1, 1))
        # Non-finite elements are always sent, so that every worker sees them.
        chosen = blocks.flat(xp, (reach >= bound) & (bound > 0), n) | xp.invert(xp.isfinite(total))
        # In double precision: the mean of equal magnitudes, as in the second of two stages, is then exact.
        sizes = xp.sum(xp.cast(largest, "float64"))
        scale = xp.cast(sizes / float(max(1, blocks.block_count(n, size))), "float32")
        counts = xp.cast(xp.sum(blocks.rows(xp, xp.cast(chosen, "int32"), size), 1), "uint8")
        positions = xp.nonzero(chosen)
        negative, scale = xp.take(total, positions) < 0, xp.reshape(scale, (1,))
        places = positions % size + 128 * xp.cast(negative, "int32")
        payload = (counts, xp.cast(places, "uint8"), scale)
        return payload, {"residual": xp.scatter_add(total, positions, xp.where(negative, scale, -scale))}

    def parts(self, payload: Payload, ctx: Context) -> tuple[Array, Array]:
        xp = ctx.xp
        counts, sent, scale = payload
        counts = fitting(xp, counts, "uint8", blocks.block_count(ctx.size, self.bin_size), "counts")
        scale = fitting(xp, scale, "float32", 1, "scales")
        sent = typed(xp, sent, "uint8", "places")
        many, counts = xp.lengths([sent]), xp.cast(counts, "int32")
        sent = xp.sound(sent, lambda: xp.all(xp.cast(xp.sum(counts), "int64") == many), "its counts do not add up")
        # The r-th sent element lies in the first bin whose cumulative count reaches r. A dummy element avoids an empty
        # search.
        sent = xp.cast(xp.concat([sent, xp.zeros(1, "uint8")]), "int32")
        bins = xp.searchsorted(xp.cumsum(counts), xp.cumsum(sent * 0 + 1))[:-1]
        sent = sent[:-1]
        places = xp.bitwise_and(sent, 127)
        places = xp.sound(places, lambda: xp.all(places < self.bin_size), "its places lie outside their bins")
        return xp.where(sent >= 128, -scale, scale), bins * self.bin_size + places
