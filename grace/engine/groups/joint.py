"""Groups with an elementwise memory, which runs once for all units, on the concatenation of their vectors."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from grace.backends import Backend
from grace.compressors.sparse import kept
from grace.compressors.studies.randomk import RandomK
from grace.core import Array, Context, Memory, Program, State, run_local
from grace.core.collectives import Collective, Reduce
from grace.core.method import Method, materialize
from grace.engine.groups.cells import RowCell
from grace.engine.groups.exchanges import (
    FLOAT,
    RESIDUAL,
    CodedGroup,
    Form,
    GatheredGroup,
    Group,
    Landed,
    each_finite,
)
from grace.engine.groups.native import Draws, Encoder, Point
from grace.engine.groups.recipes import Recipe
from grace.engine.groups.twostage import TwoStageGroup
from grace.kernels import Library
from grace.kernels.rows import Copies, Rows


class Joint:
    """Concatenates float32 vectors of these lengths, and copies the parts back to other memory."""

    def __init__(self, xp: Backend, library: Library, sizes: Sequence[int]):
        self._xp, self._library, self._sizes = xp, library, sizes
        ends = np.cumsum([0, *sizes])
        self.starts, self.size = ends[:-1], int(ends[-1])
        self._copies = Copies(library, sizes)

    def empty(self) -> Array:
        return self._xp.buffers.empty((self.size,))

    def at(self, vector: Array) -> Any:
        """The address of each part of a joined vector."""
        return self._xp.buffers.address(vector) + FLOAT * self.starts

    def gathered(self, addresses: Any) -> Array:
        """Return the concatenation of the vectors at these addresses."""
        found = self.empty()
        self._copies.call(addresses, self.at(found), self._xp.threads)
        return found

    def scatter(self, vector: Array, addresses: Any, only: Any = None) -> None:
        """Copy the parts of a joined vector, or those in ``only``, bool[parts], to these addresses."""
        self._copies.call(self.at(vector), addresses, self._xp.threads, only)

    def finite(self, vector: Array) -> list[bool] | None:
        """Return whether each part of a joined vector is finite; None if all are."""
        return each_finite(self._library, self.at(vector).tolist(), self._sizes)


class JointState:
    """The concatenated state of several points. ``starts``: each point's first element within its own arrays."""

    def __init__(self, joint: Joint, cells: Sequence[Mapping[str, RowCell]], starts: Sequence[int]):
        self._joint, self._bytes = joint, FLOAT * np.array(starts, np.int64)
        self._table: Any = next(iter(cells[0].values())).table if cells[0] else None
        self._which = {key: np.array([each[key].number for each in cells], np.int64) for key in cells[0]}

    def hold(self) -> None:
        """Keep the current arrays until the next exchange is committed or discarded."""
        for which in self._which.values():
            self._table.hold(which)

    def read(self) -> State:
        """The current arrays by key, each concatenated over the points."""
        return {key: self._joint.gathered(self._table.old(at) + self._bytes) for key, at in self._which.items()}

    def commit(self, state: State, ok: Any) -> None:
        """Store the new arrays of points where ``ok``, bool[points]; None: of all."""
        for key, which in self._which.items():
            self._joint.scatter(state[key], self._table.new(which) + self._bytes, ok)
            self._table.advance(which if ok is None else which[ok])


