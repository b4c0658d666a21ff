"""The exchange of a group with communicator "hierarchical": exact means within machines, a group between them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from grace.communicators.hierarchical import Hierarchical, across, crossing
from grace.core import Array, Program
from grace.core.collectives import AllToAll, Collective, Gather, arrays_of
from grace.core.sharding import shards
from grace.engine.groups.exchanges import FLOAT, CodedGroup, Form, Group, Landed, addresses, filled
from grace.kernels.rows import Copies


class HierarchicalGroup(Group):
    """A group with communicator "hierarchical". ``between``: the class of the group between machines."""

    def __init__(self, *parts: Any, between: type[CodedGroup]):
        super().__init__(*parts)
        xp, library, method, communicator, contexts, cells = parts
        machine: Hierarchical = communicator
        self._size, self._place = machine.node_size, contexts[0].rank % machine.node_size
        # int64[units, workers of the machine]: the shards' sizes, their starts in their units, and in their messages.
        cut = [shards(method.compressor, ctx, self._size) for ctx in contexts]
        self._sizes = np.array([[shard.size for shard in each] for each in cut], np.int64)
        self._starts = np.cumsum(self._sizes, 1) - self._sizes
        self._begins = np.cumsum(self._sizes, 0) - self._sizes
        self._bounds = np.cumsum([0, *self._sizes.sum(0)])
        # In the last message every shard is padded to the size of its unit's first shard, which is the longest.
        self._slots = np.cumsum(self._sizes[:, 0]) - self._sizes[:, 0]
        self._copies = Copies(library, self._sizes.reshape(-1))
        # A small unit may have no shard for workers with this local rank, on any machine.
        self._mine = np.flatnonzero(self._sizes[:, self._place]).tolist()
        self._between = None
        asked = between.idle(machine.outer, contexts[0].world_size // self._size)
        if self._mine:
            mine = [machine.cross(method, contexts[unit], self._place) for unit in self._mine]
            self._between = between(xp, library, method, machine.outer, mine, [cells[unit] for unit in self._mine])
            asked = self._between.asked
        self._crossing = [crossing(each) for each in asked]
        self.rounds = 2 + len(self._crossing)
        # the machine's means of this worker's shards; encoding may swap the old residuals into this array
        self._total: Array = None

    @property
    def asked(self) -> Sequence[Collective]:
        sent = tuple((Form("float32", (stop - start,)),) for start, stop in pairwise(self._bounds.tolist()))
        slots = Form("float32", (int(self._sizes[:, 0].sum()),))
        return AllToAll(sent, "node"), *self._crossing, Gather((slots,), group="node")

    def exchange(self, x: Sequence[int], step: int) -> Program[Landed]:
        xp, address = self.xp, self.xp.buffers.address
        message = xp.buffers.empty((int(self._bounds[-1]),))
        self._copy(self._at(x), address(message) + FLOAT * (self._bounds[:-1] + self._begins))
        sent = [(message[start:stop],) for start, stop in pairwise(self._bounds.tolist())]
        total, *others = [part for (part,) in (yield AllToAll(tuple(sent), "node"))]
        for other in others:
            total = total + other
        self._total = total / self._size
        mean = xp.zeros((int(self._sizes[:, 0].sum()),))
        if self._between is None:
            for each in self._crossing:
                yield filled(each, [xp.zeros(form.shape, form.dtype) for form in arrays_of(each)])
        else:
            sums = address(self._total) + FLOAT * self._begins[:, self._place]
            means = address(mean) + FLOAT * self._slots
            landed = yield from across(self._between.exchange(sums[self._mine].tolist(), step))
            self._between.decode(landed, means[self._mine].tolist())
        gathered = yield Gather((mean,), group="node")
        return Landed(gathered, addresses(xp, gathered), step)

    def _at(self, x: Sequence[int]) -> Any:
        # Returns the address of each shard.
        return np.array(x, np.int64)[:, None] + FLOAT * self._starts

    def _copy(self, source: Any, target: Any) -> None:
        self._copies.call(source.reshape(-1), target.reshape(-1), self.xp.threads)

    def finite(self, landed: Landed) -> list[bool] | None:
        finite, count = self.library.finite, int(self._sizes[:, 0].sum())
        if finite(landed.addresses.tolist(), [count] * self._size, self._size):
            return None
        means = zip(self._means(landed).tolist(), self._sizes.tolist(), strict=True)
        return [bool(finite(at, sizes, self._size)) for at, sizes in means]

    def _means(self, landed: Landed) -> Any:
        # Returns the address of each shard's mean.
        return landed.addresses + FLOAT * self._slots[:, None]

    def finish(self, landed: Landed, x: Sequence[int], ok: Sequence[bool] | None) -> None:
        if self._between is not None:
            self._between.settle(None if ok is None else [ok[unit] for unit in self._mine])
        self._total = None
        self._copy(self._means(landed), self._at(x))

    def hold(self) -> None:
        if self._between is not None:
            self._between.hold()

    def undo(self) -> None:
        if self._between is not None:
            self._between.undo()

    @property
    def traffic(self) -> list[tuple[int, int]]:
        mine, slot = self._sizes[:, self._place], self._sizes[:, 0]
        sent, received = FLOAT * (self._sizes.sum(1) - mine + slot), FLOAT * (mine + slot) * (self._size - 1)
        if self._between is not None:
            more = np.array(self._between.traffic, np.int64)
            sent[self._mine] += more[:, 0]
            received[self._mine] += more[:, 1]
        return list(zip(sent.tolist(), received.tolist(), strict=True))
