"""Runs jobs, each in separate processes with a time limit, and stores their results: a line of JSON for each cell.

A cell is a training, or the time of a step at one bandwidth. The row of a failed cell has its error.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from grace.bench.kernels import machine
from grace.bench.plan import UNSHAPED
from grace_bench.lab.launch import LAUNCHERS, Outcome
from grace_bench.lab.network import Lab, LabError, Loopback
from grace_bench.lab.probe import probe
from grace_bench.tasks import plan
from grace_bench.tasks.plan import CHOICE, Job

Row = dict[str, Any]
Tell = Callable[[str], None]
TRAINED, TIMED, PROBED, MACHINE = "trained", "timed", "probed", "machine"
HEAD = ("task", "toolkit", "workers", "method", "seed", "scale", "steps", "real", "trained_at")


class Store:
    """The rows of a file; new rows are appended to it."""

    def __init__(self, file: Path):
        self.file = file
        self.rows: list[Row] = list(read(file)) if file.exists() else []

    def add(self, row: Row) -> None:
        """Append a row; it is on disk when this returns."""
        self.rows.append(row)
        with self.file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
            lines.flush()
            os.fsync(lines.fileno())


def read(file: Path) -> Iterator[Row]:
    """The rows of a file, without a truncated last line. ValueError for other content."""
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if not isinstance(row, dict) or "kind" not in row:
            raise ValueError(f"{file}, line {number}, is no row of `grace bench tasks`: {line[:60]!r}")
        yield row


def cell(row: Row) -> tuple[Any, ...]:
    """The key of the cell that a row measures."""
    return (row["kind"], *(row.get(key) for key in HEAD), row.get("bandwidth"))


def latest(rows: Iterable[Row]) -> list[Row]:
    """The last row of each cell."""
    return list({cell(row): row for row in rows}.values())


def remaining(jobs: Iterable[Job], rows: Sequence[Row], retry: bool = False) -> list[Job]:
    """The jobs that have cells left to measure, reduced to these. ``retry``: include failed cells."""
    done = {cell(row) for row in latest(rows) if not (retry and "error" in row)}
    found = []
    for job in jobs:
        train = job.train and (TRAINED, *job.head.values(), None) not in done
        bandwidths = tuple(b for b in job.bandwidths if (TIMED, *job.head.values(), b) not in done)
        beside = any((TIMED, *job.head_of(rival).values(), job.trained_at) not in done for rival in job.rivals)
        if job.trained_at and (train or bandwidths or beside):  # only a training shows what the method chose
            train, bandwidths = True, job.bandwidths
        if train or bandwidths:
            found.append(dataclasses.replace(job, train=train, bandwidths=bandwidths))
    return found


def run(
    jobs: Sequence[Job], store: Store, shaped: bool, limit: float, budget: float, tell: Tell, done: Callable[[], None]
) -> list[Job]:
    """Run jobs; returns those that were not started because they would exceed ``budget`` seconds.

    ``limit``: seconds after which a launch is stopped. ``tell``: receives messages about the progress. ``done``: called
    after each job.
    """
    began, expected = time.monotonic(), 0.0
    left_out: list[Job] = []
    store.add({"kind": MACHINE, **machine()})
    for workers in dict.fromkeys(job.workers for job in jobs):
        mine = [job for job in jobs if job.workers == workers]
        network: Lab | Loopback = Lab(workers, UNSHAPED) if shaped else Loopback(workers)
        with network:
            if isinstance(network, Lab):
                _probe(network, mine, store, tell)
            for job in mine:
                spent, ahead = time.monotonic() - began, plan.seconds_of(job)
                if left_out or spent + ahead * max(1.0, spent / expected if expected else 1.0) > budget:
                    left_out.append(job)
                    continue
                tell(str(job))
                for row in launch(network, dataclasses.replace(job, shaped=shaped), limit, tell):
                    store.add(row)
                expected += ahead
                done()
    return left_out


def _probe(lab: Lab, jobs: Sequence[Job], store: Store, tell: Tell) -> None:
    known = {(row["workers"], row["bandwidth"]) for row in store.rows if row["kind"] == PROBED}
    for bandwidth in dict.fromkeys(b for job in jobs for b in job.bandwidths):
        if lab.size > 1 and (lab.size, bandwidth) not in known:
            lab.shape(bandwidth)
            reached = probe(lab)
            tell(f"links of {bandwidth}: a probe reaches {reached / 1e6:.0f} Mbit/s")
            store.add({"kind": PROBED, "workers": lab.size, "bandwidth": bandwidth, "reached": reached})


def launch(network: Lab | Loopback, job: Job, limit: float, tell: Tell) -> list[Row]:
    """Run one job in separate processes; returns its rows."""
    with tempfile.TemporaryDirectory(prefix="job-", dir=network.folder) as name:
        folder = Path(name)
        job.write(folder / "job.json")
        if isinstance(network, Lab):
            network.shape(UNSHAPED)
        heard = 0

        def listen() -> int:
            nonlocal heard
            found = events(folder / "0.jsonl")
            for event in found[heard:]:
                if event["event"] == "wants" and isinstance(network, Lab):
                    network.shape(event["bandwidth"])
                    (folder / f"is-{event['bandwidth']}").touch()
                elif event["event"] == "looked":
                    tell(f"{job}: step {event['step']}, {event['quality']}")
            heard = len(found)
            return 0  # constant, so that the limit is that of the whole launch

        began = time.monotonic()
        command = (sys.executable, "-m", "grace_bench.tasks.worker", folder / "job.json", folder)
        env = {"TF_CPP_MIN_LOG_LEVEL": "3"}
        start = LAUNCHERS[plan.LAUNCHERS[job.toolkit]]
        try:
            outcome = start(network, *command, env=env, timeout=limit, alive=listen)
        except LabError as error:
            outcome = Outcome(plan.LAUNCHERS[job.toolkit], {}, {}, "", str(error))
        rows = rows_of(job, [events(folder / f"{rank}.jsonl") for rank in range(job.workers)], outcome)
        seconds = time.monotonic() - began
    return [{**row, "launch_seconds": round(seconds, 2)} for row in rows]


def events(file: Path) -> list[Row]:
    """The complete lines that a worker has written so far."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def rows_of(job: Job, ranks: Sequence[Sequence[Row]], outcome: Outcome | None = None) -> list[Row]:
    """The rows of a job, from its workers' lines: the time of the slowest worker, the bytes of the busiest one."""
    first: dict[str, Row] = {event["event"]: event for event in (ranks[0] if ranks else ())}
    ready: Row = first.get("ready", {})
    about: Row = {key: ready[key] for key in ("parameters", "tensors", "source", "batch") if key in ready}
    head: Row = {**job.head, **about, "time": time.time(), "load": os.getloadavg()[0]}
    failed: Row = {}
    if outcome is not None and outcome.failed:
        failed = {"error": reason(outcome), "log": str(outcome)[-3000:]}
    elif "done" not in first:
        failed = {"error": "the workers did not come to their end"}
    rows: list[Row] = []
    if job.train:
        trained = first.get("trained", {})
        found = {key: trained[key] for key in ("curve", "clock", *CHOICE) if trained.get(key)}
        rows.append({"kind": TRAINED, **head, **(found or failed)})
    for key in job.times:
        timed = [e for rank in ranks for e in rank if e["event"] == "timed" and (e["method"], e["bandwidth"]) == key]
        method, bandwidth = key
        row = {"kind": TIMED, **head, **job.head_of(method), "bandwidth": bandwidth, "shaped": job.shaped}
        # In turn with a training, whose time is the sum of its steps, a mean is fair; else a median is steadier.
        usual, told = (statistics.fmean, {"in_turn": True}) if method in job.rivals else (statistics.median, {})
        rows.append({**row, **told, **(_joined(timed, usual) if len(timed) == job.workers else failed)})
    return rows


def _joined(timed: Sequence[Row], usual: Callable[[Sequence[float]], float]) -> Row:
    slowest = max(timed, key=lambda found: usual(found["seconds"]))
    seconds = sorted(slowest["seconds"])
    wires = [max(found["wire"]) for found in timed if found["wire"]]
    return {
        "seconds": round(usual(seconds), 6),
        "quartiles": [seconds[len(seconds) // 4], seconds[-1 - len(seconds) // 4]],
        "timed_steps": len(seconds),
        "sent": max(found["sent"] for found in timed),
        "wire": max(wires) if wires else None,
    }


def reason(outcome: Outcome) -> str:
    """Why a launch failed, in one line: the last output of the first failed worker."""
    if outcome.reason.startswith("nothing happened for"):
        return outcome.reason.replace("nothing happened for", "did not end within")
    for rank, text in outcome.outputs.items():
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if outcome.codes[rank] != 0 and lines:
            wrong = [line for line in lines if "Error" in line or "error:" in line]
            return (wrong or lines)[-1][:300]
    return outcome.reason or f"exit codes {outcome.codes}"
