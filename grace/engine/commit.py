"""The end of an exchange: checks the means, commits the state, decodes, and splits the means by tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grace.core import Array, Memory
from grace.core.dtypes import ITEMSIZE
from grace.core.method import Undecoded, materialize
from grace.engine.buckets import Unit
from grace.engine.codecs import PendingMean, all_finite
from grace.engine.flight import Flight
from grace.engine.groups.book import Grouped, Joined
from grace.engine.handshake import HEADER
from grace.engine.setup import DENSE, PRESENT, Setup

NOT_FINITE = "the mean gradient of {!r} is not finite on any worker"


class Commit:
    """Turns the results of one message into means and new state. Only this class commits state.

    The state is left unchanged if no worker had a gradient, or if the mean is not finite; the mean is equal on all
    workers, so they all decide alike. ``gradients``: the submitted gradients, by tensor.
    """

    def __init__(self, setup: Setup, flight: Flight, gradients: Mapping[str, Array | None]):
        self._setup, self._flight, self._results = setup, flight, flight.scheduler.results
        self._flat, self._levels = flight.flat, flight.levels
        self.skipped = 0
        self._plain = flight.plain
        self._counted: dict[str, list[int]] = {}  # in graphs: byte counts of grouped units
        self._holders = self._count_holders(gradients)
        self._marks = self._marked_means()
        self._all_finite = self._look_at_marks()

    def means(self) -> dict[str, Array | None]:
        """The mean of each tensor; None if no worker had a gradient."""
        setup, xp = self._setup, self._setup.xp
        dense = iter(self._results.pop(DENSE, ()))
        means: dict[str, Array | None] = {}
        for each in self._flight.layout.groups:
            if each.hosted:
                means |= self._hosted_means(each)
            else:
                means |= self._device_means(each) if each.group.on_device else self._group_means(each)
        for whole in self._flight.layout.joined:
            means |= self._joined_means(whole)
        for unit in self._flight.layout.rest:
            x = self._flat[unit]
            if unit in self._plain:
                mean, state = xp.cast(next(dense), unit.dtype), {}
            else:
                mean, state = self._results.pop(unit.name)
            if unit.dense and (setup.store.any(unit, 0) or self._finishes_dense):
                memory, ctx = setup.method.memory, setup.context(unit, setup.step.read())
                mean, state = memory.after_dense_mean(mean, setup.store.state(unit, 0), ctx)
            ok = None
            if self._judged(unit) and not self._absent(unit):
                mean, ok = self._judge(unit, mean)
                setup.store.commit(unit, self._levels[unit], state, ok, x)
            # Decode only now that the state is committed: the new residual may have been in x, which receives the mean.
            if isinstance(mean, Undecoded):
                mean = mean.array(x)
            means |= self._by_tensor(unit, self._zeroed(unit, mean, ok))
        return means

    def counts(self) -> dict[str, list[Any]]:
        """Number of bytes sent, bytes received and exchanges, by unit."""
        setup = self._setup
        sizes = {
            unit.name: unit.size * ITEMSIZE[setup.wire_dtype(unit, self._levels[unit])] for unit in self._flight.plain
        }
        layout = self._flight.layout
        left_out = {DENSE, *(each.name for each in layout.groups), *(each.name for each in layout.joined)}
        asked = [(name, *rest) for name, *rest in self._flight.scheduler.asked if name not in left_out]
        units = [*(unit.name for unit in layout.rest), *self._results]
        return {**setup.meter.count(units, asked, setup.transport.group_rank, sizes), **self._counted}

    def _count(self, counts: dict[str, list[int]]) -> None:
        # Counts the bytes of units that are exchanged together. In a graph they are counted when it runs.
        if self._setup.xp.traced:
            self._counted |= counts
        else:
            self._setup.meter.repeat(counts)

    def _hosted_means(self, grouped: Grouped) -> dict[str, Array | None]:
        # Returns the means of a hosted group, whose `finish` also returns the new state.
        setup, group, units, options = self._setup, grouped.group, grouped.units, self._setup.options
        judged = self._judged(units[0])
        held = [not self._absent(unit) for unit in units] if self._holders else None
        shapes = [unit.shape if len(unit.tensors) == 1 else (unit.size,) for unit in units]
        landed = self._results.pop(grouped.name)
        found, ok, state = group.finish(landed, held, judged, options.nonfinite == "zero", shapes)
        if judged and (options.nonfinite == "raise" or any(setup.store.carried(unit) is not None for unit in units)):
            self._look_at_each(units, ok)
        group.store(state)
        self._count(grouped.counts)
        means: dict[str, Array | None] = {}
        for unit, mean in zip(units, found, strict=True):
            means |= self._by_tensor(unit, mean)
        return means

    def _look_at_each(self, units: Sequence[Unit], ok: Array) -> None:
        # ``ok``: whether the mean of each unit is finite, bool[units].
        for number, unit in enumerate(units):
            if self._setup.options.nonfinite == "raise":
                self._setup.xp.require(ok[number], NOT_FINITE.format(unit.name))
            if not self._absent(unit):
                self._setup.store.commit_carried(unit, ok[number], self._flat[unit])

    def _group_means(self, grouped: Grouped) -> dict[str, Array | None]:
        # Returns the means of a group's tensors, in the memory of their gradients.
        setup, group, units = self._setup, grouped.group, grouped.units
        landed, finite, ok = self._results.pop(grouped.name), None, None
        if self._judged(units[0]):  # all units of a group have the same kind of state
            finite = ok = group.finite(landed)
        if finite is not None:
            self.skipped += finite.count(False)
            if setup.options.nonfinite == "raise":
                setup.xp.require(False, NOT_FINITE.format(units[finite.index(False)].name))
        if self._holders:
            held = [not self._absent(unit) for unit in units]
            ok = held if finite is None else [one and other for one, other in zip(held, finite, strict=True)]
        if setup.store.carries:
            for number, unit in enumerate(units):
                setup.store.commit_carried(unit, ok is None or ok[number], self._flat[unit])
        vectors = [self._flat[unit] for unit in units]
        group.finish(landed, grouped.places(self._flat), ok)
        self._count(grouped.counts)
        if grouped.names and finite is None and not self._holders:
            return self._shaped(grouped.names, vectors, [unit.shape for unit in units])
        means: dict[str, Array | None] = {}
        for number, unit in enumerate(units):
            x = setup.xp.reshape(vectors[number], (-1,))
            means |= self._by_tensor(unit, self._zeroed(unit, x, None if finite is None else finite[number]))
        return means

    def _device_means(self, grouped: Grouped) -> dict[str, Array | None]:
        # As `_group_means`, for groups on a device: only the device knows which means are finite.
        setup, group, units = self._setup, grouped.group, grouped.units
        xp, poison, landed = setup.xp, setup.options.nonfinite == "poison", self._results.pop(grouped.name)
        finite = group.finite(landed) if self._judged(units[0]) else None
        if finite is not None and xp.can_read_values:
            self.skipped += len(units) - int(xp.sum(finite))
        if finite is not None and (not poison or setup.store.carries):
            self._look_at_each(units, finite != 0)
        kept = finite
        if self._holders:
            held = xp.asarray([int(not self._absent(unit)) for unit in units], "int32")
            kept = held if finite is None else held * finite
        vectors = [self._flat[unit] for unit in units]
        group.finish(landed, grouped.places(self._flat), kept)
        self._count(group.counted(grouped.counts, landed))
        if grouped.names and (finite is None or poison) and not self._holders:
            return self._shaped(grouped.names, vectors, [unit.shape for unit in units])
        means: dict[str, Array | None] = {}
        for number, unit in enumerate(units):
            x = xp.reshape(vectors[number], (-1,))
            means |= self._by_tensor(unit, self._zeroed(unit, x, None if finite is None else finite[number] != 0))
        return means

    def _joined_means(self, joined: Joined) -> dict[str, Array | None]:
        # Returns the means of tensors that were sent as one vector: each is a part of the vector's mean.
        xp, mean = self._setup.xp, self._results.pop(joined.name)
        parts = xp.buffers.parts(mean, [self._flat[unit] for unit in joined.units])
        if not joined.counts:
            self._count_joined(joined)
        self._count(joined.counts)
        if self._setup.options.nonfinite == "poison" and not self._holders and not self._setup.store.carries:
            shapes = [unit.shape for unit in joined.units]
            return self._shaped(joined.names, parts, shapes)
        means: dict[str, Array | None] = {}
        for unit, part in zip(joined.units, parts, strict=True):
            part, ok = (part, None) if self._absent(unit) or not self._judged(unit) else self._judge(unit, part)
            if ok is not None:
                self._setup.store.commit_carried(unit, ok, self._flat[unit])
            means |= self._by_tensor(unit, self._zeroed(unit, part, ok))
        return means

    def _count_joined(self, joined: Joined) -> None:
        # Divide the vector's bytes among the units in proportion to their sizes.
        setup, whole = self._setup, sum(unit.size for unit in joined.units)
        asked = [each for each in self._flight.scheduler.asked if each[0] == joined.name]
        sent, received, _ = setup.meter.count([joined.name], asked, setup.transport.group_rank, {})[joined.name]
        for unit in joined.units:
            joined.counts[unit.name] = [sent * unit.size // whole, received * unit.size // whole, 1]

    def _shaped(self, names: Sequence[str], means: Sequence[Array], shapes: Sequence[Any]) -> dict[str, Array | None]:
        # Returns the means in the shapes of their tensors; most means already have them.
        reshape, found = self._setup.xp.reshape, zip(names, means, shapes, strict=True)
        return {name: mean if mean.shape == shape else reshape(mean, shape) for name, mean, shape in found}

    def _zeroed(self, unit: Unit, mean: Array, ok: Array | None) -> Array:
        # Returns zeros instead of a mean that is not finite, if the option `nonfinite` is "zero".
        if self._setup.options.nonfinite != "zero" or ok is None:
            return mean
        xp = self._setup.xp
        return xp.choose(ok, mean, xp.zeros(xp.shape(mean), unit.dtype))

    def _by_tensor(self, unit: Unit, mean: Array) -> dict[str, Array | None]:
        setup, xp, scattered = self._setup, self._setup.xp, self._setup.communicator.reduce_scatters
        means: dict[str, Array | None] = {}
        start, several = 0, len(unit.tensors) > 1 or scattered
        for tensor in unit.tensors:
            size, shape = tensor.size, tensor.shape
            if scattered:
                size, shape = size // setup.world_size, shape[1:]
                start = setup.rank * size if unit.dense else 0
            part = xp.reshape(mean[start : start + size] if several else mean, shape)
            means[tensor.name] = None if self._holders.get(tensor.name) == 0 else xp.cast(part, tensor.dtype)
            start += size
        return means

    # -- finite means --------------------------------------------------------------------------------------------------
    def _judge(self, unit: Unit, mean: Any) -> tuple[Any, Array]:
        # Returns the mean and whether it is finite, bool[]. Decodes a mean only if its payloads do not show whether it
        # is finite.
        setup, xp = self._setup, self._setup.xp
        seen = self._marks.get(unit)
        if seen is None:
            mean = materialize(mean)
            ok = xp.finite(xp.cast(mean, "float16") if self._narrow(unit) else mean)
        else:
            ok = True if self._all_finite else xp.finite(xp.concat(seen.marks()))
        if xp.can_read_values and not ok:
            self.skipped += 1
        if setup.options.nonfinite == "raise":
            xp.require(ok, NOT_FINITE.format(unit.name))
        return mean, ok

    def _judged(self, unit: Unit) -> bool:
        # Returns whether the mean is checked: the state or the option `nonfinite` depends on whether it is finite.
        return self._setup.store.any(unit, self._levels[unit]) or self._setup.options.nonfinite != "poison"

    def _narrow(self, unit: Unit) -> bool:
        # Returns whether to check that the mean fits float16: a residual may push it out of range. Skipped after a
        # reduce-scatter, when each worker has only its own row, so the workers could decide differently.
        return unit.narrow and not self._setup.communicator.reduce_scatters

    def _marked_means(self) -> dict[Unit, PendingMean]:
        # Returns the means whose payloads show whether they are finite.
        found = {}
        for unit in self._flight.layout.rest:
            mean = None if unit in self._plain else self._results[unit.name][0]
            if isinstance(mean, PendingMean) and mean.marked and self._judged(unit) and not self._narrow(unit):
                found[unit] = mean
        return found

    def _look_at_marks(self) -> bool:
        # Returns whether all marked means are known to be finite. False on a device, to avoid a synchronisation.
        xp = self._setup.xp
        if not xp.can_read_values or not self._marks:
            return False
        return all_finite(list(self._marks.values()), xp)

    @property
    def _finishes_dense(self) -> bool:
        return type(self._setup.method.memory).after_dense_mean is not Memory.after_dense_mean

    # -- absent gradients ----------------------------------------------------------------------------------------------
    def _absent(self, unit: Unit) -> bool:
        return bool(self._holders) and all(self._holders.get(tensor.name) == 0 for tensor in unit.tensors)

    def _count_holders(self, gradients: Mapping[str, Array | None]) -> dict[str, float]:
        # Returns the number of workers with a gradient for each tensor whose gradient is missing on this worker.
        # Reading the numbers synchronises a device.
        names = [tensor.name for unit in self._flat for tensor in unit.tensors]
        missing = [name for name in names if gradients.get(name) is None]
        if not missing or not self._setup.track_missing:
            return {}
        sums = self._setup.xp.to_numpy(self._results[PRESENT]).tolist()
        found = dict(zip(names, sums[HEADER if self._setup.tagged else 0 :], strict=True))
        return {name: found[name] for name in missing}
