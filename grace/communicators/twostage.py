"""Compressed allreduce: scatter, average, compress again, gather."""

from __future__ import annotations

from dataclasses import dataclass

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
    scope,
)
from grace.execution import cuts, unit
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

    def points(self, method: Method, ctx: Context) -> dict[str, tuple[Method, Context]]:
        shard = self.shard(method.compressor, ctx, ctx.rank)
        return {"worker": (method, ctx), "server": (method.again, shard.stage("server"))}

    def reduce(self, x: Array, method: Method, state: State, ctx: Context) -> Program[tuple[Array, State]]:
        xp, compressor, workers = ctx.xp, method.compressor, range(ctx.world_size)
        payload, worker = yield from method.encode(x, scope(state, "worker"), ctx)

        # Shards of equal size, the last ones shorter: of each payload array as many parts as there are workers.
        full = self.shard_size(compressor, ctx)
        ends = tuple(min(w * full, ctx.size) for w in workers[1:])
        sizes = cuts(compressor, xp, ctx.size, ends, tuple(xp.shape(array)[0] for array in payload))
        parts = tuple(zip(*(xp.split(array, size) for array, size in zip(payload, sizes, strict=True)), strict=True))
        received = yield AllToAll(parts)

        shard = self.shard(compressor, ctx, ctx.rank)
        mean = method.mean(received, shard).array()
        payload, server = yield from method.again.encode(mean, scope(state, "server"), shard.stage("server"))

        # The last shards are shorter than the first: filled up for the exchange, and cut off again.
        filled = tuple(xp.pad(array, size[0]) for array, size in zip(payload, sizes, strict=True))
        shards = yield Gather(filled)
        columns = zip(zip(*shards, strict=True), sizes, strict=True)
        whole = tuple(xp.concat([part[:n] for part, n in zip(column, size, strict=True)]) for column, size in columns)
        mean, worker = method.finish(method.mean([whole], ctx.stage("server"), agreed=True), worker, ctx)
        return mean, join(worker=worker, server=server)

    def shard_size(self, compressor: Compressor, ctx: Context) -> int:
        """Elements of a full shard: whole blocks and whole bytes."""
        whole = unit(compressor)
        return -(-ctx.size // (whole * ctx.world_size)) * whole

    def shard(self, compressor: Compressor, ctx: Context, worker: int) -> Context:
        """The context of the shard that a worker owns."""
        full = self.shard_size(compressor, ctx)
        start = min(worker * full, ctx.size)
        return ctx.piece(start, min(full, ctx.size - start))
