"""Grace: takes named gradients and returns their means over all workers."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from grace.backends import backend_of
from grace.core import Array, Program, Transport, name_of
from grace.core.communicator import Communicator
from grace.core.method import Method
from grace.core.policy import Decision, Policy
from grace.engine import persistence
from grace.engine.averager import Averager
from grace.engine.buckets import CHANGED, Tensor
from grace.engine.level_costs import level_costs
from grace.engine.options import Options
from grace.engine.report import Report, TensorReport
from grace.engine.reshard import sizes_of
from grace.engine.scheduler import RoundScheduler
from grace.engine.setup import Setup
from grace.engine.state_store import Snapshot
from grace.transports import get_transport

FLOATS = ("float16", "bfloat16", "float32", "float64")
MOMENTUM_TWICE = (
    "memory {!r} has momentum of its own: set the optimizer's momentum to 0 (of Adam and its kin: the first beta), or "
    "use another memory, such as 'residual'"
)
PLAIN_SGD = (
    "compressor {!r} returns updates, with a momentum of its own memory: its parameters need an optimizer without "
    "momentum or moments, SGD with momentum 0, not {}. Vectors may have another one, in a parameter group of their own"
)
SPARSE = "its sparse gradients are made dense first"


def _shown(part: Any, all_fields: bool = False) -> str:
    """The text of a compressor or a memory: its name, with all settings or those that are not the default."""
    settings = [
        f"{field.name}={name_of(value) if is_dataclass(value) else repr(value)}"
        for field in (fields(part) if is_dataclass(part) else ())
        if field.init and ((value := getattr(part, field.name)) != field.default or all_fields)
    ]
    return f"{name_of(part)}({', '.join(settings)})" if settings else name_of(part)


class Grace(Averager):
    """Averages named gradients with a method, a communicator and a transport.

    Made by `grace.grace_from_params`. The integrations (`grace.torch`, `grace.tensorflow`) drive it; you can, too:
    call `build` once, then `step` (or `start` and `finish`) for every exchange. Every worker must make the same calls.
    """

    def __init__(
        self,
        method: Method,
        communicator: Communicator,
        transport: Transport | None,
        options: Options,
        policy: Policy | None = None,
    ):
        super().__init__(Setup(method, communicator, transport, options, policy))
        self.bindings: dict[Any, str] = {}
        """Tensor names by the identity of the toolkit's variables, if the variables' own names are ambiguous."""
        self.awaited: dict[str, int] = {}
        """Tensors of a state loaded before `build`, with their numbers of elements."""
        self.claimed: set[str] = set()
        """Names used since a state was loaded; no other variable may take them."""
        self._waiting: tuple[persistence.State, ...] = ()  # states loaded before `build`
        self._lost = False  # whether some of these states may be missing

    def __deepcopy__(self, memo: Any) -> Grace:
        """A Grace with the same settings, workers and state, but its own tensors and counts."""
        setup = self.setup
        copy = Grace(setup.method, setup.unresolved, setup.given_transport, setup.options, setup.policy)
        if setup.bound:
            copy.load_state_dict(self.state_dict())
        return copy

    def __reduce__(self) -> Any:
        # Pickle the settings only: each worker saves its own state (`state_dict`), and the loader finds its own group.
        setup = self.setup
        return Grace, (setup.method, setup.unresolved, None, setup.options, setup.policy)

    def __repr__(self) -> str:
        # Do not read `transport`: it would look up the group of workers.
        setup, transport = self.setup, self.setup.given_transport
        communicator = setup.unresolved if transport is None else setup.communicator
        compressor, memory = setup.method.compressor, setup.method.memory
        parts = [_shown(compressor, all_fields=True), _shown(memory), name_of(communicator)]
        where = "workers not known yet" if transport is None else f"worker {transport.rank} of {transport.size}"
        policy = [] if setup.policy is None else [f"policy {name_of(setup.policy)}"]
        return f"Grace({'; '.join([' + '.join(parts), *policy, where, f'{len(self.names)} tensors'])})"

    # -- tensors -----------------------------------------------------------------------------------------------------
    def build(self, named_tensors: Mapping[str, Array] | Iterable[tuple[str, Array]]) -> None:
        """Lay out tensors and create their state. ``named_tensors``: parameters or gradients; values do not matter.

        A second call adds new tensors. If the workers' tensors or settings differ, every worker raises an error that
        names the difference; if workers may join a running job (Horovod's elastic launches), `settle` does so instead.
        """
        setup, new = self.setup, {}
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
            _check(tensor, setup)
            if name in new or setup.table.tensors.get(name, tensor) != tensor:
                raise ValueError(
                    f"two tensors are named {name!r}: names must be unique, and shapes must not change. {CHANGED}"
                )
            if name not in setup.table.tensors:
                new[name] = tensor
        if new:
            self._add(new)

    def _add(self, new: Mapping[str, Tensor]) -> None:
        self.setup.loaded_step = self.steps if self._waiting else None
        self.setup.add(new)
        if self._waiting:
            self.load_state_dict(*self._waiting, lost=self._lost)
        self._reporter.begin_record()

    def settle(self) -> None:
        """Compare tensors with the other workers, and create the groups of workers.

        Needed before a graph if workers may join a running job, since `build` then exchanges no messages; else the
        first gradient triggers it. Raises as `build` does.
        """
        self.setup.settle()

    def rebuild(self, named_tensors: Mapping[str, Array] | Iterable[tuple[str, Array]]) -> None:
        """Replace the tensors, as after a change of the model. Call it between two steps.

        An unchanged tensor keeps its state, all other state is dropped, and `report` starts again. Raises as `build`
        does.
        """
        self._end_step("finish it before the tensors change")
        self.discard()
        setup, named = self.setup, dict(named_tensors)
        recording = self._reporter.recording
        if recording:
            self.record()  # before the counts are reset
        shapes = {name: setup.xp.shape(array) for name, array in named.items()} if setup.bound else {}
        units = setup.table.units
        same = [unit for unit in units if all(shapes.get(tensor.name) == tensor.shape for tensor in unit.tensors)]
        before = {(unit.name, unit.tensors, unit.dense): cells for unit, cells in setup.store.detach(same).items()}
        if setup.schedule is not None:
            setup.schedule.forget(unit.name for unit in units if unit not in same)
        setup.table.clear()
        setup.snapshot = Snapshot(setup.store)
        setup.groups.clear()
        self._means = {}
        self._reporter.begin_anew()
        self.build(named)
        for unit in setup.table.units:
            if (cells := before.get((unit.name, unit.tensors, unit.dense))) is not None:
                setup.store.attach(unit, cells)
        if recording:
            self._reporter.begin_record(again=True)

    def reset(self, transport: str | Transport | None = None, states: Sequence[Mapping[str, Any]] = ()) -> None:
        """Continue over another transport, with other workers. Drops an unfinished step and resets `report`.

        ``transport``: as in `grace_from_params`. ``states``: the `state_dict` of every remaining worker, the same on
        all workers; arrays follow their rules (`grace.core.Resize`), and the data of lost workers is lost. Without
        states this worker keeps its own state and rank. Every worker must make this call, including new ones. Raises as
        `build` and `load_state_dict` do, in which case nothing has changed.
        """
        own, setup = () if states else (self.state_dict(),), self.setup
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # already issued when this object was made
            new = Grace(setup.method, setup.unresolved, get_transport(transport), setup.options, setup.policy)
        for key in ("learning_rate", "track_missing", "defer_commit", "keeps_base", "transposed", "trace"):
            setattr(new.setup, key, getattr(setup, key))
        new._reporter.notes, new._reporter.parameters = self._reporter.notes, self._reporter.parameters
        if setup.bound:
            new.setup.bind(setup.xp)
            new._add(setup.table.tensors)
        new.load_state_dict(*(states or own), lost=bool(states))
        new._reporter.first_step = new.setup.step_number()
        new.bindings, new.settles = self.bindings, self.settles
        vars(self).update(vars(new))

    # -- policy ------------------------------------------------------------------------------------------------------
    @property
    def decision(self) -> Decision:
        """The policy's latest decision; an empty one without a policy."""
        return Decision({}) if self.schedule is None else self.schedule.decision

    @property
    def steps(self) -> int:
        """Number of steps in total, across resumed runs; `Report.steps` counts those of this object."""
        self.settles()
        return int(self._waiting[0]["step"]) if self._waiting else self.setup.step_number()

    @property
    def steps_this_epoch(self) -> int:
        """Number of steps since the last `end_epoch`; without a policy, of all steps."""
        return self.setup.step_number() - (0 if self.schedule is None else self.schedule.step)

    def end_epoch(self, lr: float | None = None, next_lr: float | None = None) -> Decision:
        """End an epoch: let the policy make its next decision. Every worker must call this.

        ``lr``: the learning rate of this epoch, by default the ``next_lr`` of the last call. ``next_lr``: that of the
        next epoch, by default unchanged. Worker 0's numbers and decision hold for all workers. Without a policy
        nothing happens. Raises RuntimeError during a step, and if workers disagree.
        """
        flight = self.ending(lr, next_lr)
        while not flight.advance():
            pass
        return self.decision

    def ending(self, lr: float | None = None, next_lr: float | None = None) -> RoundScheduler:
        """`end_epoch` for several workers in one process: call ``advance()`` on each in turn until all return True."""
        self._end_step("finish it before the epoch ends")
        if self.schedule is None:
            return RoundScheduler("policy", {}, self.transport, self.setup.trace)
        return self._decided(self.schedule.on_epoch_end(lr, next_lr, self.setup.step_number(), self.rank))

    @property
    def trying(self) -> bool:
        """Whether a policy still times steps; see `tune`."""
        return self.schedule is not None and self.schedule.on_trial(self.world_size)

    def tune(self) -> Decision:
        """Count a training step for a policy that times steps; decides when a trial ends. Every worker must call this.

        The integrations call it, except in TensorFlow graphs: there, use `grace.tensorflow.PolicyCallback`, or call it
        after each step of your own loop. Raises as `end_epoch`.
        """
        flight = self.tuning()
        while flight is not None and not flight.advance():
            pass
        return self.decision

    def tuning(self) -> RoundScheduler | None:
        """`tune` for several workers in one process: call ``advance()`` on each in turn until all return True.

        Returns None, on all workers alike, if there is no decision to make.
        """
        self._end_step("finish it before the policy is told of it")
        schedule, setup = self.schedule, self.setup
        if schedule is None or setup.step is None or not self.trying:
            return None
        if not schedule.trial_over(step := setup.step_number(), self.world_size):
            return None
        schedule.costs = schedule.costs or level_costs(setup, Grace)
        return self._decided(schedule.on_trial_end(step, self.rank, self.world_size))

    def _decided(self, decision: Program[list[str]]) -> RoundScheduler:
        # Lets a policy decide, and moves each tensor to its new level.
        def program() -> Program[None]:
            self._reporter.record()  # so that no line of the record spans a change of level
            before = dict(self.decision.levels)
            units = self.setup.table.by_name()
            for name in (yield from decision):
                self.discard(tensor.name for tensor in units[name].tensors)  # undecided state is of the old level
                self.setup.switch_level(name, before[name])

        return RoundScheduler("policy", {"policy": program()}, self.transport, self.setup.trace)

    # -- state -------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """All state of this worker: the step, and every tensor's arrays (PyTorch: CPU tensors; else NumPy).

        Each worker saves and loads its own state, as residuals differ. `grace.checkpoint` writes states to files.
        Raises RuntimeError if states of another number of workers were loaded and still wait for `build`.
        """
        if self._waiting:  # loaded before `build`, and not changed since
            state, *others = self._waiting
            if others or (state["rank"], state["world_size"]) != (self.rank, self.world_size):
                raise RuntimeError("build has yet to distribute the loaded states of other workers: run a step first")
            return dict(state)
        self.settles()
        return persistence.export(self.setup)

    def load_state_dict(self, *states: Mapping[str, Any], lost: bool = False) -> None:
        """Continue from a `state_dict`: this worker's own, or, after a change in the number of workers, those of all
        workers of the previous run, on every worker. Then every array follows its rule (`grace.core.Resize`). ``lost``:
        some states may be missing, and their data is lost.

        Every worker must make this call. Raises ValueError on all, and changes nothing, if a state is another worker's,
        of another format, method or policy, or of other names or shapes. Before `build`, the states wait until the
        tensors are known; another worker's state is an error only then.
        """
        setup = self.setup
        found = persistence.agreed(setup, states, lost)
        self.claimed.clear()
        if not setup.bound:
            self.awaited = sizes_of(found.states[0])
            self._waiting, self._lost, setup.saved_layout = found.states, lost, persistence.layout(found.states)
            return
        self.discard()
        self._waiting = ()
        self._reporter.first_step += found.step - setup.step_number()  # the report counts only the steps of this object
        persistence.load(setup, found)
        setup.attempt = setup.exchanges = 0
        setup.windows.restart(found.step)
        if self._reporter.recording:
            self._reporter.begin_record(again=True)

    def check_state(self, *states: Mapping[str, Any], lost: bool = False) -> persistence.Checked:
        """Check states without loading them; raises as `load_state_dict`."""
        return persistence.checked(self.setup, states, lost)

    # -- report ------------------------------------------------------------------------------------------------------
    def report_parameters(self, source: Callable[[], list[TensorReport]]) -> None:
        """Let the report include traffic of parameters, as ``source`` returns it."""
        self._reporter.parameters = source

    def report(self, trace: str | os.PathLike[str] | None = None) -> Report:
        """Traffic since this object was made (or reset, or rebuilt), in total and per tensor.

        ``trace``: a file for the last steps in Chrome's trace format: backward pass, compression, messages in flight,
        waiting, decompression. The option ``trace`` sets the number of steps. ValueError without that option, and for
        TensorFlow graphs: use TensorFlow's own profiler.
        """
        if trace is not None:
            if self.setup.bound and self.xp.traced:
                raise ValueError("a graph runs by itself and cannot be traced from here: use tf.profiler.experimental")
            self.setup.trace.save(trace, self.rank)
        self.settles()
        return self._reporter.report()

    def record(self, **metrics: float) -> None:
        """Write a line to the record: the changes since the previous line, and ``metrics`` at this step. Only worker 0
        writes.

        ``metrics``: numbers that measure quality, as ``grc.record(loss=0.3, accuracy=0.9)``; worker 0's are recorded.
        Lines are written automatically, except in TensorFlow graphs: there, call it between two steps
        (`grace.tensorflow.RecordCallback` does so). Call it at the end of a training for the last steps.
        ValueError if the option ``record`` is not set or a metric has the name of another number of the record,
        TypeError if one is no number, RuntimeError for metrics before `build`.
        """
        if not self.options.record:
            raise ValueError("there is no record: name a file, as grace_from_params({..., 'record': 'run.jsonl'})")
        self.settles()
        self._reporter.record(metrics)


def _check(tensor: Tensor, setup: Setup) -> None:
    if tensor.dtype not in FLOATS:
        raise TypeError(f"{tensor.name!r} has dtype {tensor.dtype}: only {', '.join(FLOATS)} gradients can be averaged")
    if setup.communicator.reduce_scatters and tensor.shape[:1] != (setup.world_size,):
        raise ValueError(
            f"communicator {name_of(setup.communicator)!r} hands each of {setup.world_size} workers its own row "
            f"of a tensor, but {tensor.name!r} has shape {list(tensor.shape)}. It is for grace.torch.fsdp: use "
            "another communicator for whole gradients"
        )
