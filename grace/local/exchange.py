"""The exchange of pseudo-gradients."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from grace.core import Array
from grace.core.collectives import Reduce
from grace.core.local_training import Settings
from grace.engine.session import Grace
from grace.local.handshake import Change, Handshake
from grace.local.model import Model
from grace.local.progress import Progress


class Flight:
    """An exchange of fragments in flight.

    ``deltas``: the pseudo-gradients by name. ``side``: arrays that are summed uncompressed: float32[1] with the
    worker's weight, if workers have weights, and buffers. ``handshake``: the message sent first; None if the
    workers' progress has already been compared. ``delayed``: the exchange lands in a later step, so a checkpoint may
    need the pseudo-gradients.
    """

    def __init__(
        self,
        grace: Grace,
        fragments: tuple[int, ...],
        deltas: dict[str, Array],
        side: tuple[Array, ...],
        handshake: Handshake | None,
        delayed: bool,
    ):
        self.fragments, self.names, self.side = fragments, list(deltas), side
        self.deltas = deltas if delayed else {}
        self.rounds = 0
        """Number of finished rounds."""
        self._grace, self._delayed, self._handshake = grace, delayed, handshake
        self._unsent: dict[str, Array] | None = deltas
        self._arrive: Callable[[], list[Any]] | None = None
        self._background: Future[None] | None = None

    def start(self, at_once: bool, executor: Executor | None) -> None:
        """Send the handshake and, if ``at_once``, the first round; otherwise `advance` sends it after the handshake.

        ``executor``: runs the whole exchange, for a toolkit whose operations block.
        """
        if executor is not None:
            self._background = executor.submit(self._run)
            return
        if self._handshake is not None:
            self._handshake.start()
        if at_once or self._handshake is None:
            self._send()

    def _send(self) -> None:
        deltas, self._unsent = self._unsent, None
        assert deltas is not None
        # Name the message after a tensor: several DiLoCo objects may have exchanges in flight.
        if self.side:
            self._arrive = self._grace.transport.start([Reduce(self.side, "sum")], f"local.{self.names[0]}")
        self._grace.launch(deltas, spent=not self._delayed)

    def _run(self) -> None:
        if self._handshake is not None:
            self._handshake.start()
        while not self._advance():
            pass

    def advance(self) -> bool:
        """Wait for one round and send the next. True when nothing is left to exchange."""
        if self._background is not None:
            self._background.result()
            return True
        return self._advance()

    def _advance(self) -> bool:
        handshake, self._handshake = self._handshake, None
        if handshake is not None:
            handshake.check()
        if self._unsent is not None:
            self._send()
            return False
        self.rounds += 1
        return self._grace.advance()

    def sums(self) -> list[Array]:
        """The sums of ``side`` over the workers."""
        return [] if self._arrive is None else list(self._arrive()[0])

    def join(self) -> None:
        """Wait for the executor's thread, if there is one."""
        if self._background is not None:
            wait([self._background])


