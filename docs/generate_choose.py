"""Write the tables of whole trainings in docs: python docs/generate_choose.py; --check compares.

They stand in choose.md, benchmarks-tasks.md, benchmarks-methods.md and local-measured.md, from
benchmarks/results/tasks-*.json and *-workers.json, and of other runs (LOCAL, FEEDBACK, FRESH), each with a dense
training of its own: rows of `grace bench tasks` (its results.jsonl) and their origin:
{"schema": 1, "date": ..., "command": ..., "machine": ..., "network": ..., "results": [...]}. Keys of a row: those
of `grace_bench.tasks.results.FIELDS`.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from grace.bench.plan import parse
from grace.local import PRESETS
from grace_bench.lab.network import bits_per_second
from grace_bench.tasks import results
from grace_bench.tasks.figures import NAMES
from grace_bench.tasks.plan import AUTO, BASELINES, LIMIT
from grace_bench.tasks.tasks import TOLERANCE, task_of

from generate_tables import filled, shown

ROOT = Path(__file__).parents[1]
PAGE, STORE = ROOT / "docs" / "choose.md", ROOT / "benchmarks" / "results"
TASKS, ALL, LOCALLY = (
    ROOT / "docs" / f"{name}.md" for name in ("benchmarks-tasks", "benchmarks-methods", "local-measured")
)
LOCAL, FEEDBACK = "local-2026-11-26.json", "feedback-2026-11-29.json"
"""Runs of methods that missed the quality in most tasks: local training, and long-delayed error feedback."""
FRESH = ("auto-2026-11-29.json", "auto-keras-2.json", "auto-torch-4.json", "auto-keras-4.json")
"""Runs of `auto` with predictions, and of the limit, with seeds that tuned nothing."""
SECTION = "python docs/generate_choose.py"
ABOUT = ("date", "command", "machine", "network")
LIMITS = (0.03, 0.1)
NOISE = 0.03
"""About the loss that one seed may show by chance: fp16, whose rounding costs nothing, has shown 1.7 %."""
ABOUT_EARLIER = """

Earlier, Zen 5, with an `auto` that tried every candidate: qualities, and how many times sooner than float32 a method
reached float32's quality less 3 %.

"""
ABOUT_FEEDBACK = f"""
**PyTorch, 2 workers**, methods that hold most of each gradient back for later steps: quality ± half of the mean's 95 %
interval over the seeds; bold: it never reached float32's less {TOLERANCE * 100:.0f} %.

