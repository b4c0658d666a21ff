"""The exchange of pseudo-gradients."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import Any

from grace.core import Array
from grace.core.collectives import Reduce
from grace.engine.session import Grace
from grace.local.model import Model
from grace.local.progress import Progress
from grace.local.settings import Settings


class Flight:
    """An exchange of fragments in flight.

    ``deltas``: the pseudo-gradients by name. ``side``: arrays that are summed uncompressed: float32[3] with the number
    of landings, its square, and the worker's weight; then buffers. ``delayed``: the exchange lands in a later step, so
    a checkpoint may need the pseudo-gradients.
    """

    def __init__(
        self, grace: Grace, fragments: tuple[int, ...], deltas: dict[str, Array], side: tuple[Array, ...], delayed: bool
    ):
        self.fragments, self.names, self.side = fragments, list(deltas), side
        self.deltas = deltas if delayed else {}
        self.rounds = 0
        """Number of finished rounds."""
        self._grace, self._delayed = grace, delayed
        self._arrive: Callable[[], list[Any]] | None = None
        self._background: Future[None] | None = None

    def start(self, deltas: dict[str, Array], executor: Executor | None) -> None:
        """Send the first round. ``executor``: runs the whole exchange, for a toolkit whose operations block."""
        if executor is None:
            self._send(deltas)
        else:
            self._background = executor.submit(self._run, deltas)

    def _send(self, deltas: dict[str, Array]) -> None:
        # Name the message after a tensor: several DiLoCo objects may have exchanges in flight.
        self._arrive = self._grace.transport.start([Reduce(self.side, "sum")], f"local.{self.names[0]}")
        self._grace.launch(deltas, spent=not self._delayed)

    def _run(self, deltas: dict[str, Array]) -> None:
        self._send(deltas)
        while not self._grace.advance():
            pass

    def advance(self) -> bool:
        """Wait for one round and send the next. True when nothing is left to exchange."""
        if self._background is not None:
            self._background.result()
            return True
        self.rounds += 1
        return self._grace.advance()

    def sums(self) -> list[Array]:
        """The sums of ``side`` over the workers."""
        assert self._arrive is not None
        return list(self._arrive()[0])

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
        self.side_bytes = 0
        """Bytes of the uncompressed sums."""
        self.skipped = 0
        """Number of non-finite means."""
        self._executor: ThreadPoolExecutor | None = None

    def launch(self, fragments: tuple[int, ...]) -> None:
        """Start the exchange of these fragments."""
        xp, model = self._grace.xp, self.model
        with self.dropped_on_error():
            weight = self._weight()
            deltas = {}
            for name in (name for number in fragments for name in self.fragments[number]):
                delta = model.base(name) - model.current(name)
                deltas[name] = delta if weight is None else delta * weight
            limit = math.isqrt(2**24 // self._grace.world_size)  # keeps sums of squares exact
            landed = float(self._progress.landed % limit)
            side = [xp.asarray([landed, landed * landed, 1.0 if weight is None else weight], "float32")]
            if fragments[-1] == self._settings.parts - 1:
                side += [value if weight is None else value * weight for value in model.buffer_values()]
            self.start(fragments, deltas, tuple(side))

    def start(self, fragments: tuple[int, ...], deltas: dict[str, Array], side: tuple[Array, ...]) -> None:
        """Start an exchange of these arrays: see `Flight`."""
        delayed = self._settings.fragment_sync_delay > 0
        self.flight = Flight(self._grace, fragments, deltas, side, delayed)
        if delayed and self._grace.xp.traced and not self._grace.transport.lockstep:
            # Horovod's TensorFlow operations block. Horovod matches messages by name, so another thread may issue them.
            self._executor = self._executor or ThreadPoolExecutor(1, "grace.local")
            self.flight.start(deltas, self._executor)
        else:
            self.flight.start(deltas, None)

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
            about, *side = flight.sums()
            self._check_landings(about)
            # The Grace's step count advances once every H steps: methods that alternate by step do so for each
            # fragment.
            self._grace.land(last=last)
        with model.access.inside(), xp.quiet():
            weight = None if self._weights is None else about[2:] / self._grace.world_size
            found = {}
            for name in flight.names:
                mean = self._grace.mean(name)
                if not xp.finite(mean):  # on all workers; the Grace leaves its state unchanged too
                    continue
                mean = mean if weight is None else mean / xp.cast(weight, xp.dtype(mean))
                base, momentum = settings.outer_step(model.base(name), model.momentum(name), mean)
                mixed = base if alpha == 0 else (1 - alpha) * base + alpha * model.current(name)
                found[name] = base, momentum, mixed
            for name, (base, momentum, mixed) in found.items():
                model.store(name, base, momentum)
                model.put(name, mixed)
            if side:
                count = self._grace.world_size if weight is None else about[2:]
                model.put_buffers(
                    [each / (count if weight is None else xp.cast(count, xp.dtype(each))) for each in side]
                )
        self.side_bytes += sum(int(xp.nbytes(each)) for each in flight.side)
        self.flight = None
        self._progress.landed += 1
        self._progress.apart = alpha > 0 or not (together or settings.parts == 1)
        if skipped := [name for name in flight.names if name not in found]:
            if not self.skipped:
                warnings.warn(
                    f"the mean of {skipped[0]!r} is not finite: some worker's parameters are not. All workers leave "
                    "its base unchanged; report().skipped counts such means",
                    stacklevel=4,
                )
            self.skipped += len(skipped)

    def _check_landings(self, about: Array) -> None:
        # The sums are exact and equal on all workers, so all workers raise together.
        landed, squares, _ = self._grace.xp.to_numpy(about).tolist()
        if landed * landed != self._grace.world_size * squares:
            raise RuntimeError(
                "the workers have landed different numbers of exchanges "
                f"(this one {self._progress.landed}): one failed on some of them only, so that their bases differ. "
                "Load a checkpoint on all workers, or go on from the last base by reset(transport, states)"
            )

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
        flight, self.flight = self.flight, None
        if flight is None:
            return
        flight.join()
        with suppress(Exception):  # waiting for messages in flight may fail for the same reason
            self._grace.abandon()
