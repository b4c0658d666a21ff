"""Grace: holds the triple, the transport and every tensor's state, and drives a gradient's way to the mean."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

from grace.backends import Backend, backend_of
from grace.core import Array, Calls, Context, Memory, Program, Transport, name_of
from grace.core.collectives import Reduce
from grace.core.communicator import Communicator
from grace.core.dtypes import ITEMSIZE
from grace.core.method import Method, materialize
from grace.core.policy import Decision, Policy
from grace.core.version import VERSION
from grace.engine.buckets import Bucket, Tensor, Unit, layout
from grace.engine.compiled import uncompiled
from grace.engine.encoders import FastMethod
from grace.engine.handshake import HEADER, agree, header, in_step, out_of_step
from grace.engine.lazy_mean import LazyMean, all_finite
from grace.engine.meter import Meter
from grace.engine.options import Options
from grace.engine.policy_runner import Schedule
from grace.engine.record import Recorder
from grace.engine.report import Report, TensorReport, leveled
from grace.engine.reshard import check_form, complete, renamed, sizes_of
from grace.engine.scheduler import Flight, Offload
from grace.engine.state_store import Fitted, Kept, Snapshot, Way, exported
from grace.engine.trace import Trace
from grace.transports import get_transport
from grace.transports.local import LocalTransport, World

FORMAT = 2  # of state_dict
FLOATS = ("float16", "bfloat16", "float32", "float64")
MOMENTUM_TWICE = "memory {!r} has momentum of its own: set the optimizer's momentum to 0"
SPARSE = "its sparse gradients are made dense first"
UNTOLD = "no method was tried: call Grace.tune() after each step, or in Keras add a PolicyCallback"
_built = 0  # Graces of this process that have compared their tensors with other workers
PRESENT = "(present)"  # the program that says which step this is, and counts who has a gradient
DENSE = "(dense)"  # the program of all tensors of a bucket that go dense


class Job(NamedTuple):
    """A gradient on its way; `Grace.finish` gives its mean."""

    name: str


class Grace:
    """A method, a communicator and a transport at work on named gradients.

    Made by `grace.grace_from_params`. The toolkits' doors (`grace.torch`, `grace.tensorflow`) drive it; so may you, by
    `build` once and `step` (or `start` and `finish`) for every exchange. Every worker must make the same calls.
    """

    def __init__(
        self,
        method: Method,
        communicator: Communicator,
        transport: Transport | None,
        options: Options,
        policy: Policy | None = None,
    ):
        self.schedule = None if policy is None else Schedule(policy, method, communicator)
        """The policy at work, if there is one."""
        self.method, self.options = method, options
        self._unfitted = communicator
        self._ways: list[Way] = []
        for each, _ in self._methods:
            each.check()
        self._transport: Transport | None = None
        self._recorder: Recorder | None = None
        if transport is None:
            self._fit(None)
        else:
            self._settle_workers(transport)
        self.track_missing = False
        """Some gradient may be absent on some workers (None): costs 4 bytes per tensor and step."""
        self.defer_commit = False
        """A step's state is provisional until `commit`; `rollback` restores what was before. For integrations that see
        whether the optimizer applies the means. Costs a copy of the state."""
        self.learning_rate: Callable[[str], Any] | None = None
        """Gives a tensor's learning rate by its name, for memories that need it. The toolkits' doors set it."""
        self.bindings: dict[Any, str] = {}
        """Names of a toolkit's variables by their identities, where names alone do not tell variables apart."""
        self.awaited: dict[str, int] = {}
        """Tensors of a state that was loaded before `build`, and how many elements they have."""
        self.claimed: set[str] = set()
        """Those of these names that were used since a state was loaded: no other variable may have them."""
        self._xp: Backend | None = None
        self._tensors: dict[str, Tensor] = {}
        self._buckets: list[Bucket] = []
        self._unit_of: dict[str, Unit] = {}
        self._kept = Kept(self._ways, self.schedule)
        self._offload: Offload | None = None
        self._notes: dict[str, str] = {}
        self._step: Any = None
        self._meter: Any = None
        self.trace = Trace(options.trace)
        """Where the time goes; the toolkits' doors note what they know."""
        self._weighed = False
        self._skipped = 0
        self._discarded = 0
        self._paused = False
        self._snapshot = Snapshot()
        self._provisional = False  # the last exchange waits for `commit` or `rollback`
        self._attempt = 0  # exchanges since the last commit
        self._number: int | None = (
            None  # tells this Grace's messages from another one's that are under way; on all workers
        )
        self._failure = ""  # why this worker gives up the step under way
        self._headers: list[tuple[tuple[int, int], Array]] = []  # on a device: checked with the next exchange
        self._first_step = 0  # from which on the report counts
        self._unsettled: dict[str, Tensor] = {}  # not compared with the other workers' yet
        self._prepared = False
        self._told = False  # what compile=True does not do
        self._waiting: partial[None] | None = None  # a checkpoint that came before the tensors
        self._clear()

    def __deepcopy__(self, memo: Any) -> Grace:
        """A Grace of the same settings, workers and state, with tensors and a count of its own."""
        copy = Grace(self.method, self._unfitted, self._transport, self.options, self._policy)
        if self._xp is not None:
            copy.load_state_dict(self.state_dict())
        return copy

    def __reduce__(self) -> Any:
        # Settings alone: state is each worker's own (`state_dict`), and a group of workers is found where it is loaded.
        return Grace, (self.method, self._unfitted, None, self.options, self._policy)

    def _clear(self) -> None:
        self._kept.drop()  # what is not kept by now is of a step that does not count
        self._gradients: dict[str, Array | None] = {}
        self._spent: set[str] = set()
        self._flights: list[tuple[Flight, dict[Unit, Array]]] = []
        self._launched = 0
        self._departed = False  # all that was launched has left, where some may wait for the pool
        self._switched: dict[str, Array] = {}
        self._means: dict[str, Array | None] = {}

    @property
    def xp(self) -> Backend:
        """The backend; known once `build` has seen a tensor."""
        if self._xp is None:
            raise RuntimeError("call build(named_tensors) first: nothing is known about the gradients yet")
        return self._xp

    @property
    def transport(self) -> Transport:
        """Carries messages. Where there was no group of workers at first: of the group there is when this is read.

        Raises RuntimeError if the launcher asks for several workers and there is no group.
        """
        if self._transport is None:
            return self._settle_workers(get_transport())
        return self._transport

    @transport.setter
    def transport(self, transport: Transport) -> None:
        self._transport = transport

    @property
    def _methods(self) -> Sequence[tuple[Method, Communicator]]:
        return [(self.method, self._unfitted)] if self.schedule is None else self.schedule.ways

    def _settle_workers(self, transport: Transport) -> Transport:
        self._fit(transport)
        if self.options.record and transport.rank == 0:
            self._recorder = Recorder(self.options.record, self.options.record_every)
        self._transport = transport
        return transport

    def _fit(self, transport: Transport | None) -> None:
        # Before the workers are known: what holds for any number of them.
        ways = []
        for method, communicator in self._methods:
            carrier = transport or LocalTransport(World(getattr(communicator, "node_size", 0) or 1))
            fitted = communicator.fitted(method, carrier)
            fitted.check(method, carrier.size)
            if fitted.scattered and self.options.fuse != "tensor":
                raise ValueError(
                    f"communicator {name_of(communicator)!r} needs the rows of each tensor apart: use fuse='tensor', "
                    f"not {self.options.fuse!r}"
                )
            parts = (method.compressor, method.memory, fitted)
            encoder = FastMethod(method.compressor, method.memory)
            plain = [name_of(part) for part in parts] == ["none", "none", "allreduce"]
            ways.append(Way(method, encoder, fitted, plain))
        self._ways[:] = ways
        self.communicator = ways[0].communicator

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def world_size(self) -> int:
        return self.transport.size

    @property
    def _policy(self) -> Policy | None:
        return None if self.schedule is None else self.schedule.policy

    @property
    def started(self) -> set[str]:
        """Tensors whose gradient of this step was handed in."""
        return set(self._gradients)

    @property
    def names(self) -> list[str]:
        """Names of all tensors, in the order in which they were built."""
        return list(self._tensors)

    # -- set-up -----------------------------------------------------------------------------------------------------
    def build(self, named_tensors: Mapping[str, Array] | Iterable[tuple[str, Array]]) -> None:
        """Lay out tensors and make all their state. ``named_tensors``: parameters or gradients; only shapes count.

        Called again, it adds what is new. Raises on every worker, naming the difference, when the workers' tensors or
        settings differ; where workers come while others train (Horovod's elastic launches), `settle` does so instead.
        """
        named = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
        new: dict[str, Tensor] = {}
        for name, array in named:
            xp = backend_of(array)
            if self._xp is None:
                self._bind(xp)
            elif xp is not self._xp:
                raise ValueError(
                    f"{name!r} lies on another toolkit or device than the tensors before it: use a second Grace"
                )
            tensor = Tensor(name, xp.shape(array), xp.dtype(array))
            if tensor.dtype not in FLOATS:
                raise TypeError(
                    f"{name!r} has dtype {tensor.dtype}: only {', '.join(FLOATS)} gradients can be averaged"
                )
            if self.communicator.scattered and tensor.shape[:1] != (self.world_size,):
                raise ValueError(
                    f"communicator {name_of(self.communicator)!r} hands each of {self.world_size} workers its own row "
                    f"of a tensor, but {name!r} has shape {list(tensor.shape)}. It is for grace.torch.fsdp: take "
                    "another one for whole gradients"
                )
            if name in new or self._tensors.get(name, tensor) != tensor:
                raise ValueError(f"two tensors are named {name!r}: names must be unique, and shapes must not change")
            if name not in self._tensors:
                new[name] = tensor
        if new:
            self._lay(new)

    def _bind(self, xp: Backend) -> None:
        self.transport = self.transport.bind(xp)
        self._xp = xp
        self._kept.bind(xp)
        self.transport.timeout = self.options.timeout
        if self.transport.elastic:
            for way in self._ways:
                way.communicator.lay(self.transport)
        else:
            self._prepare()

    def _prepare(self) -> None:
        for way in self._ways:
            way.communicator.prepare(self.transport)
        self._prepared = True

    def settle(self) -> None:
        """Compare with the other workers what was built without them, and make the groups of workers.

        Needed where workers come while others train: `build` says nothing to them then. Done before a first gradient
        leaves; `grace.elastic` does it when all workers meet. In a graph call it before. Raises as `build` does.
        """
        if not self._prepared and self._xp is not None:
            self._prepare()
        if self._unsettled:
            self._agree(self._unsettled.values())
            self._unsettled = {}

    def _lay(self, new: Mapping[str, Tensor]) -> None:
        xp = self.xp
        if self.transport.elastic:
            self._unsettled.update(new)
        else:
            self._agree(new.values())
        self._tensors.update(new)

        def refusal(ctx: Context) -> str:
            ctx = replace(ctx, rank=self.rank, world_size=self.world_size)
            refusing = (way for way in self._ways if not way.communicator.applies(way.method, ctx))
            return next((way.communicator.reason(way.method, ctx) for way in refusing), "")

        method, first = name_of(self.method.compressor), len(self._buckets)
        buckets = layout(new.values(), method, refusal, self.options, xp, first, self._lossless)
        self._buckets += buckets
        if self._step is None:
            self._step = xp.cell(xp.asarray(0, "int64")) if xp.traced else Counter()
            self._meter = Meter(xp)
            self._meter.extend([PRESENT])
        for unit in (unit for bucket in buckets for unit in bucket.units):
            self._unit_of.update({tensor.name: unit for tensor in unit.tensors})
            ctx = self._context(unit, 0)
            ways = self._ways[:1] if unit.dense else self._ways
            memories = (way.method.memory.init_dense(ctx) for way in ways)
            states = memories if unit.dense else (way.communicator.init(way.method, ctx) for way in ways)
            self._kept.add(unit, list(states))
        if self.schedule is not None:
            units = [unit for bucket in buckets for unit in bucket.units if not unit.dense]
            self.schedule.extend({unit.name: math.prod(unit.shape) for unit in units}, xp, self.rank)
        self._meter.extend([unit.name for bucket in buckets for unit in bucket.units])
        if self.options.compile and not self._told:
            self._told = True
            self._warn_of_compile()
        self._offload = self._pooled()
        if self._waiting is not None:
            self._waiting()
        if self._recorder is not None and not self._recorder.begun:
            self._begin_record()

    def _way(self, unit: Unit) -> Way:
        return self._ways[self._level(unit)]

    def _lossless(self, name: str) -> bool:
        methods = [way.communicator.method(way.method, name) for way in self._ways]
        return all(each.compressor.lossless and name_of(each.memory) == "none" for each in methods)

    def _plain(self, unit: Unit, levels: Mapping[Unit, int]) -> bool:
        # Whether a unit travels in its bucket's one dense message.
        return unit.dense != "" or self._ways[levels[unit]].dense

    def _level(self, unit: Unit) -> int:
        return 0 if self.schedule is None or unit.dense else self.schedule.level(unit.name)

    def rebuild(self, named_tensors: Mapping[str, Array] | Iterable[tuple[str, Array]]) -> None:
        """Lay out these tensors instead of those that were built, as after a change of the model, between two steps.

        State of a tensor that stays as it was is kept, all other state is dropped, and `report` begins anew. Raises as
        `build` does.
        """
        if self._gradients or self._flights:
            raise RuntimeError("a step is under way: finish it before the tensors change")
        self.rollback()
        named = dict(named_tensors)
        if self._recording:
            self.record()  # what is counted anew below
        shapes = {name: self.xp.shape(array) for name, array in named.items()} if self._xp is not None else {}
        units = [unit for bucket in self._buckets for unit in bucket.units]
        same = [unit for unit in units if all(shapes.get(tensor.name) == tensor.shape for tensor in unit.tensors)]
        kept = {(unit.name, unit.tensors, unit.dense): cells for unit, cells in self._kept.taken(same).items()}
        if self.schedule is not None:
            self.schedule.forget(unit.name for unit in units if unit not in same)
        self._tensors, self._buckets, self._unit_of, self._means = {}, [], {}, {}
        if self._step is not None:
            self._first_step = int(self._step.read())
            self._meter = Meter(self.xp)
            self._meter.extend([PRESENT])
        self.trace.totals.update(dict.fromkeys(self.trace.totals, 0.0))
        self._skipped = self._discarded = 0
        self._snapshot = Snapshot()
        self.build(named)
        for unit in dict.fromkeys(self._unit_of.values()):
            if (cells := kept.get((unit.name, unit.tensors, unit.dense))) is not None:
                self._kept.put(unit, cells)
        if self._recording:
            self._begin_record()

    def reset(self, transport: str | Transport | None = None, states: Sequence[Mapping[str, Any]] = ()) -> None:
        """Go on over another transport, with other workers; a step that was begun is dropped, `report` begins anew.

        ``transport``: as of `grace_from_params`. ``states``: the `state_dict` of every worker that was there before and
        is left, the same on all workers; arrays follow their rules (`grace.core.Resize`), and what those held that are
        gone is lost. Without states this worker keeps its own, and its place. Every worker must make this call, also
        one that has just come. Raises as `build` and `load_state_dict` do, and then nothing has changed here.
        """
        own = () if states else (self.state_dict(),)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it was said when this was made
            new = Grace(self.method, self._unfitted, get_transport(transport), self.options, self._policy)
        for key in ("learning_rate", "track_missing", "defer_commit", "_notes", "trace"):
            setattr(new, key, getattr(self, key))
        if self._xp is not None:
            new._bind(self._xp)
            new._lay(self._tensors)
        new.load_state_dict(*(states or own), lost=bool(states))
        new._first_step = 0 if new._step is None else int(new._step.read())
        new.bindings = self.bindings
        vars(self).update(vars(new))

    def _agree(self, tensors: Iterable[Tensor]) -> None:
        settings = {
            "grace's version": VERSION,
            "compressor": repr(self.method.compressor),
            "memory": repr(self.method.memory),
            "communicator": "; ".join(dict.fromkeys(repr(way.communicator) for way in self._ways)),
            "policy": repr(self._policy),
            "the checkpoint that was loaded": "none" if self._waiting is None else f"of step {self.steps}",
            # Both decode the same numbers, but a graph may round a constant division otherwise than a kernel.
            "the use of native kernels": "on" if self.xp.kernels else "off",
            # The record is worker 0's own affair, and a trace each worker's.
            **asdict(replace(self.options, record="", record_every=1, trace=0)),
        }
        global _built
        number = agree(self.transport, settings, tensors, _built)
        if self._number is None and not self.transport.lockstep:  # workers of one process would all differ
            self._number, _built = number, number + 1

    def _context(
        self, unit: Unit, step: Any, undo: list[tuple[Array, Array]] | None = None, calls: Calls | None = None
    ) -> Context:
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
            undo=undo,
            calls=calls,
            compile=self.options.compile,
        )

    def _warn_of_compile(self) -> None:
        # A request that nothing comes of.
        units = [unit for bucket in self._buckets for unit in bucket.units if not unit.dense]
        points = [
            point
            for unit in units
            for way in self._ways
            for point in way.communicator.points(way.method, self._context(unit, 0)).values()
        ]
        reason = uncompiled([(method.compressor, ctx) for method, ctx in points], self.xp)
        if reason:
            warnings.warn(f"compile=True has no effect: {reason}", stacklevel=4)

    # -- exchange ---------------------------------------------------------------------------------------------------
    def start(self, name: str, gradient: Array | None, spent: bool = False) -> Job:
        """Hand in a gradient. Its bucket leaves as soon as it is complete and the buckets before it have left.

        Buckets leave in one order on all workers, whatever the order of these calls. ``spent``: its memory may be used
        for the exchange and for the mean, where the toolkit can; read it no more. Raises KeyError for a name that was
        not built and RuntimeError for a second gradient before `finish`.
        """
        if self._paused:
            self._means[name] = gradient
            return Job(name)
        self._check_gradient(name, gradient)
        self._hand_in(name, gradient, spent)
        if self._offload is not None and self._flights:
            self._flights[-1][0].depart()  # it may have waited for the pool
        while self._launched < len(self._buckets):
            bucket = self._buckets[self._launched]
            if not bucket.names <= self._gradients.keys():
                break
            self._launched += 1
            self._launch(bucket.name, bucket.units)
        return Job(name)

    def finish(self, job: Job) -> Array | None:
        """The mean of a gradient, in its shape and dtype. The first call ends the step.

        A gradient that was not handed in counts as absent on this worker: with ``track_missing`` its mean is None if it
        is absent everywhere, and zero is averaged for it otherwise.
        """
        if job.name not in self._means:
            self.flush()
        return self._means.pop(job.name)

    def flush(self) -> None:
        """End the step: launch what is left, wait for everything, and keep the new state."""
        for bucket in self._buckets[self._launched :]:
            self._launch(bucket.name, bucket.units)
        self._launched = len(self._buckets)
        self.land()

    def step(self, gradients: Mapping[str, Array | None]) -> dict[str, Array | None]:
        """The means of these gradients, in one exchange. Tensors that are not named take no part."""
        if not gradients or self._paused:
            return dict(gradients)
        self.launch(gradients)
        self.land()
        return {name: self._means.pop(name) for name in gradients}

    def launch(self, gradients: Mapping[str, Array | None], together: str = "", spent: bool = False) -> None:
        """Hand in gradients and let them leave now, one message for each bucket. `land` ends the step.

        ``together``: a name under which they all leave as one message instead. ``spent``: as in `start`.
        """
        for name, gradient in gradients.items():
            self._check_gradient(name, gradient)
        for name, gradient in gradients.items():
            self._hand_in(name, gradient, spent)
        names = dict.fromkeys(self._unit_of[name].name for name in gradients)
        groups = [(bucket.name, [unit for unit in bucket.units if unit.name in names]) for bucket in self._buckets]
        if together:
            groups = [(together, [unit for _, units in groups for unit in units])]
        for label, units in groups:
            if units:
                self._launch(label, tuple(units))

    def land(self, last: bool = True) -> None:
        """Wait for all that was launched, bucket by bucket and round by round, and keep the new state.

        ``last``: the step ends here; otherwise more of its tensors are to come. With `defer_commit` it ends with
        `commit`. Raises RuntimeError on all workers, and keeps the state that was, where they are at different steps
        or one of them gave up (`abort`).
        """
        try:
            try:
                while not self.advance():
                    pass
                self._check_headers()
                means: dict[str, Array | None] = dict(self._switched)
                elements = sum(math.prod(unit.shape) for _, flat in self._flights for unit in flat)
                with self.xp.quiet(), self.xp.together(elements):
                    for flight, flat in self._flights:
                        with self.trace.span("decompress", flight.name):
                            levels = {unit: self._level(unit) for unit in flat}
                            found, counts = self._commit(flight, flat, levels)
                            self._meter.add(counts)
                            means.update(found)
                self._note_means(means)
            finally:
                self._drop()
                self._attempt += 1
        except BaseException:
            self._restore()
            raise
        self._means = means
        self._provisional = True
        if last and not self.defer_commit:
            self.commit()

    @property
    def report_skipped(self) -> int:
        """How many means were not finite so far, on the host (`Report.skipped`)."""
        return self._skipped

    @property
    def provisional(self) -> bool:
        """Whether an exchange waits for `commit` or `rollback`."""
        return self._provisional

    def commit(self) -> None:
        """The means are applied: the step counts, and its state is kept. With `defer_commit` only."""
        self._snapshot.release()
        self._provisional, self._attempt = False, 0
        self._step.assign(self._step.read() + 1)
        self.trace.end_step()
        if not self._weighed and not self.xp.tracing and self.schedule is None:
            self._weighed = True
            if self.rank == 0 and (heavier := self._report(norms=False).heavier):
                warnings.warn(heavier, stacklevel=3)
        if self._recorder is not None and not self.xp.tracing and self._recorder.passed():
            self.record()

    def rollback(self, names: Iterable[str] | None = None) -> None:
        """The means are thrown away: all state is as it was before the exchange. With `defer_commit` only.

        ``names``: of these tensors alone; those of other exchanges of this step are to be applied.
        """
        if not self._provisional:
            return
        if names is None:
            self._restore()
            self._discarded += 1
        else:
            for unit in dict.fromkeys(self._unit_of[name] for name in names):
                self._snapshot.restore(self.xp, self._kept.cells(unit, self._level(unit)))

    def _restore(self) -> None:
        if self._xp is not None:
            self._snapshot.restore(self.xp)
            self._kept.note_carried()
        self._provisional = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Pause the exchange, as DistributedDataParallel's `no_sync`: gradients stay each worker's own.

        Nothing is sent or counted, and no state changes; `step` gives gradients back as they are. Every worker must do
        so in the same passes.
        """
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @property
    def paused(self) -> bool:
        """Whether this is inside `no_sync`."""
        return self._paused

    def abandon(self) -> None:
        """Drop a step that was begun: wait for what is under way, and keep neither means nor state."""
        for flight, _ in self._flights:
            flight.settle()
        self._drop()

    def abort(self, reason: str) -> NoReturn:
        """Give up the step under way: all workers raise RuntimeError with the reason, and keep the state that was.

        What this worker has not handed in leaves as absent, so that nobody waits for it.
        """
        self._failure = reason
        try:
            self.flush()
            self._restore()
        finally:
            self._failure = ""
        raise RuntimeError(f"worker {self.rank} gave up step {self._step_number()}: {reason}")

    def _drop(self) -> None:
        for flight, _ in self._flights:
            flight.rest()  # the pool works in the gradients' memory
        self._clear()

    def advance(self) -> bool:
        """One round of every bucket, in order. True when nothing is left to exchange."""
        with self.xp.quiet():
            if self._offload is not None and self._flights and not self._departed:
                self._departed = self._flights[-1][0].depart(wait=True)
                return False  # a call of its own, after which the workers of one process find each other's messages
            done = [flight.advance() for flight, _ in self._flights]  # every one of them, so no generator
        return all(done)

    def _nbytes(self, flat: Mapping[Unit, Array]) -> int:
        return sum(map(self.xp.nbytes, flat.values())) if self.xp.mutable else 0

    def note(self, name: str, text: str) -> None:
        """Have the report say this of a tensor."""
        self._notes[name] = text

    def mean(self, name: str) -> Array | None:
        """The mean of a gradient after `land`; asked for once."""
        return self._means.pop(name)

    def _check_gradient(self, name: str, gradient: Array | None) -> None:
        if self._unsettled:
            self.settle()
        tensor = self._tensors.get(name)
        if tensor is None:
            raise KeyError(
                f"{name!r} was not built; build(named_tensors) must name every tensor before its first gradient"
            )
        if name in self._gradients:
            raise RuntimeError(f"{name!r} has a gradient in this step already: finish the step before the next one")
        if gradient is not None and self.xp.shape(gradient) != tensor.shape:
            raise ValueError(f"gradient of {name!r} has shape {self.xp.shape(gradient)}, but {tensor.shape} was built")

    def _hand_in(self, name: str, gradient: Array | None, spent: bool) -> None:
        self._gradients[name] = gradient
        if spent:
            self._spent.add(name)

    def _launch(self, name: str, units: tuple[Unit, ...]) -> None:
        try:
            self._send_off(name, units)
        except BaseException:  # the step is over: the next one begins from the state that was
            self._drop()
            self._restore()
            raise

    def _send_off(self, name: str, units: tuple[Unit, ...]) -> None:
        step = self._step.read()
        if self.defer_commit or (self.options.nonfinite == "raise" and not self.xp.traced):
            self._hold(units)
        flat = {unit: self._flatten(unit) for unit in units}
        self._note(flat, ("rank0", "mean"))
        flat = {unit: self._kept.with_carried(unit, x) for unit, x in flat.items()}
        if self.schedule is None or not self.xp.tracing:
            levels = {unit: self._level(unit) for unit in units}
            self._flights.append((self._depart(name, flat, levels, step), flat))
            return
        for number, group in enumerate(self._groups(units)):
            part = {unit: flat[unit] for unit in group}
            label = f"{name}.{number}" if number else name
            if group[0].dense:
                self._flights.append((self._depart(label, part, dict.fromkeys(group, 0), step), part))
            else:
                self._switch(label, part, step)

    def _depart(self, name: str, flat: Mapping[Unit, Array], levels: Mapping[Unit, int], step: Any) -> Flight:
        programs: dict[str, Program[Any]] = {}
        calls = self._calls()
        for unit, x in flat.items():
            if not self._plain(unit, levels):
                way = self._ways[levels[unit]]
                state = self._kept.state(unit, levels[unit])
                undo = self._kept.undo(unit) if self.xp.mutable else None
                elsewhere = self._offload is not None and unit.name in self._offload.units
                ctx = self._context(unit, step, undo, None if elsewhere else calls)
                programs[unit.name] = way.communicator.reduce(x, way.encoder, state, ctx)
        if dense := [unit for unit in flat if self._plain(unit, levels)]:
            programs[DENSE] = _averaged(tuple(self.xp.cast(flat[unit], self._wire(unit, levels)) for unit in dense))
        if self.track_missing or self._tagged:
            programs[PRESENT] = self._presence(flat)
        room = partial(self.xp.side_by_side, self._nbytes(flat))
        with self.xp.quiet():
            last = self._flights[-1][0] if self._flights else None
            before = None if last is None or last.depart() else last
            label = f"{name}.of{self._number}" if self._number else name  # a name that TensorFlow takes
            return Flight(label, programs, self.transport, self.trace, self._offload, before, room, calls)

    def _wire(self, unit: Unit, levels: Mapping[Unit, int]) -> str:
        # What a unit that is averaged as it is travels in.
        lossless = unit.lossless or self._ways[levels[unit]].method.compressor.lossless
        return unit.wire if lossless else unit.dtype

    def _calls(self) -> Calls | None:
        return Calls() if self.xp.mutable and self._on_host(self.xp) and self.xp.kernels else None

    def _pooled(self) -> Offload | None:
        # Threads for what strategies give to the CPU; graphs schedule by themselves, and devices keep what is theirs.
        if self.xp.traced or not self._on_host(self.xp):
            return None
        units = {unit.name for unit in self._unit_of.values() if not unit.dense}
        threads = {name: max(way.communicator.threads(name) for way in self._ways) for name in units}
        most = max(threads.values(), default=0)
        return Offload(most, {name for name in units if threads[name]}, self.xp) if most else None

    def _groups(self, units: tuple[Unit, ...]) -> list[list[Unit]]:
        # Units that share a switch in a graph, one that is compressed first: all, or each by itself.
        compressed, dense = [u for u in units if not u.dense], [u for u in units if u.dense]
        if self.schedule is not None and self.schedule.policy.together and compressed:
            return [[*compressed, *dense]]
        return [[unit] for unit in compressed] + ([dense] if dense else [])

    def _switch(self, name: str, flat: dict[Unit, Array], step: Any) -> None:
        # The whole exchange at each level, of which a graph runs one: a change of level does not trace it again.
        # Counts are added outside: what all switches write to would let them run only one after the other.
        assert self.schedule is not None
        names = [tensor.name for unit in flat for tensor in unit.tensors]

        def at(level: int) -> Callable[[], Any]:
            def exchange() -> Any:
                levels = {unit: 0 if unit.dense else level for unit in flat}
                flight = self._depart(f"{name}.level{level}", flat, levels, step)
                while not flight.advance():
                    pass
                means, counts = self._commit(flight, flat, levels)
                rows = [counts[unit.name] for unit in flat]
                return [means[each] for each in names], self.xp.asarray(rows, "int64")

            return exchange

        index = self.schedule.index(next(iter(flat)).name)
        means, rows = self.xp.switch(index, [at(level) for level in range(len(self._ways))])
        self._meter.add({unit.name: self.xp.integers(rows[number]) for number, unit in enumerate(flat)})
        self._switched.update(zip(names, means, strict=True))

    def _note(self, flat: Mapping[Unit, Array], sources: tuple[str, ...]) -> None:
        # For a policy that looks at gradients, before they are spent.
        if self.schedule is not None and self.schedule.policy.norm_source in sources:
            self.schedule.on_gradient({unit.name: x for unit, x in flat.items() if not unit.dense})

    def _flatten(self, unit: Unit) -> Array:
        # What the exchange may write to, if the toolkit's arrays can be written to: the gradient itself if it is spent.
        xp = self.xp
        parts, owned = [], False
        for tensor in unit.tensors:
            gradient = self._gradients.get(tensor.name)
            if gradient is None:
                parts.append(xp.zeros(tensor.size, unit.dtype))
                owned = True
            else:
                flat = xp.contiguous(xp.cast(xp.reshape(gradient, (-1,)), unit.dtype))
                owned = tensor.name in self._spent or (xp.mutable and not xp.same_memory(flat, gradient))
                parts.append(flat)
        owned = owned or len(parts) > 1 or unit.dense != ""
        return xp.concat(parts) if owned else xp.copy(parts[0])

    def _note_means(self, means: Mapping[str, Array | None]) -> None:
        if self.schedule is None or self.schedule.policy.norm_source != "aggregated":
            return
        flat = {}
        for unit in dict.fromkeys(self._unit_of[name] for name in means):
            parts = [means.get(tensor.name) for tensor in unit.tensors]
            if not any(part is None for part in parts):
                flat[unit] = self.xp.concat([self.xp.cast(self.xp.reshape(p, (-1,)), "float32") for p in parts])
        self._note(flat, ("aggregated",))

    def _hold(self, units: Iterable[Unit]) -> None:
        for unit in units:
            for cell in self._kept.cells(unit, self._level(unit)):
                self._snapshot.take(self.xp, cell)
        if self.schedule is not None and self.schedule.watching:
            for cell in self.schedule.sums:
                self._snapshot.take(self.xp, cell)

    @property
    def _tagged(self) -> bool:
        # Whether messages say which step they are of. Local workers run in lockstep, and graphs cannot look.
        return self.world_size > 1 and not self.transport.lockstep and not self.xp.tracing

    def _step_number(self) -> int:
        return 0 if self._step is None else int(self._step.read())

    def _presence(self, units: Iterable[Unit]) -> Program[Array]:
        values: list[float] = []
        if self._tagged:
            values += header(self._step_number(), self._attempt, bool(self._failure), self.world_size)
        if self.track_missing:
            values += [float(self._gradients.get(t.name) is not None) for unit in units for t in unit.tensors]
        (count,) = yield Reduce((self.xp.asarray(values, "float32"),), "sum")
        return count

    def _check_headers(self) -> None:
        # Every worker has the same sums, so that all of them raise. On a device those of the exchange before are
        # looked at: they are there already.
        if not self._tagged:
            return
        place = (self._step_number(), self._attempt)
        found = [(place, flight.results[PRESENT]) for flight, _ in self._flights if PRESENT in flight.results]
        if not self._on_host(self.xp):
            found, self._headers = self._headers, found
        for (step, attempt), sums in found:
            told = self.xp.to_numpy(sums[:HEADER]).tolist()
            if not in_step(told, self.world_size):
                raise out_of_step(self.transport, step, attempt, self._failure, told)

    def _commit(
        self, flight: Flight, flat: Mapping[Unit, Array], levels: Mapping[Unit, int]
    ) -> tuple[dict[str, Array | None], dict[str, list[Any]]]:
        # Means by tensor, and counts by unit. The one place where state is kept: not at all where the mean is not
        # finite (the same decision on all workers, since the mean is) or where no worker had a gradient.
        xp, policy, scattered = self.xp, self.options.nonfinite, self.communicator.scattered
        counts = self._counts(flight, flat)
        means: dict[str, Array | None] = {}
        dense = iter(flight.results.pop(DENSE, ()))
        marks = self._marks(flight, flat, levels)
        all_sound = self._all_sound(marks)
        found: list[tuple[Unit, Array, Array | None]] = []
        calls = self._calls()
        for unit, x in flat.items():
            if self._plain(unit, levels):
                mean, state = xp.cast(next(dense), unit.dtype), {}
            else:
                mean, state = flight.results.pop(unit.name)
            if unit.dense and (self._kept.any(unit, 0) or self._finishes_dense):
                state = self._kept.state(unit, 0)
                mean, state = self.method.memory.finish_dense(mean, state, self._context(unit, self._step.read()))
            absent = bool(counts) and all(counts.get(tensor.name) == 0 for tensor in unit.tensors)
            ok, parted = None, False
            if self._judged(unit, levels) and not absent:
                seen = marks.get(unit)
                if seen is None:
                    mean = materialize(mean)
                    ok = xp.finite(xp.cast(mean, "float16") if self._narrow(unit) else mean)
                else:
                    ok = True if all_sound else xp.finite(xp.concat(seen.marks()))
                if not xp.traced and self._on_host(ok) and not ok:
                    self._skipped += 1
                if policy == "raise":
                    xp.require(ok, f"the mean gradient of {unit.name!r} is not finite on any worker")
                parted = self._kept.keep(unit, levels[unit], state, ok, x)
            self._kept.close(unit, ok)
            # Only now, since what was not sent may be where the mean belongs.
            if parted:
                mean = x
            elif isinstance(mean, LazyMean):
                mean = mean.into(x, calls) if xp.mutable else mean.array()
            found.append((unit, mean, ok))
        if calls:
            calls.make()
        for unit, mean, ok in found:
            if policy == "zero" and ok is not None:
                mean = xp.choose(ok, mean, xp.zeros(xp.shape(mean), unit.dtype))
            start, several = 0, len(unit.tensors) > 1 or scattered
            for tensor in unit.tensors:
                size, shape = tensor.size, tensor.shape
                if scattered:
                    size, shape = size // self.world_size, shape[1:]
                    start = self.rank * size if unit.dense else 0
                part = xp.reshape(mean[start : start + size] if several else mean, shape)
                means[tensor.name] = None if counts.get(tensor.name) == 0 else xp.cast(part, tensor.dtype)
                start += size
        sizes = {
            unit.name: sum(t.size for t in unit.tensors) * ITEMSIZE[self._wire(unit, levels)]
            for unit in flat
            if self._plain(unit, levels)
        }
        asked = [(name, *rest) for name, *rest in flight.asked if name != DENSE]
        units = [*(unit.name for unit in flat), *flight.results]
        return means, self._meter.count(units, asked, self.transport.group_rank, sizes)

    @property
    def _finishes_dense(self) -> bool:
        return type(self.method.memory).finish_dense is not Memory.finish_dense

    def _narrow(self, unit: Unit) -> bool:
        # What was kept may make a mean larger than float16 holds. A row of it only its own worker could judge.
        return unit.narrow and not self.communicator.scattered

    def _judged(self, unit: Unit, levels: Mapping[Unit, int]) -> bool:
        # Whether anything depends on its mean being finite.
        return self._kept.any(unit, levels[unit]) or self.options.nonfinite != "poison"

    def _marks(self, flight: Flight, units: Iterable[Unit], levels: Mapping[Unit, int]) -> dict[Unit, LazyMean]:
        # Means that show whether they are finite before they are decoded.
        found = {}
        for unit in units:
            mean = None if self._plain(unit, levels) else flight.results[unit.name][0]
            if isinstance(mean, LazyMean) and mean.marked and self._judged(unit, levels) and not self._narrow(unit):
                found[unit] = mean
        return found

    def _all_sound(self, marks: Mapping[Unit, LazyMean]) -> bool:
        # Whether all of these are known to be finite. A device would have to be waited for.
        if self.xp.traced or not self._on_host(self.xp) or not marks:
            return False
        return all_finite(list(marks.values()), self.xp)

    def _counts(self, flight: Flight, units: Iterable[Unit]) -> dict[str, float]:
        # How many workers had a gradient; looked at (a device waits) only for what this worker lacks.
        names = [tensor.name for unit in units for tensor in unit.tensors]
        missing = [name for name in names if self._gradients.get(name) is None]
        if not missing or not self.track_missing:
            return {}
        sums = self.xp.to_numpy(flight.results[PRESENT]).tolist()
        found = dict(zip(names, sums[HEADER if self._tagged else 0 :], strict=True))
        return {name: found[name] for name in missing}

    def _on_host(self, value: Array) -> bool:
        return str(getattr(value, "device", "cpu")) == "cpu"

    # -- policy -----------------------------------------------------------------------------------------------------
    @property
    def decision(self) -> Decision:
        """What the policy decided last; without a policy, what always holds."""
        return Decision({}) if self.schedule is None else self.schedule.decision

    @property
    def steps(self) -> int:
        """How many steps were made in all, across resumed runs; `Report.steps` counts those of this object."""
        return self._step_number() if self._waiting is None else int(self._waiting.args[0]["step"])

    @property
    def steps_this_epoch(self) -> int:
        """How many exchanges there were since `end_epoch`."""
        done = 0 if self._step is None else int(self._step.read())
        return done - (0 if self.schedule is None else self.schedule.step)

    def end_epoch(self, lr: float | None = None, next_lr: float | None = None) -> Decision:
        """An epoch is over: let the policy decide what holds from now on. Every worker must call this.

        ``lr``: the learning rate of this epoch, by default the ``next_lr`` of the last call. ``next_lr``: that of the
        next epoch, by default the same again. Worker 0's numbers and decision hold for all workers. Without a policy
        nothing happens. Raises RuntimeError while a step is under way, and if workers do not agree.
        """
        flight = self.ending(lr, next_lr)
        while not flight.advance():
            pass
        return self.decision

    def ending(self, lr: float | None = None, next_lr: float | None = None) -> Flight:
        """`end_epoch`, for several workers of one process: ``advance()`` all of them in turn until each gives True."""
        if self._gradients or self._flights:
            raise RuntimeError("a step is under way: finish it before the epoch ends")
        self.rollback()  # no step applies it any more
        programs: dict[str, Program[Any]] = {}
        if self.schedule is not None:
            ended = self.schedule.on_epoch_end(lr, next_lr, int(self._step.read()), self.rank)
            programs["policy"] = self._entering(ended)
        return Flight("policy", programs, self.transport, self.trace)

    @property
    def trying(self) -> bool:
        """Whether a policy is still timing steps; see `tune`."""
        return self.schedule is not None and self.schedule.on_trial(self.world_size)

    def tune(self) -> Decision:
        """A training step is over: let a policy that times steps decide when a trial ends. Every worker must call this.

        The doors do it, but for graphs of TensorFlow: there it is for `grace.tensorflow.PolicyCallback`, or for a loop
        of your own, after each step. Raises as `end_epoch`.
        """
        flight = self.tuning()
        while flight is not None and not flight.advance():
            pass
        return self.decision

    def tuning(self) -> Flight | None:
        """`tune`, for several workers of one process: ``advance()`` all of them in turn until each gives True.

        None where nothing is to be decided, on all workers.
        """
        if self._gradients or self._flights:
            raise RuntimeError("a step is under way: finish it before the policy is told of it")
        self.rollback()
        schedule = self.schedule
        if schedule is None or self._step is None or not self.trying:
            return None
        step = int(self._step.read())
        if not schedule.trial_over(step, self.world_size):
            return None
        decided = schedule.on_trial_end(step, self.rank, self.world_size)
        return Flight("policy", {"policy": self._entering(decided)}, self.transport, self.trace)

    def _entering(self, decided: Program[list[str]]) -> Program[None]:
        # Carries a decision out: what does not outlast a change of level is made anew.
        schedule = self.schedule
        assert schedule is not None
        if self._recording:
            self.record()  # no line spans a change of level
        before = dict(schedule.decision.levels)
        for name in (yield from decided):
            level = schedule.level(name)
            (unit,) = {unit for unit in self._unit_of.values() if unit.name == name}
            way, ctx = self._ways[level], self._context(unit, 0)
            self._kept.enter(unit, before[name], level, way.communicator.init(way.method, ctx), ctx)

    # -- state ------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """All state of this worker: the step, and every tensor's arrays (PyTorch: tensors on the CPU; else NumPy).

        Each worker saves and loads its own: residuals differ between workers. `grace.checkpoint` writes it to files.
        Raises RuntimeError where the states of another number of workers wait for `build`.
        """
        if self._waiting is not None:  # no step was made since it was loaded
            state, *others = self._waiting.args
            if others or (state["rank"], state["world_size"]) != (self.rank, self.world_size):
                raise RuntimeError("states of other workers were loaded and are shared out by build: make a step first")
            return dict(state)
        levels = self.decision.levels
        tensors = self._kept.export(levels, self._snapshot)
        units = {unit.name: unit for unit in self._unit_of.values() if unit.name in tensors}
        points = {
            name: self._kept.points(unit, self._level(unit), self._context(unit, 0)) for name, unit in units.items()
        }
        return {
            "format": FORMAT,
            "rank": self.rank,
            "world_size": self.world_size,
            "step": int(self._step.read()) if self._step is not None else 0,
            "method": repr(self.method),
            "points": {
                unit: {name: [ctx.offset, ctx.size] for name, (_, ctx) in each.items()} for unit, each in points.items()
            },
            "tensors": tensors,
            "strategies": self._kept.strategies(levels, units),
            "policy": self._export_policy(),
        }

    def _export_policy(self) -> dict[str, Any] | None:
        if self.schedule is None:
            return None
        state = self.schedule.state_dict()
        return {**state, "sums": {name: exported(array, self.xp) for name, array in state["sums"].items()}}

    def load_state_dict(self, *states: Mapping[str, Any], lost: bool = False) -> None:
        """Continue from a `state_dict`: this worker's own, or, where the number of workers has changed, those of all
        workers of the run before, on every worker. Then every array follows its rule (`grace.core.Resize`). ``lost``:
        some of those workers' may be missing, and with them what those workers held.

        Before `build` they are kept until the tensors are known. With a policy every worker must make this call: they
        compare their levels. Raises ValueError, and changes nothing, when a state is another worker's, of another
        format, method or policy, or when names or shapes differ from the model's.
        """
        states = self._under_own_names(states)
        new, step = self.check_state(*states, lost=lost)
        self.claimed.clear()
        if self._xp is None:
            self.awaited = sizes_of(states[0])
            self._waiting = partial(self.load_state_dict, *states, lost=lost)
            return
        self._restore()
        self._attempt = 0
        self._kept.load(new)
        self._first_step += step - int(self._step.read())  # the report counts what this object did
        self._step.assign(self.xp.asarray(step, "int64") if self.xp.traced else step)
        self._waiting = None
        if self._recording:
            self._begin_record()
        if self.schedule is not None:
            self.schedule.load_state_dict(self._whose(states)["policy"])
            texts = self.transport.exchange(self.schedule.text())
            if any(text != texts[0] for text in texts):
                raise ValueError("the workers' states have different levels: load states that were saved together")

    def _whose(self, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        # The state that this worker takes over where arrays have no rule.
        state = states[self.rank % len(states)]
        if self.schedule is None or not state.get("policy") or state["rank"] == self.rank:
            return state
        return {**state, "policy": self.schedule.taken_over(state["policy"])}

    def _under_own_names(self, states: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
        units = [] if self._xp is None else list(self._kept.held(self.decision.levels))
        return tuple(renamed(state, units) for state in states)

    def check_state(self, *states: Mapping[str, Any], lost: bool = False) -> tuple[list[Fitted], int]:
        """What `load_state_dict` would set, and the step; raises as that does."""
        states = self._under_own_names(states)
        for state in states:
            self._check_form(state)
        whose = [(state["rank"], state["world_size"]) for state in states]
        moved = lost or whose != [(self.rank, self.world_size)]
        if moved:
            if len(states) == 1 and whose[0][1] != 1 and not lost:
                raise ValueError(
                    f"this is the state of worker {whose[0][0]} of {whose[0][1]}, but this is worker {self.rank} of "
                    f"{self.world_size}: load each worker's own, or give the states of all {whose[0][1]} workers"
                )
            if self.communicator.scattered:
                raise ValueError(
                    f"communicator {name_of(self.communicator)!r} cuts tensors into other rows for another number of "
                    f"workers: this is the state of {whose[0][1]}, so go on with as many"
                )
            states = tuple(complete(states, lost))
        step = states[0]["step"]
        if self._xp is None:
            return [], step
        saved: Any = self._whose(states).get("policy")
        if self.schedule is not None:
            self.schedule.check_state(saved)
        levels = saved["levels"] if saved else {}
        units = {unit.name: unit for unit in self._unit_of.values()}
        among = (self.rank, self.world_size) if moved else None
        return self._kept.fitted(states, levels, units, partial(self._context, step=0), among), step

    def _check_form(self, state: Mapping[str, Any]) -> None:
        if state.get("format") != FORMAT:
            raise ValueError(f"this state has format {state.get('format')!r}, but this version of grace reads {FORMAT}")
        check_form(state, {unit.name: math.prod(unit.shape) for unit in self._unit_of.values()})
        if state["method"] != repr(self.method):
            raise ValueError(
                f"this state belongs to {state['method']}, but this is {self.method!r}: use the same settings"
            )
        saved: Any = state.get("policy")
        settings = saved.get("settings", "?") if isinstance(saved, Mapping) else saved
        if settings != (self.schedule and repr(self._policy)):
            raise ValueError(
                f"this state belongs to policy {settings}, but this is {self._policy!r}: use the same settings"
            )

    # -- report -----------------------------------------------------------------------------------------------------
    def report(self, trace: str | os.PathLike[str] | None = None) -> Report:
        """What was sent since this object was made (or loaded, or rebuilt), in total and for every tensor.

        ``trace``: a file for the last steps in Chrome's trace format: backward pass, compression, messages under way,
        waiting, decompression. The option ``trace`` says how many steps; ValueError without it, and for TensorFlow,
        whose graphs run by themselves: use its own profiler.
        """
        if trace is not None:
            if self._xp is not None and self._xp.traced:
                raise ValueError("a graph runs by itself and cannot be traced from here: use tf.profiler.experimental")
            if not self.trace.steps:
                raise ValueError(
                    "no trace was kept: say of how many of the last steps, as grace_from_params({..., 'trace': 20})"
                )
            self.trace.save(trace, self.rank)
        return self._report(norms=True)

    def _report(self, norms: bool) -> Report:
        # Norms of residuals take a pass over all of them, and wait for a device.
        leading = next((self._way(unit) for unit in self._unit_of.values() if not unit.dense), self._ways[0])
        parts = (leading.method.compressor, leading.method.memory, leading.communicator)
        method = " + ".join(name_of(part) for part in parts)
        if self._xp is None:
            return Report(0, self.rank, self.world_size, method, 0, 0, 0)
        traffic = self._meter.read()
        untold = UNTOLD if self._kept.switches and self.schedule is not None and not self.schedule.told else ""
        units = list(dict.fromkeys(self._unit_of[name] for name in self._tensors))
        residuals = self._kept.norms(units, self.decision.levels, self._snapshot) if norms else {}
        tensors = [
            TensorReport(
                name=unit.name,
                shape=unit.shape,
                method="dense" if unit.dense else self._compressor_name(unit),
                reason="; ".join(
                    filter(None, [unit.dense or untold, *(self._notes.get(t.name) for t in unit.tensors)])
                ),
                bytes_sent=traffic[unit.name][0],
                bytes_dense=traffic[unit.name][2] * sum(tensor.nbytes for tensor in unit.tensors),
                residual_norm=residuals.get(unit.name),
                levels=self._levels(unit),
                strategy=self._kept.strategy(unit, self._level(unit)),
            )
            for unit in units
        ]
        return Report(
            steps=int(self._step.read()) - self._first_step,
            rank=self.rank,
            world_size=self.world_size,
            method=method,
            bytes_sent=sum(counts[0] for counts in traffic.values()),
            bytes_received=sum(counts[1] for counts in traffic.values()),
            bytes_dense=sum(tensor.bytes_dense for tensor in tensors),
            tensors=tensors,
            times={} if self.xp.traced else dict(self.trace.totals),
            skipped=self._skipped,
            discarded=self._discarded,
            trials=self._trials(),
            plan=leading.communicator.origin,
        )

    def record(self) -> None:
        """Write a line to the record now: what happened since the line before. Other workers than 0 write nothing.

        Lines are written without this call, except in TensorFlow graphs, which run by themselves: there call it between
        two steps (`grace.tensorflow.RecordCallback` does), and anywhere at a training's end, for its last steps.
        ValueError if no record was asked for.
        """
        if not self.options.record:
            raise ValueError("there is no record: name a file, as grace_from_params({..., 'record': 'run.jsonl'})")
        if self._recorder is not None and self._recorder.begun:
            self._recorder.write(self.report(), int(self._step.read()))

    @property
    def _recording(self) -> bool:
        return self._recorder is not None and self._recorder.begun

    def _begin_record(self) -> None:
        assert self._recorder is not None
        on_host = self._on_host(self.xp)
        kernels = bool(self.xp.kernels) if on_host else None
        about = {"grace": VERSION, "toolkit": self.xp.name, "kernels": kernels, "graph": self.xp.traced}
        self._recorder.begin(self.report(), int(self._step.read()), about)

    def _trials(self) -> dict[str, float]:
        if self.schedule is None:
            return {}
        found = self.schedule.policy.trials(self.decision)
        return {leveled(self.schedule.levels[level]): seconds for level, seconds in found.items()}

    def _compressor_name(self, unit: Unit) -> str:
        way = self._way(unit)
        return name_of(way.communicator.method(way.method, unit.name).compressor)

    def _levels(self, unit: Unit) -> list[tuple[int, dict[str, Any]]]:
        if self.schedule is None or unit.dense:
            return []
        return [(epoch, dict(self.schedule.levels[level])) for epoch, level in self.schedule.history[unit.name]]


def _averaged(arrays: tuple[Array, ...]) -> Program[tuple[Array, ...]]:
    means = yield Reduce(arrays, "mean")
    return means


class Counter:
    """A step count on the host."""

    def __init__(self) -> None:
        self._value = 0

    def read(self) -> int:
        return self._value

    def assign(self, value: int) -> None:
        self._value = value
