"""The exchange of a group of low-rank methods on a device: one batched product and factorisation for equal shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from grace.compressors.lowrank import Factored
from grace.compressors.studies.dion import Dion
from grace.core import Array, Program
from grace.core.collectives import Collective, Reduce
from grace.core.rng import NOISE
from grace.engine.groups.devices import DeviceFeedback
from grace.engine.groups.exchanges import FLOAT, Form, Group
from grace.engine.groups.lowrank import DIRECTIONS
from grace.engine.groups.native import Point
from grace.engine.groups.recipes import Recipe
from grace.memories.decoupled import Decoupled

MEMORY = "memory/"
LEFT = "compressor/p"
NO_RECIPE = Recipe("", "", (), {})


class Run(NamedTuple):
    """Units whose matrices are [a, b] and of rank r."""

    units: Any
    """int64[k]"""
    a: int
    b: int
    r: int


class Agreed(NamedTuple):
    """What the workers have agreed on for one run, and this worker's matrices."""

    matrix: Array
    """float32[k, a, b], with the memory."""
    payload: tuple[Array, Array]
    """P float32[k, a, r] and Q float32[k, r, b], which show whether a mean is finite."""
    mean: tuple[Array, Array]
    """The factors of the result, shaped as P and Q."""
    sent: tuple[Array, Array] | None
    """The factors of what is subtracted from the memory; None: those of the result."""
    state: Mapping[str, Array]
    """The compressor's new state by key, [k, ...]."""


class Factors(NamedTuple):
    """What an exchange has agreed on, by run."""

    runs: list[Agreed]
    step: int


