"""`grace report`: records of trainings in the terminal, as a page, as CSV and as JSON."""

from __future__ import annotations

import contextlib
import json
import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from grace.cli import compare, inputs
from grace.cli.page import comparison, page
from grace.cli.show import BARS, COLOURS, size, spans, spark
from grace.engine.record import Run, read, warnings_of
from grace.planner.profile import but

WIDTH = 48  # width of the sparklines, in characters
COURSE = 12  # width of a tensor's levels over time, in characters
SHOWN = 40  # maximum tensors in the terminal; the page has all


def report(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            callback=inputs.input_files,
            help="The files that `record` named in grace_from_params, even of running trainings.",
        ),
    ],
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", callback=inputs.output_file, help="Write a self-contained page instead."),
    ] = None,
    follow: Annotated[bool, typer.Option(help="Update after each new line, until Ctrl-C.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV: a row for each recorded step.")] = False,
    as_json: inputs.AsJson = False,
) -> None:
    """Show a training's record: metrics, bytes, ratio over time, residuals, levels, times, warnings.

    With several records, compare their quality at the same steps, seconds and bytes.
    """
    if (as_json or as_csv) and (follow or html is not None or (as_json and as_csv)):
        one, other = ("json", "csv") if as_json else ("csv", "json")
        raise typer.BadParameter(f"--{one} prints the record once: leave out --follow, --html and --{other}")
    if follow and len(files) > 1:
        raise typer.BadParameter("--follow shows one record: name one file")
    console = inputs.console()
    runs = {str(path): _read(path) for path in files}
    path, run = files[0], runs[str(files[0])]
    if as_csv:
        compare.write_csv(runs)
        return
    if as_json:
        data = {name: _data(each) for name, each in runs.items()}
        print(json.dumps(data if len(files) > 1 else data[str(path)], indent=2))
        return
    if html is not None:
        text = page(run, path.name) if len(files) == 1 else comparison(runs)
        html.write_text(text, encoding="utf-8")
        console.print(f"{html}: {html.stat().st_size / 1000:.0f} kB", highlight=False, soft_wrap=True)
    if not follow:
        if html is None:
            console.print(view(run) if len(files) == 1 else compare.view(runs))
        return
    seen = path.stat().st_size
    with Live(view(run), console=console, auto_refresh=False) as live:
        while True:
            try:
                time.sleep(1.0)
            except KeyboardInterrupt:
                return
            try:
                now = path.stat().st_size
            except FileNotFoundError:  # the file was moved away; a new one may replace it
                continue
            if now != seen:
                seen, run = now, _read(path)
                live.update(view(run), refresh=True)
                if html is not None:
                    html.write_text(page(run, path.name), encoding="utf-8")


def _data(run: Run) -> dict[str, Any]:
    return {**asdict(run), "history": run.history(), "warnings": warnings_of(run)}


def _read(path: Path) -> Run:
    try:
        return read(path)
    except OSError as error:
        raise typer.BadParameter(inputs.refused(error, path)) from None
    except RecursionError:
        raise typer.BadParameter(f"{path} is no record: it is nested too deeply") from None
    except ValueError as error:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            raise typer.BadParameter(f"{error}{but(json.loads(path.read_text(encoding='utf-8')))}") from None
        raise typer.BadParameter(str(error)) from None


def view(run: Run) -> RenderableType:
    """The terminal view of a run."""
    about = run.about
    steps, seconds = run.total("steps"), run.total("seconds")
    last = run.lines[-1].step if run.lines else about["step"]
    head = Text(f"{about['method']}", style="bold")
    head.append(f"  {about['world_size']} worker{'s' * (about['world_size'] > 1)}, {about['toolkit']}, step {last:,}")
    parts: list[RenderableType] = [head]
    if run.lines:
        parts += [
            Text(
                f"per step {size(run.total('bytes_sent') / steps)} sent by worker 0, dense "
                f"{size(run.total('bytes_dense') / steps)}: {run.ratio:.1f} times fewer; "
                f"{seconds / steps * 1e3:.3g} ms a step"
            ),
            "",
            _curves(run),
            "",
            *_times(run),
            _tensors(run),
            "",
        ]
    parts += [Text(f"! {text}", style="yellow") for text in warnings_of(run)]
    return Group(*parts)


def _curves(run: Run) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    lines = run.thinned(WIDTH)
    curves = [
        ("ratio", [line.ratio for line in lines], "{:.1f}"),
        ("ms a step", [line.seconds / line.steps * 1e3 for line in lines], "{:.3g}"),
        ("residual", [line.norm for line in lines if line.norm is not None], "{:.3g}"),
    ]
    metrics = compare.metrics_of({"": run})
    for metric in metrics:
        values = [value for each in run.metrics if (value := each.values.get(metric)) is not None]
        curves.append((escape(metric), values[:: max(-(-len(values) // WIDTH), 1)], "{:.4g}"))
    for name, values, form in curves:
        if values:
            ends = f"{form.format(values[0])} → {form.format(values[-1])}"
            table.add_row(name, Text(spark(values), style="cyan"), ends)
        elif name in map(escape, metrics):
            table.add_row(name, "", "not finite")
    return table


def _times(run: Run) -> list[RenderableType]:
    times = run.times
    total = sum(times.values())
    if not total:
        return ["Where the time goes is not known inside graphs: use tf.profiler.experimental.", ""]
    bar = Text()
    for (name, seconds), colour in zip(times.items(), COLOURS, strict=False):
        bar.append("█" * round(seconds / total * WIDTH), style=colour)
        bar.append(f" {name} {seconds / total:.0%}  ")
    return [bar, ""]


def _tensors(run: Run) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    line = run.lines[-1]
    leveled = any(tensor["level"] for tensor in line.tensors)
    planned = any(tensor["strategy"] for tensor in line.tensors)
    heads = ["tensor", "shape", "method", "a step", "ratio", "residual"]
    for head in [*heads, *["over time", "level"] * leveled, *["strategy"] * planned]:
        right = head in ("a step", "ratio", "residual")
        folds = head in ("tensor", "strategy", "level")  # columns that wrap in a narrow terminal
        table.add_column(head, justify="right" if right else "left", no_wrap=not folds, overflow="fold")
    order = sorted(range(len(line.tensors)), key=lambda place: -line.sent[place])
    for place in order[:SHOWN]:
        tensor, sent, norm = line.tensors[place], line.sent[place], line.residual[place]
        cells = [
            tensor["name"],
            "x".join(map(str, tensor["shape"])) or "scalar",
            tensor["method"],
            size(sent / line.steps),
            f"{line.dense[place] / sent:.1f}" if sent else "",
            "" if norm is None else f"{norm:.3g}",
            *[_course(run, tensor["name"]), re.sub(r"\w+=", "", tensor["level"])] * leveled,
            *[tensor["strategy"]] * planned,
        ]
        table.add_row(*map(escape, cells))
    if len(order) > SHOWN:
        table.add_row(f"and {len(order) - SHOWN} more: --html has all of them")
    return table


def _course(run: Run, name: str) -> str:
    # Returns a tensor's levels over time as bars, with one height per level in order of appearance.
    held = spans(run, name)
    known = list(dict.fromkeys(level for _, _, level in held))
    first, last = held[0][0], held[-1][1]
    steps = [first + (last - first) * (2 * part + 1) / (2 * COURSE) for part in range(COURSE)]
    at = [next(known.index(level) for start, end, level in held if start <= step <= end) for step in steps]
    return spark(at) if len(known) > 1 else BARS[0] * COURSE * bool(known[0])
