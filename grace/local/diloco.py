"""DiLoCo: workers train on their own and average pseudo-gradients every H steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from grace.core import Transport, name_of
from grace.core.local_training import Settings
from grace.engine.options import Options
from grace.engine.report import Report
from grace.engine.session import Grace
from grace.local.exchange import Exchange
from grace.local.handshake import Change
from grace.local.model import Access, Model
from grace.local.progress import FORMAT, Progress, State, check_states, compare


class DiLoCo:
    """Local training: each worker steps its own optimizer, and every H steps a Grace averages pseudo-gradients.

    The base is the last model that all workers agreed on. A fragment's pseudo-gradient is its base minus the worker's
    parameters. An outer optimizer applies the mean pseudo-gradient to the base; the worker's parameters become the new
    base, or a mixture of their values and the base. A failed exchange changes nothing: the next pseudo-gradient is
    relative to the same base, so it includes what was lost.

    ``grace``: averages the pseudo-gradients, in float32 (float64 for float64 parameters). Bases and outer momentum have
    that dtype too, also for 16-bit parameters. For the other settings see `Settings`. ``weights``: this worker's weight
    in the mean, a positive number near 1, or a function that returns one at each exchange, such as the tokens since the
    last exchange divided by their expected number. ``on_host``: store bases and momentum in host memory, as NumPy
    arrays.

    The integrations (`grace.torch.local`, `grace.tensorflow.LocalCallback`) drive it. In a loop of your own call
    `build` once, `step` after each step of the optimizer, and `finish` before evaluation and export. Every worker must
    make the same calls. Raises TypeError and ValueError, naming the remedy, for settings that cannot work.

    Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023, arXiv:2311.08105,
    algorithm 1; Douillard et al., "Streaming DiLoCo", 2025, arXiv:2501.18512, section 2, for fragments, delay and
    mixture.
    """

    def __init__(
        self,
        grace: Grace,
        sync_every: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        fragments: int | Sequence[Sequence[str]] = 1,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        weights: float | Callable[[], float] | None = None,
        on_host: bool = False,
    ):
        _check_grace(grace, outer_momentum, weights is not None)
        schedule = (fragments, fragment_sync_delay, fragment_update_alpha)
        self.settings = Settings(sync_every, outer_lr, outer_momentum, nesterov, *schedule)
        self.grace = grace
        """The Grace that averages pseudo-gradients."""
        grace.learning_rate = lambda name: outer_lr  # for memories that need a learning rate
        self._weights, self._on_host = weights, on_host
        self._progress = Progress()
        self._exchange = Exchange(grace, self.settings, weights, self._progress)
        self._settled = False
        self._waiting: tuple[State, ...] = ()  # states that were loaded before `build`
        self._left: Any = None  # a sample of the parameters after the last step or landing; None: unknown

    # -- the part of Grace's interface that checkpoints and elastic jobs use ------------------------------------------
    @property
    def transport(self) -> Transport:
        """The Grace's transport."""
        return self.grace.transport

    @property
    def options(self) -> Options:
        """The Grace's options."""
        return self.grace.options

    @property
    def rank(self) -> int:
        return self.grace.rank

    @property
    def world_size(self) -> int:
        return self.grace.world_size

    @property
    def names(self) -> list[str]:
        """Names of all parameters, in order."""
        return list(self._model.tensors)

    # -- progress ----------------------------------------------------------------------------------------------------
    @property
    def steps(self) -> int:
        """Number of inner steps, across resumed runs."""
        return self._progress.steps

    @property
    def landed(self) -> int:
        """Number of exchanges that have landed."""
        return self._progress.landed

    @property
    def in_flight(self) -> bool:
        """Whether an exchange is in flight."""
        return self._exchange.flight is not None

    @property
    def fragments(self) -> list[tuple[str, ...]]:
        """The parameter names of each fragment, in order of exchange."""
        return list(self._exchange.fragments)

    @property
    def built(self) -> bool:
        """Whether `build` has seen the parameters."""
        return bool(self._model.tensors)

    # -- parameters --------------------------------------------------------------------------------------------------
    def build(
        self,
        parameters: Mapping[str, Any] | Iterable[tuple[str, Any]],
        buffers: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
        access: Access | None = None,
    ) -> None:
        """Set the parameters, once, before the first step. Their values, equal on all workers, are the first base.

        ``buffers``: other arrays to average once in H steps, such as BatchNorm's moving means; those that are not
        floats are ignored. ``access``: how to read and write parameters and buffers. Raises TypeError for
        parameters that are not floats, ValueError for fragments that do not fit the parameters.
        """
        named = dict(parameters)
        if self.built:
            raise RuntimeError("built already: make one DiLoCo for all parameters, and build it once")
        if not named:
            raise ValueError("there are no parameters: pass named_parameters")
        access = access or Access()
        with access.inside():
            model = Model.of(named, dict(buffers), access, self._on_host, self.settings.outer_momentum > 0)
            fragments = self.settings.split({name: tensor.nbytes for name, tensor in model.tensors.items()})
            for names in fragments:  # separate calls, so that no bucket spans two fragments
                self.grace.build({name: model.base(name) for name in names})
            self._exchange.model, self._exchange.fragments = model, fragments
        if self._waiting:
            states, self._waiting = self._waiting, ()
            self.load_state_dict(*states)

    @property
    def _model(self) -> Model:
        return self._exchange.model

    @property
    def settled(self) -> bool:
        """Whether `settle` has run."""
        return self._settled

    def settle(self) -> None:
        """Make the current parameters the base if no step has been counted; in any case, compare the workers.

        The integrations call it before the first step. Raises ValueError on all workers, naming the difference, if
        settings, steps or bases differ.
        """
        self._require_built()
        if not self._progress.steps:
            with self._model.access.inside():
                self._model.adopt()
        self._compare()

    def _compare(self) -> None:
        self.grace.settle()
        self._settled = True
        if self.transport.size == 1 or self.transport.lockstep:
            self._exchange.in_step = True
            return
        model, progress = self._model, self._progress
        buffers = {name: self.grace.xp.shape(model.access.read(buffer)) for name, buffer in model.buffers.items()}
        compare(
            self.transport,
            {
                "settings": repr(self.settings) + ", with weights" * (self._weights is not None),
                "buffers": str(buffers),
                "inner steps": f"{progress.steps}, {progress.inner} of slot {progress.turns}",
                "parameters": f"values with sum {model.checksum():08x}",
            },
        )
        self._exchange.in_step = True

    # -- an inner step -----------------------------------------------------------------------------------------------
    def step(self) -> None:
        """Count a step of the worker's optimizer, and start or land the exchange that is due.

        Raises any error of the transport or the method. The exchange is then dropped: parameters, base, momentum and
        residuals stay unchanged, and the fragment's next exchange includes the lost pseudo-gradient. Raises
        OutOfStep, a RuntimeError, on all workers if their steps, landings or calls differ.
        """
        for _ in self.stepping():
            pass

    def stepping(self) -> Iterator[None]:
        """The generator form of `step` for `in_turn`: yields when the other workers must catch up."""
        self._require_built()
        if not self._settled:
            self._compare()
        settings, progress = self.settings, self._progress
        progress.step()
        started, ends = settings.slot - settings.fragment_sync_delay, progress.inner == settings.slot
        try:
            if progress.inner == started:
                yield from self._exchange.launching(progress.turns % settings.parts)
            if self._exchange.flight is None:  # no exchange is due, or it failed in this slot
                return
            if not ends:
                # Each round is sent after the wait for the previous one: spread these waits over the delay.
                elapsed = progress.inner - started
                while self._exchange.flight.rounds < progress.rounds * elapsed // settings.fragment_sync_delay:
                    self._exchange.advance()
                    yield
                return
            while not self._exchange.advance():
                yield
            self._exchange.land(settings.fragment_update_alpha)
        finally:
            if ends:
                progress.end_slot()
            self._look()

    def finish(self) -> None:
        """Land the exchange in flight, and make all workers' parameters and buffers equal by one more exchange.

        For evaluation and export; training may continue afterwards. Every worker must call it after the same step.

        - If the optimizer's steps moved the parameters, all fragments are exchanged and become the base.
        - If the parameters of any worker were written after the last step or landing (averaged weights swapped in, the
          best ones restored, a checkpoint loaded), the workers' parameters become their plain mean, uncompressed,
          without the outer optimizer. Momentum and residuals stay as they are, and an exchange in flight is dropped.
        - If nothing moved on any worker, nothing is exchanged but the handshake of 36 bytes.

        Raises as `step`.
        """
        for _ in self.finishing():
            pass

    def finishing(self) -> Iterator[None]:
        """The generator form of `finish` for `in_turn`."""
        self._require_built()
        if not self._settled:
            self.settle()
        exchange, progress = self._exchange, self._progress
        while exchange.flight is not None and not exchange.advance():
            yield
        change = yield from exchange.agreed(exchange.handshake(finish=True, change=self._change()))
        if exchange.flight is not None:
            if change is Change.WRITTEN:  # the parameters to average include the change in flight
                exchange.drop()
            else:
                exchange.land(self.settings.fragment_update_alpha)
            progress.end_slot()
        if change is Change.STEPS and progress.apart:
            exchange.launch_all()
            yield
            while not exchange.advance():
                yield
            exchange.land(0.0)
        elif change in (Change.BUFFERS, Change.WRITTEN):
            yield from exchange.averaging(parameters=change is Change.WRITTEN)
        if change >= Change.STEPS:
            progress.inner = 0
            self._look()

    def _look(self) -> None:
        # Keep a sample of the parameters, to detect later writes.
        with self._model.access.inside():
            self._left = self._model.sample()

    def _change(self) -> Change:
        # Returns what this worker has to exchange.
        model = self._model
        with model.access.inside():
            if self._progress.apart:
                written = self._left is not None and not model.same(self._left, model.sample())
                return Change.WRITTEN if written else Change.STEPS
            if model.moved():
                return Change.WRITTEN
            return Change.BUFFERS if model.buffers_moved() else Change.NONE

    def _require_built(self) -> None:
        if not self.built:
            raise RuntimeError("call build(named_parameters) first: nothing is known about the parameters yet")

    # -- state -------------------------------------------------------------------------------------------------------
    def global_state(self) -> dict[str, Any]:
        """The state that is equal on all workers: "base" and the outer optimizer's "momentum", each by parameter name.

        Host arrays (PyTorch: CPU tensors; else NumPy), float32, or float64 for float64 parameters.
        """
        return self._model.state()

    def state_dict(self) -> dict[str, Any]:
        """This worker's state at any inner step. It excludes parameters and the inner optimizer: save these yourself.

        An exchange in flight is included, and restarted by `load_state_dict`. `grace.checkpoint.save` writes the state
        to files: save right after landings, or at intervals of at least H / P + fragment_sync_delay steps, since
        workers may be that many steps apart and need files of a common step. RuntimeError before `build`.
        """
        self._require_built()
        flight, progress, xp = self._exchange.flight, self._progress, self.grace.xp
        side: list[Any] = []
        if flight is not None:
            flight.join()
            side = [*flight.side] if self._weights is not None else [xp.asarray([1.0], "float32"), *flight.side]
        return {
            "format": FORMAT,
            "rank": self.rank,
            "world_size": self.world_size,
            "step": progress.steps,
            "settings": repr(self.settings),
            "inner": progress.inner,
            "turns": progress.turns,
            "landed": progress.landed,
            "apart": progress.apart,
            "rounds": progress.rounds,
            **self.global_state(),
            "sent": {} if flight is None else {name: xp.exported(each) for name, each in flight.deltas.items()},
            "side": [xp.exported(each) for each in side],
            "grace": self.grace.state_dict(),
        }

    def check_state(self, *states: State, lost: bool = False) -> None:
        """Raise ValueError, naming the difference, for states that `load_state_dict` cannot load."""
        self._checked(states, lost)

    def _checked(self, states: Sequence[State], lost: bool = False) -> tuple[State, ...]:
        # Returns the states under the model's names, if they can be loaded.
        shapes = {name: each.shape for name, each in self._model.tensors.items()}
        found = check_states(states, self.settings, shapes, lost)
        self.grace.check_state(*(_graces(found) if lost else (state["grace"] for state in found)), lost=lost)
        return found

    def load_state_dict(self, *states: State) -> None:
        """Continue from this worker's `state_dict`, or, for another number of workers, those of all former workers.

        Load the worker's parameters and optimizer first. For another number of workers a new slot begins, parameters
        become the base, and residuals follow their rules (`grace.core.Resize`). Before `build` the states are stored,
        and `build` loads them. Parameters may have new names, such as those that `torch.compile` and Keras's
        `load_model` assign, if shapes and the ends of names match. Raises ValueError, and changes nothing, for a state
        that does not fit.
        """
        states = self._checked(states)
        if not self.built:
            self._waiting = states
            return
        self._exchange.drop()
        own = [(state["rank"], state["world_size"]) for state in states] == [(self.rank, self.world_size)]
        self.grace.load_state_dict(*(state["grace"] for state in states))
        self._take(states[0])
        if not own:
            self._restore()
            self._progress.apart = False
            return
        self._progress.inner, self._progress.apart = states[0]["inner"], states[0]["apart"]
        if sent := states[0]["sent"]:
            with self._exchange.dropped_on_error():
                deltas = {name: self._model.loaded(array) for name, array in sent.items()}
                first, *side = map(self._model.loaded, states[0]["side"])
                if self._weights is not None:
                    side = [first[-1:], *side]  # older states have two other numbers before the weight
                place = self._exchange.handshake(finish=False)
                self._exchange.start((self._progress.turns % self.settings.parts,), deltas, tuple(side), place)

    def reset(self, transport: str | Transport | None = None, states: Sequence[State] = ()) -> None:
        """Continue with other workers over another transport, as `Grace.reset` does. Drops the exchange in flight.

        ``states``: the `state_dict` of every former worker that remains, equal on all workers. A worker that joins, or
        that missed the last landing, takes base and momentum from the others, and its parameters become the base.
        Residuals are summed and divided among all. Every worker must make this call; all begin a new slot.
        """
        if states:
            states = self._checked(states, lost=True)
        newest = max(states, key=lambda state: state["landed"], default=None)
        own = [state for state in states if (state["rank"], state["world_size"]) == (self.rank, self.world_size)]
        joins = newest is not None and (not self.steps or [s["landed"] for s in own] != [newest["landed"]])
        flight, self._exchange.flight = self._exchange.flight, None  # do not wait: the workers may be lost
        if flight is not None:
            flight.join()
        self._exchange.in_step, self._left = False, None
        self.grace.reset(transport, _graces(states))
        self._settled, self._progress.inner = False, 0
        if newest is not None:
            self._take(newest)
        self._progress.first_step = self.steps
        if joins:
            self._restore()  # `apart` stays True, as on the survivors, so that all workers exchange in `finish`

    def _take(self, state: State) -> None:
        # Load the part of a state that is equal on all workers.
        with self._model.access.inside():
            self._model.take(state)
        self._progress.take(state)
        self._left = None

    def _restore(self) -> None:
        # Set the parameters to the base.
        with self._model.access.inside():
            self._model.restore()

    # -- report ------------------------------------------------------------------------------------------------------
    def report(self) -> Report:
        """Traffic since this object was made or reset, per inner step.

        ``bytes_dense``: as if every step averaged gradients. ``skipped``: number of means that were not finite.
        """
        found, steps = self.grace.report(), self.steps - self._progress.first_step
        dense = {name: steps * tensor.nbytes for name, tensor in self._model.tensors.items()}
        tensors = [replace(tensor, bytes_dense=dense[tensor.name]) for tensor in found.tensors]
        settings = self.settings
        turns = f", {settings.parts} fragments" if settings.parts > 1 else ""
        notes = [found.exchange]
        if settings.fragment_sync_delay and self._progress.rounds > 1:
            notes.append(f"an exchange has {self._progress.rounds} rounds, each sent after the wait for the one before")
        return replace(
            found,
            steps=steps,
            method=f"{found.method} every {settings.sync_every} steps{turns}",
            bytes_sent=found.bytes_sent + self._exchange.side_bytes,
            bytes_received=found.bytes_received + self._exchange.side_bytes,
            bytes_dense=sum(dense.values()),
            tensors=tensors,
            skipped=self._exchange.skipped,
            exchange="; ".join(filter(None, notes)),
        )