class DeviceFactored(Group):
    """Methods that agree on factors, with communicator "allreduce", by operations of the toolkit that wait for nothing.

    The memory adds its one array to the gradient.
    """

    rounds = 2
    overwrites = True
    on_device = True

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        self._compressor: Factored = self.method.compressor  # type: ignore[assignment]
        alike: dict[tuple[int, int, int], list[int]] = {}
        for unit, ctx in enumerate(self.contexts):
            alike.setdefault(self._compressor.sizes(ctx), []).append(unit)
        self._runs = [Run(np.array(units, np.int64), *sizes) for sizes, units in alike.items()]
        order = np.concatenate([run.units for run in self._runs])
        self._places_of_units = self.xp.asarray(np.argsort(order), "int32")
        self._units = [self.xp.asarray(run.units, "int32") for run in self._runs]
        self._table = self.cells[0][DIRECTIONS].table
        self._rows = {key: np.array([each[key].number for each in self.cells], np.int64) for key in self.cells[0]}
        for key in [key for key in self._rows if key.startswith(MEMORY)]:
            cells, units = [each[key] for each in self.cells], np.arange(len(self.cells))
            points = [Point(ctx, NO_RECIPE) for ctx in self.contexts]
            self.feedback = [DeviceFeedback(self.library, self.xp, cells, points, [0] * len(cells), units)]
            self._memory = self._rows.pop(key)

    def places(self, vectors: Sequence[Array]) -> Any:
        return vectors

    def hold(self) -> None:
        super().hold()
        for rows in self._rows.values():
            self._table.hold(rows)

    @property
    def asked(self) -> Sequence[Collective]:
        counts = [(len(run.units) * run.r, run) for run in self._runs]
        sizes = sum(k * run.a for k, run in counts), sum(k * run.b for k, run in counts)
        return [Reduce((Form("float32", (size,)),), "mean", donated=True) for size in sizes]

    def _matrices(self, x: Sequence[Array]) -> list[Array]:
        # The sums of gradients and memory.
        matrices = [self._stacked([x[unit] for unit in run.units], run.a, run.b) for run in self._runs]
        if self.feedback:
            for run, matrix in zip(self._runs, matrices, strict=True):
                old = self._table.arrays(self._memory[run.units], False)
                self.xp.inplace.add(matrix, self._stacked(old, run.a, run.b))
        return matrices

    def _stacked(self, arrays: Sequence[Array], *shape: int) -> Array:
        # A single array is not copied.
        whole = self.xp.concat([self.xp.reshape(array, (-1,)) for array in arrays])
        return self.xp.reshape(whole, (len(arrays), *shape))

    def _state(self, key: str, run: Run) -> Array:
        # The compressor's state of a run, P float32[k, a, r] or Q float32[k, r, b].
        shape = (run.a, run.r) if key == LEFT else (run.r, run.b)
        return self._stacked(self._table.arrays(self._rows[key][run.units], False), *shape)

    def _mean(self, parts: Sequence[Array]) -> Program[Sequence[Array]]:
        # All workers' means of these arrays, by one collective.
        xp = self.xp
        (mean,) = yield Reduce((xp.buffers.joined(parts),), "mean", donated=True)
        return xp.buffers.parts(mean, parts)

    def _revived(self, rows: Array, run: Run, label: str, step: int) -> Array:
        # `Factored.revived` of all units of a run, for rows [k, r, n].
        xp, (k, _, n) = self.xp, self.xp.shape(rows)
        scaled, alive = xp.linalg.unit_rows(xp.reshape(rows, (k * run.r, n)))

        def spare() -> Array:
            contexts = [self.contexts[unit]._with(step=step) for unit in run.units]
            if run.r * n > NOISE // 2:
                return xp.concat([self._compressor._spare(ctx, label, n) for ctx in contexts])
            return xp.concat([self._compressor._spare(contexts[0], label, n)] * k)

        return xp.reshape(xp.mended(alive, scaled, spare), (k, run.r, n))

    def _directions(self, step: int) -> list[Array]:
        return [self._revived(self._state(DIRECTIONS, run), run, "q", step) for run in self._runs]

    def finite(self, landed: Factors) -> Array:
        """Whether the mean of each unit is finite, int32[units] on the device."""
        xp, found = self.xp, []
        for run, each in zip(self._runs, landed.runs, strict=True):
            one, two = (xp.isfinite(xp.max_abs(xp.reshape(x, (len(run.units), -1)))) for x in each.payload)
            found.append(xp.cast(one & two, "int32"))
        return xp.take(xp.concat(found), self._places_of_units)

    def finish(self, landed: Factors, x: Sequence[Array], ok: Array | None) -> None:
        xp, write = self.xp, self.xp.buffers.write_all
        means: list[Any] = [None] * len(self.contexts)
        left: list[Any] = [None] * len(self.contexts)
        for run, each in zip(self._runs, landed.runs, strict=True):
            mean = each.mean[0] @ each.mean[1]
            rest = each.matrix - (mean if each.sent is None else each.sent[0] @ each.sent[1]) if self.feedback else mean
            for unit, *both in zip(run.units, mean, rest, strict=True):
                means[unit], left[unit] = both
        if self.feedback:
            self._keep(x, left, ok)
        for run, units, each in zip(self._runs, self._units, landed.runs, strict=True):
            kept = None if ok is None else xp.reshape(xp.take(ok, units) != 0, (-1, 1, 1))
            for key, new in each.state.items():
                if kept is not None:
                    new = xp.where(kept, new, self._state(key, run))
                after = self._table.arrays(self._rows[key][run.units], True)
                write(after, [xp.reshape(part, xp.shape(row)) for part, row in zip(new, after, strict=True)])
        for rows in self._rows.values():
            self._table.advance(rows)
        write(x, [xp.reshape(mean, xp.shape(vector)) for mean, vector in zip(means, x, strict=True)])

    def _keep(self, x: Sequence[Array], left: Sequence[Array], ok: Array | None) -> None:
        # Writes the new memory; where there is one row, x receives the old one, from which a flag may restore it.
        xp, (feedback,) = self.xp, self.feedback
        before, after = (self._table.arrays(self._memory, each) for each in (False, True))
        feedback.begin(np.array([xp.buffers.address(vector) for vector in x], np.int64))
        swapped = [number for number in range(len(x)) if before[number] is after[number]]
        if swapped:
            old = [xp.reshape(before[number], xp.shape(x[number])) for number in swapped]
            xp.buffers.write_all([x[number] for number in swapped], old)
        shaped = [xp.reshape(each, xp.shape(row)) for each, row in zip(left, after, strict=True)]
        xp.buffers.write_all(after, shaped)
        feedback.end(ok)

    @property
    def traffic(self) -> list[tuple[int, int]]:
        sizes = (self._compressor.sizes(ctx) for ctx in self.contexts)
        return [(FLOAT * r * (a + b),) * 2 for a, b, r in sizes]


