"""Runs cases in the lab, interleaved and repeated; each result is a row for a line of JSON."""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lab.cases import ALONE, DENSE, Case
from grace_bench.lab.launch import LAUNCHERS
from grace_bench.lab.network import Lab, bits_per_second, parse_topology
from grace_bench.lab.probe import probe

Row = dict[str, Any]
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """Settings common to all jobs."""

    steps: int = 20
    budget: float = 8.0
    """Maximum seconds of timed steps per job, which then runs fewer steps; 0: no limit."""
    repeats: int = 2
    seed: int = 0
    losses: int = 0
    """Number of evaluations of the held-out loss during training."""
    decay: bool = False
    """Decay the learning rate to zero over the steps, as in a complete training."""
    burst: int | None = None
    delay: float = 0.0
    """Milliseconds by which each link delays packets, in each direction."""
    isolated: bool = False
    """Launch every job separately."""
    timeout: float = 240.0
    """Time limit of a job in seconds."""
    peer: str = ""
    """A checkout of upstream GRACE."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of every launch."""


def measure(
    topologies: Sequence[str],
    rates: Sequence[str],
    models: Sequence[str],
    cases_of: Callable[[int], list[Case]],
    options: Options,
    tell: Tell = print,
) -> Iterator[Row]:
    """Measure all combinations, in shuffled order within each repeat; yields rows.

    ``cases_of``: returns the cases for a number of workers per host.
    """
    order = random.Random(options.seed)
    for text in topologies:
        hosts, workers = parse_topology(text)
        with Lab(hosts, rates[0], workers, options.burst, options.delay) as lab:
            for repeat, rate in itertools.product(range(options.repeats), rates):
                lab.shape(rate, options.burst)
                reached = probe(lab) if hosts > 1 else None
                tell(f"{lab.topology} hosts at {rate}: a probe reaches {(reached or 0) / 1e6:.0f} Mbit/s")
                jobs = list(itertools.product(cases_of(workers), models))
                order.shuffle(jobs)
                for row in _batches(lab, jobs, options, tell):
                    yield {
                        "hosts": lab.topology + (f" ({lab.delay:g} ms a link)" if lab.delay else ""),
                        "workers": lab.size,
                        "rate": rate,
                        "reached": reached,
                        "repeat": repeat,
                        "burst": options.burst,
                        "delay": options.delay,
                        "env": options.env,
                        "load": os.getloadavg()[0],
                        "time": time.time(),
                        **row,
                    }


def _batches(lab: Lab, jobs: list[tuple[Case, str]], options: Options, tell: Tell) -> Iterator[Row]:
    # Launch jobs of the same launcher and environment together; yield their rows.
    def launch_of(job: tuple[Case, str]) -> tuple[Any, ...]:
        return job[0].launcher, tuple(sorted(job[0].env.items()))

    for key in dict.fromkeys(map(launch_of, jobs)):
        todo = [job for job in jobs if launch_of(job) == key]
        while todo:
            part = todo[:1] if options.isolated else todo
            rows, reason = _launch(lab, part, options, tell)
            for row in rows:
                if "error" in row:
                    tell(f"  {row['case']['name']} {row['model']}: {row['error']}")
                yield row
            if not rows:  # no job started: the cause would stop all others
                raise RuntimeError(f"{key[0]} did not start: {reason}")
            todo = todo[len(rows) :]


def _launch(lab: Lab, jobs: Sequence[tuple[Case, str]], options: Options, tell: Tell) -> tuple[list[Row], str]:
    # Rows of the finished jobs, the last one possibly with an error; and the launch's outcome as text.
    with tempfile.TemporaryDirectory(prefix="jobs-", dir=lab.folder) as name:
        folder = Path(name)
        plan = {
            "peer": options.peer,
            "jobs": [
                {
                    "case": case.to_dict(),
                    "model": model,
                    "seed": options.seed,
                    "steps": options.steps,
                    "budget": options.budget,
                    "losses": options.losses,
                    "decay": options.decay,
                }
                for case, model in jobs
            ],
        }
        (folder / "plan.json").write_text(json.dumps(plan))

        told = 0

        def alive() -> int:
            nonlocal told
            first = folder / "0.jsonl"
            lines = first.read_text().splitlines()[told:] if first.exists() else []
            for found in map(json.loads, lines):
                if "job" in found:
                    case, model = jobs[found["job"]]
                    tell(f"  {case.name} {model}: {found['seconds']:.3f} s per step, {found['steps']} steps")
            told += len(lines)
            return sum(path.stat().st_size for path in folder.glob("*.jsonl"))

        launch, env = LAUNCHERS[jobs[0][0].launcher], {**options.env, **jobs[0][0].env}
        command = (sys.executable, "-m", "benchmarks.lab.train", folder / "plan.json", folder)
        outcome = launch(lab, *command, env=env, timeout=options.timeout, alive=alive)
        ranks: dict[int, dict[int, Row]] = {}
        begun: set[int] = set()
        for path in folder.glob("*.jsonl"):
            for line in path.read_text().splitlines():
                found = json.loads(line)
                if "begins" in found:
                    begun.add(found["begins"])
                else:
                    ranks.setdefault(found["job"], {})[found["rank"]] = found
    rows = []
    for index, (case, model) in enumerate(jobs):
        # Trainings with decay have a model name of their own, so that losses are compared only among them.
        head = {"case": case.to_dict(), "model": f"{model}, decay" if options.decay else model}
        if len(ranks.get(index, {})) == lab.size:
            rows.append({**head, **joined([ranks[index][rank] for rank in range(lab.size)])})
        elif index in begun:
            rows.append({**head, "error": str(outcome)})
            break
        else:
            break
    return rows, str(outcome)


