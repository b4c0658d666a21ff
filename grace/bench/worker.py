"""A measuring process: times every case of one configuration in interleaved, shuffled rounds.

Reads a job as JSON from standard input and writes one JSON object per line: "begin" before anything that may be slow
or kill the process (the parent watches), "left_out", "postponed" and finally "records".
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

from grace.bench.plan import LEAST, MODES, Case, Config, Limits
from grace.bench.subjects import Bench, Ours, backend, cuda_of

SHORTEST = 2e-3  # minimum seconds per sample: shorter calls are repeated
FIRST = 3  # time factor allowed for a first call, which also loads code
ROOM = 6  # free memory to leave, in gradient sizes
Operation = tuple[str, Callable[[], None]]


class Clock:
    """Samples of one sequence of operations, such as encode and commit."""

    def __init__(
        self,
        subject: Any,
        operations: list[Operation],
        wait: Callable[[], None],
        traced: bool = False,
        events: Callable[[Callable[[], None]], float] | None = None,
    ):
        """``events``: a function that times a call by the device's clock, in seconds; None: use the host's clock."""
        self.seconds, self.once = 0.0, False
        self._traced = traced
        self.samples: dict[str, list[float]] = {name: [] for name, _ in operations if name}
        self.calls = 1
        """Calls per sample, so that a sample is long enough."""
        self._subject, self._operations, self._wait, self._events = subject, operations, wait, events

    def call(self) -> dict[str, float]:
        """Call each operation once; returns its seconds, by name."""
        self._subject.refill()
        self._wait()
        found = {}
        for name, operation in self._operations:
            if not name:  # untimed
                operation()
                continue
            found[name] = self._seconds(operation) if self._events is None else self._events(operation)
        self._subject.release()
        return found

    def _seconds(self, operation: Callable[[], None]) -> float:
        began = time.perf_counter()
        operation()
        self._wait()
        return time.perf_counter() - began

    def run(self) -> None:
        """Run each operation once, without recording it."""
        for _, operation in self._operations:
            operation()

    def warm_up(self, long: float) -> None:
        """Make two calls; the second one sets the number of calls per sample. Long calls are not repeated.

        An extra call comes first if it traces a graph, or on a device, for which it may compile kernels.
        """
        if self._traced or self._events is not None:
            self.call()
        first = self.call()
        if sum(first.values()) > FIRST * long:  # even without one-time costs, a second call would take too long
            self._keep(first)
            self.once = True
            return
        again = self.call()
        least = min(again.values())
        if sum(again.values()) > long:
            self._keep(again)
            self.once = True
            return
        self.calls = 1 if least >= SHORTEST else min(1000, int(SHORTEST / max(sum(again.values()), 1e-6)) + 1)
        for _ in range(min(20, self.calls)):
            self.call()

    def sample(self) -> None:
        """One sample of each operation: the mean of ``calls`` calls."""
        totals: dict[str, float] = {}
        for _ in range(self.calls):
            for name, seconds in self.call().items():
                totals[name] = totals.get(name, 0.0) + seconds
        self._keep({name: total / self.calls for name, total in totals.items()}, self.calls)

    def _keep(self, found: dict[str, float], calls: int = 1) -> None:
        self.seconds += calls * sum(found.values())
        for name, seconds in found.items():
            self.samples[name].append(seconds)

    def results(self) -> dict[str, dict[str, Any]]:
        """For each operation its median and quartiles in microseconds."""
        return {name: {**spread(found), "calls": self.calls, "once": self.once} for name, found in self.samples.items()}


class Loop:
    """Samples of memcpy; each times many copies, to amortise the cost of the clock."""

    def __init__(self, copy: Callable[[], None], wait: Callable[[], None], least: float = SHORTEST):
        self.copy, self._wait, self.samples = copy, wait, [0.0]
        self._calls = 1
        while self._time() < least and self._calls < 100_000:
            self._calls *= 2
        self.samples = []

    def _time(self) -> float:
        began = time.perf_counter()
        for _ in range(self._calls):
            self.copy()
        self._wait()
        return time.perf_counter() - began

    def sample(self) -> None:
        """One sample: the mean of many copies."""
        self.samples.append(self._time() / self._calls)


def spread(samples: list[float]) -> dict[str, Any]:
    """Median and quartiles of seconds, in microseconds."""
    quarters = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else samples * 3
    names = ("q1_us", "us", "q3_us")
    return {**{name: 1e6 * each for name, each in zip(names, quarters, strict=True)}, "samples": len(samples)}


def measure(job: dict[str, Any], say: Callable[..., None]) -> None:
    """Measure a job's cases; ``say`` reports to the parent."""
    config, limits = Config(**job["config"]), Limits(**job["limits"])
    xp = backend(config)
    say(begin="gradients")
    bench = Bench(xp, config)
    clocks: list[tuple[Any, str, str, list[Clock]]] = []
    tasks = [(Case(**case), mode) for case in job["cases"] for mode in MODES[config.backend]]
    random.seed(job["seed"])
    for number, (case, mode) in enumerate(tasks):
        if clocks and bench.free_bytes() < ROOM * 4 * bench.n + 5 * 10**8:
            say(postponed=list(dict.fromkeys(each.label for each, _ in tasks[number:])))
            break
        say(begin=f"{case.label} ({mode})", case=case.label)
        try:
            clocks.append(prepared(case, mode, bench, limits, job["peer"], say))
        except Exception as error:
            say(left_out=case.label, mode=mode, reason=f"{type(error).__name__}: {error}"[:500])
    say(begin="rounds")
    rounds(config, limits, clocks, bench, say)


