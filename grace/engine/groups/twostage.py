"""The exchange of a group in two stages, along the axes of a grid of workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from grace.communicators.twostage import again_at
from grace.core import Array, Context, Program
from grace.core.collectives import AllToAll, Collective, Gather
from grace.core.method import Method
from grace.core.sharding import cuttable
from grace.engine.groups.exchanges import FLOAT, NOTHING, CodedGroup, Form, Landed, bytes_of, point_of
from grace.engine.groups.native import PAD, Decoder, Encoder, Message


class Level(NamedTuple):
    """The all-to-all of a `TwoStageGroup` along one axis of its grid."""

    members: Any
    """int64[shards]: the shards that this worker encodes."""
    message: Message
    encoder: Encoder | None
    """None: without members."""
    feedback: Any
    decoder: Decoder | None
    """Averages the shards that this worker encodes at the next level; None: without any."""
    ends: Any
    """int64[shards + 1]: the ends of their means, in bytes."""


class TwoStageGroup(CodedGroup):
    """The exchange of communicator "twostage"."""

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        compressor, ctx = self.method.compressor, self.contexts[0]
        self._rank, self._grid = ctx.rank, self.communicator.grid(ctx.world_size)
        self.rounds = 2 * len(self._grid.dims)
        # Shards in the order of units, each with its index among the shards of its unit.
        shards = [
            (unit, index, owner, shard)
            for unit, each in enumerate(self.contexts)
            for index, (owner, shard) in enumerate(self.communicator.owned(compressor, each).items())
            if shard.size
        ]
        self._unit = np.array([unit for unit, *_ in shards], np.int64)
        self._owner = np.array([owner for _, _, owner, _ in shards], np.int64)
        self._starts = np.array([shard.offset - self.contexts[unit].offset for unit, *_, shard in shards], np.int64)
        self._first = [point_of(compressor, shard) for *_, shard in shards]
        self._second = [point_of(compressor, shard.stage("server"), owner) for _, _, owner, shard in shards]
        whole = cuttable(compressor)
        named = [("worker" if whole else f"worker.{index}", shard) for _, index, _, shard in shards]
        self._levels = []
        for level in range(len(self._grid.dims)):
            method = self.method.for_second_stage if level else self.method
            starts = self._starts if whole and not level else 0 * self._starts
            self._levels.append(self._level(level, method, named, starts))
            named = [again_at(self._grid, level + 1, index, shard) for _, index, _, shard in shards]
        self._own = self._members(len(self._grid.dims))
        server = [self._second[number]._replace(destination=0) for number in self._own]
        self._recode = self.coding.encoder(server, Message(server)) if server else None
        units, prefixes = self._unit[self._own], ["server/memory/"] * len(server)
        self._again = self._state(self.method.for_second_stage, prefixes, server, [0] * len(server), units)
        each = [*(level.feedback for level in self._levels), self._again]
        self.feedback = [feedback for feedback in each if feedback is not None]
        self._set_up_return(ctx)
        # by level, means of this worker's shards; encoding may swap the old residuals into these arrays
        self._means: list[Array] = []

    def _members(self, level: int) -> Any:
        # Returns the shards that this worker encodes at a level; after the last level, those that it owns.
        shared = [self._grid.shared(owner, self._rank, level) for owner in self._owner.tolist()]
        return np.flatnonzero(shared)

    def _level(self, level: int, method: Method, named: Sequence[tuple[str, Context]], starts: Any) -> Level:
        # ``named``: the compression point and the context of each shard.
        grid, compressor, members = self._grid, method.compressor, self._members(level)
        points = [
            point_of(compressor, named[number][1], grid.place(int(self._owner[number]), level)) for number in members
        ]
        message, encoder, decoder = Message(points, grid.dims[level]), None, None
        prefixes = [f"{named[number][0]}/memory/" for number in members]
        feedback = self._state(method, prefixes, points, starts[members].tolist(), self._unit[members])
        taken = np.flatnonzero(np.isin(members, self._members(level + 1))).tolist()
        mine = [points[number]._replace(ctx=grid.sent_along(level, points[number].ctx)) for number in taken]
        if points:
            encoder = self.coding.encoder(points, message)
        if mine:
            senders = np.tile(np.arange(grid.dims[level]), (len(mine), 1))
            decoder = self.coding.decoder(mine, message.at(taken), senders)
        ends = np.cumsum([0, *(FLOAT * point.ctx.size for point in mine)])
        return Level(members, message, encoder, feedback, decoder, ends)

    def _set_up_return(self, ctx: Context) -> None:
        # Each worker is a cell of the grid, with one message. Along each axis the messages of several cells travel as
        # one, so they are padded to keep their arrays aligned.
        grid, again = self._grid, Message(self._second, self._grid.size)
        pad, levels = PAD if len(grid.dims) > 1 else 1, range(len(grid.dims))
        sizes = [end - begin + -(end - begin) % pad for begin, end in again.parts]
        self._size = sizes[self._rank]
        self._back = [  # by level, the sizes of the messages that are gathered
            [sum(sizes[cell] for cell in grid.behind(worker, level + 1)) for worker in grid.line(self._rank, level)]
            for level in levels
        ]
        starts, senders = np.zeros(grid.size, np.int64), np.zeros(grid.size, np.int64)
        for number, worker in enumerate(grid.line(self._rank, 0)):
            cells = grid.behind(worker, 1)
            starts[cells], senders[cells] = np.cumsum([0, *(sizes[cell] for cell in cells[:-1])]), number
        points = self._second
        if len(grid.dims) > 1:  # errors name the owner, not the worker that forwarded its message
            workers = range(ctx.world_size) if ctx._workers is None else ctx._workers
            first = [workers[owner - int(senders[owner])] for owner in self._owner.tolist()]
            points = [
                point._replace(ctx=point.ctx._with(_workers=range(each, workers.stop, workers.step)))
                for point, each in zip(points, first, strict=True)
            ]
        places = {array: at + starts[self._owner] for array, at in again.places.items()}
        self._decoder = self.coding.decoder(points, places, senders[self._owner][:, None], self._unit)

    @property
    def asked(self) -> Sequence[Collective]:
        there = [
            AllToAll(tuple((Form("uint8", (end - begin,)),) for begin, end in level.message.parts), self._grid.group(n))
            for n, level in enumerate(self._levels)
        ]
        return *there, *(self._gather(n, Form("uint8", (size,))) for n, size in self._forwarded())

    def _forwarded(self) -> list[tuple[int, int]]:
        # Returns each level, the last first, with the size of the message that this worker sends back along its axis.
        places = [self._grid.place(self._rank, level) for level in range(len(self._back))]
        return [(level, self._back[level][place]) for level, place in reversed(list(enumerate(places)))]

    def _gather(self, level: int, array: Any) -> Gather:
        shapes = tuple(((size,),) for size in self._back[level])
        return Gather((array,), group=self._grid.group(level), shapes=shapes)

    def exchange(self, x: Sequence[int], step: int) -> Program[Landed]:
        xp, places = self.xp, self._at(x)
        self._means = []
        for number, level in enumerate(self._levels):
            message = xp.zeros((0,), "uint8")
            if level.encoder is not None:
                message = self._encoded(level.encoder, level.feedback, places, step)
            sent = tuple((message[begin:end],) for begin, end in level.message.parts)
            received = yield AllToAll(sent, self._grid.group(number))
            if level.decoder is not None:
                means = xp.buffers.empty((int(level.ends[-1]) // FLOAT,))
                self._means.append(means)
                places = xp.buffers.address(means) + level.ends[:-1]
                mine = self.coding.landed(received, step)
                self._decoded(level.decoder, mine.addresses, places, step)
        again = xp.zeros((0,), "uint8")
        if self._recode is not None:
            again = self._encoded(self._recode, self._again, places, step)
        cells = [xp.pad(again, self._size)]
        for number in reversed(range(len(self._levels))):
            gathered = yield self._gather(number, xp.concat(cells) if len(cells) > 1 else cells[0])
            cells = [array for (array,) in gathered]
        return self.coding.landed(gathered, step)

    def _at(self, x: Sequence[int]) -> Any:
        # Returns the address of each shard.
        return np.array(x, np.int64)[self._unit] + FLOAT * self._starts

    def finite(self, landed: Landed) -> list[bool] | None:
        found = self._decoder.finite(landed.addresses)
        if found is None:
            return None
        ok = np.ones(len(self.contexts), bool)
        np.logical_and.at(ok, self._unit, found)
        return list(map(bool, ok))

    @staticmethod
    def idle(communicator: Any, workers: int) -> Sequence[Collective]:
        grid = communicator.grid(workers)
        lines = [(size, grid.group(axis)) for axis, size in enumerate(grid.dims)]
        there = [AllToAll(((NOTHING,),) * size, group) for size, group in lines]
        back = [Gather((NOTHING,), group=group, shapes=(((0,),),) * size) for size, group in reversed(lines)]
        return *there, *back

    def settle(self, ok: Sequence[bool] | None) -> None:
        kept = None if ok is None else np.array(ok)[self._unit]
        ends = [*((level.feedback, level.members) for level in self._levels), (self._again, self._own)]
        for feedback, members in ends:
            if feedback is not None:
                feedback.end(None if kept is None else kept[members])
        self._means = []

    def decode(self, landed: Landed, out: Sequence[int]) -> None:
        self._decoded(self._decoder, landed.addresses, self._at(out), landed.step)

    @property
    def traffic(self) -> list[tuple[int, int]]:
        grid, rank = self._grid, self._rank
        sent, received = (np.zeros(len(self.contexts), np.int64) for _ in range(2))
        sizes = np.array([bytes_of(point) for point in self._first], np.int64)
        again = np.array([bytes_of(point) for point in self._second], np.int64)
        held = [np.isin(self._owner, grid.behind(rank, level)) for level in range(len(grid.dims) + 1)]
        for level, size in enumerate(grid.dims):
            gone, kept = held[level] & ~held[level + 1], held[level + 1]
            np.add.at(sent, self._unit, np.where(gone, sizes, 0) + np.where(kept, again, 0))
            np.add.at(received, self._unit, np.where(kept, sizes, 0) * (size - 1) + np.where(gone, again, 0))
        return list(zip(sent.tolist(), received.tolist(), strict=True))
