"""The exchange of a group of PowerSGD on a device: one batched product and one factorisation for equal shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from grace.compressors.measured.powersgd import PowerSGD
from grace.core import Array, Program
from grace.core.collectives import Collective, Reduce
from grace.core.rng import NOISE
from grace.engine.groups.devices import DeviceFeedback
from grace.engine.groups.exchanges import FLOAT, RESIDUAL, Form, Group
from grace.engine.groups.lowrank import DIRECTIONS
from grace.engine.groups.native import Point
from grace.engine.groups.recipes import Recipe

NO_RECIPE = Recipe("", "", (), {})


class Run(NamedTuple):
    """Units whose matrices are [a, b] and of rank r."""

    units: Any
    """int64[k]"""
    a: int
    b: int
    r: int


class Factors(NamedTuple):
    """What an exchange has agreed on, by run: P [k, a, r] and Q [k, r, b]; and this worker's matrices [k, a, b]."""

    p: list[Array]
    q: list[Array]
    matrices: list[Array]


class DeviceLowRank(Group):
    """PowerSGD with communicator "allreduce", by operations of the toolkit, which wait for nothing."""

    rounds = 2
    overwrites = True
    on_device = True

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        self._compressor: PowerSGD = self.method.compressor  # type: ignore[assignment]
        alike: dict[tuple[int, int, int], list[int]] = {}
        for unit, ctx in enumerate(self.contexts):
            alike.setdefault(self._compressor.sizes(ctx), []).append(unit)
        self._runs = [Run(np.array(units, np.int64), *sizes) for sizes, units in alike.items()]
        order = np.concatenate([run.units for run in self._runs])
        self._places_of_units = self.xp.asarray(np.argsort(order), "int32")
        table = self.cells[0][DIRECTIONS].table
        self._table, self._q = table, np.array([each[DIRECTIONS].number for each in self.cells], np.int64)
        if RESIDUAL in self.cells[0]:
            cells, units = [each[RESIDUAL] for each in self.cells], np.arange(len(self.cells))
            points = [Point(ctx, NO_RECIPE) for ctx in self.contexts]
            self.feedback = [DeviceFeedback(self.library, self.xp, cells, points, [0] * len(cells), units)]
            self._residual = np.array([cell.number for cell in cells], np.int64)

    def places(self, vectors: Sequence[Array]) -> Any:
        return vectors

    def hold(self) -> None:
        super().hold()
        self._table.hold(self._q)

    @property
    def asked(self) -> Sequence[Collective]:
        counts = [(len(run.units) * run.r, run) for run in self._runs]
        sizes = sum(k * run.a for k, run in counts), sum(k * run.b for k, run in counts)
        return [Reduce((Form("float32", (size,)),), "mean", donated=True) for size in sizes]

    def exchange(self, x: Sequence[Array], step: int) -> Program[Factors]:
        xp = self.xp
        matrices = [self._stacked([x[unit] for unit in run.units], run.a, run.b) for run in self._runs]
        if self.feedback:
            for run, matrix in zip(self._runs, matrices, strict=True):
                old = self._table.arrays(self._residual[run.units], False)
                xp.inplace.add(matrix, self._stacked(old, run.a, run.b))
        directions = [self._directions(run, step) for run in self._runs]
        flat = [xp.reshape(m @ _turned(xp, q), (-1,)) for m, q in zip(matrices, directions, strict=True)]
        (mean,) = yield Reduce((xp.concat(flat),), "mean", donated=True)
        p = [xp.linalg.qr(each) for each in self._cut(mean, [(run.a, run.r) for run in self._runs])]
        flat = [xp.reshape(_turned(xp, each) @ m, (-1,)) for m, each in zip(matrices, p, strict=True)]
        (mean,) = yield Reduce((xp.concat(flat),), "mean", donated=True)
        return Factors(p, self._cut(mean, [(run.r, run.b) for run in self._runs]), matrices)

    def _stacked(self, arrays: Sequence[Array], *shape: int) -> Array:
        # A single array is not copied.
        whole = self.xp.concat([self.xp.reshape(array, (-1,)) for array in arrays])
        return self.xp.reshape(whole, (len(arrays), *shape))

    def _cut(self, whole: Array, shapes: Sequence[tuple[int, int]]) -> list[Array]:
        counts = [len(run.units) for run in self._runs]
        sizes = [count * a * b for count, (a, b) in zip(counts, shapes, strict=True)]
        parts = zip(self.xp.split(whole, sizes), counts, shapes, strict=True)
        return [self.xp.reshape(part, (count, *shape)) for part, count, shape in parts]

    def _directions(self, run: Run, step: int) -> Array:
        # `Factored.revived` of all units of a run.
        xp, k = self.xp, len(run.units)
        rows = self._stacked(self._table.arrays(self._q[run.units], False), run.r, run.b)
        scaled, alive = xp.linalg.unit_rows(xp.reshape(rows, (k * run.r, run.b)))

        def spare() -> Array:
            contexts = [self.contexts[unit]._with(step=step) for unit in run.units]
            if run.r * run.b > NOISE // 2:
                return xp.concat([self._compressor._spare(ctx, "q", run.b) for ctx in contexts])
            return xp.concat([self._compressor._spare(contexts[0], "q", run.b)] * k)

        return xp.reshape(xp.mended(alive, scaled, spare), (k, run.r, run.b))

    def finite(self, landed: Factors) -> Array:
        """Whether the mean of each unit is finite, int32[units] on the device."""
        xp, found = self.xp, []
        for run, *factors in zip(self._runs, landed.p, landed.q, strict=True):
            one, two = (xp.isfinite(xp.max_abs(xp.reshape(each, (len(run.units), -1)))) for each in factors)
            found.append(xp.cast(one & two, "int32"))
        return xp.take(xp.concat(found), self._places_of_units)

    def finish(self, landed: Factors, x: Sequence[Array], ok: Array | None) -> None:
        xp, write = self.xp, self.xp.buffers.write_all
        means: list[Any] = [None] * len(self.contexts)
        for run, p, q in zip(self._runs, landed.p, landed.q, strict=True):
            for unit, mean in zip(run.units, p @ q, strict=True):
                means[unit] = mean
        if self.feedback:
            left: list[Any] = [None] * len(means)
            for run, matrix in zip(self._runs, landed.matrices, strict=True):
                for unit, own in zip(run.units, matrix, strict=True):
                    left[unit] = own - means[unit]
            self._keep(x, left, ok)
        for run, q in zip(self._runs, landed.q, strict=True):
            which = self._q[run.units]
            if ok is not None:
                old = self._stacked(self._table.arrays(which, False), run.r, run.b)
                kept = xp.reshape(xp.take(ok, xp.asarray(run.units, "int32")) != 0, (-1, 1, 1))
                q = xp.where(kept, q, old)
            after = self._table.arrays(which, True)
            write(after, [xp.reshape(part, xp.shape(row)) for part, row in zip(q, after, strict=True)])
        self._table.advance(self._q)
        write(x, [xp.reshape(mean, xp.shape(vector)) for mean, vector in zip(means, x, strict=True)])

    def _keep(self, x: Sequence[Array], left: Sequence[Array], ok: Array | None) -> None:
        # Writes the new residuals; where there is one row, x receives the old one, from which a flag may restore it.
        xp, (feedback,) = self.xp, self.feedback
        before, after = (self._table.arrays(self._residual, each) for each in (False, True))
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


def _turned(xp: Any, x: Array) -> Array:
    return xp.transpose(x, (0, 2, 1))
