"""Compressed allreduce in two stages: scatter and average shards, then compress the means and gather them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from zlib import crc32

from grace.core import Array, Compressor, Context, Memory, Payload, Program, State, Transport, join, name_of, scope
from grace.core.collectives import AllToAll, Gather
from grace.core.communicator import Communicator, refuse_agreed
from grace.core.grid import Grid, factors
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
    With ``levels`` k above 1 the workers form a grid of k dimensions: those of a row average shards and compress the
    means again, those of a column average these, and so on; the last means go back the same way, without another
    compression. A worker then sends about 2 k N^(1/k) messages instead of 2 (N - 1), of as many bytes in total, and
    compresses k + 1 times instead of twice. Each compression has a memory of its own. Over Horovod this needs
    ``HOROVOD_DYNAMIC_PROCESS_SETS=1`` before ``hvd.init()``.
    With memory "residual" and one level this is DoubleSqueeze, with each worker as the server of its shard.
    With memory "efsignsgd" and SGD without momentum the second compression is also EF21-P, which sends compressed
    differences of models instead of gradients: if w are the workers' parameters and the server steps from x, they
    receive w + C(x - w). This holds if C(-a x) = -a C(x) for a > 0, as with "topk", "efsignsgd" and "blockint"; x is w
    minus the rate times the second residual. With momentum or Adam the two differ, since EF21-P compresses what the
    server's optimizer has made of the mean. The paper's workers send by unbiased methods without memory or as in
    "diana"; here they have the same compressor and memory as the server.
    ``min_shard``: minimum elements per shard; a tensor of fewer than ``min_shard`` times N elements has fewer shards,
    on workers chosen by a hash of its name. 0: every worker has a shard, in rank order.
    ``levels``: dimensions of the grid, 1 or more; fewer if N has fewer prime factors, as the report says.
    Sparse methods send a fixed share of elements from each shard; "oktopk" selects over the whole tensor instead.
    Tang et al., "1-bit Adam", ICML 2021, arXiv:2102.02888, section 4. Tang, Yu, Lian, Zhang and Liu, "DoubleSqueeze",
    ICML 2019, arXiv:1905.05957, algorithm 1. Gruntkowska, Tyurin and Richtarik, "EF21-P and Friends", ICML 2023,
    arXiv:2209.15218.
    """

    min_shard: int = 0
    levels: int = 1

    def __post_init__(self) -> None:
        if self.min_shard < 0:
            raise ValueError(f"min_shard={self.min_shard!r} must be 0 or more")
        if self.levels < 1:
            raise ValueError(f"levels={self.levels!r} must be 1 or more")

    @property
    def rounds(self) -> int:  # type: ignore[override]
        """Two rounds for each level."""
        return 2 * self.levels

    def resolve(self, method: Method, transport: Transport) -> TwoStage:
        return replace(self, levels=len(factors(transport.size, self.levels)))

    def choice(self, method: Method, transport: Transport) -> str:
        return "" if self.levels == 1 else self.described(transport.size)

    def described(self, workers: int) -> str:
        """The grid, and the number of messages that a worker sends for each bucket."""
        grid = self.grid(workers)
        count = len(grid.dims)
        found = f"{count} level{'s' * (count > 1)}"
        if count < self.levels:
            found += f" instead of {self.levels}, as {workers} has no more prime factors"
        return found if count == 1 else f"{found}, a grid of {grid}: {grid.messages} messages per worker"

    def grid(self, workers: int) -> Grid:
        return Grid(factors(workers, self.levels))

    def check(self, method: Method, world_size: int) -> None:
        refuse_agreed("twostage", method)
        if reason := self.refusal(method):
            raise ValueError(reason)

    def refusal(self, method: Method) -> str:
        """The reason why this communicator does not support a method; empty if it does."""
        if method.compressor.traits.waits_for_steps:
            return (
                f"communicator 'twostage' cannot carry {name_of(method.compressor)!r}: its second compression would "
                "wait again for several means that agree. Use communicator 'allgather'"
            )
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
        owned, grid = self.owned(method.compressor, ctx), self.grid(ctx.world_size)
        points = {"worker": (method, ctx)}
        if not cuttable(method.compressor):
            points = {f"worker.{index}": (method, shard) for index, shard in enumerate(owned.values())}
        for level in range(1, len(grid.dims) + 1):
            for index, (owner, shard) in enumerate(owned.items()):
                if grid.shared(owner, ctx.rank, level):
                    point, again = again_at(grid, level, index, shard)
                    points[point] = method.for_second_stage, again
        return points

    def reduce(self, x: Array, method: Method, state: State, ctx: Context) -> Program[tuple[Array, State]]:
        compressor, grid, rank = method.compressor, self.grid(ctx.world_size), ctx.rank
        owned = self.owned(compressor, ctx)
        payloads, states = yield from _encode(x, method, state, ctx, list(owned.values()))
        sent, nothing = dict(zip(owned, payloads, strict=True)), tuple(array[:0] for array in payloads[0])

        # The shards that this worker has compressed last, by owner: their contexts there, and their payloads.
        held, payload_of = owned, sent
        for level, size in enumerate(grid.dims):
            parts: list[list[int]] = [[] for _ in range(size)]
            for owner in held:
                parts[grid.place(owner, level)].append(owner)
            received = yield AllToAll(
                tuple(tuple(array for owner in part for array in payload_of[owner]) or nothing for part in parts),
                *(grid.group(level), False, compressor.traits.variable_length),
            )
            mine, before, start = parts[grid.place(rank, level)], payload_of, 0
            held, payload_of = {owner: held[owner] for owner in mine}, {}
            for index, (owner, shard) in enumerate(owned.items()):
                if owner in held:
                    stop = start + len(before[owner])
                    each = received if len(mine) == 1 else [arrays[start:stop] for arrays in received]
                    mean = yield from method.decode(each, grid.sent_along(level, held[owner]))
                    point, held[owner] = again_at(grid, level + 1, index, shard)
                    payload_of[owner], states[point] = yield from method.for_second_stage.encode(
                        mean, scope(state, point), held[owner]
                    )
                    start = stop

        each = yield from _gathered(payload_of.get(rank, nothing), sent, nothing, method, grid, ctx)
        again = [shard.stage("server") for shard in owned.values()]
        mean = method.mean_of_shards(each, ctx.stage("server"), again, list(owned))
        if "worker" in states:
            mean, states["worker"] = method.finish(mean, states["worker"], ctx)
        return mean, join(**states)


