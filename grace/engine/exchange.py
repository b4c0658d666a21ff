"""One exchange: averages the gradients of a step. An exchange that is dropped is rolled back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from grace.core import Array
from grace.engine.buckets import CHANGED, Unit
from grace.engine.commit import Commit
from grace.engine.flight import Flight, averaged
from grace.engine.groups.book import Layout
from grace.engine.handshake import HEADER, header, in_step, out_of_step
from grace.engine.probe import NoiseProbe
from grace.engine.setup import PRESENT, SAMPLE, Setup
from grace.engine.vectors import flattened, joined, of_group, of_joined, whole


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
        self._flights: list[Flight] = []
        self._launched = 0  # number of launched buckets
        self._departed = False  # with a thread pool: whether all launched buckets were encoded and sent
        self._switched: dict[str, Array] = {}  # means of tensors whose exchange was traced at every level
        self._sampled: dict[Unit, Array] = {}  # this worker's gradients, whose samples measure noise

    @property
    def begun(self) -> bool:
        """Whether a gradient was submitted or a bucket launched."""
        return bool(self.gradients or self._flights)

    # -- submit ------------------------------------------------------------------------------------------------------
    def submit(self, gradients: Mapping[str, Array | None], donated: bool) -> None:
        """Submit gradients. ``donated``: their memory may be overwritten.

        Raises KeyError, RuntimeError or ValueError, and submits none, if one of them cannot be submitted.
        """
        tensors = self._setup.table.tensors
        for name, gradient in gradients.items():
            if name not in tensors:
                raise KeyError(
                    f"{name!r} was not built; build(named_tensors) must name every tensor before its first gradient"
                )
            if name in self.gradients:
                raise RuntimeError(f"{name!r} has a gradient in this step already: finish the step before the next one")
            if gradient is None:
                continue
            if (shape := gradient.shape) != tensors[name].shape:
                raise ValueError(
                    f"gradient of {name!r} has shape {tuple(shape)}, but {tensors[name].shape} was built. {CHANGED}"
                )
        self.gradients.update(gradients)
        if donated:
            self._donated.update(gradients)

    def next_bucket(self) -> set[str]:
        """The tensors of the next bucket that have no submitted gradient."""
        buckets = self._setup.table.buckets
        return set() if self._launched >= len(buckets) else set(buckets[self._launched].names - self.gradients.keys())

    def launch_complete(self) -> None:
        """Launch the next complete buckets, in order."""
        if self._setup.offload is not None and self._flights:
            self._flights[-1].scheduler.depart()  # its message may still wait for the thread pool
        buckets = self._setup.table.buckets
        while self._launched < len(buckets) and buckets[self._launched].names <= self.gradients.keys():
            self.launch_next()

    def launch_next(self) -> None:
        """Launch the next bucket; its missing gradients count as absent."""
        bucket, left = self._setup.table.buckets[self._launched], self._setup.left
        self._launched += 1
        units = bucket.units
        if left:
            units = tuple(unit for unit in units if not left.issuperset(tensor.name for tensor in unit.tensors))
        if units:
            self.launch(bucket.name, units)
            self._begin_later_rounds()

    def launch_rest(self) -> None:
        """Launch all remaining buckets."""
        while self._launched < len(self._setup.table.buckets):
            self.launch_next()

    def launch_names(self, names: Iterable[str], together: str) -> None:
        """Launch the units of these tensors: one message per bucket, or a single one named ``together``."""
        messages = self._setup.table.messages(tuple(names), together)
        for label, units in messages:
            self.launch(label, units)
        if len(messages) == 1:  # one bucket of a running backward pass
            self._begin_later_rounds()

    def launch(self, name: str, units: tuple[Unit, ...]) -> None:
        """Send units as one message per round."""
        setup = self._setup
        levels = setup.levels(units)
        layout = setup.groups.of(levels)
        if (setup.defer_commit and setup.keeps_base) or (setup.options.nonfinite == "raise" and not setup.xp.traced):
            setup.hold(units, layout if setup.xp.mutable else Layout(rest=units))
        flat = self._vectors(units, layout)
        if setup.schedule is None or not setup.xp.tracing:
            self._flights.append(self._flight(name, flat, levels, layout, self._sample(flat)))
            return
        for number, group in enumerate(self._groups(units)):
            part = {unit: flat[unit] for unit in group}
            label = f"{name}.{number}" if number else name
            if group[0].dense:
                self._flights.append(self._flight(label, part, dict.fromkeys(group, 0), Layout(rest=tuple(group))))
            else:
                self._switch(label, part)

    def _begin_later_rounds(self) -> None:
        # Begin the next round of all messages but the last, while gradients are still computed. This depends on the
        # messages alone, so all workers send in one order. Skipped for workers in lockstep, which must all post a
        # message before one waits; on devices, whose computation would wait; and where a thread pool sends.
        setup = self._setup
        if setup.transport.lockstep or setup.xp.tracing or not setup.xp.on_host or setup.offload is not None:
            return
        for flight in self._flights[:-1]:
            if flight.begun < flight.rounds:
                flight.begun += 1
                with setup.xp.quiet():
                    flight.scheduler.advance()

    def _vectors(self, units: tuple[Unit, ...], layout: Layout) -> dict[Unit, Array]:
        # Each unit's gradients as a vector, plus the residual that a change of strategy left.
        setup, xp, flat = self._setup, self._setup.xp, dict.fromkeys(units)
        if setup.schedule is None and not setup.store.carries:
            for each in layout.groups:
                if (found := of_group(xp, each, self.gradients, self._donated)) is not None:
                    flat.update(zip(each.units, found, strict=True))
            for vector in layout.joined:
                if (found := of_joined(vector, self.gradients)) is not None:
                    flat.update(zip(vector.units, found, strict=True))
        missing = [unit for unit, x in flat.items() if x is None]
        flat.update({unit: flattened(xp, unit, self.gradients, self._donated) for unit in missing})
        self._show_policy(flat, ("rank0", "mean"))
        if setup.measures_noise:
            self._sampled |= {unit: x for unit, x in flat.items() if not unit.dense}
        flat.update({unit: setup.store.with_carried(unit, flat[unit]) for unit in missing})
        return flat

    def _flight(
        self,
        name: str,
        flat: Mapping[Unit, Array],
        levels: Mapping[Unit, int],
        layout: Layout,
        sample: Array | None = None,
    ) -> Flight:
        last = self._flights[-1].scheduler if self._flights else None
        return Flight(self._setup, name, flat, levels, layout, self._presence(flat), sample, last, self._donated)

    def _sample(self, units: Iterable[Unit]) -> Array | None:
        # Returns a sample of these units' gradients, before an exchange overwrites them; None if noise is not measured.
        probe, found = self._setup.probe, {unit.name: self._sampled[unit] for unit in units if unit in self._sampled}
        return None if probe is None or not found else probe.sample(found)

    def _groups(self, units: tuple[Unit, ...]) -> list[list[Unit]]:
        # Returns groups of units that share a switch in a graph: one group of all units if the policy decides for them
        # together, else a group of each compressed unit and one of all dense units. Compressed units come first.
        schedule = self._setup.schedule
        compressed, dense = [unit for unit in units if not unit.dense], [unit for unit in units if unit.dense]
        if schedule is not None and schedule.policy.together and compressed:
            return [[*compressed, *dense]]
        return [[unit] for unit in compressed] + ([dense] if dense else [])

    def _switch(self, name: str, flat: dict[Unit, Array]) -> None:
        # Trace the whole exchange at each level, so that a change of level needs no retracing.
        # Add byte counts outside the switch, because a variable that all switches assign would serialise the switches.
        setup = self._setup
        assert setup.schedule is not None
        names = [tensor.name for unit in flat for tensor in unit.tensors]

        def at(level: int) -> Callable[[], Any]:
            def exchange() -> Any:
                levels = {unit: 0 if unit.dense else level for unit in flat}
                flight = self._flight(f"{name}.level{level}", flat, levels, setup.groups.of(levels, switched=True))
                while not flight.scheduler.advance():
                    pass
                means, counts = self._commit(flight)
                rows = [counts[unit.name] for unit in flat]
                return [means[each] for each in names], setup.xp.asarray(rows, "int64")

            return exchange

        index = setup.schedule.index(next(iter(flat)).name)
        means, rows = setup.xp.switch(index, [at(level) for level in range(len(setup.ways))])
        setup.meter.add_rows([unit.name for unit in flat], rows)
        found = dict(zip(names, means, strict=True))
        self._switched.update(found)
        if (probe := setup.probe) is not None:
            self._measure(probe, name, flat, found)

    def _measure(self, probe: NoiseProbe, name: str, flat: Mapping[Unit, Array], means: Mapping[str, Array]) -> None:
        # Trace the measurement of noise, which runs only in the steps that use it.
        setup, xp = self._setup, self._setup.xp

        def measure() -> Array:
            exact, counts = averaged(setup, name, self._sample(flat))
            self._show_probe(flat, exact, means)
            return xp.asarray([counts], "int64")

        rows = xp.switch(probe.wanted.read(), [lambda: xp.zeros((1, 3), "int64"), measure])
        setup.meter.add_rows([SAMPLE], rows)

    # -- headers -----------------------------------------------------------------------------------------------------
    def _presence(self, units: Iterable[Unit]) -> list[float]:
        # Returns the header, and for each tensor whether this worker has a gradient.
        setup = self._setup
        values: list[float] = header(setup.place(), bool(self.failure), setup.world_size) if setup.tagged else []
        if setup.track_missing:
            gradients = self.gradients
            values += [float(gradients.get(t.name) is not None) for unit in units for t in unit.tensors]
        return values

    def _check_headers(self) -> None:
        # All workers see the same sums, so all of them raise. On a device, check the previous step's headers, whose
        # copies have arrived, so that the host need not wait for this step's.
        setup = self._setup
        if not setup.tagged:
            return
        place, results = setup.place(), [flight.scheduler.results for flight in self._flights]
        fetch = setup.xp.buffers.fetch
        found = [(place, fetch(each[PRESENT][:HEADER])) for each in results if PRESENT in each]
        if not setup.xp.on_host:
            setup.arriving += found
            found, setup.headers = setup.headers, []
        for at, sums in found:
            told = sums().tolist()
            if not in_step(told, setup.world_size):
                raise out_of_step(setup.transport, at, self.failure, told)

    # -- wait --------------------------------------------------------------------------------------------------------
    def advance(self) -> bool:
        """Advance every bucket by one round, in order. True when the exchange is complete."""
        with self._setup.xp.quiet():
            if self._setup.offload is not None and self._flights and not self._departed:
                self._departed = self._flights[-1].scheduler.depart(wait=True)
                return False  # return first: workers of one process must post their messages before any of them waits
            # a list, not a generator: every flight must advance, even after one that is not done
            done = [flight.scheduler.advance() for flight in self._flights]
        return all(done)

    def land(self) -> dict[str, Array | None]:
        """Wait for all launched buckets, commit the new state, and return the means."""
        setup = self._setup
        while not self.advance():
            pass
        self._check_headers()
        means: dict[str, Array | None] = dict(self._switched)
        elements = sum([unit.size for flight in self._flights for unit in flight.flat])
        with setup.xp.quiet(), setup.xp.buffers.streaming_writes(elements):
            for flight in self._flights:
                with setup.trace.span("decompress", flight.scheduler.name):
                    found, counts = self._commit(flight)
                    setup.meter.add(counts)
                    means.update(found)
                    if SAMPLE in flight.scheduler.results:
                        self._show_probe(flight.flat, flight.scheduler.results[SAMPLE][0], found)
        self._show_policy_means(means)
        return means

    def _commit(self, flight: Flight) -> tuple[dict[str, Array | None], dict[str, list[Any]]]:
        commit = Commit(self._setup, flight, self.gradients)
        try:
            return commit.means(), commit.counts()
        finally:
            self.skipped += commit.skipped

    def abandon(self) -> None:
        """Wait for the messages in flight, then drop everything."""
        for flight in self._flights:
            flight.scheduler.settle()
        self.drop()

    def drop(self) -> None:
        """Release the gradients' memory, once groups have restored the residuals that they swapped into it."""
        for flight in self._flights:
            flight.scheduler.rest()  # the thread pool may still use the gradients' memory
            flight.undo()

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
        flat = {unit: mean for unit in units if (mean := joined(setup.xp, unit, means)) is not None}
        self._show_policy(flat, ("aggregated",))

    def _show_probe(self, flat: Iterable[Unit], exact: Array, means: Mapping[str, Array | None]) -> None:
        # ``exact``: the exact means of all samples, concatenated.
        setup, xp = self._setup, self._setup.xp
        assert setup.schedule is not None
        assert setup.probe is not None
        found = {unit.name: whole(xp, unit, means) for unit in flat if unit in self._sampled}
        if any(mean is None for mean in found.values()):
            parts = xp.split(exact, list(map(setup.probe.count, found)))
            exact = xp.concat([part for part, mean in zip(parts, found.values(), strict=True) if mean is not None])
        if present := {name: mean for name, mean in found.items() if mean is not None}:
            setup.probe.observe(exact, present, setup.schedule.feeds_back(list(present)))
