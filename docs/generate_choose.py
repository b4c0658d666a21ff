"""Write the decision table of docs/choose.md from stored results: python docs/generate_choose.py; --check compares.

Each benchmarks/results/tasks-*.json: rows of a run of `grace bench tasks` (its results.jsonl) and their origin:
{"schema": 1, "date": ..., "command": ..., "machine": ..., "network": ..., "results": [...]}. Keys of a row: those
of `grace.bench.tasks.results.FIELDS`.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from grace.bench.lab.network import bits_per_second
from grace.bench.plan import parse
from grace.bench.tasks import results
from grace.bench.tasks.figures import NAMES
from grace.bench.tasks.plan import AUTO, BASELINES
from grace.bench.tasks.tasks import TOLERANCE, task_of
from grace.local import PRESETS

from generate_tables import BLOCK

ROOT = Path(__file__).parents[1]
PAGE, STORE = ROOT / "docs" / "choose.md", ROOT / "benchmarks" / "results"
ABOUT = ("date", "command", "machine", "network")
LIMITS = (0.03, 0.1)
NOISE = 0.03
"""About the loss that one seed may show by chance: fp16, whose rounding costs nothing, has shown 1.7 %."""
CELL = ("task", "toolkit", "workers")


def load(folder: Path = STORE) -> list[dict[str, Any]]:
    """The runs that are stored; ValueError for a file of another form."""
    runs = []
    for file in sorted(folder.glob("tasks-*.json")):
        run = json.loads(file.read_text())
        if run.get("schema") != results.SCHEMA or not all(isinstance(run.get(key), str) for key in ABOUT):
            raise ValueError(f"{file}: it has no schema {results.SCHEMA} with {', '.join(ABOUT)}")
        try:
            results.check(run.get("results"))
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
        runs.append(run)
    return runs


def lines(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each method that was trained wherever dense was; baselines first, then the least loss first.

    ``losses``: by task, toolkit and workers, the share of dense's quality by which it was worse, infinite where it
    diverged or failed, negative where it was better. ``worst``: the largest. ``bytes``, ``seconds``: on the wire and of
    a step, relative to dense's, geometric means over trainings and rates.
    """
    rows = list(rows)
    dense = {(*(row[key] for key in CELL), row["bandwidth"]): row for row in rows if row["method"] == "dense"}
    pairs: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for row in rows:
        base = dense.get((*(row[key] for key in CELL), row["bandwidth"]))
        if base is not None and base["quality"] is not None:
            pairs.setdefault(row["method"], []).append((row, base))
    out = []
    for method, both in pairs.items():
        losses: dict[tuple[Any, ...], float] = {}
        for row, base in both:  # a method that measures the links is trained at each rate
            cell = tuple(row[key] for key in CELL)
            losses[cell] = max(_loss(row, base), losses.get(cell, float("-inf")))
        if len(losses) < len({cell[:-1] for cell in dense}):
            continue
        means = {}
        for name, key in (("bytes", "bytes_on_wire"), ("seconds", "seconds")):
            shares = [row[key] / base[key] for row, base in both if row[key]]
            means[name] = statistics.geometric_mean(shares) if shares else float("inf")
        out.append(
            {
                "method": method,
                "losses": losses,
                "worst": max(losses.values()),
                **means,
            }
        )
    return sorted(out, key=lambda line: (line["method"] not in BASELINES, line["worst"]))


def _loss(row: dict[str, Any], base: dict[str, Any]) -> float:
    # The part of dense's quality by which a method is worse.
    if row["quality"] is None or row["error"]:
        return float("inf")
    return (base["quality"] - row["quality"]) / base["quality"] * (1 if row["higher"] else -1)


def choice(found: Iterable[dict[str, Any]], elsewhere: Iterable[dict[str, Any]], limit: float) -> dict[str, Any]:
    """The method with the fastest steps whose quality is worse by no more than ``limit`` in any training.

    ``elsewhere``: lines of trainings with fewer seeds, in which it may be worse by NOISE more. Of the methods that
    exchange gradients in every step, and that a user names.
    """
    others = {line["method"]: line["worst"] for line in elsewhere}
    fit = (
        line
        for line in found
        if line["method"].partition(":")[0] not in (AUTO, *PRESETS)
        and line["worst"] <= limit
        and others.get(line["method"], 0.0) <= limit + NOISE
    )
    best: dict[str, Any] = min(fit, key=lambda line: line["seconds"])
    return best


def speeds(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, list[float | None]]]:
    """By bandwidth and method: how many times sooner than dense it reached dense's quality less the tolerance.

    A number for each training with a dense one; None where the method did not reach it.
    """
    rows = [row for row in rows if row["bandwidth"] and row["seconds"]]
    cells = {(*(row[key] for key in CELL), row["bandwidth"], row["method"]): row for row in rows}
    found: dict[str, dict[str, list[float | None]]] = {}
    for bandwidth in sorted({row["bandwidth"] for row in rows}, key=bits_per_second):
        bases = [row for row in rows if row["method"] == "dense" and row["bandwidth"] == bandwidth]
        for method in dict.fromkeys(row["method"] for row in rows if row["bandwidth"] == bandwidth):
            mine = [(base, cells.get((*(base[key] for key in CELL), bandwidth, method))) for base in bases]
            if all(row is not None for _, row in mine):
                times = [(base["seconds_to_relative"], row["seconds_to_relative"]) for base, row in mine if row]
                found.setdefault(bandwidth, {})[method] = [None if row is None else base / row for base, row in times]
    return found


