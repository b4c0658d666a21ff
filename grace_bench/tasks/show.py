"""Results as tables, plots and one page, including the methods that did not pay."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from grace_bench.tasks.figures import (
    NAMES,
    choices,
    grouped,
    lines,
    lost,
    measured,
    named,
    notes,
    rate,
    title,
)
from grace_bench.tasks.plan import LIMIT, order
from grace_bench.tasks.plots import plots
from grace_bench.tasks.results import results, write
from grace_bench.tasks.run import MACHINE, Row
from grace_bench.tasks.tasks import TOLERANCE, task_of

if TYPE_CHECKING:
    from rich.console import Console


# -- tables ------------------------------------------------------------------------------------------------------------
def table(group: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The headings and rows of one group's table."""
    task = task_of(group[0]["task"])
    bandwidths = sorted({b for line in group for b in line["times"]}, key=rate)
    fixed = group[0]["fixed"]  # otherwise both targets are equal
    near = f"dense less {TOLERANCE:.0%}"
    limited = any(line["method"] == LIMIT for line in group)
    heads = ["method", task.metric, "steps to target", *[f"steps to {near}"] * fixed, "MB sent", "MB on wire"]
    for bandwidth in bandwidths:
        heads += [f"{bandwidth}: s/step", f"{task.unit}/s", "s to target", *[f"s to {near}"] * fixed]
        heads += ["of limit"] * limited
    body = []
    for line in group:
        quality = "diverged" if line["diverged"] else _number(line["quality"], ".4g")
        if line["interval"] is not None:
            quality += f" ± {line['interval']:.2g}"
        cells = [named(line), quality]
        failed = bool(line["errors"] and not line["curves"])
        cells += [
            "failed" if failed else _number(line[key], ".4g", "never")
            for key in ("to_target", *["to_relative"] * fixed)
        ]
        cells += [_number(line[key] and line[key] / 1e6, ".3g") for key in ("sent", "wire")]
        for bandwidth in bandwidths:
            times = line["times"].get(bandwidth)
            if times is None:
                missed = any(b == bandwidth for b, _ in line["errors"])
                cells += ["failed" if missed else "-", "", "", *[""] * (fixed + limited)]
                continue
            cells += [f"{times['seconds']:.3g}", f"{times['throughput']:,.0f}"]
            cells += [_number(times[key], ".3g", "never") for key in ("time", *["time_relative"] * fixed)]
            cells += [_number(times["share"], ".0%")] * limited
        body.append(cells)
    return heads, body


def _number(value: float | None, form: str, none: str = "-") -> str:
    return none if value is None else f"{value:{form}}"


def caption(group: Sequence[Row]) -> str:
    """The caption above a table."""
    head, task = group[0], task_of(group[0]["task"])
    goal = "no target, since dense is missing"
    if head["target"] is not None:
        goal = f"target {task.metric} {head['target']:.3g} or {'more' if task.higher else 'less'}"
    size = f"{head['parameters']:,} parameters, {head['source']}, " if head["parameters"] else ""
    return f"{title(head)}: {size}{head['steps']} steps, {goal}"


def overview(found: Sequence[Row], near: bool) -> list[tuple[str, list[str], list[list[str]]]]:
    """Speed-ups over dense in the time to the target: methods by tasks, a table for each toolkit and bandwidth.

    ``near``: the target is the quality of dense gradients, less the tolerance.
    """
    to, time = ("to_relative", "x_time_relative") if near else ("to_target", "x_time")
    out = []
    keys = dict.fromkeys((line["toolkit"], line["workers"], line["scale"], b) for line in found for b in line["times"])
    for toolkit, workers, scale, bandwidth in sorted(keys, key=lambda k: (k[0] != "torch", k[1], k[2], rate(k[3]))):
        mine = [
            line
            for line in found
            if (line["toolkit"], line["workers"], line["scale"]) == (toolkit, workers, scale)
            and bandwidth in line["times"]
        ]
        tasks = list(dict.fromkeys(line["task"] for line in mine))
        body = []
        for method in sorted({line["method"] for line in mine}, key=order):
            cells = [method]
            for task in tasks:
                line = next((x for x in mine if (x["task"], x["method"]) == (task, method)), None)
                if line is None:
                    cells.append("-")
                else:
                    x, way = line["times"][bandwidth][time], line["times"][bandwidth]["x_throughput"]
                    late = "never" if line[to] is None else "-"
                    cells.append(f"{_number(x, '.2f', late)} ({_number(way, '.2f')})")
            body.append(cells)
        name = f"{NAMES[toolkit]}, {workers} workers, {bandwidth}{', full' if scale == 'full' else ''}"
        out.append((name, ["method", *tasks], body))
    return out


