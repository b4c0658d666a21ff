"""The parts that all exchanges of a Grace share: method, workers, tensors, state and options."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from grace.backends import Backend
from grace.core import Array, Context, Transport, name_of
from grace.core.communicator import Communicator
from grace.core.method import Method
from grace.core.policy import Policy
from grace.core.version import VERSION
from grace.engine.applied import Windows
from grace.engine.buckets import Tensor, Unit, layout
from grace.engine.groups.book import GroupBook, Layout
from grace.engine.handshake import Place, agree
from grace.engine.levels import Way, Ways
from grace.engine.meter import Meter
from grace.engine.options import Options
from grace.engine.policy_runner import Schedule
from grace.engine.probe import NoiseProbe
from grace.engine.scheduler import WorkerPool, pool_of
from grace.engine.state_store import Snapshot, StateStore
from grace.engine.tensors import TensorTable
from grace.engine.trace import Trace
from grace.transports import get_transport

DENSE = "(dense)"
"""The name of the program that averages uncompressed units as separate arrays."""
PRESENT = "(present)"
"""The name of the program that sums headers and counts, per tensor, the workers with a gradient."""
SAMPLE = "(sample)"
"""The name of the program that averages a sample of each tensor exactly, for a policy that measures noise."""
LAYOUTS = ("[in, out]", "[out, in]")
"""The layouts in which Keras's kernels (weight matrices) are exchanged: unchanged, or transposed."""
_built = 0  # number of Graces in this process that have compared their tensors with other workers


