"""Compressed allreduce: scatter, average, compress again, gather."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from grace.collectives import AllToAll, Gather
from grace.communicators.allgather import refuse_agreed
from grace.core import (
    Array,
    Communicator,
    Compressor,
    Context,
    Memory,
    Method,
    Program,
    State,
    join,
    name_of,
    run,
    scope,
)
from grace.registry import register


@register("twostage", "alltoall")
@dataclass(frozen=True)
class TwoStage(Communicator):
    """Worker i averages shard i of everybody's payload, compresses it again and sends it to all.

    Traffic is twice the payload, whatever the number of workers. The second compression has its own memory, the
    server's, so with error feedback its error is not lost either. For blockwise methods: payloads are cut at block
    boundaries.
    Tang et al., "1-bit Adam", ICML 2021, arXiv:2102.02888, section 4.
    """

    def check(self, method: Method, world_size: int) -> None:
        compressor = method.compressor
        refuse_agreed("twostage", method)
        if compressor.block is None or compressor.ragged:
            size = next((f for f in ("block_size", "bucket_size") if hasattr(compressor, f)), None)
            other = f", or set {size} so that statistics are per block" if size else ""
            raise ValueError(
                f"communicator 'twostage' cannot cut a payload of {name_of(compressor)!r}, which is not blockwise. "
                f"Use communicator 'allgather'{other}"
            )
        if type(method.memory).finish is not Memory.finish and method.memory.server is None:
            raise ValueError(
                f"communicator 'twostage' cannot carry memory {name_of(method.memory)!r}, which tracks the mean of "
                "what the workers sent: the second compression changes it. Use communicator 'allgather', or memory "
                "'residual'"
            )

    def init(self, method: Method, ctx: Context) -> State:
        shard = self.shard(method.compressor, ctx, ctx.rank)
        return join(worker=method.init(ctx), server=_server(method).init(shard.stage("server")))

    def reduce(self, x: Array, method: Method, state: State, ctx: Context) -> Program[tuple[Array, State]]:
        xp, compressor, workers = ctx.xp, method.compressor, range(ctx.world_size)
        unit = _unit(compressor)
        lengths = _lengths(compressor, ctx.xp)
        payload, worker = yield from method.encode(x, scope(state, "worker"), ctx)

        # Shards of equal size, the last ones shorter: element bounds, and with them bounds in each payload array.
        full = self.shard_size(compressor, ctx)
        bounds = [min(w * full, ctx.size) for w in workers] + [ctx.size]
        ends = [xp.shape(array)[0] for array in payload]
        cuts = [ends if bound == ctx.size else [bound // unit * length for length in lengths] for bound in bounds]
        parts = tuple(tuple(array[cuts[w][i] : cuts[w + 1][i]] for i, array in enumerate(payload)) for w in workers)
        received = yield AllToAll(parts)

        shard = self.shard(compressor, ctx, ctx.rank)
        mean = compressor.aggregate(received, shard)
        payload, server = yield from _server(method).encode(mean, scope(state, "server"), shard.stage("server"))

        # The last shards are shorter than the first: filled up for the exchange, and cut off again.
        filled = tuple(xp.pad(array, cuts[1][i] - cuts[0][i]) for i, array in enumerate(payload))
        shards = yield Gather(filled)
        whole = tuple(
            xp.concat([shards[w][i][: cuts[w + 1][i] - cuts[w][i]] for w in workers]) for i in range(len(payload))
        )
        mean, worker = method.finish(compressor.decompress(whole, ctx.stage("server")), worker, ctx)
        return mean, join(worker=worker, server=server)

    def shard_size(self, compressor: Compressor, ctx: Context) -> int:
        """Elements of a full shard: whole blocks and whole bytes."""
        unit = _unit(compressor)
        return -(-ctx.size // (unit * ctx.world_size)) * unit

    def shard(self, compressor: Compressor, ctx: Context, worker: int) -> Context:
        """The context of the shard that a worker owns."""
        full = self.shard_size(compressor, ctx)
        start = min(worker * full, ctx.size)
        return ctx.piece(start, min(full, ctx.size - start))


def _server(method: Method) -> Method:
    # What the owner of a shard compresses its mean with.
    return method if method.memory.server is None else replace(method, memory=method.memory.server)


def _unit(compressor: Compressor) -> int:
    # Elements whose codes fill whole bytes and whole blocks.
    return math.lcm(8, compressor.block or 1)


@cache
def _lengths(compressor: Compressor, xp: Any) -> tuple[int, ...]:
    # How long each payload array is for one unit of elements; blockwise methods are linear in it.
    ctx = Context(xp=xp, name="unit", shape=(_unit(compressor),))
    program = run(compressor.compress(xp.zeros(ctx.size), compressor.init(ctx), ctx))
    try:
        next(program)
    except StopIteration as stop:
        return tuple(xp.shape(array)[0] for array in stop.value[0])
    raise ValueError(f"{name_of(compressor)!r} asks for collectives inside compress, so its payload cannot be cut")