OVERVIEW = "Times faster than dense to the target (in brackets: in throughput)"
NEAR = f"Times faster than dense to its own quality less {TOLERANCE:.0%} (in brackets: in throughput)"


def overviews(found: Sequence[Row]) -> list[tuple[str, list[tuple[str, list[str], list[list[str]]]]]]:
    """The overview for each kind of target, with its caption."""
    fixed = [line for line in found if line["fixed"]]
    return [*([(OVERVIEW, overview(fixed, near=False))] if fixed else []), (NEAR, overview(found, near=True))]


def markdown(rows: Sequence[Row]) -> str:
    """The whole report in Markdown."""
    found = lines(rows)
    parts = []
    for above, tables in overviews(found):
        parts += [f"**{above}**", *(f"{name}\n\n{_markdown(heads, body)}" for name, heads, body in tables)]
    if losers := lost(found):
        parts.append("**Methods that did not pay**\n\n" + "\n".join(f"- {text}" for text in losers))
    if chosen := choices(found):
        parts.append("**Choices of auto**\n\n" + "\n".join(f"- {text}" for text in chosen))
    for group in grouped(found):
        parts.append(f"**{caption(group)}**\n\n{_markdown(*table(group))}")
    parts.append("\n".join(f"- {text}" for text in notes(rows, found)))
    return "\n\n".join(parts) + "\n"


def _markdown(heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [heads, ["---"] * len(heads), *body])


def render(rows: Sequence[Row], console: Console) -> None:
    """Print the overview, the tables, the methods that did not pay, and the notes."""
    from rich.markup import escape
    from rich.table import Table

    found = lines(rows)

    def shown(name: str, heads: Sequence[str], body: Sequence[Sequence[str]]) -> None:
        console.print(escape(name), style="italic")
        gap = 2 if console.width > 80 else 1
        widths = _widths(heads, body)
        for part in _parts(heads, [width + gap for width in widths], console.width + gap):
            made = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
            for column in part:
                wide = widths[column]
                made.add_column(escape(heads[column]), justify="right" if column else "left", width=wide)
            for cells in body:
                made.add_row(*(escape(cells[column]) for column in part))
            console.print(made, "")

    for group in grouped(found):
        shown(caption(group), *table(group))
    for above, tables in overviews(found):
        console.print(f"{above}:")
        for name, heads, body in tables:
            shown(name, heads, body)
    for text in lost(found):
        console.print(escape(f"Did not pay: {text}"))
    for text in choices(found):
        console.print(escape(f"Chosen: {text}"))
    for text in notes(rows, found):
        console.print(escape(text))


def _widths(heads: Sequence[str], body: Sequence[Sequence[str]]) -> list[int]:
    # The least width of each column that breaks no cell and no word.
    return [max(map(len, [*head.split(), *(cells[i] for cells in body)])) for i, head in enumerate(heads)]


def _parts(heads: Sequence[str], widths: Sequence[int], most: int) -> list[list[int]]:
    # The columns of each table: as many as fit, the methods always first, and those of a bandwidth together.
    starts = [1, *(i for i, head in enumerate(heads) if ": " in head), len(heads)]
    parts: list[list[int]] = []
    for start, stop in pairwise(starts):
        group = range(start, stop)
        if not parts or sum(widths[i] for i in (*parts[-1], *group)) > most:
            parts.append([0])
        for column in group:
            if len(parts[-1]) > 1 and sum(widths[i] for i in (*parts[-1], column)) > most:
                parts.append([0])
            parts[-1].append(column)
    return parts


