"""Compressed allreduce: scatter, average, compress again, gather."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from grace.core import Array, Compressor, Context, Memory, Payload, Program, State, join, name_of, scope
from grace.core.collectives import AllToAll, Gather
from grace.core.communicator import Communicator, refuse_agreed
from grace.core.method import Method
from grace.core.registry import register
from grace.core.sharding import cuts, shards


@register("twostage", "alltoall")
@dataclass(frozen=True)
class TwoStage(Communicator):
    """Worker i averages shard i of everybody's gradient, compresses the mean again and sends it to all.

    A worker receives 2 (N - 1) / N payloads, whatever the number of workers N, and decodes two. Blockwise payloads are
    cut at block boundaries; other methods compress each shard by itself, with a scale, a threshold or k / N elements of
    its own. The second compression has its own memory, the server's, so with error feedback its error is not lost
    either.
    ``min_shard``: tensors of fewer elements per worker are gathered in one round instead, since a second round costs
    more than their bytes.
    Tang et al., "1-bit Adam", ICML 2021, arXiv:2102.02888, section 4; for sparse methods the bound of 2 k (N - 1) / N
    elements is that of Li and Hoefler, "Near-Optimal Sparse Allreduce", PPoPP 2022, which reaches 6 k: shards of equal
    size with k / N elements each need no balancing.
    """

    min_shard: int = 0

    def __post_init__(self) -> None:
        if self.min_shard < 0:
            raise ValueError(f"min_shard={self.min_shard!r} must be 0 or more")

    def check(self, method: Method, world_size: int) -> None:
        refuse_agreed("twostage", method)
        if reason := self.refusal(method):
            raise ValueError(reason)

    def refusal(self, method: Method) -> str:
        """Why a method cannot be carried; empty if it can."""
        memory, other = method.memory, "communicator 'allgather', or memory 'residual'"
        if type(memory).finish is Memory.finish or (memory.server is not None and cuttable(method.compressor)):
            return ""
        if memory.server is not None:
            other = f"a blockwise compressor, such as 'blockint', or {other}"
        return (
            f"communicator 'twostage' cannot carry memory {name_of(memory)!r} with {name_of(method.compressor)!r}: it "
            f"tracks the mean of what the workers sent, which the second compression changes. Use {other}"
        )

    def applies(self, method: Method, ctx: Context) -> bool:
        compressor = method.compressor
        if self._gathers(ctx) or cuttable(compressor):
            return compressor.applies(ctx)
        owned = shards(compressor, ctx, ctx.world_size)
        return all(shard.size and compressor.applies(shard) for shard in owned)

    def reason(self, method: Method, ctx: Context) -> str:
        if not method.compressor.applies(ctx):
            return super().reason(method, ctx)
        return f"{ctx.world_size} workers cannot have a shard each of shape {list(ctx.shape)}"

    def points(self, method: Method, ctx: Context) -> dict[str, tuple[Method, Context]]:
        if self._gathers(ctx):
            return {"": (method, ctx)}
        owned = shards(method.compressor, ctx, ctx.world_size)
        server = {"server": (method.again, owned[ctx.rank].stage("server"))}
        if cuttable(method.compressor):
            return {"worker": (method, ctx), **server}
        return {f"worker.{owner}": (method, shard) for owner, shard in enumerate(owned)} | server

    def reduce(self, x: Array, method: Method, state: State, ctx: Context) -> Program[tuple[Array, State]]:
        compressor = method.compressor
        if self._gathers(ctx):
            payload, state = yield from method.encode(x, state, ctx)
            payloads = yield Gather(payload, ragged=compressor.ragged)
            return method.finish(method.mean(payloads, ctx), state, ctx)

        owned = shards(compressor, ctx, ctx.world_size)
        parts, worker = yield from _encode(x, method, state, ctx, owned)
        lengths = [[ctx.xp.shape(array)[0] for array in arrays] for arrays in zip(*parts, strict=True)]
        sizes = None if compressor.ragged else lengths
        received = yield AllToAll(parts, ragged=compressor.ragged)
        mean = yield from method.decode(received, owned[ctx.rank])

        again = [shard.stage("server") for shard in owned]
        payload, server = yield from method.again.encode(mean, scope(state, "server"), again[ctx.rank])
        if sizes is None:
            received = yield from _gather_flat(payload, parts, ctx)
        else:  # the last shards are shorter than the first: filled up for the exchange
            padded = tuple(ctx.xp.pad(array, max(size)) for array, size in zip(payload, sizes, strict=True))
            received = yield Gather(padded)
        mean = method.mean_of_shards(received, ctx.stage("server"), again, sizes)
        if "worker" in worker:
            mean, worker["worker"] = method.finish(mean, worker["worker"], ctx)
        return mean, join(**worker, server=server)

    def _gathers(self, ctx: Context) -> bool:
        return ctx.size < self.min_shard * ctx.world_size


def cuttable(compressor: Compressor) -> bool:
    """Whether the payload of a tensor can be cut into those of its shards."""
    return compressor.block is not None and not compressor.ragged


def _gather_flat(payload: Payload, parts: Sequence[Payload], ctx: Context) -> Program[list[Payload]]:
    # Payloads of any length, each worker's with rows as long as those of this worker's payload for the same shard.
    xp = ctx.xp
    received = yield Gather(tuple(xp.reshape(array, (-1,)) for array in payload), ragged=True)
    return [
        tuple(xp.reshape(array, (-1, *xp.shape(own)[1:])) for array, own in zip(arrays, part, strict=True))
        for arrays, part in zip(received, parts, strict=True)
    ]


def _encode(
    x: Array, method: Method, state: State, ctx: Context, owned: Sequence[Context]
) -> Program[tuple[tuple[Payload, ...], dict[str, State]]]:
    # A payload for the owner of each shard, and the states of the first compression.
    xp, compressor = ctx.xp, method.compressor
    if cuttable(compressor):
        payload, worker = yield from method.encode(x, scope(state, "worker"), ctx)
        ends = tuple(accumulate(shard.size for shard in owned[:-1]))
        sizes = cuts(compressor, xp, ctx.size, ends, tuple(xp.shape(array)[0] for array in payload))
        parts = zip(*(xp.split(array, size) for array, size in zip(payload, sizes, strict=True)), strict=True)
        return tuple(parts), {"worker": worker}
    payloads, states, start = [], {}, 0
    for owner, shard in enumerate(owned):
        point, mine = f"worker.{owner}", x[start : start + shard.size]
        payload, states[point] = yield from method.encode(mine, scope(state, point), shard)
        payloads.append(payload)
        start += shard.size
    return tuple(payloads), states