class Exchange:
    """Averages pseudo-gradients, one exchange at a time. A failed exchange changes nothing.

    ``weights``: this worker's weight in the mean, or a function that returns it.
    """

    def __init__(
        self, grace: Grace, settings: Settings, weights: float | Callable[[], float] | None, progress: Progress
    ):
        self._grace, self._settings, self._weights, self._progress = grace, settings, weights, progress
        self.model = Model()
        self.fragments: list[tuple[str, ...]] = []
        """The parameter names of each fragment, in order of exchange."""
        self.flight: Flight | None = None
        self.in_step = False
        """Whether the last comparison or landing found all workers at the same step, and nothing has failed on this
        worker since. If so, all start the same exchange next, unless one calls `finish`, which waits for its handshake.
        """
        self.side_bytes = 0
        """Bytes of the uncompressed messages."""
        self.skipped = 0
        """Number of non-finite means."""
        self._executor: ThreadPoolExecutor | None = None

    # -- an exchange of pseudo-gradients -----------------------------------------------------------------------------
    def launching(self, fragment: int) -> Iterator[None]:
        """Start the exchange of a fragment; yields when the other workers must catch up.

        The handshake comes first, because payloads of different sizes must not meet: torch.distributed would end the
        process. An exchange with a delay does not wait for the handshake if the workers are known to be `in_step`.
        """
        deltas, side = self._collected((fragment,))
        at_once = self._delayed and self.in_step
        self.start((fragment,), deltas, side, self.handshake(finish=False), at_once)
        yield
        if not at_once and not self._in_background:
            self.advance()
            yield

    def launch_all(self) -> None:
        """Start the exchange of all fragments, after a handshake."""
        fragments = tuple(range(self._settings.parts))
        self.start(fragments, *self._collected(fragments))

    def handshake(self, finish: bool, change: Change = Change.NONE) -> Handshake:
        """A handshake before the next exchange; see `Handshake`."""
        grace = self._grace
        with self.dropped_on_error():
            name = next(iter(self.model.tensors))  # names the message: there may be several DiLoCo objects
            return Handshake(grace.transport, grace.xp, name, self._progress, finish, change)

    def agreed(self, handshake: Handshake) -> Generator[None, None, Change]:
        """Start a handshake and wait for it; returns the largest change. Yields when the others must catch up."""
        with self.dropped_on_error():
            handshake.start()
        self.side_bytes += handshake.nbytes
        yield
        with self.dropped_on_error():
            return handshake.check()

    def _collected(self, fragments: tuple[int, ...]) -> tuple[dict[str, Array], tuple[Array, ...]]:
        # Returns the pseudo-gradients of fragments, and the arrays that are summed beside them.
        model = self.model
        with self.dropped_on_error():
            weight = self._weight()
            deltas = {}
            for name in (name for number in fragments for name in self.fragments[number]):
                delta = model.base(name) - model.current(name)
                deltas[name] = delta if weight is None else delta * weight
            side = [] if weight is None else [self._grace.xp.asarray([weight], "float32")]
            if fragments[-1] == self._settings.parts - 1:
                side += [value if weight is None else value * weight for value in model.buffer_values()]
        return deltas, tuple(side)

    @property
    def _delayed(self) -> bool:
        return self._settings.fragment_sync_delay > 0

    @property
    def _in_background(self) -> bool:
        # Returns whether to use another thread, since Horovod's TensorFlow operations block. Any thread may issue them,
        # because Horovod matches messages by name.
        return self._delayed and self._grace.xp.traced and not self._grace.transport.lockstep

    def start(
        self,
        fragments: tuple[int, ...],
        deltas: dict[str, Array],
        side: tuple[Array, ...],
        handshake: Handshake | None = None,
        at_once: bool = False,
    ) -> None:
        """Start an exchange of these arrays: see `Flight`."""
        with self.dropped_on_error():
            self.flight = Flight(self._grace, fragments, deltas, side, handshake, self._delayed)
            self.side_bytes += 0 if handshake is None else handshake.nbytes
            if self._in_background and self._executor is None:
                self._executor = ThreadPoolExecutor(1, "grace.local")
            self.flight.start(at_once, self._executor)

    def advance(self) -> bool:
        """Wait for one round and send the next. True when nothing is left to exchange."""
        flight = self.flight
        assert flight is not None
        with self.dropped_on_error():
            done = flight.advance()
        if done:
            self._progress.rounds = max(self._progress.rounds, flight.rounds)
        return done

    def land(self, alpha: float) -> None:
        """Apply the means to the base. ``alpha``: the weight of a worker's own parameters in its new ones."""
        flight, xp, settings, model = self.flight, self._grace.xp, self._settings, self.model
        assert flight is not None
        together = len(flight.fragments) > 1
        last = together or flight.fragments[0] == settings.parts - 1
        with self.dropped_on_error():
            side = flight.sums()
            weights = None if self._weights is None else side.pop(0)
            # The Grace's step count advances once every H steps: methods that alternate by step do so for each
            # fragment.
            self._grace.land(last=last)
        with model.access.inside(), xp.quiet():
            weight = None if weights is None else weights / self._grace.world_size
            found = {}
            for name in flight.names:
                mean = self._grace.mean(name)
                if not xp.finite(mean):  # all workers skip it, and the Grace leaves its state unchanged
                    continue
                mean = mean if weight is None else mean / xp.cast(weight, xp.dtype(mean))
                base, momentum = settings.outer_step(model.base(name), model.momentum(name), mean)
                mixed = base if alpha == 0 else (1 - alpha) * base + alpha * model.current(name)
                found[name] = base, momentum, mixed
            for name, (base, momentum, mixed) in found.items():
                model.store(name, base, momentum)
                model.put(name, mixed)
            if side:
                model.put_buffers([
                    each / (self._grace.world_size if weights is None else xp.cast(weights, xp.dtype(each)))
                    for each in side
                ])  # fmt: skip
        self.side_bytes += sum(int(xp.nbytes(each)) for each in flight.side)
        self.flight = None
        self._landed(flight.names, found, alpha > 0 or not (together or settings.parts == 1))

    def _landed(self, names: Sequence[str], found: Collection[str], apart: bool) -> None:
        # Count an exchange of these tensors. ``found``: those whose mean is finite.
        self.in_step = True
        self._progress.landed += 1
        self._progress.apart = apart
        if skipped := [name for name in names if name not in found]:
            if not self.skipped:
                warnings.warn(
                    f"the mean of {skipped[0]!r} is not finite: some worker's parameters are not. All workers leave "
                    "its base unchanged; report().skipped counts such means",
                    stacklevel=5,
                )
            self.skipped += len(skipped)

    # -- an exchange of the parameters themselves --------------------------------------------------------------------
    def averaging(self, parameters: bool) -> Iterator[None]:
        """Set buffers, and ``parameters`` with their bases, to their plain means, uncompressed; after a handshake.

        Momentum and residuals stay as they are. Yields when the other workers must catch up.
        """
        xp, model = self._grace.xp, self.model
        means: dict[str, Array] = {}
        buffers: Sequence[Array] = ()
        for names in self.fragments if parameters else ():  # one message each
            found = yield from self._mean(partial(map, model.current, names), f"{names[0]}.mean")
            means.update(zip(names, found, strict=True))
        if model.buffers:
            buffers = yield from self._mean(model.buffer_values, f"{next(iter(model.tensors))}.buffers")
        with model.access.inside(), xp.quiet():
            finite = {name: mean for name, mean in means.items() if xp.finite(mean)}
            for name, mean in finite.items():
                model.store(name, mean, None)
                model.put(name, mean)
            model.put_buffers(buffers)
        self._landed(list(means), finite, False)

    def _mean(self, values: Callable[[], Iterable[Array]], name: str) -> Generator[None, None, Sequence[Array]]:
        with self.dropped_on_error():
            sent = tuple(values())
            arrive = self._grace.transport.start([Reduce(sent, "mean")], f"local.{name}")
            self.side_bytes += sum(int(self._grace.xp.nbytes(each)) for each in sent)
        yield
        with self.dropped_on_error():
            (means,) = arrive()
        return tuple(means)

    def _weight(self) -> float | None:
        weights = self._weights
        weight = weights() if callable(weights) else weights
        if weight is not None and not (weight > 0 and math.isfinite(weight)):
            raise ValueError(f"weights: {weight!r} must be a positive number, near 1")
        return weight if weight is None else float(weight)

    @contextmanager
    def dropped_on_error(self) -> Iterator[None]:
        """A context manager that drops the exchange on an error. The next pseudo-gradient includes the dropped one."""
        try:
            with self.model.access.inside(), self._grace.xp.quiet():
                yield
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        """Abandon the exchange in flight, if there is one."""
        flight, self.flight, self.in_step = self.flight, None, False
        if flight is None:
            return
        flight.join()
        with suppress(Exception):  # waiting for messages in flight may fail for the same reason
            self._grace.abandon()
