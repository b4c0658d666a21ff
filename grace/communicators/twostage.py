"""Compressed allreduce in two stages: scatter and average shards, then compress the means and gather them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from zlib import crc32

from grace.core import Array, Compressor, Context, Memory, Payload, Program, State, join, name_of, scope
from grace.core.collectives import AllToAll, Gather
from grace.core.communicator import Communicator, refuse_agreed
from grace.core.method import Method
from grace.core.registry import register
from grace.core.sharding import cuts, cuttable, shards


@register("twostage", "alltoall")
@dataclass(frozen=True)
class TwoStage(Communicator):
    """Average a shard of all workers' compressed gradients on each worker, compress the mean again and send it to all.

    A worker receives the bytes of 2 (N - 1) / N payloads, less than two for any number of workers N. Blockwise payloads
    are cut at block boundaries; other methods compress each shard separately, with its own scale, threshold or number
    of elements. The second compression has a memory of its own, so error feedback recovers its error as well.
    ``min_shard``: minimum elements per shard; a tensor of fewer than ``min_shard`` times N elements has fewer shards,
    on workers chosen by a hash of its name. 0: every worker has a shard, in rank order.
    Tang et al., "1-bit Adam", ICML 2021, arXiv:2102.02888, section 4. For sparse methods see Li and Hoefler,
    "Near-Optimal Sparse Allreduce", PPoPP 2022: its workers select over the whole tensor and move the bounds of shards
    so that all have equally many elements, with at most 6 k elements of traffic; here each shard sends its share of k.
    """

    rounds = 2
    min_shard: int = 0

    def __post_init__(self) -> None:
        if self.min_shard < 0:
            raise ValueError(f"min_shard={self.min_shard!r} must be 0 or more")

    def check(self, method: Method, world_size: int) -> None:
        refuse_agreed("twostage", method)
        if reason := self.refusal(method):
            raise ValueError(reason)

    def refusal(self, method: Method) -> str:
        """The reason why this communicator does not support a method; empty if it does."""
        memory, other = method.memory, "communicator 'allgather', or memory 'residual'"
        if type(memory).after_mean is Memory.after_mean or (
            memory.second_stage is not None and cuttable(method.compressor)
        ):
            return ""
        if memory.second_stage is not None:
            other = f"a blockwise compressor, such as 'blockint', or {other}"
        return (
            f"communicator 'twostage' cannot carry memory {name_of(memory)!r} with {name_of(method.compressor)!r}: it "
            f"tracks the mean of what the workers sent, which the second compression changes. Use {other}"
        )

    def applies(self, method: Method, ctx: Context) -> bool:
        compressor = method.compressor
        if cuttable(compressor):
            return compressor.applies(ctx)
        return all(shard.size and compressor.applies(shard) for shard in self.owned(compressor, ctx).values())

    def reason(self, method: Method, ctx: Context) -> str:
        if not method.compressor.applies(ctx):
            return super().reason(method, ctx)
        return f"{ctx.world_size} workers cannot have a shard each of shape {list(ctx.shape)}"

    def owned(self, compressor: Compressor, ctx: Context) -> dict[int, Context]:
        """The shards of a tensor, in order, each under the rank of the worker that averages it."""
        size = ctx.world_size
        if not self.min_shard:
            return dict(enumerate(shards(compressor, ctx, size)))
        found = shards(compressor, ctx, min(size, max(1, ctx.size // self.min_shard)))
        first = crc32(ctx.name.encode()) % size
        return {(first + index) % size: shard for index, shard in enumerate(found) if shard.size or not index}

    def compression_points(self, method: Method, ctx: Context) -> dict[str, tuple[Method, Context]]:
        owned = self.owned(method.compressor, ctx)
        points = {"worker": (method, ctx)}
        if not cuttable(method.compressor):
            points = {f"worker.{index}": (method, shard) for index, shard in enumerate(owned.values())}
        if ctx.rank in owned:
            points["server"] = method.for_second_stage, owned[ctx.rank].stage("server")
        return points

    def reduce(self, x: Array, method: Method, state: State, ctx: Context) -> Program[tuple[Array, State]]:
        xp, compressor, rank = ctx.xp, method.compressor, ctx.rank
        owned = self.owned(compressor, ctx)
        payloads, states = yield from _encode(x, method, state, ctx, list(owned.values()))
        sent = dict(zip(owned, payloads, strict=True))
        nothing = tuple(array[:0] for array in payloads[0])
        received = yield AllToAll(
            tuple(sent.get(to, nothing) for to in range(ctx.world_size)), ragged=compressor.traits.variable_length
        )

        again, payload = {owner: shard.stage("server") for owner, shard in owned.items()}, nothing
        if rank in owned:
            mean = yield from method.decode(received, owned[rank])
            payload, server = yield from method.for_second_stage.encode(mean, scope(state, "server"), again[rank])
            states["server"] = server
        if compressor.traits.variable_length:
            # Messages are flat: reshape each array like the one that this worker sent for the same shard.
            gathered = yield Gather(tuple(xp.reshape(array, (-1,)) for array in payload), ragged=True)
            each = [
                tuple(
                    xp.reshape(array, (-1, *xp.shape(own)[1:]))
                    for array, own in zip(gathered[owner], part, strict=True)
                )
                for owner, part in sent.items()
            ]
        else:
            # Encoded positions of some shards have fewer arrays, so pad with empty arrays of the last dtype.
            most = max(map(len, payloads))
            full = [sent.get(worker, nothing) for worker in range(ctx.world_size)]
            shapes = tuple((*map(xp.shape, part), *[(0,)] * (most - len(part))) for part in full)
            gathered = yield Gather((*payload, *[payload[-1][:0]] * (most - len(payload))), shapes=shapes)
            each = [gathered[owner][: len(part)] for owner, part in sent.items()]
        mean = method.mean_of_shards(each, ctx.stage("server"), list(again.values()), list(owned))
        if "worker" in states:
            mean, states["worker"] = method.finish(mean, states["worker"], ctx)
        return mean, join(**states)


def _encode(
    x: Array, method: Method, state: State, ctx: Context, owned: Sequence[Context]
) -> Program[tuple[list[Payload], dict[str, State]]]:
    # Returns the payload of each shard, and the states of the first compression by compression point.
    xp, compressor = ctx.xp, method.compressor
    if cuttable(compressor):
        payload, worker = yield from method.encode(x, scope(state, "worker"), ctx)
        ends = tuple(accumulate(shard.size for shard in owned[:-1]))
        sizes = cuts(compressor, xp, ctx.size, ends, tuple(xp.shape(array)[0] for array in payload))
        parts = zip(*(xp.split(array, size) for array, size in zip(payload, sizes, strict=True)), strict=True)
        return list(parts), {"worker": worker}
    payloads, states, start = [], {}, 0
    for index, shard in enumerate(owned):
        point, mine = f"worker.{index}", x[start : start + shard.size]
        payload, states[point] = yield from method.encode(mine, scope(state, point), shard)
        payloads.append(payload)
        start += shard.size
    return payloads, states
