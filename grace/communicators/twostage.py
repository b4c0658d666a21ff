"""Compressed allreduce: scatter, average, compress again, gather."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from grace.core import Array, Context, Memory, Program, State, join, name_of, scope
from grace.core.collectives import AllToAll, Gather
from grace.core.communicator import Communicator, refuse_agreed
from grace.core.method import Method
from grace.core.registry import register
from grace.core.sharding import cuts, shards


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
        if compressor.traits.block_size is None or compressor.traits.variable_length:
            size = next((f for f in ("block_size", "bucket_size") if hasattr(compressor, f)), None)
            other = f", or set {size} so that statistics are per block" if size else ""
            raise ValueError(
                f"communicator 'twostage' cannot cut a payload of {name_of(compressor)!r}, which is not blockwise. "
                f"Use communicator 'allgather'{other}"
            )
        if type(method.memory).after_mean is not Memory.after_mean and method.memory.second_stage is None:
            raise ValueError(
                f"communicator 'twostage' cannot carry memory {name_of(method.memory)!r}, which tracks the mean of "
                "what the workers sent: the second compression changes it. Use communicator 'allgather', or memory "
                "'residual'"
            )

    def points(self, method: Method, ctx: Context) -> dict[str, tuple[Method, Context]]:
        shard = shards(method.compressor, ctx, ctx.world_size)[ctx.rank]
        return {"worker": (method, ctx), "server": (method.for_second_stage, shard.stage("server"))}

    def reduce(self, x: Array, method: Method, state: State, ctx: Context) -> Program[tuple[Array, State]]:
        xp, compressor = ctx.xp, method.compressor
        payload, worker = yield from method.encode(x, scope(state, "worker"), ctx)

        # Of each payload array as many parts as there are workers, the last ones shorter.
        owned = shards(compressor, ctx, ctx.world_size)
        ends = tuple(accumulate(shard.size for shard in owned[:-1]))
        sizes = cuts(compressor, xp, ctx.size, ends, tuple(xp.shape(array)[0] for array in payload))
        parts = zip(*(xp.split(array, size) for array, size in zip(payload, sizes, strict=True)), strict=True)
        received = yield AllToAll(tuple(parts))

        mean = yield from method.decode(received, owned[ctx.rank])
        again = [shard.stage("server") for shard in owned]
        payload, server = yield from method.for_second_stage.encode(mean, scope(state, "server"), again[ctx.rank])

        # The last shards are shorter than the first: filled up for the exchange.
        received = yield Gather(tuple(xp.pad(array, size[0]) for array, size in zip(payload, sizes, strict=True)))
        mean = method.mean_of_shards(received, ctx.stage("server"), again, sizes)
        mean, worker = method.finish(mean, worker, ctx)
        return mean, join(worker=worker, server=server)
