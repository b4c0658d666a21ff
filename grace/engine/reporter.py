"""Reports of a Grace, and the record written from them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from grace.core import name_of
from grace.engine.about import about
from grace.engine.buckets import Unit
from grace.engine.record import Recorder, checked
from grace.engine.report import Report, TensorReport, leveled
from grace.engine.setup import Setup

UNTOLD = "no method was tried: call Grace.tune() after each step, or in Keras add a PolicyCallback"


class Reporter:
    """Reports on the steps since ``first_step``. On worker 0 it may write a record."""

    def __init__(self, setup: Setup):
        self._setup = setup
        self.notes: dict[str, str] = {}
        """Remarks for the report, by tensor."""
        self.parameters: Callable[[], list[TensorReport]] = list
        """A function that returns the rows of `Report.parameters`."""
        self.first_step = 0
        self.skipped = 0
        self.discarded = 0
        self._recorder: Recorder | None = None
        self._not_finite: set[str] = set()  # metrics that a warning has named
        self._weighed = False  # whether the traffic was compared with that of a dense allreduce
        if setup.given_transport is not None:
            self.open_record()

    # -- report ------------------------------------------------------------------------------------------------------
    def report(self, norms: bool = True) -> Report:
        """The report. ``norms``: add the norms of residuals, which takes a pass over them and waits for a device."""
        setup = self._setup
        units = setup.table.units
        leading = next((setup.ways[setup.level(unit)] for unit in units if not unit.dense), setup.ways[0])
        parts = (leading.method.compressor, leading.method.memory, leading.communicator)
        method = " + ".join(name_of(part) for part in parts)
        exchange = leading.choice and f"{name_of(leading.communicator)}: {leading.choice}"
        if not setup.bound:
            return Report(0, setup.rank, setup.world_size, method, 0, 0, 0, exchange=exchange)
        traffic = setup.meter.read()
        levels = {} if setup.schedule is None else setup.schedule.decision.levels
        residuals = setup.store.norms(units, levels, setup.snapshot) if norms else {}
        tensors = [self._tensor(unit, traffic[unit.name], residuals.get(unit.name)) for unit in units]
        return Report(
            steps=setup.step_number() - self.first_step,
            rank=setup.rank,
            world_size=setup.world_size,
            method=method,
            bytes_sent=sum(counts[0] for counts in traffic.values()),
            bytes_received=sum(counts[1] for counts in traffic.values()),
            bytes_dense=sum(tensor.bytes_dense for tensor in tensors),
            tensors=tensors,
            times={} if setup.xp.traced else dict(setup.trace.totals),
            skipped=self.skipped,
            discarded=self.discarded,
            **self._trials(),
            runs_as=setup.xp.kernels.isa if setup.xp.kernels else "plain functions",
            exchange=exchange,
            plan=leading.communicator.origin,
            parameters=self.parameters(),
        )

    def _tensor(self, unit: Unit, traffic: Any, residual: float | None) -> TensorReport:
        setup = self._setup
        untold = UNTOLD if setup.store.switches and setup.schedule is not None and not setup.schedule.told else ""
        refused = setup.ways.refused(unit.name, setup.level(unit))
        reasons = [unit.dense or untold or refused, *(self.notes.get(tensor.name) for tensor in unit.tensors)]
        way = setup.way(unit)
        compressor = name_of(way.communicator.method(way.method, unit.name).compressor)
        return TensorReport(
            name=unit.name,
            shape=unit.shape,
            method="dense" if unit.dense or refused else compressor,
            reason="; ".join(filter(None, reasons)),
            bytes_sent=traffic[0],
            bytes_dense=traffic[2] * sum(tensor.nbytes for tensor in unit.tensors),
            residual_norm=residual,
            levels=self._levels(unit),
            strategy=setup.store.strategy(unit, setup.level(unit)),
        )

    def _levels(self, unit: Unit) -> list[tuple[int, dict[str, Any]]]:
        schedule = self._setup.schedule
        if schedule is None or unit.dense:
            return []
        ways = self._setup.ways
        history = ((epoch, ways.level(unit.name, level)) for epoch, level in schedule.history[unit.name])
        return [(epoch, dict(schedule.levels[level])) for epoch, level in history]

    def _trials(self) -> dict[str, Any]:
        schedule = self._setup.schedule
        if schedule is None:
            return {}
        names = [leveled(level) for level in schedule.levels]
        seconds = schedule.policy.trials(schedule.decision)
        forecasts = schedule.policy.forecasts(schedule.decision)
        return {
            "trials": {names[level]: each for level, each in seconds.items()},
            "noise": {names[level]: each.noise_ratio for level, each in forecasts.items()},
            "predicted": {names[level]: each.seconds for level, each in forecasts.items()},
            "chosen": schedule.policy.why(schedule.decision, names),
        }

    def begin_anew(self) -> None:
        """Reset all counts."""
        setup = self._setup
        if setup.step is not None:
            self.first_step = setup.step_number()
            setup.reset_meter()
        setup.trace.totals.update(dict.fromkeys(setup.trace.totals, 0.0))
        self.skipped = self.discarded = 0

    # -- record ------------------------------------------------------------------------------------------------------
    @property
    def recording(self) -> bool:
        """Whether a record was begun."""
        return self._recorder is not None and self._recorder.begun

    def open_record(self) -> None:
        """Prepare the record, on worker 0. FileNotFoundError if its folder is missing."""
        options = self._setup.options
        if options.record and self._setup.rank == 0 and self._recorder is None:
            self._recorder = Recorder(options.record, options.record_every, options.tracker)

    def begin_record(self, again: bool = False) -> None:
        """Write the first line of a record, once, or ``again`` after a change."""
        if self._recorder is not None and (again or not self._recorder.begun):
            self._recorder.begin(self.report(), self._setup.step_number(), about(self._setup))

    def record(self, metrics: Mapping[str, Any] | None = None) -> None:
        """Write a line, with ``metrics``. Only worker 0 writes, but all workers raise errors."""
        numbers = checked(metrics or {})
        if numbers and not self._setup.bound:
            raise RuntimeError("there are no tensors yet: record metrics after the first step, or call build first")
        if self._recorder is not None and self._recorder.begun:
            step = self._setup.step_number()
            self._recorder.write(self.report(), step, numbers)
            if bad := {name for name, value in numbers.items() if value is None} - self._not_finite:
                self._not_finite |= bad
                names = ", ".join(map(repr, sorted(bad)))
                warnings.warn(f"not finite at step {step}, and null in the record: {names}", stacklevel=3)

    def step_passed(self) -> None:
        """Write a line of the record if one is due.

        After the first step, worker 0 warns if it received more than in a dense allreduce.
        """
        setup = self._setup
        if not self._weighed and not setup.xp.tracing and setup.schedule is None:
            self._weighed = True
            if setup.rank == 0 and (heavier := self.report(norms=False).heavier):
                warnings.warn(heavier, stacklevel=4)
        if self._recorder is not None and not setup.xp.tracing and self._recorder.passed():
            self.record()
