"""The scheduler: runs the programs of many tensors in lockstep, with one message per round."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from grace.backends.base import Backend
from grace.core import Program, Transport
from grace.core.collectives import Collective
from grace.engine.trace import Trace


class WorkerPool:
    """CPU threads that run the programs of ``units`` in parallel with the thread that computes gradients."""

    def __init__(self, threads: int, units: Collection[str], xp: Backend):
        self._pool, self.units, self._xp = ThreadPoolExecutor(threads, "pool"), units, xp

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run ``call(*args)`` in the pool."""

        def quietly() -> Any:
            with self._xp.quiet():
                return call(*args)

        return self._pool.submit(quietly)


def pool_of(units: Iterable[Any], ways: Iterable[Any], xp: Backend) -> WorkerPool | None:
    """A pool for the units whose strategies compress on the CPU; None if there are none."""
    ways = list(ways)
    threads = {unit.name: max(way.communicator.threads(unit.name) for way in ways) for unit in units}
    most = max(threads.values(), default=0)
    return WorkerPool(most, {name for name, count in threads.items() if count}, xp) if most else None


class RoundScheduler:
    """Runs the programs of several units in lockstep: all collectives of a round are sent as one message.

    ``offload``: a thread pool that runs some of the programs. The first message may then be delayed until `depart` or
    `advance`. It is sent after the message of ``before``, the previous scheduler, so that all workers send in one
    order.
    """

    def __init__(
        self,
        name: str,
        programs: dict[str, Program[Any]],
        transport: Transport,
        trace: Trace,
        offload: WorkerPool | None = None,
        before: RoundScheduler | None = None,
    ):
        self.results: dict[str, Any] = {}
        self.asked: list[tuple[str, Collective, Any]] = []
        """Each collective that was requested, as (unit, collective, result)."""
        self.name, self._programs, self._transport, self._trace = name, programs, transport, trace
        self._offload, self._before = offload, before
        self._round = 0
        self._requests: list[tuple[str, tuple[Collective, ...], bool]] = []
        self._wait: Any = None
        self._sent = 0.0
        # outcomes of the resumed programs, or their futures, until the message is sent
        self._steps: dict[str, Any] = {}
        try:
            self._resume(dict.fromkeys(programs))
            self.depart()
        except Exception:
            self.rest()
            raise

    def advance(self) -> bool:
        """Wait for this round and begin the next one. True when all programs have returned."""
        self.depart(wait=True)
        if self._requests:
            message = f"{self.name}.{self._round - 1}"
            with self._trace.span("wait", message):
                results = iter(self._wait())
            self._trace.add("communicate", message, self._sent)
            answers: dict[str, Any] = {}
            for unit, collectives, single in self._requests:
                answer = tuple(next(results) for _ in collectives)
                self.asked.extend((unit, *pair) for pair in zip(collectives, answer, strict=True))
                answers[unit] = answer[0] if single else answer
            self._resume(answers)
            self.depart(wait=True)
        return not self._requests

    def depart(self, wait: bool = False) -> bool:
        """Send this round's message if its payloads are ready, or ``wait`` for them first. Returns whether it was sent.

        Raises the error of a program in the pool; then neither this message nor a later scheduler's is sent.
        """
        if not self._steps:
            return True
        if self._before is not None and not self._before.depart(wait):
            return False
        self._before = None
        if not wait and not all(future.done() for future in self._futures):
            return False
        with self._trace.span("compress", f"{self.name}.{self._round}"):
            self._send()
        return True

    def settle(self) -> None:
        """Complete this round's message, and begin no further round."""
        try:
            self.depart(wait=True)  # the other workers may already wait for this message
        except Exception:
            return  # the step is dropped, together with the pool's error
        if self._requests:
            self._wait()

    def rest(self) -> None:
        """Wait until the pool runs no program of this scheduler; ignore the results."""
        wait(self._futures)

    @property
    def _futures(self) -> list[Future[Any]]:
        return [step for step in self._steps.values() if isinstance(step, Future)]

    def _resume(self, answers: dict[str, Any]) -> None:
        self._requests = []
        self._steps = dict.fromkeys(answers)  # a message follows the order of the programs, on all workers
        elsewhere: list[str] = []
        if self._offload is not None:
            elsewhere = [unit for unit in answers if unit in self._offload.units]
            for unit in elsewhere:
                self._steps[unit] = self._offload.submit(self._beside, unit, answers[unit])
        with self._trace.span("compress", f"{self.name}.{self._round}"):
            for unit, answer in answers.items():
                if unit not in elsewhere:
                    self._steps[unit] = self._step(unit, answer)
            if not elsewhere and self._before is None:
                self._send()

    def _beside(self, unit: str, answer: Any) -> tuple[bool, Any]:
        with self._trace.span(threading.current_thread().name, f"compress {unit}"):
            return self._step(unit, answer)

    def _step(self, unit: str, answer: Any) -> tuple[bool, Any]:
        # Returns (True, result) if the program has returned, else (False, request).
        try:
            return False, self._programs[unit].send(answer)
        except StopIteration as stop:
            return True, stop.value

    def _send(self) -> None:
        found = {unit: step.result() if isinstance(step, Future) else step for unit, step in self._steps.items()}
        self._steps = {}
        for unit, (returned, outcome) in found.items():
            if returned:
                self.results[unit] = outcome
            else:
                single = not isinstance(outcome, tuple)
                self._requests.append((unit, (outcome,) if single else outcome, single))
        if self._requests:
            everything = [collective for _, asked, _ in self._requests for collective in asked]
            self._wait = self._transport.start(everything, f"{self.name}.{self._round}")
            self._sent = time.perf_counter()
            self._round += 1
