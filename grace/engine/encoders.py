"""Fast versions of methods: native kernels, chunks that fit a cache, or NumPy's kernels on the same host.

A submitted gradient is donated: its memory may hold the residual, and finally the mean. So a step needs no second
array of the gradient's size, whose page faults cost more than all arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grace.core import Array, Compressor, Context, Memory, Payload, Program, State, apart, as_program, join, scope
from grace.core.method import Method
from grace.core.sharding import in_chunks, piece, pieces, template, unit
from grace.engine import accelerators
from grace.engine.accelerators import accelerator_of, memory_accelerator_of
from grace.engine.compiled import compiled
from grace.engine.host import encode_hosted
from grace.engine.lazy_mean import DeferredResidual, LazyMean, LazyShardedMean
from grace.engine.workspace import without_rollback, workspace

RESIDUAL = "memory/residual"


@dataclass(frozen=True)
class FastMethod(Method):
    """A `Method` with the same results, bit for bit, and lazy means."""

    def encode(self, x: Array, state: State, ctx: Context, defer: bool = False) -> Program[tuple[Payload, State]]:
        done = encode_hosted(self, x, state, ctx)
        if done is None:
            done = encode(self.compressor, self.memory, x, state, ctx)
        if done is not None:
            if workspace(ctx).deferred:
                yield None  # wait until the deferred kernels have run
            return done
        accelerator, for_memory = accelerator_of(self.compressor), memory_accelerator_of(self.memory)
        memory, kept = scope(state, "memory"), scope(state, "compressor")
        compensated = None
        if self.memory.standard_feedback and "residual" in memory and ctx.xp.mutable:
            compensated = accelerator.compensated(self.compressor, x, memory["residual"], kept, ctx)
        # If elements are sent exactly, the residual differs from x only at their positions: deferring it gains nothing.
        defer = (
            defer
            and not self.compressor.traits.sends_exact_values
            and self.memory.standard_feedback
            and "residual" in memory
            and bool(ctx.xp.piece)
        )
        if compensated is None:
            # A deferred residual is written to the previous residual's memory, so x must not share that memory.
            here = without_rollback(ctx) if defer else ctx
            x, memory = yield from as_program(for_memory.compensate(self.memory, x, memory, here))
            program = as_program(accelerator.compress(self.compressor, x, kept, ctx))
        else:
            x, program = compensated
        payload, kept = yield from program
        payload = apart(payload, (x,), ctx.xp)
        if defer:
            memory = {"residual": DeferredResidual(self.compressor, x, payload, ctx)}
        else:
            compressor = accelerator.for_memory(self.compressor)
            memory = for_memory.update(self.memory, x, payload, compressor, memory, ctx)
        return payload, join(memory=memory, compressor=kept)

    def mean(self, payloads: Sequence[Payload], ctx: Context, agreed: bool = False) -> LazyMean:
        return LazyMean(self.compressor, payloads, ctx, agreed)

    def decode(self, payloads: Sequence[Payload], ctx: Context, agreed: bool = False) -> Program[Array]:
        return (yield from self.mean(payloads, ctx, agreed).made())

    def mean_of_shards(self, payloads: Sequence[Payload], ctx: Context, shards: Sequence[Context]) -> LazyMean:
        return LazyShardedMean(self.compressor, payloads, ctx, shards)


def encode(
    compressor: Compressor, memory: Memory, x: Array, state: State, ctx: Context
) -> tuple[Payload, State] | None:
    """Encode with one kernel, or chunk by chunk: the payload and the next state; None if neither applies. x is donated.

    If the workspace defers kernels, they fill these arrays later.
    """
    if not memory.standard_feedback or ctx.size == 0:
        return None
    residual = state.get(RESIDUAL)
    done = accelerators.encode(compressor, x, residual, ctx)
    if done is None and in_chunks(compressor, ctx):
        done = _encode_chunks(compressor, x, residual, ctx)
    if done is None:
        return None
    payload, left = done
    return payload, state if residual is None else {**state, RESIDUAL: left}


def _encode_chunks(compressor: Compressor, x: Array, residual: Array | None, ctx: Context) -> tuple[Payload, Array]:
    xp, units, size = ctx.xp, unit(compressor), piece(compressor, ctx.xp)
    each = template(compressor, xp, (units,), ctx.wire)
    # Allocate the whole payload, slightly too long, and write each chunk's payload to its part: concatenation would
    # cost another copy.
    whole = [xp.buffers.empty(-(-ctx.size // units) * shape[0], dtype) for dtype, shape in each]
    ends: list[int] = []
    forms = compiled(xp) if workspace(ctx).compile and not compressor.traits.lossless else None
    for start, stop in pieces(compressor, ctx):
        here, part = ctx.piece(start, stop - start), x[start:stop]
        rest = None if residual is None else residual[start:stop]
        firsts = [start // units * shape[0] for _, shape in each]
        if forms is not None and here.size == size:
            ends = [stop // units * shape[0] for _, shape in each]
            outs = tuple(array[first:end] for array, first, end in zip(whole, firsts, ends, strict=True))
            if forms.encode(compressor, part, rest, outs, here):
                continue
        if rest is not None:
            part = xp.inplace.add(part, rest)
        found: Any = compressor.compress(part, {}, here)
        payload: Payload = found[0]
        ends = [first + xp.shape(array)[0] for first, array in zip(firsts, payload, strict=True)]
        for place, first, end, array in zip(whole, firsts, ends, payload, strict=True):
            xp.buffers.write(place[first:end], array)
        if residual is not None:
            left = compressor.residual(part, payload, here)
            if not xp.buffers.same_memory(left, x[start:stop]):
                xp.buffers.write(x[start:stop], left)
    return tuple(array[:end] for array, end in zip(whole, ends, strict=True)), x