class JointMemory:
    """The counterpart of `Feedback` for the memory of ``method``, which may be any elementwise memory."""

    def __init__(
        self,
        xp: Backend,
        library: Library,
        method: Method,
        cells: Sequence[Mapping[str, RowCell]],
        points: Sequence[Point],
        starts: Sequence[int],
    ):
        self._memory: Memory = method.memory
        self._joint = Joint(xp, library, [point.ctx.size for point in points])
        self._ctx = points[0].ctx._with(shape=(self._joint.size,))
        self._state = JointState(self._joint, cells, starts)
        self.hold = self._state.hold
        self._new: State | None = None  # the new state, from `encode` until the exchange ends

    def encode(self, encoder: Encoder, x: Any, out: int, step: int) -> None:
        """Compensate the vectors at the addresses ``x``, and encode the results to the message at ``out``."""
        joint, ctx = self._joint, self._ctx._with(step=step)
        vector, state = run_local(self._memory.compensate(joint.gathered(x), self._state.read(), ctx), self._memory)
        left = joint.empty() if self._memory.feedback else None  # the residual
        encoder.encode(joint.at(vector), 0, 0 if left is None else joint.at(left), out, step)
        encoded: Any = SimpleNamespace(residual=lambda x, payload, ctx: left)
        self._new = self._memory.update(vector, (), encoded, state, ctx)

    def after_mean(self, out: Any, step: int) -> None:
        """Apply the memory's `Memory.after_mean` to the means at the addresses ``out``."""
        if type(self._memory).after_mean is Memory.after_mean:
            return
        assert self._new is not None, "encode first"
        mean, ctx = self._joint.gathered(out), self._ctx._with(step=step)
        mean, self._new = self._memory.after_mean(mean, None, self._new, ctx)  # type: ignore[arg-type]
        self._joint.scatter(mean, out)

    def end(self, ok: Any = None) -> None:
        """Keep the new state of points where ``ok``, bool[points]; None: of all."""
        if self._new is not None:
            self._state.commit(self._new, ok)
            self._new = None

    def undo(self) -> None:
        """Drop the new state."""
        self._new = None


class _JointlyCoded(CodedGroup):
    # `finite` decodes the means into the memory of the vectors, and checks them there.
    overwrites = True
    _x: Any

    def _feedback(
        self, method: Method, cells: Sequence[Any], points: Sequence[Point], starts: Sequence[int], units: Any
    ) -> Any:
        if method.memory.standard_feedback:
            return super()._feedback(method, cells, points, starts, units)
        return JointMemory(self.xp, self.library, method, cells, points, starts)

    def exchange(self, x: Sequence[int], step: int) -> Program[Landed]:
        self._x = x
        return (yield from super().exchange(x, step))  # type: ignore[safe-super]

    def finite(self, landed: Landed) -> list[bool] | None:
        self.decode(landed, self._x)
        return each_finite(self.library, self._x, [ctx.size for ctx in self.contexts])

    def finish(self, landed: Landed, x: Sequence[int], ok: Sequence[bool] | None) -> None:
        self.settle(ok)


class JointGathered(_JointlyCoded, GatheredGroup):
    """A `GatheredGroup` whose memory runs on the concatenated vector."""

    def decode(self, landed: Landed, out: Sequence[int]) -> None:
        super().decode(landed, out)
        for each in self.feedback:
            each.after_mean(np.array(out, np.int64), landed.step)


class JointTwoStage(_JointlyCoded, TwoStageGroup):
    """A `TwoStageGroup` whose memory runs on the concatenated vector."""


class SummedGroup(Group):
    """Averages gradients plus residuals, uncompressed, by communicator "allreduce". The new residuals are zero."""

    rounds = 1

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        self._sizes = [ctx.size for ctx in self.contexts]
        self._starts = np.cumsum([0, *self._sizes])
        cells = [each[RESIDUAL] for each in self.cells]
        self._table, self._which = cells[0].table, np.array([cell.number for cell in cells], np.int64)

    def hold(self) -> None:
        self._table.hold(self._which)

    @property
    def asked(self) -> Sequence[Collective]:
        return (Reduce((Form("float32", (int(self._starts[-1]),)),), "mean", donated=True),)

    def exchange(self, x: Sequence[int], step: int) -> Program[Array]:
        whole = self.xp.buffers.empty((int(self._starts[-1]),))
        parts = self._parts(self.xp.buffers.address(whole))
        for part, mine, residual in zip(parts, self._views(x), self._views(self._table.old(self._which)), strict=True):
            np.add(mine, residual, out=part)
        (mean,) = yield Reduce((whole,), "mean", donated=True)
        return mean

    def finite(self, landed: Array) -> list[bool] | None:
        starts = self.xp.buffers.address(landed) + FLOAT * self._starts[:-1]
        return each_finite(self.library, starts.tolist(), self._sizes)

    def finish(self, landed: Array, x: Sequence[int], ok: Sequence[bool] | None) -> None:
        for part, mean in zip(self._parts(self.xp.buffers.address(landed)), self._views(x), strict=True):
            mean[...] = part
        kept = np.ones(len(self._sizes), bool) if ok is None else np.array(ok)
        for residual, new in zip(self._views(self._table.new(self._which)), kept.tolist(), strict=True):
            if new:
                residual[...] = 0
        self._table.advance(self._which[kept])

    def _parts(self, base: int) -> list[Any]:
        return self._views(base + FLOAT * self._starts[:-1])

    def _views(self, addresses: Any) -> list[Any]:
        # Returns NumPy views of the units' vectors at these addresses.
        return [
            np.ctypeslib.as_array((ctypes.c_float * size).from_address(int(at)))
            for at, size in zip(addresses, self._sizes, strict=True)
        ]

    @property
    def traffic(self) -> list[tuple[int, int]]:
        return [(FLOAT * size,) * 2 for size in self._sizes]