# -- the page ----------------------------------------------------------------------------------------------------------
STYLE = """
:root { color-scheme: light dark; --ink: #1c2733; --rule: #d9e0e8; --back: #fff; --card: #f6f8fa }
@media (prefers-color-scheme: dark) { :root { --ink: #e8edf3; --rule: #384452; --back: #14191f; --card: #1d242c } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 2em auto; padding: 0 1em; color: var(--ink);
  background: var(--back); overflow-wrap: anywhere }
table { border-collapse: collapse; margin: 0.5em 0 1.5em; font-size: 13px; overflow-wrap: normal }
th, td { padding: 3px 9px; text-align: right; border-bottom: 1px solid var(--rule) } th { background: var(--card) }
th:first-child, td:first-child { text-align: left } img { max-width: 100% } h3 { margin-bottom: 0 }
div.wide { overflow-x: auto } pre { font-size: 12px; white-space: pre-wrap }
@media (prefers-color-scheme: dark) { img { border-radius: 4px; filter: brightness(0.9) } }
"""


def page(rows: Sequence[Row], pictures: Mapping[str, bytes], left_out: Sequence[str], command: str) -> str:
    """One self-contained HTML page; ``pictures``: PNG files, by name."""
    found = lines(rows)

    def made(heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
        def row(cells: Sequence[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        return f'<div class="wide"><table>{row(heads, "th")}{"".join(row(cells, "td") for cells in body)}</table></div>'

    def listed(texts: Iterable[str]) -> str:
        return "<ul>" + "".join(f"<li>{html.escape(text)}</li>" for text in texts) + "</ul>"

    parts = [f"<h1>Tasks</h1><p><code>{html.escape(command)}</code></p>", listed(notes(rows, found))]
    parts.append("<h2>Time to target</h2>")
    for above, tables in overviews(found):
        parts.append(f"<p>{above}.</p>")
        parts += [f"<h3>{html.escape(name)}</h3>{made(heads, body)}" for name, heads, body in tables]
    parts.append("<h2>Methods that did not pay</h2>" + listed(lost(found) or ["None."]))
    if chosen := choices(found):
        parts.append("<h2>Choices of auto</h2>" + listed(chosen))
    if left_out:
        parts.append("<h2>Not measured</h2><p>Time ran out; the same command goes on from here.</p>" + listed(left_out))
    parts.append("<h2>Plots</h2>")
    for name, file in pictures.items():
        parts.append(f'<p><img alt="{name}" src="data:image/png;base64,{base64.b64encode(file).decode()}"></p>')
    parts.append("<h2>Tables</h2>")
    parts += [f"<h3>{html.escape(caption(group))}</h3>{made(*table(group))}" for group in grouped(found)]
    failed = [row for row in measured(rows) if "error" in row]
    if failed:
        parts.append("<h2>What failed</h2>")
        for row in failed:
            where = f"{title(row)}, {row['method']}, {row.get('bandwidth', 'training')}: {row['error']}"
            log = html.escape(row.get("log", ""))
            parts.append(f"<details><summary>{html.escape(where)}</summary><pre>{log}</pre></details>")
    machine: Row = next((row for row in reversed(rows) if row["kind"] == MACHINE), {})
    parts.append("<h2>Machine</h2>" + listed(f"{k}: {v}" for k, v in machine.items() if k != "kind" and v is not None))
    head = '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Tasks</title>'
    head += f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>'
    return f"{head}<body>{''.join(parts)}</body></html>\n"


def save(rows: Sequence[Row], folder: Path, left_out: Sequence[str] = (), command: str = "grace bench tasks") -> None:
    """Write report.html, report.md, results.jsonl, results.csv and the plots into a folder."""
    write(results(lines(rows)), folder)
    pictures = plots(rows)
    (folder / "report.html").write_text(page(rows, pictures, left_out, command))
    (folder / "report.md").write_text(markdown(rows))
    for name, file in pictures.items():
        (folder / f"{name}.png").write_bytes(file)