def times(rows: list[dict[str, Any]]) -> list[str]:
    """The paragraphs on time to quality; none without times."""
    found = speeds(rows)
    if not found:
        return []
    methods = list(dict.fromkeys(method for each in found.values() for method in each))
    body = []
    for method in methods:
        cells = []
        for each in found.values():
            reached = [speed for speed in each.get(method, []) if speed is not None]
            mean = f"{statistics.geometric_mean(reached):.2f}" if reached else "never"
            count = len(each.get(method, []))
            short = f" ({len(reached)} of {count})" if len(reached) < count else ""
            cells.append(f"{mean}{short}" if method in each else "")
        body.append([f"`{method}`", *cells])
    above = (
        f"How many times sooner than dense gradients a method reached their quality less {TOLERANCE:.0%}, at each rate "
        "of the links: the geometric mean over the trainings that reached it, with their number if some did not:"
    )
    return [above, _table(["method", *found], body)]


def params(method: str) -> str:
    """The keys of `grace_from_params`."""
    if method in BASELINES:
        return "no compression" if method == "dense" else '`{"compressor": "fp16"}`'
    return f"`{json.dumps(parse(method).params)}`"


def text(runs: list[dict[str, Any]]) -> str:
    """The content of the generated section."""
    rows = [row for run in runs for row in run["results"]]
    seeds = max(row["seeds"] for row in rows)
    main, rest = ([row for row in rows if (row["seeds"] == seeds) is kind] for kind in (True, False))
    found, elsewhere = lines(main), lines(rest)
    titles = "; ".join(task_of(task).title for task in dict.fromkeys(row["task"] for row in rows))
    about = (
        f"Whole trainings ({titles}); every method has as many steps as dense gradients and is not tuned. Of the "
        f"methods whose final quality was close to that of dense gradients in every training (with one seed, by "
        f"{NOISE:.0%} less close), these have the fastest steps:"
    )
    best = [(limit, choice(found, elsewhere, limit)) for limit in LIMITS]
    body = [
        [f"{limit:.0%}", params(line["method"]), f"1/{1 / line['bytes']:.0f}", f"{1 / line['seconds']:.1f}"]
        for limit, line in best
    ]
    heads = ["worse by at most", "begin with", "bytes on the wire, relative to dense", "times as fast as dense"]
    parts = [about, _table(heads, body)]
    for some, each in ((main, found), (rest, elsewhere)):
        parts += _losses(some, each) + times(some) if some else []
    parts += [f"Measured {run['date']} on {run['machine']}, {run['network']}: `{run['command']}`" for run in runs]
    return "\n\n".join(parts) + "\n"


def _losses(rows: list[dict[str, Any]], found: list[dict[str, Any]]) -> list[str]:
    # The paragraph and the table on the loss of quality.
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    cells = dict.fromkeys((row["toolkit"], row["workers"], row["seeds"]) for row in rows)
    settings = (
        f"{NAMES[kit]} with {workers} workers ({seeds} seed{'s' * (seeds > 1)})" for kit, workers, seeds in cells
    )
    noise = _noise(found, sorted({each[2] for each in cells}))
    above = (
        f"{_joined(list(settings))}: the loss of quality, as a share of the quality of dense gradients (negative: "
        f"better{'; the largest of each task' * (len(cells) > 1)}). {noise}"
    )
    body = []
    for line in found:
        losses = [[loss for cell, loss in line["losses"].items() if cell[0] == task] for task in tasks]
        shown = ["failed" if max(each) == float("inf") else f"{max(each) * 100 + 0.0:+.1f} %" for each in losses]
        body.append([f"`{line['method']}`", *shown, f"{line['bytes']:.2f}"])
    return [above.rstrip(), _table(["method", *tasks, "bytes"], body)]


def _noise(found: list[dict[str, Any]], seeds: list[int]) -> str:
    # The loss of half precision, whose rounding is far below the sampling noise.
    if seeds != [1]:
        return ""
    half = next(line["worst"] for line in found if line["method"] == "fp16")
    return f"`fp16` rounds far below the sampling noise, so its loss of {half * 100:.1f} % is the noise of one seed."


def _joined(values: list[Any]) -> str:
    return " and ".join(map(str, values))


def _table(heads: list[str], body: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *body])


def page(before: str, made: str) -> str:
    """The page with this content in its generated section; ValueError if it has none."""
    after, count = BLOCK.subn(lambda found: f"{found[1]}\n{made}\n{found[3]}", before)
    if count != 1:
        raise ValueError(f"{PAGE} has {count} generated sections instead of one, which ends with <!-- end -->")
    return after


if __name__ == "__main__":
    before = PAGE.read_text()
    after = page(before, text(load()))
    if "--check" not in sys.argv:
        PAGE.write_text(after)
    elif before != after:
        sys.exit("docs/choose.md is out of date: run python docs/generate_choose.py")