def prepared(
    case: Case, mode: str, bench: Any, limits: Limits, peer: str, say: Callable[..., None]
) -> tuple[Any, str, str, list[Clock]]:
    """Build and warm up a case; returns its subject, label, mode and clocks."""
    if case.source == "grace":
        subject: Any = Ours(case, bench, mode)
    else:
        from grace_bench.peers import subject as of_peer

        subject = of_peer(case, bench, peer)
    groups: list[list[Operation]] = [
        [("encode", subject.encode), ("", subject.look), ("commit", subject.commit)],
        [("decode", subject.decode)],
        [("step", subject.step)],
    ]
    if case.source == "torch":
        groups = groups[2:]
    if case.source == "upstream":
        groups[0] = groups[0][:1]  # upstream updates its memory inside encode
    if case.source != "torch" and bench.config.tensors == "flat":
        groups = groups[:2]
    clocks = [Clock(subject, operations, bench.wait, mode == "graph", bench.events) for operations in groups]
    for number, clock in enumerate(clocks):
        if number == 0 and case.source == "torch":
            subject.several(False)
        say(begin=f"{case.label} ({mode})", case=case.label)
        clock.warm_up(limits.long)
        say(begin=f"{case.label} ({mode})", case=case.label)
        if number == 0 and case.source != "torch":
            subject.several(clock.once)
    return subject, case.label, mode, clocks


def rounds(config: Config, limits: Limits, clocks: list[Any], bench: Any, say: Callable[..., None]) -> None:
    """Run all cases in shuffled rounds, with memcpy among them, until the rounds or the budgets are used up."""
    copy = Loop(bench.memcpy, bench.wait)
    gc.collect()
    gc.disable()  # a collection would hit a random case
    try:
        for number in range(limits.rounds_of(config)):
            turn: list[Any] = []
            for _, _, _, mine in clocks:
                spent = sum(clock.seconds for clock in mine)
                turn += [c for c in mine if not c.once and (number < LEAST or spent * (1 + 1 / number) < limits.budget)]
            if not turn and number >= LEAST:
                break
            turn += [copy] * (1 + len(turn) // 8)
            random.shuffle(turn)
            for each in turn:
                say(begin=f"round {number + 1}")
                each.sample()
            gc.collect()
    finally:
        gc.enable()
    memcpy = spread(copy.samples)
    records = []
    for subject, label, mode, mine in clocks:
        found = {name: result for clock in mine for name, result in clock.results().items()}
        for result in found.values():
            result["x"] = result["us"] / memcpy["us"]
        records.append(
            {
                "label": label,
                "mode": mode,
                "elements": bench.n,
                "bytes": subject.bytes,
                "bits_per_element": 8 * subject.bytes / bench.n,
                "state_bytes": subject.state_bytes,
                "workers_decoded": subject.workers,
                "note": subject.note,
                "host_waits": host_waits(subject, mine, bench),
                "seconds": sum(clock.seconds for clock in mine),
                **found,
            }
        )
    say(records=records, memcpy=memcpy, native=getattr(bench.xp.kernels, "isa", ""), device=bench.device)


def host_waits(subject: Any, clocks: list[Clock], bench: Any) -> int | None:
    """Number of host synchronisations in one call of each operation; None without a device."""
    cuda = cuda_of(bench.xp)
    if not cuda:
        return None
    subject.refill()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        cuda.set_sync_debug_mode("warn")
        try:
            for clock in clocks:
                clock.run()
        finally:
            cuda.set_sync_debug_mode("default")
    subject.release()
    return sum("synchroniz" in str(each.message) for each in said)


def main() -> None:
    """Read a job, run it, and report."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keep toolkit output out of the results

    def say(**message: Any) -> None:
        channel.write(json.dumps(message) + "\n")

    job = json.load(sys.stdin)
    if job["task"] == "memory":
        from grace.bench.memory import measure as count

        say(memory=count(job))
    else:
        measure(job, say)
    channel.flush()
    os._exit(0)  # skip the toolkit's thread clean-up


if __name__ == "__main__":
    main()