class JointSummed(Group):
    """Exchanges the concatenated vector like one tensor, for methods whose payloads "allreduce" averages."""

    rounds = 1

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        self._joint = Joint(self.xp, self.library, [ctx.size for ctx in self.contexts])
        self._ctx = self.contexts[0]._with(shape=(self._joint.size,))
        self._state = JointState(self._joint, self.cells, [0] * len(self.cells))
        compressor = self.method.compressor
        self._random = RandomParts(compressor, self, self._joint) if isinstance(compressor, RandomK) else None
        self._counts = [ctx.size for ctx in self.contexts] if self._random is None else self._random.counts
        self._new: State = {}

    def hold(self) -> None:
        self._state.hold()

    @property
    def asked(self) -> Sequence[Collective]:
        return (Reduce((Form("float32", (sum(self._counts),)),), "mean"),)

    def exchange(self, x: Sequence[int], step: int) -> Program[Array]:
        method = self.method
        if self._random is not None:
            method = replace(method, compressor=self._random.compressor(step))
        vector, ctx = self._joint.gathered(np.array(x, np.int64)), self._ctx._with(step=step)
        mean, self._new = yield from self.communicator.reduce(vector, method, self._state.read(), ctx)
        return materialize(mean)

    def finite(self, landed: Array) -> list[bool] | None:
        return self._joint.finite(landed)

    def finish(self, landed: Array, x: Sequence[int], ok: Sequence[bool] | None) -> None:
        self._joint.scatter(landed, np.array(x, np.int64))
        self._state.commit(self._new, None if ok is None else np.array(ok))
        self._new = {}

    @property
    def traffic(self) -> list[tuple[int, int]]:
        return [(FLOAT * count,) * 2 for count in self._counts]


class RandomParts:
    """Compressor "randomk" for a group's concatenated vector: it draws each tensor's positions separately."""

    def __init__(self, randomk: RandomK, group: Group, joint: Joint):
        self._randomk, self._xp, self._joint = randomk, group.xp, joint
        sizes = [ctx.size for ctx in group.contexts]
        self.counts = [kept(randomk.compress_ratio, size) for size in sizes]
        self._positions = np.zeros(sum(self.counts), np.int32)
        self._starts = np.repeat(joint.starts, self.counts).astype(np.int32)
        self._rows = Rows(group.library, "smallest_words", len(sizes))
        where = self._positions.ctypes.data + self._positions.itemsize * (np.cumsum(self.counts) - self.counts)
        self._rows.set(n=sizes, k=self.counts, positions=where)
        recipe = Recipe("smallest_words", "", (), {}, draws="positions", shared=True)
        self._draws = Draws(group.library, [Point(ctx, recipe) for ctx in group.contexts], self._rows)
        factors = np.array([1 / randomk.chance(size) for size in sizes], np.float32)
        self._factors = self._xp.asarray(np.repeat(factors, self.counts), "float32")

    def compressor(self, step: int) -> RandomK:
        """Return the compressor of the concatenated vector for a step."""
        self._draws.at(step)
        self._rows.call(self._xp.threads)
        positions, found = self._xp.asarray(self._positions + self._starts, "int32"), copy(self._randomk)
        given = {"positions": lambda ctx: positions, "count": lambda n: len(self._starts), "sent": self._sent}
        vars(found).update(given)
        return found

    def _sent(self, x: Array, positions: Array, ctx: Context) -> Array:
        # Does what `RandomK.sent` does, for each part of the concatenated vector.
        values, ok = self._xp.take(x, positions), self._joint.finite(x)
        if self._randomk.unbiased_scale:
            values = values * self._factors
        if ok is None:
            return values
        return self._xp.where(self._xp.asarray(np.repeat(ok, self.counts), "bool"), values, float("nan"))