def again_at(grid: Grid, level: int, index: int, shard: Context) -> tuple[str, Context]:
    """The compression point and the context of the mean of shard ``index`` over the first ``level`` axes."""
    if level == len(grid.dims):
        return "server", shard.stage("server")
    return f"level{level + 1}.{index}", shard.stage(f"level{level + 1}")


def _gathered(
    payload: Payload, sent: Mapping[int, Payload], nothing: Payload, method: Method, grid: Grid, ctx: Context
) -> Program[list[Payload]]:
    # Returns the payload of each shard's mean. ``payload``: that of this worker's shard, or nothing; ``sent``: by
    # owner, payloads with the same shapes, if those are fixed. Workers forward what they have gathered along one axis.
    xp, ragged = ctx.xp, method.compressor.traits.variable_length
    # Encoded positions of some shards have fewer arrays, so pad with empty arrays of the last dtype.
    width, forms = max(map(len, sent.values())), []
    if ragged:  # Messages are flat.
        cells = [tuple(xp.reshape(array, (-1,)) for array in payload)]
    else:
        cells = [(*payload, *[payload[-1][:0]] * (width - len(payload)))]
        full = [sent.get(worker, nothing) for worker in range(grid.size)]
        forms = [(*map(xp.shape, part), *[(0,)] * (width - len(part))) for part in full]
    for level in reversed(range(len(grid.dims))):
        shapes = None
        if not ragged:
            line = grid.line(ctx.rank, level)
            shapes = tuple(
                tuple(form for cell in grid.behind(worker, level + 1) for form in forms[cell]) for worker in line
            )
        arrays = tuple(array for cell in cells for array in cell)
        gathered = yield Gather(arrays, ragged, grid.group(level), shapes)
        cells = [part[start : start + width] for part in gathered for start in range(0, len(part), width)]
    found = dict(zip(grid.behind(ctx.rank, 0), cells, strict=True))
    if not ragged:
        return [found[owner][: len(part)] for owner, part in sent.items()]
    return [  # reshape each array like the one that this worker sent for the same shard
        tuple(xp.reshape(array, (-1, *xp.shape(own)[1:])) for array, own in zip(found[owner], part, strict=True))
        for owner, part in sent.items()
    ]


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
