"""Results of tasks, a row for each method and bandwidth, as JSON lines and CSV."""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

SCHEMA = 1
FIELDS = {
    "task": "what was trained",
    "toolkit": "torch or keras",
    "workers": "how many",
    "scale": "quick or full",
    "steps": "of each training",
    "real": "whether the data was a user's own",
    "method": "as `grace bench tasks --method` takes it",
    "seeds": "trainings",
    "metric": "what quality is",
    "higher": "whether more of it is better",
    "quality": "after the last step, mean over the seeds; null if one diverged",
    "interval": "half of the mean's 95 % interval; null of one seed",
    "target": "the task's own quality to reach; null where it has none at this scale",
    "steps_to_target": "until the mean quality over the seeds reached it; null if it never did",
    "relative_target": "the quality of the dense run of the same call, less 3 %",
    "steps_to_relative": "as steps_to_target",
    "bandwidth": "of the links; null without a timed step",
    "seconds": "of a step, on the slowest worker",
    "throughput": "examples (of a text: words) per second",
    "seconds_to_target": "steps_to_target times seconds; of auto the measured time",
    "seconds_to_relative": "steps_to_relative times seconds; of auto the measured time",
    "bytes_sent": "that a worker hands over in a step",
    "bytes_on_wire": "that the busiest host's interface counted in a step",
    "error": "why a training or a measurement failed; empty if none did",
}
"""The keys of a row, and what they mean."""


def interval(values: Sequence[float]) -> float | None:
    """Half the width of the mean's 95 % confidence interval, by Student's t; None for fewer than two values."""
    if len(values) < 2:
        return None
    return student(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def student(freedom: int, chance: float = 0.95) -> float:
    """The t such that |T| <= t with probability ``chance``, T of Student's distribution with ``freedom`` degrees.

    By bisection of its distribution (Abramowitz and Stegun, 26.7.3 and 26.7.4).
    """

    def within(angle: float) -> float:
        cosine = math.cos(angle)
        odd, term, total = freedom % 2, 1.0, 0.0
        for power in range(odd, freedom - 1, 2):
            total += term * cosine**power
            term *= (power + 1) / (power + 2)
        total *= math.sin(angle)
        return (angle + total) * 2 / math.pi if odd else total

    low, high = 0.0, math.pi / 2  # bounds of atan(t / sqrt(freedom))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle) < chance else (low, middle)
    return math.tan(low) * math.sqrt(freedom)


def results(lines: Iterable[Row]) -> list[Row]:
    """Rows of results, from the lines of `figures.lines`."""
    found = []
    for line in lines:
        for bandwidth, times in line["times"].items() or [(None, {})]:
            each = {
                **line,
                "bandwidth": bandwidth,
                "seconds": times.get("seconds"),
                "throughput": times.get("throughput"),
                "target": line["target"] if line["fixed"] else None,
                "steps_to_target": line["to_target"] if line["fixed"] else None,
                "seconds_to_target": times.get("time") if line["fixed"] else None,
                "relative_target": line["relative"],
                "steps_to_relative": line["to_relative"],
                "seconds_to_relative": times.get("time_relative"),
                "bytes_sent": line["sent"],
                "bytes_on_wire": line["wire"],
                "error": "; ".join(f"{where}: {what}" for where, what in line["errors"]),
            }
            found.append({key: each[key] for key in FIELDS})
    return found


def check(rows: Any) -> list[Row]:
    """Return ``rows``; raise ValueError unless they are a list from `results`."""
    if not isinstance(rows, list):
        raise ValueError(f"no list of results but {rows!r:.60}")
    for number, row in enumerate(rows, 1):
        odd = set(FIELDS) ^ set(row) if isinstance(row, dict) else {f"{row!r:.60}"}
        if odd:
            raise ValueError(f"result {number} lacks, or has beside what results have: {', '.join(sorted(odd))}")
    return rows


def write(rows: Sequence[Row], folder: Path) -> None:
    """Write results.jsonl and results.csv."""
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (folder / "results.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(FIELDS))
        table.writeheader()
        table.writerows(rows)
