"""Exact means within a machine, compressed exchange between machines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any, TypeVar

from grace.core import Array, Context, Program, State, Transport, name_of
from grace.core.collectives import AllToAll, Collective, Gather
from grace.core.communicator import Communicator, machine_size
from grace.core.method import Method, materialize
from grace.core.registry import communicators, register
from grace.core.sharding import shards

T = TypeVar("T")


@register("hierarchical")
@dataclass(frozen=True)
class Hierarchical(Communicator):
    """Average exactly on each machine, one shard per worker, and compress only the traffic between machines.

    Worker i of a machine averages shard i of its machine's gradients, exchanges the compressed average with worker i of
    every other machine, and sends the result to the workers of its own machine. So a machine sends each shard to the
    network once, not once per worker. Error feedback and all other state belong to the shard. If the method needs the
    tensor's shape, shards are cut along the first axis, otherwise at any block boundary.
    ``outer``: the name of the communicator between machines; empty: the default (``auto``).
    ``node_size``: workers per machine, with consecutive ranks; 0: as launched. It must divide the number of workers.
    ``outer_levels``: ``levels`` of ``outer`` "twostage".
    """

    rounds = 3
    outer: Any = ""
    node_size: int = 0
    outer_levels: int = 1

    def __post_init__(self) -> None:
        if self.outer_levels != 1 and isinstance(self.outer, str) and self.outer not in ("twostage", "alltoall"):
            raise ValueError(
                f"outer_levels={self.outer_levels!r} needs outer 'twostage', not {self.outer or 'auto'!r}: name it, or "
                "leave outer_levels out"
            )

    def resolve(self, method: Method, transport: Transport) -> Communicator:
        size = machine_size("hierarchical", self.node_size, transport)
        outer = self.outer
        if not isinstance(outer, Communicator):
            levels = {"levels": self.outer_levels} if self.outer_levels != 1 else {}
            outer = communicators.find(outer or "auto")(**levels)
        machines: Any = SimpleNamespace(size=transport.size // size, node_size=1, splits=False, link=transport.link)
        return replace(self, outer=outer.resolve(method, machines), node_size=size)

    def check(self, method: Method, world_size: int) -> None:
        if isinstance(self.outer, Hierarchical):
            raise ValueError("communicator 'hierarchical' cannot be its own outer: name 'allgather' or another one")
        if self.outer.reduce_scatters:
            raise ValueError(
                f"communicator 'hierarchical' cannot run {name_of(self.outer)!r} between machines, which gives no "
                "whole means: name 'allgather' or another one, or see grace.torch.fsdp"
            )
        self.outer.check(method, world_size // self.node_size)

    def create_groups(self, transport: Transport) -> None:
        transport.split(self.node_size)
        if (grid := self.outer.grid(transport.size // self.node_size)) is not None:
            transport.split_grid(grid, self.node_size)

    def applies(self, method: Method, ctx: Context) -> bool:
        return all(method.compressor.applies(self.cross(method, ctx, place)) for place in range(self.node_size))

    def compression_points(self, method: Method, ctx: Context) -> dict[str, tuple[Method, Context]]:
        points: dict[str, tuple[Method, Context]] = self.outer.compression_points(
            method, self.cross(method, ctx, ctx.rank % self.node_size)
        )
        return points

    def reduce(self, x: Array, method: Method, state: State, ctx: Context) -> Program[tuple[Array, State]]:
        xp, sizes = ctx.xp, [shard.size for shard in shards(method.compressor, ctx, self.node_size)]
        bounds = pairwise(accumulate(sizes, initial=0))
        # A gradient that is sent uncompressed keeps its own dtype within the machine as well.
        wire = ctx.wire if method.compressor.traits.lossless else ctx.dtype
        x = xp.cast(x, wire)
        received = yield AllToAll(tuple((x[start:stop],) for start, stop in bounds), "node")
        (total, *others) = (xp.cast(part, ctx.dtype) for (part,) in received)
        for other in others:
            total = total + other
        cross = self.cross(method, ctx, ctx.rank % self.node_size)
        program = self.outer.reduce(total / self.node_size, method, state, cross)
        mean, state = yield from across(program)
        mean = xp.cast(materialize(mean), wire)
        # The last shards are shorter than the first.
        gathered = yield Gather((xp.pad(mean, sizes[0]),), group="node")
        mean = xp.concat([shard[:size] for (shard,), size in zip(gathered, sizes, strict=True)])
        return xp.cast(mean, ctx.dtype), state

    def cross(self, method: Method, ctx: Context, place: int) -> Context:
        """The context of local worker ``place``'s shard, for the exchange between machines."""
        shard = shards(method.compressor, ctx, self.node_size)[place]
        workers = range(place, ctx.world_size, self.node_size)
        return replace(shard, rank=ctx.rank // self.node_size, world_size=len(workers), _workers=workers)


def crossing(asked: Collective) -> Collective:
    """The same collective between machines: in the group "cross", or on a line of a grid of machines."""
    return replace(asked, group="cross" if asked.group == "world" else f"cross.{asked.group}")


def across(program: Program[T]) -> Program[T]:
    """The same program, with its collectives between machines."""
    answer = None
    while True:
        try:
            asked = program.send(answer)
        except StopIteration as stop:
            return stop.value
        if isinstance(asked, tuple):
            answer = yield tuple(map(crossing, asked))
        else:
            answer = yield crossing(asked)
