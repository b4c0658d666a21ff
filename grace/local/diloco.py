"""DiLoCo: workers train on their own and average pseudo-gradients every H steps."""

from __future__ import annotations

import json
import math
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from grace.backends import Backend, backend_of
from grace.core import Array, Transport, name_of
from grace.core.collectives import Reduce
from grace.engine.buckets import Tensor
from grace.engine.options import Options
from grace.engine.report import Report
from grace.engine.reshard import host
from grace.engine.session import FLOATS, Grace
from grace.engine.state_store import exported
from grace.local.settings import Settings

FORMAT = 1
"""Of `DiLoCo.state_dict`."""
State = Mapping[str, Any]


@dataclass(frozen=True)
class Access:
    """How to read and write a toolkit's parameters. Default: parameters are mutable arrays."""

    read: Callable[[Any], Array] = lambda parameter: parameter
    """The array of a parameter; may share its memory."""
    write: Callable[[Any, Array], None] | None = None
    """Copy an array of the parameter's dtype and shape into it."""
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Context manager around all arithmetic."""


@dataclass
class _Flight:
    """An exchange in flight."""

    fragments: tuple[int, ...]
    deltas: dict[str, Array]
    """The pseudo-gradients, retained if a checkpoint may need them."""
    side: tuple[Array, ...]
    """Arrays summed uncompressed: float32[3] with the number of landings, its square, and the weight; then buffers."""
    arrive: Callable[[], list[Any]] | None = None
    """Waits for the sums of ``side``."""
    rounds: int = 0
    """Rounds that were waited for."""
    background: Future[None] | None = None
    """The exchange on another thread, for a toolkit whose operations block."""
    names: list[str] = field(default_factory=list)


class DiLoCo:
    """Local training: each worker steps its own optimizer, and every H steps a Grace averages pseudo-gradients.

    The base is the last model that all workers agreed on. A fragment's pseudo-gradient is its base minus the worker's
    parameters. An outer optimizer applies the mean pseudo-gradient to the base; the worker's parameters become the
    base, or a mixture with it. A failed exchange changes nothing: the next pseudo-gradient is relative to the same
    base, so it includes what was lost.

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
        _check_grace(grace, outer_momentum)
        schedule = (fragments, fragment_sync_delay, fragment_update_alpha)
        self.settings = Settings(sync_every, outer_lr, outer_momentum, nesterov, *schedule)
        self.grace = grace
        """Carries the pseudo-gradients."""
        grace.learning_rate = lambda name: outer_lr  # for memories that ask for it
        self._weights, self._on_host = weights, on_host
        self._access = Access()
        self._parameters: dict[str, Any] = {}
        self._buffers: dict[str, Any] = {}
        self._tensors: dict[str, Tensor] = {}
        self._fragments: list[tuple[str, ...]] = []
        self._base: dict[str, Any] = {}
        self._momentum: dict[str, Any] = {}
        self._steps = self._first_step = 0  # inner steps in all, and when this object began
        self._inner = 0  # k: inner steps of the slot under way
        self._turns = 0  # slots that are over: fragments follow them, also where an exchange failed on some workers
        self._landed = 0  # n
        self._apart = False  # parameters may differ from the base
        self._flight: _Flight | None = None
        self._rounds = 0  # of an exchange, once it is known
        self._side_bytes = self._skipped = 0
        self._settled = False
        self._waiting: tuple[State, ...] = ()  # states that were loaded before `build`
        self._executor: ThreadPoolExecutor | None = None

    # -- the part of Grace's interface that checkpoints and elastic jobs use ------------------------------------------
    @property
    def transport(self) -> Transport:
        """Carries messages: the Grace's."""
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
        return list(self._tensors)

    # -- progress ----------------------------------------------------------------------------------------------------
    @property
    def steps(self) -> int:
        """Inner steps made, across resumed runs."""
        return self._steps

    @property
    def landed(self) -> int:
        """Exchanges that have landed."""
        return self._landed

    @property
    def in_flight(self) -> bool:
        """Whether an exchange is in flight."""
        return self._flight is not None

    @property
    def fragments(self) -> list[tuple[str, ...]]:
        """The names in each fragment, in order of exchange."""
        return list(self._fragments)

    @property
    def built(self) -> bool:
        """Whether `build` has seen the parameters."""
        return bool(self._tensors)

    # -- parameters --------------------------------------------------------------------------------------------------
    def build(
        self,
        parameters: Mapping[str, Any] | Iterable[tuple[str, Any]],
        buffers: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
        access: Access | None = None,
    ) -> None:
        """Set the parameters, once, before the first step. Their values, equal on all workers, are the first base.

        ``buffers``: other arrays to average once in H steps, such as BatchNorm's moving means; those that are not
        floats are ignored. ``access``: how to read and write both. Raises TypeError for parameters that are not floats,
        ValueError for fragments that do not fit them.
        """
        named = dict(parameters)
        if self.built:
            raise RuntimeError("built already: make one DiLoCo for all parameters, and build it once")
        if not named:
            raise ValueError("there are no parameters: pass named_parameters")
        access = access or Access()
        with access.inside():
            values = {name: access.read(parameter) for name, parameter in named.items()}
            xp = backend_of(next(iter(values.values())))
            if xp.tracing:
                raise RuntimeError("local training is no part of a graph: call build outside of tf.function")
            tensors = {name: Tensor(name, xp.shape(value), xp.dtype(value)) for name, value in values.items()}
            if odd := [tensor for tensor in tensors.values() if tensor.dtype not in FLOATS]:
                raise TypeError(f"{odd[0].name!r} has dtype {odd[0].dtype}: only {', '.join(FLOATS)} can be averaged")
            fragments = self.settings.split({name: tensor.nbytes for name, tensor in tensors.items()})
            base = {name: xp.copy(xp.cast(value, _wide(xp.dtype(value)))) for name, value in values.items()}
            for names in fragments:  # separate calls, so that no bucket spans two fragments
                self.grace.build({name: base[name] for name in names})
            self._access, self._parameters, self._tensors, self._fragments = access, named, tensors, fragments
            extra = {name: access.read(buffer) for name, buffer in dict(buffers).items()}
            self._buffers = {n: buffer for n, buffer in dict(buffers).items() if xp.dtype(extra[n]) in FLOATS}
            self._base = {name: self._stored(value) for name, value in base.items()}
            if self.settings.outer_momentum:
                zeros = {name: xp.zeros(xp.shape(value), xp.dtype(value)) for name, value in base.items()}
                self._momentum = {name: self._stored(value) for name, value in zeros.items()}
        if self._waiting:
            states, self._waiting = self._waiting, ()
            self.load_state_dict(*states)

    @property
    def _xp(self) -> Backend:
        return self.grace.xp

    def _stored(self, value: Array) -> Any:
        return self._xp.to_numpy(value) if self._on_host else value

    def _array(self, stored: Any) -> Array:
        return self._xp.asarray(stored, str(stored.dtype)) if self._on_host else stored

    def _theta(self, name: str) -> Array:
        # The current value of a parameter, in the dtype of its base.
        return self._xp.cast(self._access.read(self._parameters[name]), _wide(self._tensors[name].dtype))

    def _put(self, handle: Any, value: Array, dtype: str) -> None:
        value = self._xp.cast(value, dtype)
        if self._access.write is None:
            self._xp.write(handle, value)
        else:
            self._access.write(handle, value)

    @property
    def settled(self) -> bool:
        """Whether `settle` has run."""
        return self._settled

    def settle(self) -> None:
        """Take the current parameters as base, unless a step was made or a state loaded, and compare among workers.

        The integrations call it before the first step. Raises ValueError on all workers, naming the difference, where
        settings, steps or bases differ.
        """
        self._require_built()
        if not self._steps:
            with self._access.inside():
                self._base = {name: self._stored(self._xp.copy(self._theta(name))) for name in self._tensors}
        self._compare()

    def _compare(self) -> None:
        self.grace.settle()
        self._settled = True
        if self.transport.size == 1 or self.transport.lockstep:
            return
        base = 0
        for value in self._base.values():
            base = zlib.crc32(self._xp.to_numpy(self._array(value)).tobytes(), base)
        buffers = {name: self._xp.shape(self._access.read(buffer)) for name, buffer in self._buffers.items()}
        mine = {
            "settings": repr(self.settings) + ", with weights" * (self._weights is not None),
            "buffers": str(buffers),
            "inner steps": f"{self._steps}, {self._inner} of slot {self._turns}",
            "parameters": f"values with sum {base:08x}",
        }
        remedies = {
            "inner steps": "Load checkpoints of one step",
            "parameters": "Begin from the same: grace.torch.broadcast_parameters or BroadcastCallback",
        }
        texts = [json.loads(text) for text in self.transport.exchange(json.dumps(mine))]
        for worker, theirs in enumerate(texts):
            for key, value in texts[0].items():
                if theirs[key] != value:
                    raise ValueError(
                        f"worker 0 and worker {worker} differ in their {key}: {value} and {theirs[key]}. "
                        + remedies.get(key, "Use the same on every worker")
                    )

    # -- an inner step -----------------------------------------------------------------------------------------------
    def step(self) -> None:
        """Count a step of the worker's optimizer, and start or land the exchange that is due.

        Raises what transport and method raise. Then the exchange is dropped; parameters, base, momentum and residuals
        are as before, and the fragment's next exchange includes the lost pseudo-gradient. Raises RuntimeError on all
        workers where the last exchange landed on some of them only.
        """
        for _ in self.stepping():
            pass

    def stepping(self) -> Iterator[None]:
        """`step` for `in_turn`: yields where the other workers have to catch up."""
        self._require_built()
        if not self._settled:
            self._compare()
        settings = self.settings
        self._steps += 1
        self._inner += 1
        self._apart = True
        started, ends = settings.slot - settings.fragment_sync_delay, self._inner == settings.slot
        try:
            if self._inner == started:
                self._launch((self._turns % settings.parts,))
                yield
            if self._flight is None:  # not due yet, or failed in this slot
                return
            if not ends:
                # A round is sent after the wait for the one before: spread these waits over the delay.
                elapsed = self._inner - started
                while self._flight.rounds < self._rounds * elapsed // settings.fragment_sync_delay:
                    self._advance()
                    yield
                return
            while not self._advance():
                yield
            self._land(settings.fragment_update_alpha)
        finally:
            if ends:
                self._end_slot()

    def _end_slot(self) -> None:
        self._inner = 0
        self._turns += 1

    def finish(self) -> None:
        """Land the exchange in flight and exchange all fragments once more: all workers' parameters become the base.

        For evaluation and export; training may continue afterwards. Raises as `step`.
        """
        for _ in self.finishing():
            pass

    def finishing(self) -> Iterator[None]:
        """`finish` for `in_turn`."""
        self._require_built()
        if not self._settled:
            self._compare()
        if self._flight is not None:
            while not self._advance():
                yield
            self._land(self.settings.fragment_update_alpha)
            self._end_slot()
        if self._apart:
            self._launch(tuple(range(self.settings.parts)))
            yield
            while not self._advance():
                yield
            self._land(0.0)
            self._inner = 0

    def _require_built(self) -> None:
        if not self.built:
            raise RuntimeError("call build(named_parameters) first: nothing is known about the parameters yet")

    # -- an exchange -------------------------------------------------------------------------------------------------
    def _launch(self, fragments: tuple[int, ...]) -> None:
        xp = self._xp
        with self._dropped_on_error():
            weight = self._weight()
            deltas = {}
            for name in (name for number in fragments for name in self._fragments[number]):
                delta = self._array(self._base[name]) - self._theta(name)
                deltas[name] = delta if weight is None else delta * weight
            landed = float(self._landed % math.isqrt(2**24 // self.world_size))  # sums of squares are exact
            side = [xp.asarray([landed, landed * landed, 1.0 if weight is None else weight], "float32")]
            if fragments[-1] == self.settings.parts - 1:
                for buffer in self._buffers.values():
                    value = self._access.read(buffer)
                    value = xp.copy(xp.cast(value, _wide(xp.dtype(value))))
                    side.append(value if weight is None else value * weight)
            self._start(fragments, deltas, tuple(side))

    def _start(self, fragments: tuple[int, ...], deltas: dict[str, Array], side: tuple[Array, ...]) -> None:
        delayed = self.settings.fragment_sync_delay > 0
        flight = _Flight(fragments, deltas if delayed else {}, side, names=list(deltas))
        self._flight = flight

        def leave() -> None:
            # Named after a tensor: several objects may have exchanges in flight.
            flight.arrive = self.transport.start([Reduce(side, "sum")], f"local.{flight.names[0]}")
            self.grace.launch(deltas, spent=not delayed)

        def travel() -> None:
            leave()
            while not self.grace.advance():
                pass

        if delayed and self._xp.traced and not self.transport.lockstep:
            # Horovod's TensorFlow operations block. Horovod matches messages by name, so another thread may issue them.
            self._executor = self._executor or ThreadPoolExecutor(1, "grace.local")
            flight.background = self._executor.submit(travel)
        else:
            leave()

    def _advance(self) -> bool:
        # One round. True when nothing is left to exchange.
        flight = self._flight
        assert flight is not None
        with self._dropped_on_error():
            if flight.background is not None:
                flight.background.result()
                return True
            flight.rounds += 1
            done = self.grace.advance()
        if done:
            self._rounds = max(self._rounds, flight.rounds)
        return done

    def _land(self, alpha: float) -> None:
        flight, xp, settings = self._flight, self._xp, self.settings
        assert flight is not None
        together = len(flight.fragments) > 1
        last = together or flight.fragments[0] == settings.parts - 1
        with self._dropped_on_error():
            assert flight.arrive is not None
            about, *side = flight.arrive()[0]
            self._check_landings(about)
            # The Grace's step count advances once in H steps: methods that alternate by step do so for each fragment.
            self.grace.land(last=last)
        with self._access.inside(), xp.quiet():
            weight = None if self._weights is None else about[2:] / self.world_size
            found = {}
            for name in flight.names:
                mean = self.grace.mean(name)
                if not xp.finite(mean):  # on all workers; the Grace leaves its state unchanged too
                    continue
                mean = mean if weight is None else mean / xp.cast(weight, xp.dtype(mean))
                momentum = self._array(self._momentum[name]) if name in self._momentum else None
                base, momentum = settings.outer_step(self._array(self._base[name]), momentum, mean)
                mixed = base if alpha == 0 else (1 - alpha) * base + alpha * self._theta(name)
                found[name] = base, momentum, mixed
            for name, (base, momentum, mixed) in found.items():
                self._base[name] = self._stored(base)
                if momentum is not None:
                    self._momentum[name] = self._stored(momentum)
                self._put(self._parameters[name], mixed, self._tensors[name].dtype)
            for buffer, total in zip(self._buffers.values() if side else (), side, strict=True):
                count = self.world_size if weight is None else xp.cast(about[2:], xp.dtype(total))
                self._put(buffer, total / count, xp.dtype(self._access.read(buffer)))
        self._side_bytes += sum(int(xp.nbytes(each)) for each in flight.side)
        self._flight = None
        self._landed += 1
        self._apart = alpha > 0 or not (together or settings.parts == 1)
        if skipped := [name for name in flight.names if name not in found]:
            if not self._skipped:
                warnings.warn(
                    f"the mean of {skipped[0]!r} is not finite: some worker's parameters are not. All workers leave "
                    "its base unchanged; report().skipped counts such means",
                    stacklevel=4,
                )
            self._skipped += len(skipped)

    def _check_landings(self, about: Array) -> None:
        # The sums are exact and equal on all workers, so all raise together.
        landed, squares, _ = self._xp.to_numpy(about).tolist()
        if landed * landed != self.world_size * squares:
            raise RuntimeError(
                f"the workers have landed different numbers of exchanges (this one {self._landed}): one failed on some "
                "of them only, so that their bases differ. Load a checkpoint on all workers, or go on from the last "
                "base by reset(transport, states)"
            )

    def _weight(self) -> float | None:
        weights = self._weights
        weight = weights() if callable(weights) else weights
        if weight is not None and not (weight > 0 and math.isfinite(weight)):
            raise ValueError(f"weights: {weight!r} must be a positive number, near 1")
        return weight if weight is None else float(weight)

    @contextmanager
    def _dropped_on_error(self) -> Iterator[None]:
        # The next pseudo-gradient, relative to the same base, includes this one.
        try:
            with self._access.inside(), self._xp.quiet():
                yield
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        flight, self._flight = self._flight, None
        if flight is None:
            return
        if flight.background is not None:
            wait([flight.background])
        with suppress(Exception):  # waiting for messages in flight may fail for the same reason
            self.grace.abandon()

    # -- state -------------------------------------------------------------------------------------------------------
    def global_state(self) -> dict[str, Any]:
        """The state that is equal on all workers: "base" and "momentum" of the outer optimizer, by parameter name.

        Host arrays (PyTorch: CPU tensors; else NumPy), float32, or float64 for float64 parameters.
        """
        return {"base": self._exported(self._base), "momentum": self._exported(self._momentum)}

    def _exported(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        return {name: exported(self._array(array), self._xp) for name, array in arrays.items()}

    def state_dict(self) -> dict[str, Any]:
        """This worker's state, without its parameters and its optimizer, which it must save itself. At any inner step.

        An exchange in flight is included, and restarted by `load_state_dict`. `grace.checkpoint.save` writes the state
        to files: save right after landings, or at intervals of at least H / P + fragment_sync_delay steps, since
        workers may be that many steps apart and need files of a common step. RuntimeError before `build`.
        """
        self._require_built()
        flight = self._flight
        if flight is not None and flight.background is not None:
            wait([flight.background])
        return {
            "format": FORMAT,
            "rank": self.rank,
            "world_size": self.world_size,
            "step": self._steps,
            "settings": repr(self.settings),
            "inner": self._inner,
            "turns": self._turns,
            "landed": self._landed,
            "apart": self._apart,
            "rounds": self._rounds,
            **self.global_state(),
            "sent": {} if flight is None else {n: exported(each, self._xp) for n, each in flight.deltas.items()},
            "side": [] if flight is None else [exported(each, self._xp) for each in flight.side],
            "grace": self.grace.state_dict(),
        }

    def check_state(self, *states: State, lost: bool = False) -> None:
        """Raise ValueError, naming the difference, for states that `load_state_dict` cannot load."""
        for state in states:
            if state.get("format") != FORMAT or "base" not in state:
                raise ValueError(
                    f"this state has format {state.get('format')!r} or is none of local training, of which this "
                    f"version of grace reads format {FORMAT}"
                )
            if state["settings"] != repr(self.settings):
                raise ValueError(
                    f"this state belongs to {state['settings']}, but this is {self.settings!r}: use the same settings"
                )
            if state["step"] != states[0]["step"] or not (lost or state["landed"] == states[0]["landed"]):
                raise ValueError(
                    f"states of steps {states[0]['step']} and {state['step']}: load states that were saved together"
                )
            if self.built:
                mine = {name: tensor.shape for name, tensor in self._tensors.items()}
                theirs = {name: tuple(array.shape) for name, array in state["base"].items()}
                if mine != theirs:
                    odd = sorted(mine.items() ^ theirs.items())[0]
                    raise ValueError(f"this state belongs to another model: {odd} is in one of them only")
        self.grace.check_state(*(state["grace"] for state in states), lost=lost)

    def load_state_dict(self, *states: State) -> None:
        """Continue from this worker's `state_dict`, or, for another number of workers, those of all former workers.

        Load the worker's parameters and optimizer first. For another number of workers a new slot begins, parameters
        become the base, and residuals follow their rules (`grace.core.Resize`). Before `build` the states are stored
        and loaded by it. Raises ValueError, and changes nothing, for a state that does not fit.
        """
        self.check_state(*states)
        if not self.built:
            self._waiting = states
            return
        self._drop()
        own = [(state["rank"], state["world_size"]) for state in states] == [(self.rank, self.world_size)]
        self.grace.load_state_dict(*(state["grace"] for state in states))
        self._take(states[0])
        if not own:
            self._begin_slot()
            return
        self._inner, self._apart = states[0]["inner"], states[0]["apart"]
        if sent := states[0]["sent"]:
            with self._dropped_on_error():
                deltas = {name: self._loaded(array) for name, array in sent.items()}
                side = tuple(map(self._loaded, states[0]["side"]))
                self._start((self._turns % self.settings.parts,), deltas, side)

    def reset(self, transport: str | Transport | None = None, states: Sequence[State] = ()) -> None:
        """Continue with other workers over another transport, without the exchange in flight. As `Grace.reset`.

        ``states``: the `state_dict` of every former worker that remains, equal on all workers. A worker that joins, or
        that missed the last landing, takes base and momentum from the others, and its parameters become the base.
        Residuals are summed and divided among all. Every worker must make this call; all begin a new slot.
        """
        if states:
            self.check_state(*states, lost=True)
        newest = max(states, key=lambda state: state["landed"], default=None)
        own = [state for state in states if (state["rank"], state["world_size"]) == (self.rank, self.world_size)]
        joins = newest is not None and (not self._steps or [s["landed"] for s in own] != [newest["landed"]])
        flight, self._flight = self._flight, None  # no wait: the workers may be gone
        if flight is not None and flight.background is not None:
            wait([flight.background])
        self.grace.reset(transport, [state["grace"] for state in states])
        self._settled, self._inner = False, 0
        if newest is not None:
            self._take(newest)
        self._first_step = self._steps
        if joins:
            self._begin_slot()

    def _take(self, state: State) -> None:
        # The state that is equal on all workers.
        with self._access.inside():
            for mine, theirs in ((self._base, state["base"]), (self._momentum, state["momentum"])):
                for name in mine:
                    mine[name] = self._stored(self._loaded(theirs[name]))
        self._first_step += state["step"] - self._steps
        self._steps, self._turns, self._landed = state["step"], state["turns"], state["landed"]
        self._rounds, self._inner, self._apart = state["rounds"], 0, True

    def _begin_slot(self) -> None:
        with self._access.inside():
            for name, parameter in self._parameters.items():
                self._put(parameter, self._array(self._base[name]), self._tensors[name].dtype)
        self._inner, self._apart = 0, False

    def _loaded(self, array: Any) -> Array:
        array = host(array)
        return self._xp.copy(self._xp.asarray(array, str(array.dtype)))

    # -- report ------------------------------------------------------------------------------------------------------
    def report(self) -> Report:
        """Traffic since this object was made, per inner step. ``bytes_dense``: of averaging gradients in every step.

        ``skipped``: means that were not finite.
        """
        found, steps = self.grace.report(), self._steps - self._first_step
        dense = {name: steps * tensor.nbytes for name, tensor in self._tensors.items()}
        tensors = [replace(tensor, bytes_dense=dense[tensor.name]) for tensor in found.tensors]
        settings = self.settings
        turns = f", {settings.parts} fragments" if settings.parts > 1 else ""
        notes = [found.exchange]
        if settings.fragment_sync_delay and self._rounds > 1:
            notes.append(f"an exchange has {self._rounds} rounds, each sent after the wait for the one before")
        return replace(
            found,
            steps=steps,
            method=f"{found.method} every {settings.sync_every} steps{turns}",
            bytes_sent=found.bytes_sent + self._side_bytes,
            bytes_received=found.bytes_received + self._side_bytes,
            bytes_dense=sum(dense.values()),
            tensors=tensors,
            skipped=self._skipped,
            exchange="; ".join(filter(None, notes)),
        )


def in_turn(runs: Iterable[Iterator[None]]) -> None:
    """Run workers of one process in lockstep, round by round: ``in_turn(w.stepping() for w in workers)``.

    For workers of a `grace.transports.local.World`, without a network.
    """
    left = list(runs)
    while left:
        left = [run for run in left if next(run, left) is not left]


def _wide(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def _check_grace(grace: Any, outer_momentum: float) -> None:
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
    if outer_momentum and grace.method.compressor.traits.update_direction:
        raise ValueError(
            f"compressor {name_of(grace.method.compressor)!r} returns updates, with a momentum of its own memory: set "
            "outer_momentum to 0"
        )
    if outer_momentum and grace.method.memory.includes_momentum:
        warnings.warn(
            f"memory {name_of(grace.method.memory)!r} has momentum of its own: set outer_momentum to 0", stacklevel=3
        )