class DeviceLowRank(DeviceFactored):
    """PowerSGD."""

    def exchange(self, x: Sequence[Array], step: int) -> Program[Factors]:
        xp, matrices = self.xp, self._matrices(x)
        p = yield from self._mean([m @ _turned(xp, q) for m, q in zip(matrices, self._directions(step), strict=True)])
        p = [xp.linalg.qr(each) for each in p]
        q = yield from self._mean([_turned(xp, one) @ m for m, one in zip(matrices, p, strict=True)])
        found = zip(matrices, zip(p, q, strict=True), strict=True)
        return Factors([Agreed(m, each, each, None, {DIRECTIONS: each[1]}) for m, each in found], step)


class DeviceDion(DeviceFactored):
    """Dion, with memory "decoupled" or none."""

    _compressor: Dion

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        scales = np.array([self._compressor.scale(ctx) for ctx in self.contexts], np.float32)
        self._scales = [self.xp.asarray(scales[run.units].reshape(-1, 1, 1), "float32") for run in self._runs]

    def exchange(self, x: Sequence[Array], step: int) -> Program[Factors]:
        xp, matrices = self.xp, self._matrices(x)
        p = yield from self._mean([m @ _turned(xp, q) for m, q in zip(matrices, self._directions(step), strict=True)])
        zero = [xp.reshape(xp.max_abs(xp.reshape(each, (len(each), -1))) == 0, (-1, 1, 1)) for each in p]
        p = [xp.where(none, each, xp.linalg.qr(each)) for none, each in zip(zero, p, strict=True)]
        r = yield from self._mean([_turned(xp, one) @ m for m, one in zip(matrices, p, strict=True)])
        memory, found = self.method.memory, []
        for run, m, none, one, two, scale in zip(self._runs, matrices, zero, p, r, self._scales, strict=True):
            rows = self._compressor._normalized(xp.reshape(two, (-1, run.b)), self.contexts[0])
            rows = xp.reshape(rows, xp.shape(two))
            sent = (one, two * (1.0 - memory.mu)) if isinstance(memory, Decoupled) else None
            state = {DIRECTIONS: xp.where(none, self._state(DIRECTIONS, run), rows)}
            found.append(Agreed(m, (one, two), (one, rows * scale), sent, state))
        return Factors(found, step)


class DeviceACPSGD(DeviceFactored):
    """ACP-SGD: P in even steps, Q in odd ones."""

    rounds = 1

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        self._odd: dict[str, list[int]] = {}

    @property
    def asked(self) -> Sequence[Collective]:
        return super().asked[:1]  # of an even step

    def exchange(self, x: Sequence[Array], step: int) -> Program[Factors]:
        xp, matrices, even = self.xp, self._matrices(x), step % 2 == 0
        if even:
            bases = [_turned(xp, xp.linalg.qr(_turned(xp, q))) for q in self._directions(step)]
            mine = [m @ _turned(xp, q) for m, q in zip(matrices, bases, strict=True)]
        else:
            rows = [self._revived(_turned(xp, self._state(LEFT, run)), run, "p", step) for run in self._runs]
            bases = [xp.linalg.qr(_turned(xp, each)) for each in rows]
            mine = [_turned(xp, p) @ m for m, p in zip(matrices, bases, strict=True)]
        mean, found = (yield from self._mean(mine)), []
        for m, basis, one, own in zip(matrices, bases, mean, mine, strict=True):
            both, sent = ((one, basis), (own, basis)) if even else ((basis, one), (basis, own))
            found.append(Agreed(m, both, both, sent, dict(zip((LEFT, DIRECTIONS), both, strict=True))))
        return Factors(found, step)

    @property
    def traffic(self) -> list[tuple[int, int]]:
        return self._traffic(0)

    def _traffic(self, side: int) -> list[tuple[int, int]]:
        sizes = [self._compressor.sizes(ctx) for ctx in self.contexts]
        return [(FLOAT * each[2] * each[side],) * 2 for each in sizes]

    def counted(self, counts: dict[str, list[int]], landed: Factors) -> dict[str, list[int]]:
        if landed.step % 2 == 0:
            return counts
        self._odd = self._odd or {name: [*each, 1] for name, each in zip(counts, self._traffic(1), strict=True)}
        return self._odd


def _turned(xp: Any, x: Array) -> Array:
    return xp.transpose(x, (0, 2, 1))
