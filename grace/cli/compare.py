"""Compares several records: quality against steps, seconds and bytes."""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from grace.cli.show import size, spark
from grace.engine.record import START, Run

Points = list[dict[str, Any]]
AXES = {"step": "step {:,.0f}", "seconds": "{:.3g} s", "bytes_sent": "{}"}
"""The axes against which quality is compared, and how to format a value; bytes are those that worker 0 sent."""
NO_METRICS = "No quality is recorded: call grc.record(loss=..., accuracy=...) after each epoch or evaluation."
WIDTH = 16  # width of the sparklines, in characters


def metrics_of(runs: Mapping[str, Run]) -> list[str]:
    """The names of all metrics, in order of appearance."""
    return list(dict.fromkeys(name for run in runs.values() for each in run.metrics for name in each.values))


def measured(run: Run, metric: str) -> Points:
    """The points of a run's history that have a metric, finite or not."""
    return [point for point in run.history() if metric in point]


def budget(points: Sequence[Points], axis: str) -> float:
    """The largest number of steps, seconds or bytes at which all runs have a measurement."""
    return min(run[-1][axis] for run in points)


def value_at(points: Points, metric: str, axis: str, most: float) -> str:
    """The last value of a metric within a budget; a dash if there is none."""
    within = [point for point in points if point[axis] <= most]
    return written(within[-1][metric]) if within else "–"


def written(value: float | None) -> str:
    """A metric as text, with four digits."""
    return "not finite" if value is None else f"{value:.4g}"


def view(runs: Mapping[str, Run]) -> RenderableType:
    """The terminal view: a table of totals, and one for each metric."""
    parts: list[RenderableType] = [_totals(runs), ""]
    names = metrics_of(runs)
    for metric in names:
        parts += [_quality({name: found for name, run in runs.items() if (found := measured(run, metric))}, metric), ""]
    if names:
        parts.append(
            "Each metric's last value, and that within the steps, seconds and bytes that all of its runs have."
        )
    else:
        parts.append(Text(f"! {NO_METRICS}", style="yellow"))
    return Group(*parts)


def _table(*heads: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for number, head in enumerate(heads):
        table.add_column(escape(head), justify="right" if number > 1 else "left", overflow="fold")
    return table


def _totals(runs: Mapping[str, Run]) -> Table:
    table = _table("run", "method", "workers", "steps", "ms a step", "seconds", "sent", "ratio")
    for name, run in runs.items():
        steps, seconds = run.total("steps"), run.total("seconds")
        pace = f"{seconds / steps * 1e3:.3g}" if steps else ""
        cells = [str(run.about["world_size"]), f"{steps:,}", pace, f"{seconds:.3g}", size(run.total("bytes_sent"))]
        table.add_row(escape(name), escape(run.about["method"]), *cells, f"{run.ratio:.1f}")
    return table


def _quality(points: Mapping[str, Points], metric: str) -> Table:
    most = {axis: budget(list(points.values()), axis) for axis in AXES}
    heads = [form.format(size(most[axis]) if axis == "bytes_sent" else most[axis]) for axis, form in AXES.items()]
    table = _table(metric, "over steps", "last", *(f"at {head}" for head in heads))
    for name, found in points.items():
        finite = [point[metric] for point in found if point[metric] is not None]
        curve = Text(spark(finite[:: max(len(finite) // WIDTH, 1)]) if finite else "", style="cyan")
        cells = [value_at(found, metric, axis, most[axis]) for axis in AXES]
        table.add_row(escape(name), curve, written(found[-1][metric]), *cells)
    return table


def write_csv(runs: Mapping[str, Run]) -> None:
    """Print a row for each recorded step of each run; totals are those up to the step."""
    table = csv.writer(sys.stdout, lineterminator="\n")
    columns = ["step", *START, *metrics_of(runs)]
    table.writerow(["run", *columns])
    for name, run in runs.items():
        table.writerows([name, *(point.get(column) for column in columns)] for point in run.history())
