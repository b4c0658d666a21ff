"""One exchange: averages the gradients of a step. An exchange that is dropped is rolled back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from grace.core import Array, Program
from grace.core.collectives import Reduce
from grace.engine.buckets import Unit
from grace.engine.commit import DENSE, Commit
from grace.engine.handshake import HEADER, header, in_step, out_of_step
from grace.engine.scheduler import RoundScheduler
from grace.engine.setup import PRESENT, SAMPLE, Setup, on_host
from grace.engine.workspace import Workspace


class Exchange:
    """The state of one exchange: submitted gradients, messages in flight, and finally the means."""

    def __init__(self, setup: Setup):
        self._setup = setup
        self.gradients: dict[str, Array | None] = {}
        self.failure = ""
        """The reason why this worker gives up the step; empty if it does not."""
        self.skipped = 0
        """Number of units whose mean is not finite, as far as the host knows: means on a device are not counted."""
        self._donated: set[str] = set()
        # each launched message ("flight"): the scheduler of its programs, and its units' gradients as vectors
        self._flights: list[tuple[RoundScheduler, dict[Unit, Array]]] = []
        self._launched = 0  # number of launched buckets
        self._departed = False  # whether all launched buckets were sent; some may still wait for the thread pool
        self._switched: dict[str, Array] = {}  # means of tensors whose exchange was traced at every level
        self._samples: dict[Unit, Array] = {}  # samples of this worker's gradients, to measure noise

    @property
    def begun(self) -> bool:
        """Whether a gradient was submitted or a bucket launched."""
        return bool(self.gradients or self._flights)

    # -- submit ------------------------------------------------------------------------------------------------------
    def check(self, name: str, gradient: Array | None) -> None:
        """Raise KeyError, RuntimeError or ValueError for a gradient that cannot be submitted."""
        tensor = self._setup.table.tensors.get(name)
        if tensor is None:
            raise KeyError(
                f"{name!r} was not built; build(named_tensors) must name every tensor before its first gradient"
            )
        if name in self.gradients:
            raise RuntimeError(f"{name!r} has a gradient in this step already: finish the step before the next one")
        shape = None if gradient is None else self._setup.xp.shape(gradient)
        if shape is not None and shape != tensor.shape:
            raise ValueError(f"gradient of {name!r} has shape {shape}, but {tensor.shape} was built")

    def submit(self, name: str, gradient: Array | None, donated: bool) -> None:
        """Submit a gradient. ``donated``: its memory may be overwritten."""
        self.gradients[name] = gradient
        if donated:
            self._donated.add(name)

    def launch_complete(self) -> None:
        """Launch the next complete buckets, in order."""
        if self._setup.offload is not None and self._flights:
            self._flights[-1][0].depart()  # its message may still wait for the thread pool
        buckets = self._setup.table.buckets
        while self._launched < len(buckets) and buckets[self._launched].names <= self.gradients.keys():
            self.launch_next()

    def launch_next(self) -> None:
        """Launch the next bucket; its missing gradients count as absent."""
        bucket = self._setup.table.buckets[self._launched]
        self._launched += 1
        self.launch(bucket.name, bucket.units)

    def launch_rest(self) -> None:
        """Launch all remaining buckets."""
        while self._launched < len(self._setup.table.buckets):
            self.launch_next()

    def launch_names(self, names: Iterable[str], together: str) -> None:
        """Launch the units of these tensors: one message per bucket, or a single one named ``together``."""
        table = self._setup.table
        wanted = {table.unit(name) for name in names}
        groups = [(bucket.name, [unit for unit in bucket.units if unit in wanted]) for bucket in table.buckets]
        if together:
            groups = [(together, [unit for _, units in groups for unit in units])]
        for label, units in groups:
            if units:
                self.launch(label, tuple(units))

    def launch(self, name: str, units: tuple[Unit, ...]) -> None:
        """Send units as one message per round."""
        setup = self._setup
        step = setup.step.read()
        if setup.defer_commit or (setup.options.nonfinite == "raise" and not setup.xp.traced):
            setup.hold(units)
        flat = {unit: self._flatten(unit) for unit in units}
        self._show_policy(flat, ("rank0", "mean"))
        if setup.probe is not None and setup.measures_noise:
            self._samples |= {unit: setup.probe.sample(unit.name, x) for unit, x in flat.items() if not unit.dense}
        flat = {unit: setup.store.with_carried(unit, x) for unit, x in flat.items()}
        if setup.schedule is None or not setup.xp.tracing:
            self._flights.append((self._flight(name, flat, setup.levels(units), step), flat))
            return
        for number, group in enumerate(self._groups(units)):
            part = {unit: flat[unit] for unit in group}
            label = f"{name}.{number}" if number else name
            if group[0].dense:
                self._flights.append((self._flight(label, part, dict.fromkeys(group, 0), step), part))
            else:
                self._switch(label, part, step)

    def _flight(self, name: str, flat: Mapping[Unit, Array], levels: Mapping[Unit, int], step: Any) -> RoundScheduler:
        setup, xp = self._setup, self._setup.xp
        programs: dict[str, Program[Any]] = {}
        deferred = setup.deferred_kernels()
        for unit, x in flat.items():
            level = levels[unit]
            if not setup.plain(unit, level):
                way = setup.ways.at(unit.name, level)
                log = setup.store.rollback_log(unit) if xp.mutable else None
                elsewhere = setup.offload is not None and unit.name in setup.offload.units
                workspace = Workspace(log, None if elsewhere else deferred, setup.options.compile)
                ctx = setup.context(unit, step, workspace)
                programs[unit.name] = way.communicator.reduce(x, way.encoder, setup.store.state(unit, level), ctx)
        if dense := [unit for unit in flat if setup.plain(unit, levels[unit])]:
            sent = (xp.cast(flat[unit], setup.wire_dtype(unit, levels[unit])) for unit in dense)
            programs[DENSE] = _averaged(tuple(sent))
        if setup.track_missing or setup.tagged:
            programs[PRESENT] = self._presence(flat)
        if samples := [self._samples[unit] for unit in flat if unit in self._samples]:
            programs[SAMPLE] = _averaged((xp.concat(samples),))
        nbytes = sum(map(xp.nbytes, flat.values())) if xp.mutable else 0
        with xp.quiet():
            last = self._flights[-1][0] if self._flights else None
            before = None if last is None or last.depart() else last
            label = f"{name}.of{setup.number}" if setup.number else name  # a name that TensorFlow accepts
            room = partial(xp.buffers.payload_arena, nbytes)
            return RoundScheduler(label, programs, setup.transport, setup.trace, setup.offload, before, room, deferred)

    def _groups(self, units: tuple[Unit, ...]) -> list[list[Unit]]:
        # Groups of units that share a switch in a graph: one group of all units, or one for each compressed unit.
        # Compressed units come first.
        schedule = self._setup.schedule
        compressed, dense = [unit for unit in units if not unit.dense], [unit for unit in units if unit.dense]
        if schedule is not None and schedule.policy.together and compressed:
            return [[*compressed, *dense]]
        return [[unit] for unit in compressed] + ([dense] if dense else [])

    def _switch(self, name: str, flat: dict[Unit, Array], step: Any) -> None:
        # Trace the whole exchange at each level, so that a change of level needs no retracing.
        # Add byte counts outside the switch: a variable that all switches assign would serialise them.
        setup = self._setup
        assert setup.schedule is not None
        names = [tensor.name for unit in flat for tensor in unit.tensors]
        counted = [*(unit.name for unit in flat), *([SAMPLE] if setup.probe is not None else [])]

        def samples(flight: RoundScheduler) -> tuple[Array, ...]:
            return flight.results[SAMPLE] if setup.probe is not None else ()

        def at(level: int) -> Callable[[], Any]:
            def exchange() -> Any:
                levels = {unit: 0 if unit.dense else level for unit in flat}
                flight = self._flight(f"{name}.level{level}", flat, levels, step)
                while not flight.advance():
                    pass
                means, counts = self._commit(flight, flat, levels)
                rows = [counts[name] for name in counted]
                return [means[each] for each in names], setup.xp.asarray(rows, "int64"), samples(flight)

            return exchange

        index = setup.schedule.index(next(iter(flat)).name)
        means, rows, exact_means = setup.xp.switch(index, [at(level) for level in range(len(setup.ways))])
        setup.meter.add({name: setup.xp.integers(rows[number]) for number, name in enumerate(counted)})
        found = dict(zip(names, means, strict=True))
        self._switched.update(found)
        if setup.probe is not None:
            self._show_probe(flat, exact_means[0], found)

    def _flatten(self, unit: Unit) -> Array:
        # A vector that the exchange may overwrite if arrays are mutable: the donated gradient itself, or else a copy.
        xp = self._setup.xp
        parts, owned = [], False
        for tensor in unit.tensors:
            gradient = self.gradients.get(tensor.name)
            if gradient is None:
                parts.append(xp.zeros(tensor.size, unit.dtype))
                owned = True
            else:
                flat = xp.buffers.contiguous(xp.cast(xp.reshape(gradient, (-1,)), unit.dtype))
                owned = tensor.name in self._donated or (xp.mutable and not xp.buffers.same_memory(flat, gradient))
                parts.append(flat)
        owned = owned or len(parts) > 1 or unit.dense != ""
        return xp.concat(parts) if owned else xp.buffers.copy(parts[0])

    # -- headers -----------------------------------------------------------------------------------------------------
    def _presence(self, units: Iterable[Unit]) -> Program[Array]:
        setup = self._setup
        values: list[float] = []
        if setup.tagged:
            values += header(setup.step_number(), setup.attempt, bool(self.failure), setup.world_size)
        if setup.track_missing:
            values += [float(self.gradients.get(t.name) is not None) for unit in units for t in unit.tensors]
        (count,) = yield Reduce((setup.xp.asarray(values, "float32"),), "sum")
        return count

    def _check_headers(self) -> None:
        # All workers see the same sums, so all of them raise. On a device, check the previous exchange's headers: they
        # have arrived, so no synchronisation is needed.
        setup = self._setup
        if not setup.tagged:
            return
        place = (setup.step_number(), setup.attempt)
        found = [(place, flight.results[PRESENT]) for flight, _ in self._flights if PRESENT in flight.results]
        if not on_host(setup.xp):
            found, setup.headers = setup.headers, found
        for (step, attempt), sums in found:
            told = setup.xp.to_numpy(sums[:HEADER]).tolist()
            if not in_step(told, setup.world_size):
                raise out_of_step(setup.transport, step, attempt, self.failure, told)

    # -- wait --------------------------------------------------------------------------------------------------------
    def advance(self) -> bool:
        """Advance every bucket by one round, in order. True when the exchange is complete."""
        with self._setup.xp.quiet():
            if self._setup.offload is not None and self._flights and not self._departed:
                self._departed = self._flights[-1][0].depart(wait=True)
                return False  # return first: workers of one process must post their messages before any of them waits
            # a list: every flight must advance, also after one that is not done
            done = [flight.advance() for flight, _ in self._flights]
        return all(done)

    def land(self) -> dict[str, Array | None]:
        """Wait for all launched buckets, commit the new state, and return the means."""
        setup = self._setup
        while not self.advance():
            pass
        self._check_headers()
        means: dict[str, Array | None] = dict(self._switched)
        elements = sum(math.prod(unit.shape) for _, flat in self._flights for unit in flat)
        with setup.xp.quiet(), setup.xp.buffers.streaming_writes(elements):
            for flight, flat in self._flights:
                with setup.trace.span("decompress", flight.name):
                    found, counts = self._commit(flight, flat, setup.levels(flat))
                    setup.meter.add(counts)
                    means.update(found)
                    if SAMPLE in flight.results:
                        self._show_probe(flat, flight.results[SAMPLE][0], found)
        self._show_policy_means(means)
        return means

    def _commit(
        self, flight: RoundScheduler, flat: Mapping[Unit, Array], levels: Mapping[Unit, int]
    ) -> tuple[dict[str, Array | None], dict[str, list[Any]]]:
        commit = Commit(self._setup, flight, flat, levels, self.gradients)
        try:
            return commit.means(), commit.counts()
        finally:
            self.skipped += commit.skipped

    def abandon(self) -> None:
        """Wait for the messages in flight, then drop everything."""
        for flight, _ in self._flights:
            flight.settle()
        self.drop()

    def drop(self) -> None:
        """Release the gradients' memory and roll back uncommitted state."""
        for flight, _ in self._flights:
            flight.rest()  # the thread pool may still use the gradients' memory
        self._setup.store.rollback()

    # -- policy ------------------------------------------------------------------------------------------------------
    def _show_policy(self, flat: Mapping[Unit, Array], sources: tuple[str, ...]) -> None:
        schedule = self._setup.schedule
        if schedule is not None and schedule.policy.norm_source in sources:
            schedule.on_gradient({unit.name: x for unit, x in flat.items() if not unit.dense})

    def _show_policy_means(self, means: Mapping[str, Array | None]) -> None:
        setup = self._setup
        if setup.schedule is None or setup.schedule.policy.norm_source != "aggregated":
            return
        units = dict.fromkeys(setup.table.unit(name) for name in means)
        flat = {unit: mean for unit in units if (mean := self._joined(unit, means)) is not None}
        self._show_policy(flat, ("aggregated",))

    def _joined(self, unit: Unit, means: Mapping[str, Array | None]) -> Array | None:
        # The mean of a unit as float32[n]; None if one of its tensors has no mean.
        xp, parts = self._setup.xp, [means.get(tensor.name) for tensor in unit.tensors]
        if any(part is None for part in parts):
            return None
        flat = [xp.cast(xp.reshape(part, (-1,)), "float32") for part in parts]
        return xp.concat(flat) if len(flat) > 1 else flat[0]

    def _show_probe(self, flat: Iterable[Unit], exact: Array, means: Mapping[str, Array | None]) -> None:
        # ``exact``: the exact means of all samples, concatenated.
        setup = self._setup
        assert setup.schedule is not None
        assert setup.probe is not None
        units = [unit for unit in flat if unit in self._samples]
        parts = setup.xp.split(exact, [setup.probe.count(unit.name) for unit in units])
        for unit, part in zip(units, parts, strict=True):
            mean = self._joined(unit, means)
            if mean is not None:
                feeds_back = setup.schedule.feeds_back(unit.name)
                setup.probe.observe(unit.name, part, mean, feeds_back)


def _averaged(arrays: tuple[Array, ...]) -> Program[tuple[Array, ...]]:
    means = yield Reduce(arrays, "mean")
    return means