def joined(ranks: Sequence[Row]) -> Row:
    """One row from the reports of all ranks: the time of the slowest rank, the bytes of the busiest link."""
    slowest = max(ranks, key=lambda found: found["seconds"])
    row = {key: ranks[0][key] for key in ("steps", "complete", "loss", "losses", "parameters")}
    row |= {
        key: max(found[key] for found in ranks)
        for key in ("seconds", "seconds_mean", "cpu", "kernel", "faults", "peak_rss")
    }
    row |= {key: max(found[key] for found in ranks) for key in ("tx", "rx")}
    row |= {key: max(found[key] for found in ranks) for key in ("sent", "received") if key in ranks[0]}
    row |= {key: ranks[0][key] for key in ("method", "trials") if key in ranks[0]}
    row["seconds_all"] = slowest["seconds_all"]
    if "times" in slowest:
        row["times"] = slowest["times"]
    return row


def bound(alone: float, wire: float, rate: str, rounds: int) -> float:
    """The most seconds a step may take: 1.3 x (a step alone + bytes on the wire / link rate) + 15 ms per round.

    ``alone``: seconds of a step without communication; ``wire``: bytes on the wire.
    """
    return 1.3 * (alone + 8 * wire / bits_per_second(rate)) + 0.015 * rounds


def steps_to(losses: Sequence[tuple[int, float]], target: float) -> float | None:
    """The step at which the loss first reaches the target, interpolated between evaluations; None: never."""
    for (before, higher), (after, lower) in zip([*losses[:1], *losses], losses, strict=False):
        if lower <= target:
            return after if higher <= target else before + (after - before) * (higher - target) / (higher - lower)
    return None


def _curves(rows: Iterable[Row]) -> dict[tuple[str, str, str], list[tuple[int, float]]]:
    # Losses during the longest training, by number of hosts, model and method. They depend neither on the rate nor on
    # the integration.
    found: dict[tuple[str, str, str], list[tuple[int, float]]] = {}
    for row in rows:
        if "error" not in row and row["complete"] and len(row["losses"]) > 1:
            key = (row["hosts"], row["model"], _method(row["case"]))
            if row["losses"][-1][0] > found.get(key, [(0, 0.0)])[-1][0]:
                found[key] = row["losses"]
    return found


def _method(case: Row) -> str:
    return json.dumps(case["params"], sort_keys=True) if case["door"].startswith("grace") else case["name"]


def summary(rows: Iterable[Row]) -> list[Row]:
    """Medians over repeats, in the order of the rows, with the bound if its inputs were measured.

    If losses were recorded during a training (at any rate), ``steps_to`` is the number of steps after which a case was
    within 1 % of the final loss of dense training (None: never), and ``to_loss`` the seconds of these steps at the
    line's rate.
    """
    rows = list(rows)
    curves = _curves(rows)
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["hosts"], row["model"], row["rate"], row["case"]["name"]), []).append(row)
    out = []
    for (hosts, model, rate, name), group in groups.items():
        case = group[0]["case"]
        line: Row = {"hosts": hosts, "model": model, "rate": rate, "case": name, "ours": case["door"][:5] == "grace"}
        good = [row for row in group if "error" not in row]
        line["failed"] = len(group) - len(good)
        if not good:
            line["error"] = group[0]["error"].splitlines()[0][:50]
            out.append(line)
            continue
        for key in ("seconds", "cpu", "kernel", "faults", "tx", "rx", "sent", "received"):
            if key in good[0]:
                line[key] = statistics.median(row[key] for row in good)
        line["spread"] = max(row["seconds"] for row in good) / min(row["seconds"] for row in good)
        line["repeats"] = len(good)
        line["steps"] = good[0]["steps"]
        line["wire"] = max(line["tx"], line["rx"])
        if all(row["complete"] for row in good):
            line["loss"] = statistics.median(row["loss"] for row in good)
            line["losses"] = good[0]["losses"]
        if "times" in good[0]:
            keys = good[0]["times"]
            line["times"] = {key: statistics.median(row["times"].get(key, 0.0) for row in good) for key in keys}
        quiet = [row["seconds"] for row in groups.get((hosts, model, rate, ALONE[0]), []) if "error" not in row]
        if quiet and name not in ALONE:
            line["alone"] = statistics.median(quiet)
            line["bound"] = bound(line["alone"], line["wire"], rate, case["rounds"])
            line["held"] = line["seconds"] <= line["bound"]
        curve = curves.get((hosts, model, _method(case)))
        dense = [curves[hosts, model, name][-1][1] for name in DENSE if (hosts, model, name) in curves]
        if curve and dense and name not in ALONE:
            line["steps_to"] = steps_to(curve, 1.01 * dense[0])
            if line["steps_to"] is not None:
                line["to_loss"] = line["steps_to"] * line["seconds"]
        out.append(line)
    return out
