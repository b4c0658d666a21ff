"""The end of an exchange: checks the means, commits the state, decodes, and splits the means by tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from grace.core import Array, Memory
from grace.core.dtypes import ITEMSIZE
from grace.core.method import materialize
from grace.engine.buckets import Unit
from grace.engine.handshake import HEADER
from grace.engine.lazy_mean import LazyMean, all_finite
from grace.engine.scheduler import RoundScheduler
from grace.engine.setup import PRESENT, Setup, on_host

DENSE = "(dense)"
"""The name of the program that averages all dense units of a bucket."""


class Commit:
    """Turns the results of one message into means and new state. Only this class commits state.

    The state is left unchanged if no worker had a gradient, or if the mean is not finite; the mean is equal on all
    workers, so they all decide alike. ``flat``: each unit's gradient as a vector, whose memory the mean may take.
    ``levels``: each unit's policy level. ``gradients``: the submitted gradients, by tensor.
    """

    def __init__(
        self,
        setup: Setup,
        flight: RoundScheduler,
        flat: Mapping[Unit, Array],
        levels: Mapping[Unit, int],
        gradients: Mapping[str, Array | None],
    ):
        self._setup, self._flight, self._flat, self._levels = setup, flight, flat, levels
        self.skipped = 0
        self._plain = {unit for unit in flat if setup.plain(unit, levels[unit])}
        self._holders = self._count_holders(gradients)
        self._marks = self._marked_means()
        self._all_finite = self._look_at_marks()

    def means(self) -> dict[str, Array | None]:
        """The mean of each tensor; None if no worker had a gradient."""
        setup, xp = self._setup, self._setup.xp
        dense = iter(self._flight.results.pop(DENSE, ()))
        found: list[tuple[Unit, Array, Array | None]] = []
        deferred = setup.deferred_kernels()
        for unit, x in self._flat.items():
            if unit in self._plain:
                mean, state = xp.cast(next(dense), unit.dtype), {}
            else:
                mean, state = self._flight.results.pop(unit.name)
            if unit.dense and (setup.store.any(unit, 0) or self._finishes_dense):
                memory, ctx = setup.method.memory, setup.context(unit, setup.step.read())
                mean, state = memory.after_dense_mean(mean, setup.store.state(unit, 0), ctx)
            ok, in_place = None, False
            if self._judged(unit) and not self._absent(unit):
                mean, ok = self._judge(unit, mean)
                in_place = setup.store.commit(unit, self._levels[unit], state, ok, x)
            setup.store.release(unit, ok)
            # Decode only now that the state is committed: the new residual may have been in x, which receives the mean.
            if in_place:
                mean = x
            elif isinstance(mean, LazyMean):
                mean = mean.into(x, deferred) if xp.mutable else mean.array()
            found.append((unit, mean, ok))
        if deferred:
            deferred.run()
        means: dict[str, Array | None] = {}
        for unit, mean, ok in found:
            if setup.options.nonfinite == "zero" and ok is not None:
                mean = xp.choose(ok, mean, xp.zeros(xp.shape(mean), unit.dtype))
            means |= self._by_tensor(unit, mean)
        return means

    def counts(self) -> dict[str, list[Any]]:
        """Number of bytes sent, bytes received and exchanges, by unit."""
        setup = self._setup
        sizes = {
            unit.name: math.prod(unit.shape) * ITEMSIZE[setup.wire_dtype(unit, self._levels[unit])]
            for unit in self._plain
        }
        asked = [(name, *rest) for name, *rest in self._flight.asked if name != DENSE]
        units = [*(unit.name for unit in self._flat), *self._flight.results]
        return setup.meter.count(units, asked, setup.transport.group_rank, sizes)

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
        # Returns the mean and whether it is finite, bool[]. Decodes a lazy mean only if its payloads do not show that.
        setup, xp = self._setup, self._setup.xp
        seen = self._marks.get(unit)
        if seen is None:
            mean = materialize(mean)
            ok = xp.finite(xp.cast(mean, "float16") if self._narrow(unit) else mean)
        else:
            ok = True if self._all_finite else xp.finite(xp.concat(seen.marks()))
        if not xp.traced and on_host(ok) and not ok:
            self.skipped += 1
        if setup.options.nonfinite == "raise":
            xp.require(ok, f"the mean gradient of {unit.name!r} is not finite on any worker")
        return mean, ok

    def _judged(self, unit: Unit) -> bool:
        # Whether the state or the option `nonfinite` depends on the mean being finite.
        return self._setup.store.any(unit, self._levels[unit]) or self._setup.options.nonfinite != "poison"

    def _narrow(self, unit: Unit) -> bool:
        # A residual may push a mean beyond float16's range. After a reduce-scatter each worker has only its own row, so
        # skip the check: workers could not decide alike.
        return unit.narrow and not self._setup.communicator.reduce_scatters

    def _marked_means(self) -> dict[Unit, LazyMean]:
        # Lazy means whose payloads show whether they are finite.
        found = {}
        for unit in self._flat:
            mean = None if unit in self._plain else self._flight.results[unit.name][0]
            if isinstance(mean, LazyMean) and mean.marked and self._judged(unit) and not self._narrow(unit):
                found[unit] = mean
        return found

    def _look_at_marks(self) -> bool:
        # Whether all marked means are known to be finite. False on a device, to avoid a synchronisation.
        xp = self._setup.xp
        if xp.traced or not on_host(xp) or not self._marks:
            return False
        return all_finite(list(self._marks.values()), xp)

    @property
    def _finishes_dense(self) -> bool:
        return type(self._setup.method.memory).after_dense_mean is not Memory.after_dense_mean

    # -- absent gradients ----------------------------------------------------------------------------------------------
    def _absent(self, unit: Unit) -> bool:
        return bool(self._holders) and all(self._holders.get(tensor.name) == 0 for tensor in unit.tensors)

    def _count_holders(self, gradients: Mapping[str, Array | None]) -> dict[str, float]:
        # Number of workers with a gradient, for each tensor that this worker lacks; reading it synchronises a device.
        names = [tensor.name for unit in self._flat for tensor in unit.tensors]
        missing = [name for name in names if gradients.get(name) is None]
        if not missing or not self._setup.track_missing:
            return {}
        sums = self._setup.xp.to_numpy(self._flight.results[PRESENT]).tolist()
        found = dict(zip(names, sums[HEADER if self._setup.tagged else 0 :], strict=True))
        return {name: found[name] for name in missing}