"""
FEW = ("dense", "fp16", "auto", "blockint:bits=4", "eden:bits=3,block_size=64")
"""Methods of which one table compares the time to quality."""
SHORT = {
    "limit": "no exchange",
    "fp16": "fp16",
    "auto": "auto",
    "blockint:bits=4": "int4",
    "eden:bits=4": "eden 4 bits",
    "eden:bits=3,block_size=64": "eden 3 bits",
    "eden:bits=2,block_size=64": "eden 2 bits",
    "powersgd:compress_rank=16": "PowerSGD rank 16",
    "eden:bits=2": "eden 2 bits, blocks of 4096",
    "powersgd:compress_rank=4": "PowerSGD rank 4",
    "topk:compress_ratio=0.01": "top-k 1 %",
    "efsignsgd:block_size=512": "signs, blocks of 512",
    "localsgd:sync_every=4,compressor=blockint": "LocalSGD, H = 4, int8",
    "localsgd:sync_every=10,compressor=blockint": "LocalSGD, H = 10, int8",
}
"""Names that a phone shows on one line."""


def load(folder: Path = STORE, *names: str) -> list[dict[str, Any]]:
    """The runs that are stored, or those of these file names; ValueError for a file of another form."""
    runs = []
    chosen = [folder / name for name in names]
    for file in chosen or (
        *sorted(folder.glob("tasks-*.json")),
        *sorted(folder.glob("*-workers.json")),
    ):
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
    """A line for each method; baselines first, then the least loss first.

    ``losses``: by task, toolkit and workers, the share of dense's quality by which it was worse, infinite where it
    diverged or failed, negative where it was better. ``worst``: the largest. ``bytes``, ``seconds``: on the wire and of
    a step, relative to dense's, geometric means over the trainings and rates that all methods have. ``tasks``: the
    number of tasks.
    """
    rows = list(rows)
    dense = {_cell(row): row for row in rows if row["method"] == "dense"}
    pairs: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for row in rows:
        base = dense.get(_cell(row))
        if base is not None and base["quality"] is not None:
            pairs.setdefault(row["method"], []).append((row, base))
    shared = set(dense).intersection(*({_cell(row) for row, _ in both} for both in pairs.values()))
    out = []
    for method, both in pairs.items():
        losses: dict[tuple[Any, ...], float] = {}
        for (
            row,
            base,
        ) in both:  # a method that measures the links is trained at each rate
            cell = training(row)
            losses[cell] = max(loss(row, base), losses.get(cell, float("-inf")))
        means = {}
        for name, key in (("bytes", "bytes_on_wire"), ("seconds", "seconds")):
            key = key if all(row[key] for row, _ in both) else "bytes_sent"  # loopback counts no bytes on the wire
            shares = [row[key] / base[key] for row, base in both if row[key] and _cell(row) in shared]
            means[name] = statistics.geometric_mean(shares) if shares else float("inf")
        out.append(
            {
                "method": method,
                "losses": losses,
                "worst": max(losses.values()),
                "tasks": len({cell[0] for cell in losses}),
                **means,
            }
        )
    return sorted(out, key=lambda line: (line["method"] not in BASELINES, line["worst"]))


def training(row: dict[str, Any]) -> tuple[Any, ...]:
    """The task, the toolkit and the number of workers of a row."""
    return row["task"], row["toolkit"], row["workers"]


def _cell(row: dict[str, Any]) -> tuple[Any, ...]:
    return (*training(row), row["bandwidth"])


def loss(row: dict[str, Any], base: dict[str, Any]) -> float:
    """The share of dense's quality by which a method is worse; infinite if it diverged or failed."""
    if row["quality"] is None or row["error"]:
        return float("inf")
    return (base["quality"] - row["quality"]) / base["quality"] * (1 if row["higher"] else -1)


def choice(found: Iterable[dict[str, Any]], elsewhere: Iterable[dict[str, Any]], limit: float) -> dict[str, Any]:
    """The method of all tasks with the fastest steps whose quality is worse by no more than ``limit`` in any training.

    ``elsewhere``: lines of trainings with fewer seeds, in which it may be worse by NOISE more. Of the methods that
    exchange gradients in every step, and that a user names.
    """
    found = list(found)
    others, tasks = (
        {line["method"]: line["worst"] for line in elsewhere},
        max(line["tasks"] for line in found),
    )
    fit = (
        line
        for line in found
        if line["method"].partition(":")[0] not in (AUTO, *PRESETS)
        and line["tasks"] == tasks
        and line["worst"] <= limit
        and others.get(line["method"], 0.0) <= limit + NOISE
    )
    best: dict[str, Any] = min(fit, key=lambda line: line["seconds"])
    return best


def speeds(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, list[float | None]]]:
    """By method and bandwidth: how many times sooner than dense it reached dense's quality less the tolerance.

    A number for each training with a dense one; None where the method did not reach it.
    """
    rows = [row for row in rows if row["bandwidth"] and row["seconds"]]
    dense = {_cell(row): row for row in rows if row["method"] == "dense"}
    found: dict[str, dict[str, list[float | None]]] = {}
    for row in sorted(rows, key=lambda row: bits_per_second(row["bandwidth"])):
        base, own = dense[_cell(row)]["seconds_to_relative"], row["seconds_to_relative"]
        each = found.setdefault(row["method"], {}).setdefault(row["bandwidth"], [])
        each.append(None if own is None else base / own)
    return found


