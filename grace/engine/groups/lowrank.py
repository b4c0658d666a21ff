"""The exchange of a group of PowerSGD: one allreduce for the first factors of all units, one for the second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from grace.compressors.measured.powersgd import PowerSGD
from grace.core import Array, Program
from grace.core.collectives import Collective, Reduce
from grace.engine.groups.exchanges import FLOAT, RESIDUAL, Form, Group, each_finite
from grace.kernels.rows import Copies, Rows

DIRECTIONS = "compressor/q"


class Factors:
    """The averaged factors of an exchange: the P of all units as one vector, and their Q as another."""

    def __init__(self, p: Array, q: Array):
        self.p, self.q = p, q


class LowRankGroup(Group):
    """PowerSGD with communicator "allreduce". One vector holds the factors P of all units, another the factors Q."""

    rounds = 2
    overwrites = True

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        compressor: PowerSGD = self.method.compressor  # type: ignore[assignment]
        # Units of equal shapes are contiguous, so that one call factorises all their P.
        sizes = [compressor.sizes(ctx) for ctx in self.contexts]
        self._order = np.array(sorted(range(len(sizes)), key=lambda unit: (sizes[unit], unit)), np.int64)
        self._sizes = np.array([sizes[unit] for unit in self._order], np.int64)
        a, b, r = self._sizes.T
        self._p, self._q = (np.concatenate([[0], np.cumsum(each * r)]) for each in (a, b))
        self._row_starts = np.concatenate([q + np.arange(k) * n for q, n, k in zip(self._q, b, r, strict=False)])
        self._row_lengths = np.repeat(b, r)
        self._runs = self._equal_runs()
        self._residual = RESIDUAL in self.cells[0]
        self._table = self.cells[0][DIRECTIONS].table
        ordered = [self.cells[unit] for unit in self._order]
        self._directions = np.array([each[DIRECTIONS].number for each in ordered], np.int64)
        self._which = self._directions
        if self._residual:
            self._which = np.array([each[RESIDUAL].number for each in ordered], np.int64)
        self._left, self._right, self._part, self._product = (
            self._rows(f"lowrank_{name}", *self._sizes.T) for name in ("left", "right", "part", "product")
        )
        self._copies = Copies(self.library, b * r)
        self._q_memory = np.zeros(int(self._q[-1]), np.float32)
        self._x: Any = None  # the addresses of the vectors of an exchange, in the order of `_order`

    def _rows(self, name: str, a: Any, b: Any, r: Any) -> Rows:
        rows = Rows(self.library, name, len(self._order))
        rows.set(a=a, b=b, r=r, threads=self.xp.threads)
        return rows

    def _equal_runs(self) -> list[tuple[int, int, int, int]]:
        # Returns the runs of units whose P have the same shape (a, r): first unit, number of units, a, r.
        runs: list[list[int]] = []
        for unit, (a, _, r) in enumerate(self._sizes.tolist()):
            if runs and runs[-1][2:] == [a, r]:
                runs[-1][1] += 1
            else:
                runs.append([unit, 1, a, r])
        return [(first, count, a, r) for first, count, a, r in runs]

    def hold(self) -> None:
        self._table.hold(self._directions)
        if self._residual:
            self._table.hold(self._which)

    @property
    def asked(self) -> Sequence[Collective]:
        return [Reduce((Form("float32", (int(ends[-1]),)),), "mean", donated=True) for ends in (self._p, self._q)]

    def exchange(self, x: Sequence[int], step: int) -> Program[Factors]:
        xp, address = self.xp, self.xp.buffers.address
        self._x, q = np.array(x, np.int64)[self._order], self._revived(step)
        p = xp.buffers.empty((int(self._p[-1]),))
        # This kernel also adds the residuals to x, in place.
        old = self._table.old(self._which) if self._residual else 0
        self._left.set(m=self._x, residual=old, q=self._at(q.ctypes.data, self._q), p=self._at(address(p), self._p))
        self._left.call()
        (p,) = yield Reduce((p,), "mean", donated=True)
        self._orthogonalise(p)
        mine = xp.buffers.empty((int(self._q[-1]),))
        self._right.set(m=self._x, p=self._at(address(p), self._p), q=self._at(address(mine), self._q))
        self._right.call()
        (mean,) = yield Reduce((mine,), "mean", donated=True)
        return Factors(p, mean)

    def _at(self, base: int, starts: Any) -> Any:
        return base + FLOAT * starts[:-1]

    def _revived(self, step: int) -> Any:
        # Does what `Factored.revived` does, for all units at once; returns one vector.
        rows = self._q_memory
        self._copies.call(self._table.old(self._directions), self._at(rows.ctypes.data, self._q))
        largest = np.maximum.reduceat(np.abs(rows), self._row_starts)
        alive = largest > 0
        scaled = rows / np.repeat(np.where(largest == 0, np.float32(1), largest), self._row_lengths)
        if not alive.all():
            self._replace_dead(scaled, alive, step)
        return scaled

    def _replace_dead(self, scaled: Any, alive: Any, step: int) -> None:
        compressor: Any = self.method.compressor
        row = 0
        for place, unit in enumerate(self._order.tolist()):
            _, b, r = self._sizes[place].tolist()
            mine = alive[row : row + r]
            row += r
            if not mine.all():
                part = scaled[self._q[place] : self._q[place + 1]].reshape(r, b)
                ctx = self.contexts[unit]._with(step=step)
                part[~mine] = self.xp.to_numpy(compressor._spare(ctx, "q", b))[~mine]

    def _orthogonalise(self, p: Array) -> None:
        xp = self.xp
        for first, count, a, r in self._runs:
            part = p[int(self._p[first]) : int(self._p[first + count])]
            whole = xp.reshape(part, (count, a, r))
            xp.buffers.write(whole, xp.linalg.qr(whole))

    def finite(self, landed: Factors) -> list[bool] | None:
        parts = ((landed.p, self._p), (landed.q, self._q))
        starts = [self._at(self.xp.buffers.address(vector), ends) for vector, ends in parts]
        sizes = np.concatenate([np.diff(ends) for _, ends in parts]).tolist()
        each = each_finite(self.library, np.concatenate(starts).tolist(), sizes)
        if each is None:
            return None
        found = np.ones(len(self._order), bool)
        found[self._order] = np.array(each).reshape(2, -1).all(0)
        return list(map(bool, found))

    def finish(self, landed: Factors, x: Sequence[int], ok: Sequence[bool] | None) -> None:
        address = self.xp.buffers.address
        p, q = self._at(address(landed.p), self._p), self._at(address(landed.q), self._q)
        kept = np.ones(len(self._order), bool) if ok is None else np.array(ok)[self._order]
        made = kept if self._residual else np.zeros(len(kept), bool)
        if made.any():
            self._part.set(x=self._x, p=p, q=q, rest=self._table.new(self._which))
            self._part.call(only=made)
            self._table.advance(self._which[made])
        if not made.all():
            self._product.set(p=p, q=q, out=self._x)
            self._product.call(only=~made)
        self._copies.call(q, self._table.new(self._directions), only=kept)
        self._table.advance(self._directions[kept])

    @property
    def traffic(self) -> list[tuple[int, int]]:
        found = [(0, 0)] * len(self._order)
        for place, unit in enumerate(self._order.tolist()):
            a, b, r = self._sizes[place].tolist()
            found[unit] = (FLOAT * r * (a + b),) * 2
        return found