def in_turn(runs: Iterable[Iterator[None]]) -> None:
    """Run workers of one process in lockstep, round by round: ``in_turn(w.stepping() for w in workers)``.

    For workers of a `grace.transports.local.World`, without a network.
    """
    left = list(runs)
    while left:
        left = [run for run in left if next(run, left) is not left]


def _graces(states: Sequence[State]) -> list[State]:
    # Returns the states of the Graces, all with the largest step count: a worker that missed the last landing has a
    # smaller one.
    step = max((state["grace"]["step"] for state in states), default=0)
    return [{**state["grace"], "step": step} for state in states]


def _check_grace(grace: Any, outer_momentum: float, weighted: bool) -> None:
    if not isinstance(grace, Grace):
        raise TypeError(
            f"a Grace is needed, not {type(grace).__name__}: DiLoCo(grace_from_params({{...}}), sync_every=100), or "
            "grace.local.from_params for a dictionary"
        )
    if grace.options.fuse != "tensor" or grace.options.nonfinite != "poison":
        raise ValueError(
            "local training skips a tensor whose mean is not finite, and must see each mean unchanged: use "
            "fuse='tensor' and nonfinite='poison', the defaults"
        )
    if grace.schedule is not None and grace.schedule.policy.switches_methods:
        raise ValueError("compressor 'auto' times training steps, of which few exchange here: name a method")
    if grace.names:
        raise ValueError("this Grace averages tensors already: make one for local training alone")
    if weighted and getattr(grace.method.compressor, "average", "workers") == "senders":
        raise ValueError("weights are those of workers: use average='workers', or leave out weights")
    if outer_momentum and grace.method.compressor.traits.update_direction:
        raise ValueError(
            f"compressor {name_of(grace.method.compressor)!r} returns updates, with a momentum of its own memory: set "
            "outer_momentum to 0"
        )
    if outer_momentum and grace.method.memory.includes_momentum:
        warnings.warn(
            f"memory {name_of(grace.method.memory)!r} has momentum of its own: set outer_momentum to 0", stacklevel=3
        )
