"""The exchange of a group of randomk on a device: Triton's kernels draw the positions, which are not sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from grace.compressors.sparse import kept
from grace.compressors.studies.randomk import RandomK
from grace.core import Array, Program, run_local
from grace.core.collectives import Collective, Reduce
from grace.engine.groups.devices import DeviceFeedback, Launches
from grace.engine.groups.exchanges import FLOAT, RESIDUAL, Form, Group
from grace.engine.groups.native import Point
from grace.engine.groups.recipes import Recipe


class Drawn(NamedTuple):
    """The means of the elements that were sent, float32[k], and their positions, int32[k]."""

    values: Array
    positions: Array
    step: int


class DeviceRandomK(Group):
    """randomk with a fixed number of elements and communicator "allreduce"."""

    rounds = 1
    on_device = True

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        compressor, sizes = self.method.compressor, [ctx.size for ctx in self.contexts]
        assert isinstance(compressor, RandomK)
        self._compressor, self._counts = compressor, [kept(compressor.compress_ratio, n) for n in sizes]
        self._points = [
            Point(ctx, Recipe("randomk_encode", "", arrays, {}, draws="positions", shared=True))
            for ctx, k in zip(self.contexts, self._counts, strict=True)
            for arrays in [(("positions", "int32", k), ("values", "float32", k))]
        ]
        self._begins = np.cumsum([0, *self._counts])
        self._launches = mine = Launches(self.library, compressor, self._points)
        units = np.arange(len(sizes))
        places = dict.fromkeys(("positions", "values"), FLOAT * self._begins[:-1])
        table, ((how, _),) = mine.table(units, places, units), mine.parts
        self._encoder = self.library.encoder(mine.name, *how, True, table)
        self._decoder = self.library.decoder(mine.name, *how, table, np.zeros((len(sizes), 1), np.int64))
        if RESIDUAL in self.cells[0]:
            cells = [each[RESIDUAL] for each in self.cells]
            self.feedback = [DeviceFeedback(self.library, self.xp, cells, self._points, [0] * len(cells), units)]

    @property
    def asked(self) -> Sequence[Collective]:
        return (Reduce((Form("float32", (int(self._begins[-1]),)),), "mean", donated=True),)

    def exchange(self, x: Sequence[int], step: int) -> Program[Drawn]:
        xp, at, count = self.xp, np.array(x, np.int64), int(self._begins[-1])
        values, positions = xp.buffers.empty(count), xp.buffers.empty(count, "int32")
        old, new = self.feedback[0].begin(at) if self.feedback else (np.zeros_like(at),) * 2
        keys, _ = self._launches.draws.at(step)
        sent, drawn = xp.buffers.address(values), xp.buffers.address(positions)
        if not self._launches.ran(self._encoder.encode, at, old, new, sent, keys, (0, 0), drawn):
            self._encode_plainly(at.tolist(), old.tolist(), new.tolist(), values, positions, step)
        (mean,) = yield Reduce((values,), "mean", donated=True)
        return Drawn(mean, positions, step)

    def _encode_plainly(self, x: Any, old: Any, new: Any, values: Array, positions: Array, step: int) -> None:
        view, compressor, write = self.library.view, self._compressor, self.xp.buffers.write
        for number, part in enumerate(self._parts):
            ctx = self.contexts[number]._with(step=step)
            mine = view(x[number], ctx.size, "float32")
            before = view(old[number], ctx.size, "float32") if old[number] else mine * 0.0
            value = mine + before
            payload, _ = run_local(compressor.compress(value, {}, ctx), compressor)
            write(values[part], payload[0])
            write(positions[part], compressor.positions(ctx))
            if old[number]:
                if old[number] == new[number]:
                    write(mine, before)
                write(view(new[number], ctx.size, "float32"), compressor.residual(value, payload, ctx))

    @property
    def _parts(self) -> list[slice]:
        return [
            slice(begin, end) for begin, end in zip(self._begins[:-1].tolist(), self._begins[1:].tolist(), strict=True)
        ]

    def finite(self, landed: Drawn) -> Array:
        """Return whether the mean of each unit is finite, int32[units] on the device."""
        xp, flags = self.xp, self.xp.full(len(self.contexts), 1, "int32")
        at = np.array([xp.buffers.address(landed.values)], np.int64)
        if not self._launches.ran(self._decoder.judge, at, flags):
            for number, part in enumerate(self._parts):
                flags[number] *= xp.cast(xp.finite(landed.values[part]), "int32")
        return flags

    def finish(self, landed: Drawn, x: Sequence[int], ok: Array | None) -> None:
        xp, at = self.xp, np.array([self.xp.buffers.address(landed.values)], np.int64)
        for each in self.feedback:
            each.end(ok)
        keys, _ = self._launches.draws.at(landed.step)
        drawn = xp.buffers.address(landed.positions)
        if not self._launches.ran(self._decoder.mean, at, np.array(x, np.int64), keys, drawn):
            for number, part in enumerate(self._parts):
                ctx = self.contexts[number]._with(step=landed.step)
                mean = self._compressor.aggregate([(landed.values[part],)], ctx)
                xp.buffers.write(self.library.view(int(x[number]), ctx.size, "float32"), mean)

    @property
    def traffic(self) -> list[tuple[int, int]]:
        return [(FLOAT * k,) * 2 for k in self._counts]
