"""The scheduler: programs of many tensors in lockstep, one message for each round."""

from __future__ import annotations

import time
from typing import Any

from grace.collectives import Collective
from grace.core import Program, Transport
from grace.trace import Trace


class Flight:
    """Programs of several units in lockstep: the collectives that they ask for in one round travel as one message."""

    def __init__(self, name: str, programs: dict[str, Program[Any]], transport: Transport, trace: Trace):
        self.results: dict[str, Any] = {}
        self.asked: list[tuple[str, Collective, Any]] = []
        """Unit, collective and result of everything that was exchanged."""
        self.name, self._programs, self._transport, self._trace = name, programs, transport, trace
        self._round = 0
        self._requests: list[tuple[str, tuple[Collective, ...], bool]] = []
        self._wait: Any = None
        self._sent = 0.0
        self._resume(dict.fromkeys(programs))

    def advance(self) -> bool:
        """Wait for this round and begin the next one. True when all programs have returned."""
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
        return not self._requests

    def settle(self) -> None:
        """Wait for the messages of this round and look no further."""
        if self._requests:
            self._wait()

    def _resume(self, answers: dict[str, Any]) -> None:
        self._requests = []
        with self._trace.span("compress", f"{self.name}.{self._round}"):
            for unit, answer in answers.items():
                try:
                    asked = self._programs[unit].send(answer)
                except StopIteration as stop:
                    self.results[unit] = stop.value
                else:
                    single = not isinstance(asked, tuple)
                    collectives = (asked,) if not isinstance(asked, tuple) else asked
                    self._requests.append((unit, collectives, single))
            if self._requests:
                everything = [collective for _, asked, _ in self._requests for collective in asked]
                self._wait = self._transport.start(everything, f"{self.name}.{self._round}")
                self._sent = time.perf_counter()
                self._round += 1
