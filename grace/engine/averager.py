"""Averager: averages the tensors of a `Setup`, one step after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

from grace.core import Array
from grace.engine.exchange import Exchange
from grace.engine.facts import Facts
from grace.engine.ledger import Ledger
from grace.engine.reporter import Reporter
from grace.engine.setup import Setup


class Job(NamedTuple):
    """A submitted gradient; `Averager.finish` returns its mean."""

    name: str


class Averager(Facts):
    """Averages gradients step by step: each step exchanges them, and its new state is committed or rolled back."""

    def __init__(self, setup: Setup):
        super().__init__(setup)
        self._reporter = Reporter(setup)
        self._exchange = Exchange(setup)
        self._means: dict[str, Array | None] = {}
        self._landed: list[str] = []  # tensors exchanged in this step so far
        self._ledger = Ledger(setup, self._reporter)
        self.settles: Callable[[], None] = _nothing
        """Called before the step count, the state or the report is read: the integration decides what it can."""
        self.paused = False
        """Whether a `no_sync` block is active."""

    # -- exchange ----------------------------------------------------------------------------------------------------
    @property
    def started(self) -> set[str]:
        """Tensors with a submitted gradient in this step."""
        return set(self._exchange.gradients)

    def note(self, name: str, text: str) -> None:
        """Add a remark on a tensor to the report."""
        self._reporter.notes[name] = text

    def start(self, name: str, gradient: Array | None, spent: bool = False) -> Job:
        """Submit a gradient. Its bucket is sent once it is complete and all earlier buckets have been sent.

        All workers send buckets in the same order, regardless of the order of these calls. ``spent``: whether the
        gradient is donated. If arrays are mutable, its memory may then be overwritten, so do not read it again. Raises
        KeyError for an unknown name and RuntimeError for a second gradient before `finish`.
        """
        self.start_all({name: gradient}, spent)
        return Job(name)

    def start_all(self, gradients: Mapping[str, Array | None], spent: bool = False) -> None:
        """`start` several gradients."""
        if self.paused:
            self._means.update(gradients)
            return
        self._submit(gradients, spent)
        with self._undone_on_error():
            self._exchange.launch_complete()

    def next_bucket(self) -> set[str]:
        """The tensors of the next bucket that have no submitted gradient yet."""
        return self._exchange.next_bucket()

    def finish(self, job: Job) -> Array | None:
        """Return the mean of a gradient, in its shape and dtype. The first call ends the step.

        A gradient that was not submitted is absent on this worker, and counts as zero in the mean. With
        ``track_missing`` the mean is None if the gradient is absent on all workers.
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
        """Return the means of these gradients, averaged in one exchange. Other tensors take no part in it."""
        if not gradients or self.paused:
            return dict(gradients)
        return self.setup.xp.unconverted(self._step)(gradients)

    def _step(self, gradients: Mapping[str, Array | None]) -> dict[str, Array | None]:
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
        """Wait for all launched buckets, round by round, and keep the new state; with `defer_commit` it is undecided.

        ``last``: False if more of this step follows. Raises RuntimeError on all workers, and keeps the previous state,
        if they are at different exchanges, if they decided earlier ones differently, or if one gave up (`abort`).
        """
        exchange = self._exchange
        with self._undone_on_error():
            try:
                self._means = exchange.land()
            finally:
                self._reporter.skipped += exchange.skipped
                self.setup.attempt += 1
                self.setup.exchanges += not self.setup.xp.tracing  # workers may differ in how often they trace
                self._next_exchange()
        self._landed += [name for name, mean in self._means.items() if mean is not None]
        if not last:
            return
        landed, self._landed, self.setup.left = self._landed, [], self.setup.leaving
        self.setup.headers, self.setup.arriving = self.setup.arriving, []
        self._ledger.enter(landed)

    def advance(self) -> bool:
        """Advance every bucket by one round, in order. True when the exchange is complete."""
        return self._exchange.advance()

    def mean(self, name: str) -> Array | None:
        """The mean of a gradient after `land`, to be read once; None if no worker had it, or after `leave`."""
        return self._means.pop(name, None)

    def means(self, names: Iterable[str]) -> list[Array | None]:
        """The `mean` of several gradients."""
        taken = self._means.pop
        return [taken(name, None) for name in names]

    def abandon(self) -> None:
        """Drop an unfinished step: wait for the messages in flight, and discard means and state."""
        landed, self._landed = self._landed, []
        try:
            self._exchange.abandon()
        finally:  # even if a message in flight is lost
            self._next_exchange()
            self._ledger.fail(landed)

    def abort(self, reason: str) -> NoReturn:
        """Give up the current step: all workers raise RuntimeError with the reason, and keep the previous state.

        This worker's missing gradients are sent as absent, so that no worker waits for them.
        """
        self._exchange.failure = reason
        self.flush()
        self.discard()
        raise RuntimeError(f"worker {self.rank} gave up step {self.setup.step_number()}: {reason}")

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

    def leave(self, names: Iterable[str]) -> None:
        """Exclude exactly these tensors after the next exchange, in which the workers check that they agree."""
        if (left := frozenset(names)) != self.setup.leaving:
            self.setup.windows.note(left ^ self.setup.leaving, "removed from its optimizer")
            self.setup.leaving = left

    def _submit(self, gradients: Mapping[str, Array | None], spent: bool) -> None:
        self.setup.settle()
        self._ledger.look_back()
        self._exchange.submit(gradients, spent)

    def _next_exchange(self) -> None:
        self._exchange.drop()
        self._exchange, self.setup.by_hand = Exchange(self.setup), False

    @contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        # An error ends the step: restore the previous state.
        exchange = self._exchange
        try:
            yield
        except BaseException:
            if self._exchange is exchange:
                self._next_exchange()
            failed, self._landed = [*exchange.gradients, *self._landed], []
            self._ledger.fail(failed)
            raise

    def _end_step(self, remedy: str) -> None:
        if self._exchange.begun:
            raise RuntimeError(f"a step is under way: {remedy}")
        self.settles()

    def begin(self, by_hand: bool) -> None:
        """Begin an exchange. ``by_hand``: whether its gradients were set by hand; all raise if workers differ."""
        self.setup.by_hand = by_hand

    # -- decisions ---------------------------------------------------------------------------------------------------
    @property
    def undecided(self) -> Set[str]:
        """The tensors whose last exchange is neither committed nor discarded. Empty without `defer_commit`."""
        return self.setup.windows.names

    @property
    def provisional(self) -> bool:
        """Whether an exchange is undecided."""
        return bool(self.setup.windows)

    def decide(self, applied: Iterable[str] = (), discarded: Iterable[str] = (), when: Any = None) -> None:
        """Keep the new state of tensors whose means were applied; restore the previous state of discarded ones.

        Tensors without an undecided exchange are ignored. The tensors of a unit are applied together if one of them
        is. A window counts as a step at its first applied tensor, and as discarded if none is. Nothing is sent.
        ``when``: a flag, bool[], of a graph or a device; if it is false, the applied tensors are discarded, too.
        """
        self._ledger.decide(applied, discarded, when)

    def commit(self, names: Iterable[str] | None = None) -> None:
        """Confirm that means were applied: count the step and keep its state. ``names``: only for these tensors."""
        self.decide(applied=self.undecided if names is None else names)

    def discard(self, names: Iterable[str] | None = None) -> None:
        """Restore the state before an exchange whose means were not applied. ``names``: only for these tensors."""
        self.decide(discarded=self.undecided if names is None else names)

    rollback = discard


def _nothing() -> None:
    pass
