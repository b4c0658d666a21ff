"""Grace: named gradients in, their means over all workers out."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, NoReturn

from grace.backends import Backend, backend_of
from grace.core import Array, Program, Transport, name_of
from grace.core.communicator import Communicator
from grace.core.method import Method
from grace.core.policy import Decision, Policy
from grace.engine import persistence
from grace.engine.buckets import Tensor
from grace.engine.exchange import Exchange
from grace.engine.options import Options
from grace.engine.policy_runner import Schedule
from grace.engine.report import Report
from grace.engine.reporter import Reporter
from grace.engine.reshard import sizes_of
from grace.engine.scheduler import RoundScheduler
from grace.engine.setup import Setup
from grace.engine.state_store import Fitted, Snapshot
from grace.transports import get_transport

FLOATS = ("float16", "bfloat16", "float32", "float64")
MOMENTUM_TWICE = (
    "memory {!r} has momentum of its own: set the optimizer's momentum to 0 (of Adam and its kin: the first beta), or "
    "use another memory, such as 'residual'"
)
SPARSE = "its sparse gradients are made dense first"


class Job(NamedTuple):
    """A gradient on its way; `Grace.finish` gives its mean."""

    name: str


class Grace:
    """A method, a communicator and a transport at work on named gradients.

    Made by `grace.grace_from_params`. The integrations (`grace.torch`, `grace.tensorflow`) drive it; so may you:
    `build` once, then `step` (or `start` and `finish`) for every exchange. Every worker must make the same calls.
    """

    def __init__(
        self,
        method: Method,
        communicator: Communicator,
        transport: Transport | None,
        options: Options,
        policy: Policy | None = None,
    ):
        self._setup = Setup(method, communicator, transport, options, policy)
        self._reporter = Reporter(self._setup)
        if transport is not None:
            self._reporter.open_record()
        self.bindings: dict[Any, str] = {}
        """Names of a toolkit's variables by their identities, where names alone do not tell variables apart."""
        self.awaited: dict[str, int] = {}
        """Tensors of a state that was loaded before `build`, and how many elements they have."""
        self.claimed: set[str] = set()
        """Those of these names that were used since a state was loaded: no other variable may have them."""
        self._exchange = Exchange(self._setup)
        self._means: dict[str, Array | None] = {}
        self._provisional = False  # the last exchange waits for `commit` or `rollback`
        self._paused = False
        self._weighed = False  # whether traffic was compared with a dense allreduce's
        self._waiting: partial[None] | None = None  # a state that was loaded before `build`

    def __deepcopy__(self, memo: Any) -> Grace:
        """A Grace of the same settings, workers and state, with tensors and a count of its own."""
        setup = self._setup
        copy = Grace(setup.method, setup.unresolved, setup.given_transport, setup.options, setup.policy)
        if setup.bound:
            copy.load_state_dict(self.state_dict())
        return copy

    def __reduce__(self) -> Any:
        # Settings alone: state is each worker's own (`state_dict`), and a group of workers is found where it is loaded.
        setup = self._setup
        return Grace, (setup.method, setup.unresolved, None, setup.options, setup.policy)

    # -- settings ----------------------------------------------------------------------------------------------------
    @property
    def method(self) -> Method:
        """The compressor with its memory, as given."""
        return self._setup.method

    @property
    def options(self) -> Options:
        """The settings that all methods share."""
        return self._setup.options

    @property
    def communicator(self) -> Communicator:
        """The communicator, resolved for the workers."""
        return self._setup.communicator

    @property
    def schedule(self) -> Schedule | None:
        """The policy at work, if there is one."""
        return self._setup.schedule

    @property
    def trace(self) -> Any:
        """Where the time goes; the integrations add what they know."""
        return self._setup.trace

    @property
    def track_missing(self) -> bool:
        """Whether gradients may be absent (None) on some workers: costs 4 bytes per tensor and step."""
        return self._setup.track_missing

    @track_missing.setter
    def track_missing(self, value: bool) -> None:
        self._setup.track_missing = value

    @property
    def defer_commit(self) -> bool:
        """Whether a step's state is provisional until `commit`; `rollback` restores what was before.

        For integrations that see whether the optimizer applies the means. Costs a copy of the state.
        """
        return self._setup.defer_commit

    @defer_commit.setter
    def defer_commit(self, value: bool) -> None:
        self._setup.defer_commit = value

    @property
    def learning_rate(self) -> Callable[[str], Any] | None:
        """Gives a tensor's learning rate by its name, for memories that need it. The integrations set it."""
        return self._setup.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Callable[[str], Any] | None) -> None:
        self._setup.learning_rate = value

    @property
    def xp(self) -> Backend:
        """The backend; known once `build` has seen a tensor."""
        return self._setup.xp

    @property
    def transport(self) -> Transport:
        """Carries messages. Where there was no group of workers at first: of the group there is when this is read.

        Raises RuntimeError if the launcher asks for several workers and there is no group.
        """
        return self._setup.transport

    @transport.setter
    def transport(self, transport: Transport) -> None:
        self._setup.replace_transport(transport)

    @property
    def rank(self) -> int:
        return self._setup.rank

    @property
    def world_size(self) -> int:
        return self._setup.world_size

    @property
    def names(self) -> list[str]:
        """Names of all tensors, in the order in which they were built."""
        return list(self._setup.table.tensors)

    @property
    def started(self) -> set[str]:
        """Tensors whose gradient of this step was handed in."""
        return set(self._exchange.gradients)

    # -- tensors -----------------------------------------------------------------------------------------------------
    def build(self, named_tensors: Mapping[str, Array] | Iterable[tuple[str, Array]]) -> None:
        """Lay out tensors and make all their state. ``named_tensors``: parameters or gradients; only shapes count.

        Called again, it adds what is new. Raises on every worker, naming the difference, when the workers' tensors or
        settings differ; where workers come while others train (Horovod's elastic launches), `settle` does so instead.
        """
        setup, new = self._setup, {}
        named = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
        for name, array in named:
            xp = backend_of(array)
            if not setup.bound:
                setup.bind(xp)
                self._reporter.open_record()
            elif xp is not setup.xp:
                raise ValueError(
                    f"{name!r} lies on another toolkit or device than the tensors before it: use a second Grace"
                )
            tensor = Tensor(name, xp.shape(array), xp.dtype(array))
            self._check_tensor(tensor)
            if name in new or setup.table.tensors.get(name, tensor) != tensor:
                raise ValueError(f"two tensors are named {name!r}: names must be unique, and shapes must not change")
            if name not in setup.table.tensors:
                new[name] = tensor
        if new:
            self._add(new)

    def _check_tensor(self, tensor: Tensor) -> None:
        if tensor.dtype not in FLOATS:
            raise TypeError(
                f"{tensor.name!r} has dtype {tensor.dtype}: only {', '.join(FLOATS)} gradients can be averaged"
            )
        if self.communicator.reduce_scatters and tensor.shape[:1] != (self.world_size,):
            raise ValueError(
                f"communicator {name_of(self.communicator)!r} hands each of {self.world_size} workers its own row "
                f"of a tensor, but {tensor.name!r} has shape {list(tensor.shape)}. It is for grace.torch.fsdp: take "
                "another one for whole gradients"
            )

    def _add(self, new: Mapping[str, Tensor]) -> None:
        self._setup.loaded_step = None if self._waiting is None else self.steps
        self._setup.add(new)
        if self._waiting is not None:
            self._waiting()
        self._reporter.begin_record()

    def settle(self) -> None:
        """Compare with the other workers what was built without them, and make the groups of workers.

        Needed where workers come while others train: `build` says nothing to them then. Done before a first gradient
        leaves; `grace.elastic` does it when all workers meet. In a graph call it before. Raises as `build` does.
        """
        self._setup.settle()

    def rebuild(self, named_tensors: Mapping[str, Array] | Iterable[tuple[str, Array]]) -> None:
        """Lay out these tensors instead of those that were built, as after a change of the model, between two steps.

        State of a tensor that stays as it was is kept, all other state is dropped, and `report` begins anew. Raises as
        `build` does.
        """
        self._refuse_begun("finish it before the tensors change")
        self.rollback()
        setup, named = self._setup, dict(named_tensors)
        recording = self._reporter.recording
        if recording:
            self.record()  # what is counted anew below
        shapes = {name: setup.xp.shape(array) for name, array in named.items()} if setup.bound else {}
        units = setup.table.units
        same = [unit for unit in units if all(shapes.get(tensor.name) == tensor.shape for tensor in unit.tensors)]
        before = {(unit.name, unit.tensors, unit.dense): cells for unit, cells in setup.store.detach(same).items()}
        if setup.schedule is not None:
            setup.schedule.forget(unit.name for unit in units if unit not in same)
        setup.table.clear()
        setup.snapshot = Snapshot()
        self._means = {}
        self._reporter.begin_anew()
        self.build(named)
        for unit in setup.table.units:
            if (cells := before.get((unit.name, unit.tensors, unit.dense))) is not None:
                setup.store.attach(unit, cells)
        if recording:
            self._reporter.begin_record(again=True)

    def reset(self, transport: str | Transport | None = None, states: Sequence[Mapping[str, Any]] = ()) -> None:
        """Go on over another transport, with other workers; a step that was begun is dropped, `report` begins anew.

        ``transport``: as of `grace_from_params`. ``states``: the `state_dict` of every worker that was there before and
        is left, the same on all workers; arrays follow their rules (`grace.core.Resize`), and what those held that are
        gone is lost. Without states this worker keeps its own, and its place. Every worker must make this call, also
        one that has just come. Raises as `build` and `load_state_dict` do, and then nothing has changed here.
        """
        own, setup = () if states else (self.state_dict(),), self._setup
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it was said when this was made
            new = Grace(setup.method, setup.unresolved, get_transport(transport), setup.options, setup.policy)
        for key in ("learning_rate", "track_missing", "defer_commit", "trace"):
            setattr(new._setup, key, getattr(setup, key))
        new._reporter.notes = self._reporter.notes
        if setup.bound:
            new._setup.bind(setup.xp)
            new._add(setup.table.tensors)
        new.load_state_dict(*(states or own), lost=bool(states))
        new._reporter.first_step = new._setup.step_number()
        new.bindings = self.bindings
        vars(self).update(vars(new))

    # -- exchange ----------------------------------------------------------------------------------------------------
    def start(self, name: str, gradient: Array | None, spent: bool = False) -> Job:
        """Hand in a gradient. Its bucket leaves as soon as it is complete and the buckets before it have left.

        Buckets leave in one order on all workers, whatever the order of these calls. ``spent``: the gradient is
        donated: its memory may hold the mean, where arrays are mutable; read it no more. Raises KeyError for a name
        that was not built and RuntimeError for a second gradient before `finish`.
        """
        if self._paused:
            self._means[name] = gradient
            return Job(name)
        self._check_gradients({name: gradient})
        self._exchange.submit(name, gradient, spent)
        with self._undone_on_error():
            self._exchange.launch_complete()
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
        with self._undone_on_error():
            self._exchange.launch_rest()
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
        self._check_gradients(gradients)
        for name, gradient in gradients.items():
            self._exchange.submit(name, gradient, spent)
        with self._undone_on_error():
            self._exchange.launch_names(gradients, together)

    def land(self, last: bool = True) -> None:
        """Wait for all that was launched, bucket by bucket and round by round, and keep the new state.

        ``last``: the step ends here; otherwise more of its tensors are to come. With `defer_commit` it ends with
        `commit`. Raises RuntimeError on all workers, and keeps the state that was, where they are at different steps
        or one of them gave up (`abort`).
        """
        exchange = self._exchange
        with self._undone_on_error():
            try:
                self._means = exchange.land()
            finally:
                self._reporter.skipped += exchange.skipped
                self._setup.attempt += 1
                self._next_exchange()
        self._provisional = True
        if last and not self.defer_commit:
            self.commit()

    def advance(self) -> bool:
        """One round of every bucket, in order. True when nothing is left to exchange."""
        return self._exchange.advance()

    def mean(self, name: str) -> Array | None:
        """The mean of a gradient after `land`; asked for once."""
        return self._means.pop(name)

    def abandon(self) -> None:
        """Drop a step that was begun: wait for what is under way, and keep neither means nor state."""
        self._exchange.abandon()
        self._next_exchange()

    def abort(self, reason: str) -> NoReturn:
        """Give up the step under way: all workers raise RuntimeError with the reason, and keep the state that was.

        What this worker has not handed in leaves as absent, so that nobody waits for it.
        """
        self._exchange.failure = reason
        self.flush()
        self._restore()
        raise RuntimeError(f"worker {self.rank} gave up step {self._setup.step_number()}: {reason}")

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

    def note(self, name: str, text: str) -> None:
        """Have the report say this of a tensor."""
        self._reporter.notes[name] = text

    def _check_gradients(self, gradients: Mapping[str, Array | None]) -> None:
        self._setup.settle()
        for name, gradient in gradients.items():
            self._exchange.check(name, gradient)

    def _next_exchange(self) -> None:
        self._exchange.drop()
        self._exchange = Exchange(self._setup)

    @contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        # After an error the step is over: the next one begins from the state that was.
        exchange = self._exchange
        try:
            yield
        except BaseException:
            if self._exchange is exchange:
                self._next_exchange()
            self._restore()
            raise

    def _refuse_begun(self, remedy: str) -> None:
        if self._exchange.begun:
            raise RuntimeError(f"a step is under way: {remedy}")

    # -- commit ------------------------------------------------------------------------------------------------------
    @property
    def report_skipped(self) -> int:
        """How many means were not finite so far, on the host (`Report.skipped`)."""
        return self._reporter.skipped

    @property
    def provisional(self) -> bool:
        """Whether an exchange waits for `commit` or `rollback`."""
        return self._provisional

    def commit(self) -> None:
        """The means are applied: the step counts, and its state is kept. With `defer_commit` only."""
        setup = self._setup
        setup.snapshot.release()
        self._provisional = False
        setup.attempt = 0
        setup.step.assign(setup.step.read() + 1)
        setup.trace.end_step()
        if not self._weighed and not setup.xp.tracing and setup.schedule is None:
            self._weighed = True
            if self.rank == 0 and (heavier := self._reporter.report(norms=False).heavier):
                warnings.warn(heavier, stacklevel=3)
        self._reporter.step_passed()

    def rollback(self, names: Iterable[str] | None = None) -> None:
        """The means are thrown away: all state is as it was before the exchange. With `defer_commit` only.

        ``names``: of these tensors alone; those of other exchanges of this step are to be applied.
        """
        setup = self._setup
        if not self._provisional:
            return
        if names is None:
            self._restore()
            self._reporter.discarded += 1
            return
        for unit in dict.fromkeys(setup.table.unit(name) for name in names):
            setup.snapshot.restore(setup.xp, setup.cells(unit))

    def _restore(self) -> None:
        self._setup.restore()
        self._provisional = False

    # -- policy ------------------------------------------------------------------------------------------------------
    @property
    def decision(self) -> Decision:
        """What the policy decided last; without a policy, what always holds."""
        return Decision({}) if self.schedule is None else self.schedule.decision

    @property
    def steps(self) -> int:
        """How many steps were made in all, across resumed runs; `Report.steps` counts those of this object."""
        return self._setup.step_number() if self._waiting is None else int(self._waiting.args[0]["step"])

    @property
    def steps_this_epoch(self) -> int:
        """How many exchanges there were since `end_epoch`."""
        return self._setup.step_number() - (0 if self.schedule is None else self.schedule.step)

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

    def ending(self, lr: float | None = None, next_lr: float | None = None) -> RoundScheduler:
        """`end_epoch`, for several workers of one process: ``advance()`` all of them in turn until each gives True."""
        self._refuse_begun("finish it before the epoch ends")
        self.rollback()  # no step applies it any more
        programs: dict[str, Program[Any]] = {}
        if self.schedule is not None:
            ended = self.schedule.on_epoch_end(lr, next_lr, self._setup.step_number(), self.rank)
            programs["policy"] = self._entering(ended)
        return RoundScheduler("policy", programs, self.transport, self.trace)

    @property
    def trying(self) -> bool:
        """Whether a policy is still timing steps; see `tune`."""
        return self.schedule is not None and self.schedule.on_trial(self.world_size)

    def tune(self) -> Decision:
        """A training step is over: let a policy that times steps decide when a trial ends. Every worker must call this.

        The integrations do it, but for graphs of TensorFlow: there it is for `grace.tensorflow.PolicyCallback`, or for
        a loop of your own, after each step. Raises as `end_epoch`.
        """
        flight = self.tuning()
        while flight is not None and not flight.advance():
            pass
        return self.decision

    def tuning(self) -> RoundScheduler | None:
        """`tune`, for several workers of one process: ``advance()`` all of them in turn until each gives True.

        None where nothing is to be decided, on all workers.
        """
        self._refuse_begun("finish it before the policy is told of it")
        self.rollback()
        schedule, setup = self.schedule, self._setup
        if schedule is None or setup.step is None or not self.trying:
            return None
        step = setup.step_number()
        if not schedule.trial_over(step, self.world_size):
            return None
        decided = schedule.on_trial_end(step, self.rank, self.world_size)
        return RoundScheduler("policy", {"policy": self._entering(decided)}, self.transport, self.trace)

    def _entering(self, decided: Program[list[str]]) -> Program[None]:
        # Carries a decision out.
        assert self.schedule is not None
        self._reporter.record()  # no line spans a change of level
        before = dict(self.schedule.decision.levels)
        for name in (yield from decided):
            self._setup.switch_level(name, before[name])

    # -- state -------------------------------------------------------------------------------------------------------
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
        return persistence.export(self._setup)

    def load_state_dict(self, *states: Mapping[str, Any], lost: bool = False) -> None:
        """Continue from a `state_dict`: this worker's own, or, where the number of workers has changed, those of all
        workers of the run before, on every worker. Then every array follows its rule (`grace.core.Resize`). ``lost``:
        some of those workers' may be missing, and with them what those workers held.

        Before `build` they are kept until the tensors are known. With a policy every worker must make this call: they
        compare their levels. Raises ValueError, and changes nothing, when a state is another worker's, of another
        format, method or policy, or when names or shapes differ from the model's.
        """
        setup = self._setup
        states = persistence.under_own_names(setup, states)
        fitted, step = persistence.checked(setup, states, lost)
        self.claimed.clear()
        if not setup.bound:
            self.awaited = sizes_of(states[0])
            self._waiting = partial(self.load_state_dict, *states, lost=lost)
            return
        self._restore()
        setup.attempt = 0
        self._waiting = None
        self._reporter.first_step += step - setup.step_number()  # the report counts what this object did
        persistence.load(setup, states, fitted, step)
        if self._reporter.recording:
            self._reporter.begin_record(again=True)

    def check_state(self, *states: Mapping[str, Any], lost: bool = False) -> tuple[list[Fitted], int]:
        """What `load_state_dict` would set, and the step; raises as that does."""
        return persistence.checked(self._setup, persistence.under_own_names(self._setup, states), lost)

    # -- report ------------------------------------------------------------------------------------------------------
    def report(self, trace: str | os.PathLike[str] | None = None) -> Report:
        """What was sent since this object was made (or loaded, or rebuilt), in total and for every tensor.

        ``trace``: a file for the last steps in Chrome's trace format: backward pass, compression, messages under way,
        waiting, decompression. The option ``trace`` says how many steps; ValueError without it, and for TensorFlow,
        whose graphs run by themselves: use its own profiler.
        """
        if trace is not None:
            if self._setup.bound and self.xp.traced:
                raise ValueError("a graph runs by itself and cannot be traced from here: use tf.profiler.experimental")
            if not self.trace.steps:
                raise ValueError(
                    "no trace was kept: say of how many of the last steps, as grace_from_params({..., 'trace': 20})"
                )
            self.trace.save(trace, self.rank)
        return self._reporter.report()

    def record(self) -> None:
        """Write a line to the record now: what happened since the line before. Other workers than 0 write nothing.

        Lines are written without this call, except in TensorFlow graphs, which run by themselves: there call it between
        two steps (`grace.tensorflow.RecordCallback` does), and anywhere at a training's end, for its last steps.
        ValueError if no record was asked for.
        """
        if not self.options.record:
            raise ValueError("there is no record: name a file, as grace_from_params({..., 'record': 'run.jsonl'})")
        self._reporter.record()