def common(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of FEW and of the limit in the trainings in which all reached dense's quality less the tolerance."""
    rows = [row for row in rows if row["method"] in (LIMIT, *FEW)]
    missed = {training(row) for row in rows if row["seconds_to_relative"] is None}
    return [row for row in rows if training(row) not in missed]


def times(runs: list[dict[str, Any]]) -> list[str]:
    """The paragraph on time to quality, and its table."""
    rows = [row for run in runs for row in run["results"]]
    found = speeds(common(rows))
    rates = list(dict.fromkeys(rate for each in found.values() for rate in each))
    above = (
        f"How many times sooner than dense gradients a method reached their quality less {TOLERANCE:.0%}: geometric "
        f"mean over the {len(found['dense'][rates[0]])} of {len({training(row) for row in rows})} "
        "trainings in which all did, on another machine ([each](benchmarks-tasks.md#measured)):"
    )
    body = [[f"`{method}`", *(_speed(found[method].get(rate, [])) for rate in rates)] for method in FEW]
    return [above, _table(["method", *rates], body)]


def by_task(runs: list[dict[str, Any]]) -> str:
    """By toolkit, workers and rate: how many times sooner than dense in each task; "never" where it was not."""
    rows, parts = [row for run in runs for row in run["results"]], []
    for kit, workers in dict.fromkeys((row["toolkit"], row["workers"]) for row in rows):
        mine = [row for row in rows if (row["toolkit"], row["workers"]) == (kit, workers)]
        tasks = list(dict.fromkeys(row["task"] for row in mine))
        each = {task: speeds(row for row in mine if row["task"] == task) for task in tasks}
        for rate in sorted({row["bandwidth"] for row in mine}, key=bits_per_second):
            body = [
                [
                    name,
                    *(_speed(each[task].get(method, {}).get(rate, [])).split(" (")[0] for task in tasks),
                ]
                for method, name in SHORT.items()
                if any(row["method"] == method for row in mine)
            ]
            parts += [
                f"**{NAMES[kit]}, {workers} workers, {rate}**",
                _table(["method", *tasks], body),
            ]
    for run in runs:
        command, semicolon, rest = run["command"].partition(";")
        parts.append(f"Measured {run['date']} by `{command}`{semicolon}{rest}.")
    return "\n\n".join(parts) + "\n"


def fresh(runs: list[dict[str, Any]]) -> dict[tuple[str, int, str], list[dict[str, float | None]]]:
    """By toolkit, workers and rate: of each training, seconds to dense's quality less the tolerance by method."""
    found: dict[tuple[str, int, str], dict[str, dict[str, float | None]]] = {}
    for row in (row for run in runs for row in run["results"]):
        each = found.setdefault((row["toolkit"], row["workers"], row["bandwidth"]), {})
        each.setdefault(row["task"], {})[row["method"]] = row["seconds_to_relative"]
    return {cell: [*each.values()] for cell, each in found.items()}


def sooner(runs: list[dict[str, Any]]) -> str:
    """`auto` against fp16 and the fastest of the methods that keep the quality, where it reached the quality itself."""
    body = []
    for (kit, workers, rate), trainings in fresh(runs).items():
        reached = [each for each in trainings if each[AUTO]]
        gains = [each["fp16"] / each[AUTO] for each in reached if each["fp16"]]
        fastest = [min(filter(None, (each[method] for method in FEW[1:] if method != AUTO))) for each in reached]
        behind = [each[AUTO] / least for each, least in zip(reached, fastest, strict=True)]
        body.append(
            [
                f"{NAMES[kit]}, {workers} workers, {rate}",
                f"{len(reached)} of {len(trainings)}",
                f"{statistics.geometric_mean(gains):.2f} ({min(gains):.2f} to {max(gains):.2f})",
                str(sum(gain < 1 / 1.03 for gain in gains)),
                f"{sum(share <= 1.1 for share in behind)} ({max(behind):.2f})",
            ]
        )
    heads = ["`auto`", "reached", "fp16's time / `auto`'s", "over 3 % slower than fp16"]
    heads.append("within 1.1 of the fastest (worst)")
    return _table(heads, body) + "\n\n"


def _speed(speeds: list[float | None]) -> str:
    reached = [speed for speed in speeds if speed is not None]
    mean = f"{statistics.geometric_mean(reached):.2f}" if reached else "never" if speeds else ""
    return f"{mean} ({len(reached)} of {len(speeds)})" if len(reached) < len(speeds) else mean


def params(method: str) -> str:
    """The keys of `grace_from_params`."""
    if method in BASELINES:
        return "no compression" if method == "dense" else '`{"compressor": "fp16"}`'
    return f"`{json.dumps(parse(method).params)}`"


def qualities(runs: list[dict[str, Any]]) -> str:
    """Each training's quality, with half of the mean's 95 % interval; one table for each toolkit and number of workers.

    Of a method that is trained at each rate, the first rate's.
    """
    rows, parts = [row for run in runs for row in run["results"] if row["method"] != LIMIT], []
    for kit, workers in dict.fromkeys((row["toolkit"], row["workers"]) for row in rows):
        mine = [row for row in rows if (row["toolkit"], row["workers"]) == (kit, workers)]
        tasks, seeds = {row["task"]: row["metric"] for row in mine}, mine[0]["seeds"]
        cells = {(row["method"], row["task"]): row for row in reversed(mine)}
        body = [
            [name, *(_quality(cells[method, task]) for task in tasks)]
            for method, name in {"dense": "float32", **SHORT}.items()
            if any(row["method"] == method for row in mine)
        ]
        heads = ["method", *(f"{task}, {metric}" for task, metric in tasks.items())]
        parts += [
            f"**{NAMES[kit]}, {workers} workers, {seeds} seed{'s' * (seeds > 1)}**",
            _table(heads, body),
        ]
    return "\n\n".join(parts)


def _quality(row: dict[str, Any]) -> str:
    if row["quality"] is None or row["error"]:
        return "failed"
    digits = 1 if row["quality"] > 1 else 3
    interval = "" if row["interval"] is None else f" ± {row['interval']:.{digits}f}"  # one seed has none
    return f"{row['quality']:.{digits}f}{interval}"


def missed(run: dict[str, Any]) -> str:
    """The qualities of a run, those in bold that never reached dense's quality less the tolerance."""
    rows = run["results"]
    tasks = {row["task"]: row["metric"] for row in rows}
    cells = {(row["method"], row["task"]): row for row in rows}
    body = []
    for method, name in {"dense": "float32", **SHORT}.items():
        mine = [cells[method, task] for task in tasks if (method, task) in cells]
        if mine:
            shown = (f"**{_quality(row)}**" if row["steps_to_relative"] is None else _quality(row) for row in mine)
            body.append([name, *shown])
    return _table(["method", *(f"{task}, {metric}" for task, metric in tasks.items())], body)


def local(run: dict[str, Any]) -> str:
    """What local training lost and gained: quality, and how many times sooner than fp16, by step and to the quality."""
    rows = run["results"]
    half = {row["task"]: row for row in rows if row["method"] == "fp16"}
    body = []
    for method, name in SHORT.items():
        if method.partition(":")[0] not in PRESETS:
            continue
        mine = {row["task"]: row for row in rows if row["method"] == method}
        sooner = {
            task: f"{half[task]['seconds_to_relative'] / row['seconds_to_relative']:.1f}"
            if row["seconds_to_relative"]
            else "never"
            for task, row in mine.items()
        }
        steps = {task: half[task]["seconds"] / row["seconds"] for task, row in mine.items()}
        body.append(
            [
                f"{name}, sooner",
                *(f"{sooner[task]} ({steps[task]:.1f})" for task in mine),
            ]
        )
    heads = ["", *(f"{row['task']}, {row['metric']}" for row in half.values())]
    return missed(run) + "\n\n" + _table(heads, body)


def text(runs: list[dict[str, Any]], others: Sequence[dict[str, Any]], later: list[dict[str, Any]]) -> str:
    """The content of the generated section. ``others``: runs whose methods only the table of losses has, too.

    ``later``: the runs of the table of times.
    """
    rows = [row for run in runs for row in run["results"]]
    seeds = max(row["seeds"] for row in rows)
    main, rest = ([row for row in rows if (row["seeds"] == seeds) is kind] for kind in (True, False))
    found, elsewhere = lines(main), lines(rest)
    one = f" (with one seed, {NOISE:.0%} more)" if rest else ""
    titles = "; ".join(task_of(task).title for task in dict.fromkeys(row["task"] for row in rows))
    about = (
        f"Whole trainings ({titles}), each with as many steps as dense gradients, no method tuned. The fastest steps "
        f"among the methods that lost little in every training{one}:"
    )
    best = [(limit, choice(found, elsewhere, limit)) for limit in LIMITS]
    body = [
        [
            f"{limit:.0%}",
            params(line["method"]),
            f"1/{1 / line['bytes']:.0f}",
            f"{1 / line['seconds']:.1f}",
        ]
        for limit, line in best
    ]
    heads = [
        "worse by at most",
        "begin with",
        "bytes on the wire, relative to dense",
        "times as fast as dense",
    ]
    parts = [about, _table(heads, body)]
    named = {line["method"] for line in found} | {"eden:bits=2"}  # in larger blocks than the recommended ones
    beside = [line for run in others for line in lines(run["results"]) if line["method"] not in named]
    for some, each in ((main, found + beside), (rest, elsewhere)):
        parts += _losses(some, each) if some else []
    run = runs[0]
    last = f"; the last {len(beside)} rows: [other runs](benchmarks-tasks.md#measured)" if beside else ""
    parts.append(f"Measured {run['date']} on {run['machine']}, {run['network']}{last}.")
    return "\n\n".join(parts + times(later)) + "\n"


def _losses(rows: list[dict[str, Any]], found: list[dict[str, Any]]) -> list[str]:
    # The paragraph and the table on the loss of quality.
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    cells = dict.fromkeys((row["toolkit"], row["workers"], row["seeds"]) for row in rows)
    counts = dict.fromkeys(seeds for *_, seeds in cells)
    kits, workers = (list(dict.fromkeys(each)) for each in list(zip(*cells, strict=True))[:2])
    settings = [f"{_joined([NAMES[kit] for kit in kits])}, {_joined(workers)} workers"]
    if len(cells) != len(kits) * len(workers):
        settings = [f"{NAMES[kit]} with {count} workers" for kit, count, _ in cells]
    noise = _noise(found, sorted({each[2] for each in cells}))
    above = (
        f"{', '.join(settings)}, {_joined(list(counts))} seed{'s' * (max(counts) > 1)}: the loss of quality, as a "
        f"share of that of dense gradients (negative: better{'; largest of each task' * (len(cells) > 1)}; bold: "
        f"above {TOLERANCE:.0%}), and in how many settings it was trained. {noise}"
    )
    body = []
    for line in found:
        losses = [[value for cell, value in line["losses"].items() if cell[0] == task] for task in tasks]
        shown = ["" if not each else _percent(max(each)) for each in losses]
        count = len({cell[1:] for cell in line["losses"]})
        body.append(
            [
                f"`{line['method']}`",
                *shown,
                f"{count} of {len(cells)}",
                f"{line['bytes']:.2f}",
            ]
        )
    heads = ["method", *tasks, "settings", "bytes"]
    return [above.rstrip(), _table(heads, body)]


def _percent(loss: float) -> str:
    shown = "failed" if loss == float("inf") else f"{loss * 100 + 0.0:+.1f} %"
    return f"**{shown}**" if loss > TOLERANCE else shown


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
    """The page with this content in its generated section, and tables of commands; ValueError if it has no section."""
    if len(re.findall(f"<!-- {SECTION} -->", before)) != 1:
        raise ValueError(f"the page has not one generated section <!-- {SECTION} -->, which ends with <!-- end -->")
    return filled(before, lambda what: made.rstrip("\n") if what == SECTION else shown(what))


def pages() -> dict[Path, str]:
    """The generated section of each page."""
    runs, feedback, locally, *later = load(), *load(STORE, FEEDBACK, LOCAL, *FRESH)
    return {
        PAGE: text(runs, [feedback, locally], later),
        TASKS: sooner(later) + by_task(later) + ABOUT_FEEDBACK + measured(missed(feedback), feedback),
        ALL: f"{qualities(later)}{ABOUT_EARLIER}{qualities(runs)}\n\n{by_task(runs)}",
        LOCALLY: measured(local(locally), locally),
    }


def measured(table: str, run: dict[str, Any]) -> str:
    """A table with its origin."""
    command, semicolon, rest = run["command"].partition(";")
    return f"{table}\n\nMeasured {run['date']} by `{command}`{semicolon}{rest}.\n"


if __name__ == "__main__":
    for file, made in pages().items():
        before = file.read_text()
        after = page(before, made)
        if "--check" not in sys.argv:
            file.write_text(after)
        elif before != after:
            sys.exit(f"{file.relative_to(ROOT)} is out of date: run python docs/generate_choose.py")