class Setup:
    """Method, workers, tensors, state and options: known before an exchange, equal on all workers."""

    def __init__(
        self,
        method: Method,
        communicator: Communicator,
        transport: Transport | None,
        options: Options,
        policy: Policy | None,
    ):
        self.method, self.options, self.policy = method, options, policy
        self.unresolved = communicator
        """The communicator as given, before the number of workers is known."""
        self.schedule = None if policy is None else Schedule(policy, method, communicator)
        self.ways = Ways(policy.exact if policy is not None and options.fuse == "tensor" else None)
        self.table = TensorTable()
        self.store = StateStore(self.ways, self.schedule)
        self.snapshot = Snapshot(self.store)
        self.groups = GroupBook(self)
        self.trace = Trace(options.trace)
        self.meter: Any = None
        self.step: Any = None
        """Number of steps made: a cell of the backend; None before there are tensors."""
        self.offload: WorkerPool | None = None
        self.track_missing = False
        self.defer_commit = False
        self.keeps_base = True
        """With `defer_commit`: whether the state before an exchange is kept; if not, a discard zeroes the residuals."""
        self.transposed = False
        """Whether Keras's kernels, [in, out], are exchanged as [out, in]; see `choose_layout`."""
        self.saved_layout: bool | None = None
        """`transposed` of a state loaded before there were tensors; None if it holds no arrays."""
        self.learning_rate: Callable[[str], Any] | None = None
        self.number: int | None = None
        """A number in the names of messages, to distinguish several Graces; all workers agree on it."""
        self.attempt = 0
        """Number of exchanges since the last counted step."""
        self.exchanges = 0
        self.by_hand = False
        """Whether the gradients of this exchange were set by hand."""
        self.windows = Windows()
        self.left: frozenset[str] = frozenset()
        """Tensors that are excluded from exchanges."""
        self.leaving = self.left
        """The next value of `left`; the workers agree on it in the next exchange."""
        self.headers: list[tuple[Place, Callable[[], Any]]] = []
        """Place and summed header of each message of the last step, if a device holds the sums."""
        self.arriving: list[tuple[Place, Callable[[], Any]]] = []
        """As `headers`, for the current step."""
        self.loaded_step: int | None = None
        """Step of a state loaded before there were tensors."""
        self._xp: Backend | None = None
        self._transport: Transport | None = None
        self._prepared = False
        if options.compile:
            warnings.warn("compile=True has no effect any more: native kernels are faster. Leave it out", stacklevel=4)
        self._unsettled: dict[str, Tensor] = {}  # tensors by name, not yet compared with the other workers'
        for each, _ in self._methods:
            each.check()
        if transport is None:
            self.ways.resolve(self._methods, None, options)
        else:
            self.join(transport)

    # -- workers -----------------------------------------------------------------------------------------------------
    @property
    def xp(self) -> Backend:
        """The backend of the tensors. RuntimeError before there are any."""
        if self._xp is None:
            raise RuntimeError("call build(named_tensors) first: nothing is known about the gradients yet")
        return self._xp

    @property
    def bound(self) -> bool:
        """Whether the backend is known."""
        return self._xp is not None

    @property
    def transport(self) -> Transport:
        """The transport; if none was given, the first read looks up the group of workers."""
        if self._transport is None:
            return self.join(get_transport())
        return self._transport

    @property
    def given_transport(self) -> Transport | None:
        """The transport, if it is known."""
        return self._transport

    def join(self, transport: Transport) -> Transport:
        """Set the transport, and resolve the communicator for its workers."""
        self.ways.resolve(self._methods, transport, self.options)
        self._transport = transport
        return transport

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def world_size(self) -> int:
        return self.transport.size

    @property
    def communicator(self) -> Communicator:
        """The communicator of the first level, resolved."""
        return self.ways[0].communicator

    @property
    def tagged(self) -> bool:
        """Whether exchanges carry a header. Local workers run in lockstep and need none; graphs cannot read one."""
        return self.world_size > 1 and not self.transport.lockstep and not self.xp.tracing

    @property
    def _methods(self) -> Sequence[tuple[Method, Communicator]]:
        return [(self.method, self.unresolved)] if self.schedule is None else self.schedule.ways

    # -- tensors -----------------------------------------------------------------------------------------------------
    def bind(self, xp: Backend) -> None:
        """Set the backend, from the first tensors."""
        self._transport = self.transport.bind(xp)
        self._xp = xp
        self.store.bind(xp)
        self.transport.timeout, self.transport.contents = self.options.timeout, self.table.contents
        if self.transport.elastic:
            for way in self.ways:
                way.communicator.adopt_local_plan(self.transport)
        else:
            self._prepare()

    def _prepare(self) -> None:
        self.ways.measure(self._methods, self.transport, self.options)
        for way in self.ways:
            way.communicator.create_groups(self.transport)
        self._prepared = True

    def settle(self) -> None:
        """Compare tensors with the other workers, and create the groups of workers."""
        if not self._prepared and self.bound:
            self._prepare()
        if self._unsettled:
            self._agree(self._unsettled.values())
            self._unsettled = {}

    def choose_layout(self) -> bool:
        """Return `transposed`. Until there are tensors, each call decides it anew.

        A loaded state with arrays determines it. Otherwise it is True if any method that may run is blockwise.
        """
        if not self.bound:
            blockwise = any((method.compressor.traits.block_size or 0) > 1 for method, _ in self._methods)
            self.transposed = blockwise if self.saved_layout is None else self.saved_layout
        return self.transposed

    def add(self, new: Mapping[str, Tensor]) -> None:
        """Lay out new tensors and create their state."""
        xp = self.xp
        if self.transport.elastic:
            self._unsettled.update(new)
        else:
            self._agree(new.values())
        method, first = name_of(self.method.compressor), len(self.table.buckets)
        buckets = layout(new.values(), method, self._refusal, self.options, xp, first, self._lossless)
        units = [unit for bucket in buckets for unit in bucket.units]
        first_tensors = self.step is None
        self.table.add(new, buckets)
        if first_tensors:
            self.step = xp.cell(0)
            self.reset_meter()
        for unit in units:
            ctx = self.context(unit, 0)
            if not unit.dense:
                self.ways.add(unit.name, ctx)
            ways = self.ways[:1] if unit.dense else self.ways.of(unit.name)
            memories = (way.method.memory.init_dense(ctx) for way in ways)
            states = memories if unit.dense else (way.communicator.init(way.method, ctx) for way in ways)
            self.store.add(unit, list(states))
        if self.schedule is not None:
            sizes = {unit.name: math.prod(unit.shape) for unit in units if not unit.dense}
            self.schedule.extend(sizes, xp, self.rank)
        self.meter.extend([unit.name for unit in units])
        self.offload = pool_of(self.table.compressed(), self.ways, xp) if xp.can_read_values else None

    def reset_meter(self) -> None:
        """Reset the byte counts."""
        self.meter = Meter(self.xp)
        self.meter.extend([PRESENT] if self.probe is None else [PRESENT, SAMPLE])

    def _refusal(self, ctx: Context) -> str:
        return self.ways.refusal(replace(ctx, rank=self.rank, world_size=self.world_size))

    def _lossless(self, name: str) -> bool:
        methods = [way.communicator.method(way.method, name) for way in self.ways]
        return all(each.compressor.traits.lossless and name_of(each.memory) == "none" for each in methods)

    def _agree(self, tensors: Iterable[Tensor]) -> None:
        settings = {
            "grace's version": VERSION,
            "compressor": repr(self.method.compressor),
            "memory": repr(self.method.memory),
            "communicator": "; ".join(dict.fromkeys(repr(way.communicator) for way in self.ways)),
            "policy": repr(self.policy),
            "the checkpoint that was loaded": "none" if self.loaded_step is None else f"of step {self.loaded_step}",
            "the layout of Keras's kernels (a loaded checkpoint keeps its own)": LAYOUTS[self.transposed],
            # Kernels and plain functions read the same payloads, but a graph may round a division by a constant
            # differently.
            "the use of native kernels": "on" if self.xp.kernels else "off",
            # The record concerns worker 0 alone, and each worker may set its own trace.
            **asdict(replace(self.options, record="", record_every=1, trace=0, tracker=None)),
        }
        global _built
        number = agree(self.transport, settings, tensors, _built)
        # workers in one process would each get a different number
        if self.number is None and not self.transport.lockstep:
            self.number = self.table.number = number
            _built = number + 1

    # -- a unit ------------------------------------------------------------------------------------------------------
    def level(self, unit: Unit) -> int:
        """A unit's current policy level."""
        return 0 if self.schedule is None or unit.dense else self.schedule.level(unit.name)

    def levels(self, units: Iterable[Unit]) -> dict[Unit, int]:
        """The level of each unit."""
        if self.schedule is None:
            return dict.fromkeys(units, 0)
        return {unit: self.level(unit) for unit in units}

    def way(self, unit: Unit) -> Way:
        """The method and communicator of a unit at its current policy level."""
        return self.ways.at(unit.name, self.level(unit))

    def plain(self, unit: Unit, level: int) -> bool:
        """Return whether a unit is averaged uncompressed, in its bucket's single dense message."""
        return unit.dense != "" or self.ways.at(unit.name, level).dense

    def wire_dtype(self, unit: Unit, level: int) -> str:
        """The wire dtype of a unit that is averaged uncompressed."""
        lossless = unit.lossless or self.ways.at(unit.name, level).method.compressor.traits.lossless
        return unit.wire if lossless else unit.dtype

    def context(self, unit: Unit, step: Any, draws: dict[Any, Array] | None = None) -> Context:
        """The context of a unit in a step. ``draws``: the step's cache for `Context.once`."""
        return Context(
            xp=self.xp,
            name=unit.name,
            shape=unit.shape,
            dtype=unit.dtype,
            wire=unit.wire,
            rank=self.rank,
            world_size=self.world_size,
            step=step,
            seed=self.options.seed,
            lr=None if self.learning_rate is None else partial(self.learning_rate, unit.tensors[0].name),
            _draws=draws,
        )

    @property
    def probe(self) -> NoiseProbe | None:
        """The probe that measures the noise of exchanges, for a policy that wants it; else None."""
        return None if self.schedule is None else self.schedule.probe

    @property
    def measures_noise(self) -> bool:
        """Whether the noise of this step's exchange is measured."""
        return self.schedule is not None and self.schedule.measures(self.world_size)

    def step_number(self) -> int:
        """Number of steps made, on the host."""
        return 0 if self.step is None else int(self.step.read())

    def place(self) -> Place:
        """This worker's position in the sequence of exchanges, for their headers."""
        decided = self.windows.digest, dict(self.windows.recent)
        return Place(self.step_number(), self.attempt, self.exchanges, self.by_hand, *decided)

    def hold(self, units: Iterable[Unit], layout: Layout) -> None:
        """Keep the state of units, and of groups among them, from before an exchange that may be discarded."""
        measured, alone = self.measures_noise, set(layout.rest)
        for each in layout.groups:
            each.group.hold()
        for unit in layout.rest if self.schedule is None and not self.store.carries else units:
            cells = self.cells(unit, measured, unit in alone)
            if unit not in alone and (carried := self.store.carried(unit)) is not None:
                cells = [*cells, carried]
            for cell in cells:
                self.snapshot.take(self.xp, cell)

    def cells(self, unit: Unit, measured: bool = True, state: bool = True) -> list[Any]:
        """The cells of a unit that an exchange changes. ``measured``: whether its noise is measured."""
        level = None if self.xp.tracing else self.level(unit)  # a graph chooses the level at run time
        cells = self.store.cells(unit, level) if state else []
        return cells if self.schedule is None else [*cells, *self.schedule.cells(unit.name, measured)]

    def switch_level(self, name: str, before: int) -> None:
        """Move a unit to its new level, and initialise state that does not survive the change."""
        unit = self.table.by_name()[name]
        way, ctx, level = self.way(unit), self.context(unit, 0), self.level(unit)
        self.store.enter(unit, before, level, way.communicator.init(way.method, ctx), ctx)
