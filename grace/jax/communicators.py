"""Communicators for one program that all devices run: shards of equal size, at positions that depend on the device."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from grace.communicators.allgather import Allgather
from grace.communicators.allreduce import Allreduce
from grace.communicators.broadcast import Broadcast
from grace.communicators.hierarchical import Hierarchical, across
from grace.communicators.twostage import TwoStage
from grace.core import Array, Context, Payload, Program, State, join, name_of, scope
from grace.core.collectives import AllToAll, Gather
from grace.core.communicator import Communicator
from grace.core.method import Method, materialize
from grace.core.sharding import cuttable, unit

ROOM = 4
"""Least number of units per shard: padding then adds at most a quarter to the bytes."""


def for_one_program(communicator: Communicator) -> Communicator:
    """The form of a resolved communicator in which each device runs the same program.

    ValueError for a communicator that has no such form.
    """
    if isinstance(communicator, Hierarchical):
        return EqualNodes(for_one_program(communicator.outer), communicator.node_size)
    if isinstance(communicator, TwoStage):
        return EqualShards()
    if type(communicator) in (Allgather, Allreduce, Broadcast):
        return communicator
    raise ValueError(
        f"communicator {name_of(communicator)!r} does not run in JAX: leave communicator out, or name 'allgather', "
        "'allreduce', 'broadcast', 'twostage' or 'hierarchical'"
    )


class Position:
    """The position of a shard's first element, an int64 scalar without a value yet.

    It equals no number: methods treat a whole tensor, at position 0, in another way only if it is smaller than a shard.
    """

    def __init__(self, value: Array):
        self._value = value

    def __jax_array__(self) -> Array:
        return self._value

    def __add__(self, other: Any) -> Position:
        return Position(self._value + (other._value if isinstance(other, Position) else other))

    def __mul__(self, other: int) -> Position:
        return Position(self._value * other)

    def __floordiv__(self, other: int) -> Position:
        return Position(self._value // other)

    def __mod__(self, other: int) -> Position:
        return Position(self._value % other)

    __radd__, __rmul__ = __add__, __mul__


@dataclass(frozen=True)
class Cut:
    """A tensor cut into ``parts`` shards of equal size, the last ones filled up with zeros."""

    ctx: Context
    parts: int
    shape: tuple[int, ...]
    """Shape of a shard."""

    @property
    def size(self) -> int:
        """Elements of a shard."""
        return math.prod(self.shape)

    @property
    def whole(self) -> Context:
        """The context of the tensor with its padding."""
        return self.ctx._with(shape=(self.parts * self.shape[0], *self.shape[1:]))

    def at(self, index: Any) -> Context:
        """The context of shard ``index``, an int or an int64 scalar."""
        start = index * self.size
        start = start if isinstance(start, int) else Position(start)
        return self.ctx._with(shape=self.shape, offset=self.ctx.offset + start)


def cut_evenly(method: Method, ctx: Context, parts: int) -> Cut | None:
    """Cut at whole units, or whole rows for a method that needs the shape; None if a tensor has too few of them."""
    rows = method.compressor.traits.needs_shape
    step = 1 if rows else unit(method.compressor)
    length = ctx.shape[0] if rows and ctx.shape else ctx.size
    if length < ROOM * step * parts or (rows and len(ctx.shape) < 2):
        return None
    cut = Cut(ctx, parts, (-(-length // (step * parts)) * step, *(ctx.shape[1:] if rows else ())))
    return cut if method.compressor.applies(cut.at(0)) else None


@dataclass(frozen=True)
class EqualShards(Communicator):
    """`TwoStage` with shards of equal size; a tensor that is too small for them goes by `Allgather`."""

    registered_name = "twostage"
    rounds = 2

    def compression_points(self, method: Method, ctx: Context) -> dict[str, tuple[Method, Context]]:
        cut = cut_evenly(method, ctx, ctx.world_size)
        if cut is None:
            return Allgather().compression_points(method, ctx)
        points = {"worker": (method, cut.whole)}
        if not cuttable(method.compressor):
            points = {f"worker.{index}": (method, cut.at(index)) for index in range(cut.parts)}
        return {**points, "server": (method.for_second_stage, cut.at(ctx.rank).stage("server"))}

    def reduce(self, x: Array, method: Method, state: State, ctx: Context) -> Program[tuple[Array, State]]:
        cut = cut_evenly(method, ctx, ctx.world_size)
        if cut is None:
            return (yield from Allgather().reduce(x, method, state, ctx))
        payloads, states = yield from self._encode(ctx.xp.pad(x, cut.parts * cut.size), method, state, cut)
        received = yield AllToAll(tuple(payloads))
        own = cut.at(ctx.rank)
        mean = yield from method.decode(received, own)
        payload, states["server"] = yield from method.for_second_stage.encode(
            mean, scope(state, "server"), own.stage("server")
        )
        gathered = yield Gather(payload)
        shards = [cut.at(index).stage("server") for index in range(cut.parts)]
        mean = materialize(method.mean_of_shards(gathered, ctx.stage("server"), shards))[: ctx.size]
        if "worker" in states:
            padded, states["worker"] = method.finish(ctx.xp.pad(mean, cut.whole.size), states["worker"], cut.whole)
            mean = padded[: ctx.size]
        return mean, join(**states)

    def _encode(
        self, x: Array, method: Method, state: State, cut: Cut
    ) -> Program[tuple[list[Payload], dict[str, State]]]:
        # Returns the payload of each shard, and the states of the first compression.
        xp, places = cut.ctx.xp, range(cut.parts)
        if cuttable(method.compressor):
            payload, worker = yield from method.encode(x, scope(state, "worker"), cut.whole)
            rows = [xp.split(array, [array.shape[0] // cut.parts] * cut.parts) for array in payload]
            return [tuple(parts) for parts in zip(*rows, strict=True)], {"worker": worker}
        payloads, states = [], {}
        for index, part in zip(places, xp.split(x, [cut.size] * cut.parts), strict=True):
            point = f"worker.{index}"
            payload, states[point] = yield from method.encode(part, scope(state, point), cut.at(index))
            payloads.append(payload)
        return payloads, states


@dataclass(frozen=True)
class EqualNodes(Communicator):
    """`Hierarchical` with shards of equal size: exact within a node, ``outer`` between nodes of ``node_size``."""

    registered_name = "hierarchical"
    rounds = 3
    outer: Communicator
    node_size: int

    def applies(self, method: Method, ctx: Context) -> bool:
        return cut_evenly(method, ctx, self.node_size) is not None

    def reason(self, method: Method, ctx: Context) -> str:
        return f"{self.node_size} devices of a node cannot have an equal shard each of shape {list(ctx.shape)}"

    def compression_points(self, method: Method, ctx: Context) -> dict[str, tuple[Method, Context]]:
        return self.outer.compression_points(method, self._cross(method, ctx)[1])

    def _cross(self, method: Method, ctx: Context) -> tuple[Cut, Context]:
        cut = cut_evenly(method, ctx, self.node_size)
        assert cut is not None, "a tensor to which `applies` does not hold"
        shard = cut.at(ctx.rank % self.node_size)
        return cut, replace(shard, rank=ctx.rank // self.node_size, world_size=ctx.world_size // self.node_size)

    def reduce(self, x: Array, method: Method, state: State, ctx: Context) -> Program[tuple[Array, State]]:
        xp = ctx.xp
        cut, cross = self._cross(method, ctx)
        # A gradient that is sent uncompressed keeps its own dtype within the node as well.
        wire = ctx.wire if method.compressor.traits.lossless else ctx.dtype
        x = xp.pad(xp.cast(x, wire), cut.parts * cut.size)
        received = yield AllToAll(tuple((part,) for part in xp.split(x, [cut.size] * cut.parts)), "node")
        (total, *others) = (xp.cast(part, ctx.dtype) for (part,) in received)
        for other in others:
            total = total + other
        mean, state = yield from across(self.outer.reduce(total / self.node_size, method, state, cross))
        gathered = yield Gather((xp.cast(materialize(mean), wire),), group="node")
        return xp.cast(xp.concat([shard for (shard,) in gathered])[: ctx.size], ctx.dtype), state
