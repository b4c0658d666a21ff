"""Runs a method on one tensor: by kernels, by NumPy's kernels on the same host, in chunks, or as plain functions.

A submitted gradient is donated: its memory may hold the residual, and finally the mean. So a step needs no second
array of the gradient's size, whose page faults cost more than all arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from grace.core import Array, Compressor, Context, Payload, Program, State, apart, as_program, join, scope
from grace.core.method import Method
from grace.core.sharding import in_chunks, pieces, template, unit
from grace.engine.codecs.mean import Part, PendingMean
from grace.engine.codecs.table import calls_of, compress, encode, residual
from grace.engine.host import encode_hosted

RESIDUAL = "memory/residual"


@dataclass(frozen=True)
class TensorCodec(Method):
    """A `Method` with the same results, bit for bit, whose means are decoded later (`PendingMean`)."""

    def encode(self, x: Array, state: State, ctx: Context) -> Program[tuple[Payload, State]]:
        done = encode_hosted(self, x, state, ctx)
        if done is None:
            done = self._at_once(x, state, ctx)
        if done is not None:
            return done
        x, memory = yield from as_program(self.memory.compensate(x, scope(state, "memory"), ctx))
        payload, kept = yield from as_program(compress(self.compressor, x, scope(state, "compressor"), ctx))
        payload = apart(payload, (x,), ctx.xp)
        compressor = self.compressor if calls_of(type(self.compressor)).residual is None else _twin(self.compressor)
        memory = self.memory.update(x, payload, compressor, memory, ctx)
        return payload, join(memory=memory, compressor=kept)

    def _at_once(self, x: Array, state: State, ctx: Context) -> tuple[Payload, State] | None:
        # Compensate, compress and update by one kernel, or chunk by chunk; None if neither applies.
        compressor = self.compressor
        if not self.memory.standard_feedback or ctx.size == 0:
            return None
        last = state.get(RESIDUAL)
        done = encode(compressor, x, last, ctx)
        if done is None and in_chunks(compressor, ctx) and not (ctx.xp.kernels and calls_of(type(compressor)).compress):
            done = _encode_chunks(compressor, x, last, ctx)
        if done is None:
            return None
        payload, left = done
        return payload, state if last is None else {**state, RESIDUAL: left}

    def mean(self, payloads: Sequence[Payload], ctx: Context, agreed: bool = False) -> PendingMean:
        return PendingMean(self.compressor, [Part(payloads, ctx, agreed)], ctx)

    def mean_of_shards(
        self, payloads: Sequence[Payload], ctx: Context, shards: Sequence[Context], senders: Sequence[int] = ()
    ) -> PendingMean:
        sent = zip(payloads, shards, senders or range(len(shards)), strict=True)
        return PendingMean(self.compressor, [Part([each], shard, True, worker) for each, shard, worker in sent], ctx)


@cache
def _twin(compressor: Compressor) -> Compressor:
    # Returns a copy of the compressor whose `residual` calls a kernel if there is one. The copy is passed to memories.
    found = copy(compressor)
    object.__setattr__(found, "residual", partial(residual, compressor))
    return found


def _encode_chunks(compressor: Compressor, x: Array, residual: Array | None, ctx: Context) -> tuple[Payload, Array]:
    xp, units = ctx.xp, unit(compressor)
    each = template(compressor, xp, (units,), ctx.wire)
    # Allocate the whole payload, slightly too long, and write each chunk's payload to its part: concatenation would
    # cost another copy.
    whole = [xp.buffers.empty(-(-ctx.size // units) * shape[0], dtype) for dtype, shape in each]
    ends: list[int] = []
    for start, stop in pieces(compressor, ctx):
        here, part = ctx.piece(start, stop - start), x[start:stop]
        rest = None if residual is None else residual[start:stop]
        firsts = [start // units * shape[0] for _, shape in each]
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
