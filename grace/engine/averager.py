"""Averager: averages the tensors of a `Setup`, one step after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

from grace.backends import Backend
from grace.core import Array, Transport
from grace.core.communicator import Communicator
from grace.core.method import Method
from grace.engine.exchange import Exchange
from grace.engine.options import Options
from grace.engine.policy_runner import Schedule
from grace.engine.reporter import Reporter
from grace.engine.setup import Setup


class Job(NamedTuple):
    """A submitted gradient; `Averager.finish` returns its mean."""

    name: str


class Averager:
    """Averages gradients step by step: each step exchanges them, and its new state is committed or rolled back."""

    def __init__(self, setup: Setup):
        self._setup = setup
        self._reporter = Reporter(setup)
        self._exchange = Exchange(setup)
        self._means: dict[str, Array | None] = {}
        self.provisional = False
        """Whether the last exchange waits for `commit` or `rollback`."""
        self.paused = False
        """Whether a `no_sync` block is active."""

    # -- settings ----------------------------------------------------------------------------------------------------
    @property
    def method(self) -> Method:
        """The compressor with its memory, without changes by a policy."""
        return self._setup.method

    @property
    def options(self) -> Options:
        """The settings common to all methods."""
        return self._setup.options

    @property
    def communicator(self) -> Communicator:
        """The communicator, resolved for the workers."""
        return self._setup.communicator

    @property
    def schedule(self) -> Schedule | None:
        """The running policy, if there is one."""
        return self._setup.schedule

    @property
    def trace(self) -> Any:
        """The timed events of steps; the integrations add their own."""
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
        """Whether a step's state is provisional until `commit`; `rollback` restores the state before it.

        For integrations that see whether the optimizer applies the means. Costs a copy of the state.
        """
        return self._setup.defer_commit

    @defer_commit.setter
    def defer_commit(self, value: bool) -> None:
        self._setup.defer_commit = value

    @property
    def transposed(self) -> bool:
        """Whether Keras's integration exchanges kernels transposed; see `choose_layout`."""
        return self._setup.transposed

    def choose_layout(self) -> bool:
        """`transposed`, which the first call before there are tensors decides for the whole run.

        It becomes that of a loaded state with arrays; without one, True if a method that may run is blockwise.
        """
        return self._setup.choose_layout()

    @property
    def learning_rate(self) -> Callable[[str], Any] | None:
        """A function from a tensor's name to its learning rate, for memories that need it. The integrations set it."""
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
        """The transport. If none was given, the group of workers is looked up when this is first read.

        Raises RuntimeError if the launcher asks for several workers and there is no group.
        """
        return self._setup.transport

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
        """Tensors with a submitted gradient in this step."""
        return set(self._exchange.gradients)

    # -- exchange ----------------------------------------------------------------------------------------------------
    def start(self, name: str, gradient: Array | None, spent: bool = False) -> Job:
        """Submit a gradient. Its bucket is sent once it is complete and the buckets before it were sent.

        Buckets leave in one order on all workers, regardless of the order of these calls. ``spent``: the gradient is
        donated: if arrays are mutable, its memory may hold the mean, so do not read it again. Raises KeyError for an
        unknown name and RuntimeError for a second gradient before `finish`.
        """
        if self.paused:
            self._means[name] = gradient
            return Job(name)
        self._submit({name: gradient}, spent)
        with self._undone_on_error():
            self._exchange.launch_complete()
        return Job(name)

    def finish(self, job: Job) -> Array | None:
        """The mean of a gradient, in its shape and dtype. The first call ends the step.

        A gradient that was not submitted is absent on this worker. With ``track_missing`` its mean is None if it is
        absent on all workers; otherwise zero takes its place.
        """
        if job.name not in self._means:
            self.flush()
        return self._means.pop(job.name)

    def flush(self) -> None:
        """End the step: launch the remaining buckets, wait for all of them, and commit the new state."""
        with self._undone_on_error():
            self._exchange.launch_rest()
        self.land()

    def step(self, gradients: Mapping[str, Array | None]) -> dict[str, Array | None]:
        """The means of these gradients, in one exchange. Other tensors take no part."""
        if not gradients or self.paused:
            return dict(gradients)
        self.launch(gradients)
        self.land()
        return {name: self._means.pop(name) for name in gradients}

    def launch(self, gradients: Mapping[str, Array | None], together: str = "", spent: bool = False) -> None:
        """Submit gradients and send them now, one message per bucket. `land` ends the step.

        ``together``: send a single message under this name instead. ``spent``: as in `start`.
        """
        self._submit(gradients, spent)
        with self._undone_on_error():
            self._exchange.launch_names(gradients, together)

    def land(self, last: bool = True) -> None:
        """Wait for all launched buckets, round by round, and commit the new state.

        ``last``: False if more tensors of this step follow; else the step ends here, or with `defer_commit` at
        `commit`. Raises RuntimeError on all workers, and keeps the previous state, if they are at different steps or
        one of them gave up (`abort`).
        """
        exchange = self._exchange
        with self._undone_on_error():
            try:
                self._means = exchange.land()
            finally:
                self._reporter.skipped += exchange.skipped
                self._setup.attempt += 1
                self._next_exchange()
        self.provisional = True
        if last and not self._setup.defer_commit:
            self.commit()

    def advance(self) -> bool:
        """Advance every bucket by one round, in order. True when the exchange is complete."""
        return self._exchange.advance()

    def mean(self, name: str) -> Array | None:
        """The mean of a gradient after `land`; can be taken once."""
        return self._means.pop(name)

    def abandon(self) -> None:
        """Drop an unfinished step: wait for the messages in flight, and discard means and state."""
        try:
            self._exchange.abandon()
        finally:  # even if a message in flight is lost
            self._next_exchange()

    def abort(self, reason: str) -> NoReturn:
        """Give up the current step: all workers raise RuntimeError with the reason, and keep the previous state.

        This worker's missing gradients are sent as absent, so that no worker waits for them.
        """
        self._exchange.failure = reason
        self.flush()
        self._restore()
        raise RuntimeError(f"worker {self.rank} gave up step {self._setup.step_number()}: {reason}")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Pause the exchange, as DistributedDataParallel's `no_sync`: gradients stay local.

        Nothing is sent or counted, and no state changes; `step` returns gradients unchanged. Every worker must pause
        in the same passes.
        """
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def _submit(self, gradients: Mapping[str, Array | None], spent: bool) -> None:
        self._setup.settle()
        for name, gradient in gradients.items():
            self._exchange.check(name, gradient)
        for name, gradient in gradients.items():
            self._exchange.submit(name, gradient, spent)

    def _next_exchange(self) -> None:
        self._exchange.drop()
        self._exchange = Exchange(self._setup)

    @contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        # An error ends the step: restore the previous state.
        exchange = self._exchange
        try:
            yield
        except BaseException:
            if self._exchange is exchange:
                self._next_exchange()
            self._restore()
            raise

    def _end_step(self, remedy: str) -> None:
        # If the last exchange is still provisional, its means will not be applied any more: roll it back.
        if self._exchange.begun:
            raise RuntimeError(f"a step is under way: {remedy}")
        self.rollback()

    # -- commit ------------------------------------------------------------------------------------------------------
    def commit(self) -> None:
        """Confirm that the means were applied: count the step and keep its state. Needed only with `defer_commit`."""
        setup = self._setup
        setup.snapshot.release()
        self.provisional = False
        setup.attempt = 0
        setup.step.assign(setup.step.read() + 1)
        setup.trace.end_step()
        self._reporter.step_passed()

    def rollback(self, names: Iterable[str] | None = None) -> None:
        """Restore the state before the exchange, since its means were discarded. Needed only with `defer_commit`.

        ``names``: restore only these tensors; the means of the step's other tensors will be applied.
        """
        setup = self._setup
        if not self.provisional:
            return
        if names is None:
            self._restore()
            self._reporter.discarded += 1
            return
        for unit in dict.fromkeys(setup.table.unit(name) for name in names):
            setup.snapshot.restore(setup.xp, setup.cells(unit))

    def _restore(self) -> None:
        self._setup.restore()
        self.provisional = False
