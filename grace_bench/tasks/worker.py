"""The program of each launched worker: trains one job, times its steps, and writes a line of JSON per event.

Start ``python -m grace_bench.tasks.worker JOB FOLDER`` by torchrun or horovodrun.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grace_bench.tasks.data import Data
from grace_bench.tasks.plan import Job, params_of
from grace_bench.tasks.tasks import batch, rate, task_of

WARM_UP = 3  # DDP rebuilds its buckets after the first step; graphs are traced in the first step
WARM_AT_RATE = 2  # untimed steps (in local training, rounds) after each change of the bandwidth
LEAST = 3  # fewest timed steps
TURN = 3  # timed steps of each rival after each evaluation


class Turn(NamedTuple):
    """Timed steps: the seconds of each, and of a step the bytes passed to collectives and those sent and received."""

    seconds: list[float]
    sent: float
    wire: list[float] | None


def traffic() -> tuple[int, int]:
    """Bytes that this emulated host has sent and received so far."""
    folder = Path("/sys/class/net/eth0/statistics")
    return int((folder / "tx_bytes").read_text()), int((folder / "rx_bytes").read_text())


class Method:
    """A method's trainer on the task's data, and the number of its steps so far."""

    def __init__(self, trainer: Any, job: Job, data: Data):
        self.trainer, self.steps = trainer, 0
        self._job, self._data, self._scale = job, data, job.sized

    def step(self, lr: float | None = None) -> float:
        """Train on the next batch; returns the seconds of the step, without those of making the batch."""
        inputs, targets = batch(self._data, self._scale.batch, self.trainer.rank, self.steps, self._job.seed)
        began = time.perf_counter()
        self.trainer.step(inputs, targets, rate(self._scale, self.steps) if lr is None else lr)
        self.steps += 1
        return time.perf_counter() - began

    def timed(self, count: int, every: int | None = None) -> list[float]:
        """The seconds of some steps; in local training, ``every``: means over the steps from one exchange to the next.

        The learning rate is 0, since only time is measured. Local training keeps the last rate: with 0, all
        pseudo-gradients would be 0.
        """
        lr = 0.0 if every is None else None
        return [statistics.fmean(self.step(lr) for _ in range(every or 1)) for _ in range(count)]


class Worker:
    """One worker of a job."""

    def __init__(self, job: Job, folder: Path):
        self.job, self.folder = job, folder
        self.task = task_of(job.task)
        self.scale = job.sized
        self.data = self.task.data(Path(job.data) if job.data else None)
        module = importlib.import_module(f"grace_bench.tasks.train_{job.toolkit}")

        def made(params: dict[str, Any] | str) -> Method:
            return Method(module.Trainer(self.task, self.scale, self.data.sizes, params, job.seed), job, self.data)

        self.method = made(job.params)
        self.rivals = {name: made(params_of(name)) for name in job.rivals}
        self.trainer = self.method.trainer
        self._lines = (folder / f"{self.trainer.rank}.jsonl").open("a")

    def tell(self, event: str, **found: Any) -> None:
        """Write a line about an event."""
        self._lines.write(json.dumps({"event": event, "rank": self.trainer.rank, **found}) + "\n")
        self._lines.flush()

    def train(self) -> None:
        """Run all steps; worker 0 evaluates the model at intervals, and notes the seconds of all steps until then.

        Each of the first WARM_UP steps counts as long as the step after them, since `time` leaves out warm-up as well.
        After each evaluation the rivals take some timed steps, so that a machine whose speed drifts is fair to all.
        """
        if self.job.trained_at:
            self.shape(self.job.trained_at)
        curve: list[tuple[int, float | None]] = []
        clock: list[float] = []
        turns: dict[str, list[Turn]] = {name: [] for name in self.rivals}
        for rival in self.rivals.values():
            rival.timed(WARM_UP)
        seconds = 0.0
        for done in range(1, self.scale.steps + 1):
            last = self.method.step()
            seconds = done * last if done <= WARM_UP + 1 else seconds + last
            if done == self.scale.steps:
                self.trainer.finish()
            if done % self.scale.every and done < self.scale.steps:
                continue
            if self.trainer.rank == 0:
                quality = self.data.quality(self.trainer.predict)
                curve.append((done, round(quality, 5) if math.isfinite(quality) else None))
                clock.append(round(seconds, 4))
                self.tell("looked", step=done, quality=curve[-1][1])
            for name, rival in self.rivals.items():
                rival.timed(1)  # the caches hold another model
                turns[name].append(self.turn(rival, TURN))
        self.trainer.agree(0)
        if self.trainer.rank == 0:
            self.tell("trained", curve=curve, clock=clock, **self.trainer.choice)
        for name, found in turns.items():
            self.found(name, self.job.trained_at, found)

    def turn(self, method: Method, count: int, every: int | None = None) -> Turn:
        """Time some steps of a method."""
        self.trainer.agree(0)
        before, sent, done = traffic() if self.job.shaped else (0, 0), method.trainer.sent, method.steps
        seconds = method.timed(count, every)
        sent, done = method.trainer.sent - sent, method.steps - done
        self.trainer.agree(0)
        wire = None  # not counted on the machine's own interface, which has other traffic, too
        if self.job.shaped:
            wire = [(now - then) / done for now, then in zip(traffic(), before, strict=True)]
        return Turn(seconds, sent / done, wire)

    def found(self, method: str, bandwidth: str | None, turns: Sequence[Turn]) -> None:
        """Write what the timed steps of a method found."""
        seconds = [round(second, 6) for turn in turns for second in turn.seconds]
        wires = [turn.wire for turn in turns if turn.wire]
        wire = [statistics.fmean(ways) for ways in zip(*wires, strict=True)] if wires else None
        sent = statistics.fmean(turn.sent for turn in turns)
        self.tell("timed", method=method, bandwidth=bandwidth, seconds=seconds, sent=sent, wire=wire)

    def shape(self, bandwidth: str) -> None:
        """Have the launcher limit the links, if it can."""
        if self.job.shaped and self.trainer.rank == 0:
            self.tell("wants", bandwidth=bandwidth)
            while not (self.folder / f"is-{bandwidth}").exists():
                time.sleep(0.02)
        self.trainer.agree(0)

    def time(self, bandwidth: str) -> None:
        """Time some steps at a bandwidth."""
        self.shape(bandwidth)
        every = self.job.sync_every
        first = statistics.median(self.method.timed(WARM_AT_RATE, every))
        fit = int(self.job.seconds / max(first * (every or 1), 1e-6))
        count = self.trainer.agree(max(LEAST, min(fit, self.job.most)))
        self.found(self.job.method, bandwidth, [self.turn(self.method, count, every)])

    def run(self) -> None:
        """Run the whole job."""
        self.tell(
            "ready",
            parameters=sum(self.trainer.tensors),
            tensors=len(self.trainer.tensors),
            source=self.data.source,
            size=self.trainer.size,
            batch=self.scale.batch,
        )
        if self.job.train:
            self.train()
        else:
            for _ in range(WARM_UP):
                self.method.step()
        for bandwidth in self.job.bandwidths:
            self.time(bandwidth)
        self.tell("done")
        self._lines.close()


def main() -> None:
    """Run the job of the command line."""
    worker = Worker(Job.read(Path(sys.argv[1])), Path(sys.argv[2]))
    worker.run()
    worker.trainer.agree(0)
    # gloo's threads may outlive the group and sometimes abort in Python's clean-up, so skip it.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
