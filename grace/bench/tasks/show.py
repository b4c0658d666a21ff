"""What was found as tables, plots and one page, with what lost said plainly."""

from __future__ import annotations

import base64
import html
import statistics
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grace.bench.lab.network import bits_per_second
from grace.bench.tasks.plan import AS_IS, BASELINES, LOOPBACK
from grace.bench.tasks.results import interval, results, write
from grace.bench.tasks.run import MACHINE, PROBED, TIMED, TRAINED, Row, latest
from grace.bench.tasks.tasks import TOLERANCE, task_of, tasks

if TYPE_CHECKING:
    from rich.console import Console

GROUP = ("task", "toolkit", "workers", "scale", "steps", "real")
NAMES = {"torch": "PyTorch", "keras": "Keras"}


# -- what follows from the rows ----------------------------------------------------------------------------------------
def measured(rows: Iterable[Row]) -> list[Row]:
    """The newest row of each training and each time."""
    return latest(row for row in rows if row["kind"] in (TRAINED, TIMED))


def lines(rows: Iterable[Row]) -> list[Row]:
    """One line for each method of each group (task, toolkit, workers, size): its training, and its times by bandwidth.

    Of several seeds means count, of times medians. ``interval``: half of the quality's 95 % interval. ``to_target``:
    steps until the quality was first seen to be at the target; None if a seed's never was. ``relative``: the target
    that follows from dense, whether or not the task has its own. ``times[bandwidth]``: seconds of a step, examples per
    second, seconds to the targets, and throughput and times relative to dense (more is faster).
    """
    rows = measured(rows)
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in GROUP), []).append(row)
    found = []
    for group in sorted(groups, key=lambda key: ([*tasks()].index(key[0]), key[1] != "torch", *key[2:])):
        found += _group(dict(zip(GROUP, group, strict=True)), groups[group])
    return found


def _group(head: Row, rows: Sequence[Row]) -> list[Row]:
    task = task_of(head["task"])
    methods = sorted({row["method"] for row in rows}, key=_order)
    trained = {m: [r for r in rows if (r["kind"], r["method"]) == (TRAINED, m) and "curve" in r] for m in methods}
    dense = [_last(row) for row in trained.get("dense", [])]
    fixed = head["scale"] == "quick" and not head["real"] and head["steps"] == task.quick.steps
    relative: float | None = None
    if dense and None not in dense:
        relative = task.near(statistics.mean(dense))  # type: ignore[type-var, arg-type]
    target = task.target if fixed else relative
    found = []
    for method in methods:
        line = {**head, "method": method, "target": target, "fixed": fixed, "relative": relative, "errors": []}
        line |= {"metric": task.metric, "higher": task.higher, "seeds": len(trained[method])}
        mine = [row for row in rows if row["method"] == method]
        line["errors"] = [(row.get("bandwidth", "training"), row["error"]) for row in mine if "error" in row]
        line |= {key: mine[0].get(key) for key in ("parameters", "source", "batch")}
        lasts = [_last(row) for row in trained[method]]
        sound: list[float] = [] if None in lasts else lasts  # type: ignore[assignment]
        line["quality"] = statistics.mean(sound) if sound else None
        line["interval"] = interval(sound)
        line["diverged"] = None in lasts
        line["curves"] = [row["curve"] for row in trained[method]]
        for key, goal in (("to_target", target), ("to_relative", relative)):
            steps = [_steps(row["curve"], task, goal) for row in trained[method]]
            line[key] = statistics.mean(steps) if steps and None not in steps else None  # type: ignore[type-var]
        timed = [row for row in mine if row["kind"] == TIMED and "seconds" in row]
        line["sent"] = statistics.median(r["sent"] for r in timed) if timed else None
        wires = [r["wire"] for r in timed if r["wire"] is not None]
        line["wire"] = statistics.median(wires) if wires else None
        line["times"] = {}
        for bandwidth in sorted({row["bandwidth"] for row in timed}, key=_rate):
            at = [row for row in timed if row["bandwidth"] == bandwidth]
            seconds = statistics.median(row["seconds"] for row in at)
            examples = head["workers"] * at[0]["batch"] * task.unit_size
            line["times"][bandwidth] = {"seconds": seconds, "throughput": examples / seconds}
            for key, steps_to in (("time", line["to_target"]), ("time_relative", line["to_relative"])):
                line["times"][bandwidth][key] = None if steps_to is None else steps_to * seconds
        found.append(line)
    base = next((line for line in found if line["method"] == "dense"), None)
    for line in found:
        line["volume"] = base["sent"] / line["sent"] if base and base["sent"] and line["sent"] else None
        for bandwidth, times in line["times"].items():
            reference = base["times"].get(bandwidth, {}) if base else {}
            for key, more in (("throughput", True), ("time", False), ("time_relative", False)):
                a, b = times[key], reference.get(key)
                times[f"x_{key}"] = None if not a or not b else (a / b if more else b / a)
    return found


def _order(method: str) -> tuple[int, str]:
    return (BASELINES.index(method) if method in BASELINES else len(BASELINES)), method


def _rate(bandwidth: str) -> float:
    return 0.0 if bandwidth in (LOOPBACK, AS_IS) else bits_per_second(bandwidth)


def _last(row: Row) -> float | None:
    return row["curve"][-1][1]


def _steps(curve: Sequence[Sequence[Any]], task: Any, target: float | None) -> int | None:
    if target is None:
        return None
    return next((step for step, quality in curve if quality is not None and task.reached(quality, target)), None)


def lost(found: Sequence[Row]) -> list[str]:
    """What did not pay, a line for each group: methods that missed the target, and that came later than a baseline."""
    texts = []
    for group in grouped(found):
        missed, late = [], []
        bests: dict[str, tuple[float, str]] = {}
        for line in group:
            for bandwidth, times in line["times"].items():
                if line["method"] in BASELINES and times["time"]:
                    bests[bandwidth] = min(bests.get(bandwidth, (float("inf"), "")), (times["time"], line["method"]))
        for line in group:
            if line["errors"]:
                missed.append(f"{line['method']} failed ({line['errors'][0][1][:60]})")
            elif line["target"] is not None and line["to_target"] is None and line["curves"]:
                value = "it diverged" if line["diverged"] else f"{line['quality']:.3g}"
                missed.append(f"{line['method']} missed it ({value})")
            if line["method"] in BASELINES:
                continue
            for bandwidth, times in line["times"].items():
                best, name = bests.get(bandwidth, (0.0, ""))
                if name and times["time"] and times["time"] > best:
                    late.append(f"{line['method']} at {bandwidth} ({times['time'] / best:.2f}x the time of {name})")
        parts = [", ".join(missed)] * bool(missed) + ["slower to it: " + ", ".join(late)] * bool(late)
        if parts:
            head = group[0]
            goal = "" if head["target"] is None else f", target {head['target']:.3g}"
            texts.append(f"{title(head)}{goal}: " + "; ".join(parts) + ".")
    return texts


def grouped(found: Sequence[Row]) -> list[list[Row]]:
    """The lines of each table."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for line in found:
        groups.setdefault(tuple(line[key] for key in GROUP), []).append(line)
    return list(groups.values())


def title(head: Row) -> str:
    """What a table is of."""
    size = "" if head["scale"] == "quick" else ", full"
    return f"{task_of(head['task']).title}, {NAMES[head['toolkit']]}, {head['workers']} workers{size}"


def notes(rows: Sequence[Row], found: Sequence[Row]) -> list[str]:
    """What a reader of the figures must know."""
    bandwidths = {bandwidth for line in found for bandwidth in line["times"]}
    texts = []
    if bandwidths - {LOOPBACK, AS_IS}:
        reached = {row["bandwidth"]: row["reached"] / 1e6 for row in rows if row["kind"] == PROBED}
        probes = ", ".join(f"{key}: {value:.0f} Mbit/s" for key, value in sorted(reached.items(), key=lambda p: p[1]))
        texts.append(
            "Emulated network: hosts are network namespaces of one machine, one worker on each, links are shaped "
            f"both ways; the workers share the machine's cores. One TCP connection was seen to carry {probes or '?'}."
        )
    if LOOPBACK in bandwidths:
        texts.append(
            "Plain loopback, no network: the workers share one machine (root and iproute2 would give shaped links), so "
            "bytes cost next to nothing and compression can only lose time."
        )
    texts.append(
        "Steps to the target were measured once for each method, without a limit on the links; the time of a step was "
        "measured at each bandwidth, over a few steps that follow. Time to the target is their product. Quality is "
        "looked at every so many steps, which is how finely steps to the target are known."
    )
    spans = [(r["quartiles"][1] - r["quartiles"][0]) / r["seconds"] for r in measured(rows) if "quartiles" in r]
    if spans:
        texts.append(
            f"The middle half of a cell's timed steps spans {statistics.median(spans):.0%} of their median in a usual "
            f"cell, {max(spans):.0%} in the worst."
        )
    seeds = len({row["seed"] for row in rows if row["kind"] == TRAINED})
    several = f"{seeds} seeds, means, with 95 % intervals (Student's t) of the quality"
    texts.append(
        f"{'One seed' if seeds == 1 else several}; the same data, batches, learning rate and number of steps for all "
        "methods, none of them tuned."
    )
    if {line["toolkit"] for line in found} >= {"torch"}:
        texts.append(
            "PyTorch: DistributedDataParallel over gloo; dense and fp16 are its own hooks, a method is GRACE's hook."
        )
    if {line["toolkit"] for line in found} >= {"keras"}:
        texts.append(
            "Keras: train_on_batch over Horovod with GRACE's optimizer; dense and fp16 are one allreduce (compressors "
            "none and fp16), since Horovod's own optimizer does not work with Keras 3."
        )
    if any(not line["fixed"] for line in found):
        texts.append(
            f"Where the target is not the task's own, it is the dense run's last quality less {TOLERANCE:.0%}."
        )
    return texts


# -- tables ------------------------------------------------------------------------------------------------------------
def table(group: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The heads and rows of one group's table."""
    task = task_of(group[0]["task"])
    bandwidths = sorted({b for line in group for b in line["times"]}, key=_rate)
    fixed = group[0]["fixed"]  # else both targets are one
    near = f"dense less {TOLERANCE:.0%}"
    heads = ["method", task.metric, "steps to target", *[f"steps to {near}"] * fixed, "MB sent", "MB on wire"]
    for bandwidth in bandwidths:
        heads += [f"{bandwidth}: s/step", f"{task.unit}/s", "s to target", *[f"s to {near}"] * fixed]
    body = []
    for line in group:
        quality = "diverged" if line["diverged"] else _number(line["quality"], ".4g")
        if line["interval"] is not None:
            quality += f" ± {line['interval']:.2g}"
        cells = [line["method"], quality]
        failed = bool(line["errors"] and not line["curves"])
        cells += [
            "failed" if failed else _number(line[key], ".4g", "never")
            for key in ("to_target", *["to_relative"] * fixed)
        ]
        cells += [_number(line[key] and line[key] / 1e6, ".3g") for key in ("sent", "wire")]
        for bandwidth in bandwidths:
            times = line["times"].get(bandwidth)
            if times is None:
                cells += ["failed" if any(b == bandwidth for b, _ in line["errors"]) else "-", "", "", *[""] * fixed]
                continue
            cells += [f"{times['seconds']:.3g}", f"{times['throughput']:,.0f}"]
            cells += [_number(times[key], ".3g", "never") for key in ("time", *["time_relative"] * fixed)]
        body.append(cells)
    return heads, body


def _number(value: float | None, form: str, none: str = "-") -> str:
    return none if value is None else f"{value:{form}}"


def caption(group: Sequence[Row]) -> str:
    """What is above a table."""
    head, task = group[0], task_of(group[0]["task"])
    goal = "no target, since dense is missing"
    if head["target"] is not None:
        goal = f"target {task.metric} {head['target']:.3g} or {'more' if task.higher else 'less'}"
    size = f"{head['parameters']:,} parameters, {head['source']}, " if head["parameters"] else ""
    return f"{title(head)}: {size}{head['steps']} steps, {goal}"


def overview(found: Sequence[Row], near: bool) -> list[tuple[str, list[str], list[list[str]]]]:
    """Time to the target, as many times faster than dense: methods by tasks, a table for each toolkit and bandwidth.

    ``near``: to dense's own quality less the tolerance.
    """
    to, time = ("to_relative", "x_time_relative") if near else ("to_target", "x_time")
    out = []
    keys = dict.fromkeys((line["toolkit"], line["workers"], line["scale"], b) for line in found for b in line["times"])
    for toolkit, workers, scale, bandwidth in sorted(keys, key=lambda k: (k[0] != "torch", k[1], k[2], _rate(k[3]))):
        mine = [
            line
            for line in found
            if (line["toolkit"], line["workers"], line["scale"]) == (toolkit, workers, scale)
            and bandwidth in line["times"]
        ]
        tasks = list(dict.fromkeys(line["task"] for line in mine))
        body = []
        for method in sorted({line["method"] for line in mine}, key=_order):
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
    """The overview for each kind of target that there is, with what is above it."""
    fixed = [line for line in found if line["fixed"]]
    return [*([(OVERVIEW, overview(fixed, near=False))] if fixed else []), (NEAR, overview(found, near=True))]


def markdown(rows: Sequence[Row]) -> str:
    """All of it for a page."""
    found = lines(rows)
    parts = []
    for above, tables in overviews(found):
        parts += [f"**{above}**", *(f"{name}\n\n{_markdown(heads, body)}" for name, heads, body in tables)]
    if losers := lost(found):
        parts.append("**What lost**\n\n" + "\n".join(f"- {text}" for text in losers))
    for group in grouped(found):
        parts.append(f"**{caption(group)}**\n\n{_markdown(*table(group))}")
    parts.append("\n".join(f"- {text}" for text in notes(rows, found)))
    return "\n\n".join(parts) + "\n"


def _markdown(heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [heads, ["---"] * len(heads), *body])


def render(rows: Sequence[Row], console: Console) -> None:
    """Print the overview, the tables, what lost and the notes."""
    from rich.markup import escape
    from rich.table import Table

    found = lines(rows)

    def shown(name: str, heads: Sequence[str], body: Sequence[Sequence[str]]) -> None:
        console.print(escape(name), style="italic")
        made = Table(box=None, pad_edge=False, padding=(0, 2 if console.width > 80 else 1, 0, 0))
        for head in heads:
            if head == "method":
                made.add_column(head, no_wrap=True)
            else:
                made.add_column(escape(head), justify="right", overflow="fold")
        for cells in body:
            made.add_row(*map(escape, cells))
        console.print(made, "")

    for group in grouped(found):
        shown(caption(group), *table(group))
    for above, tables in overviews(found):
        console.print(f"{above}:")
        for name, heads, body in tables:
            shown(name, heads, body)
    for text in lost(found):
        console.print(escape(f"Lost: {text}"))
    for text in notes(rows, found):
        console.print(escape(text))


# -- plots -------------------------------------------------------------------------------------------------------------
def plots(rows: Sequence[Row]) -> dict[str, bytes]:
    """PNG files: relative throughput and relative volume against quality, and quality over time."""
    found = [line for line in lines(rows) if line["curves"] and line["times"]]
    if not found:
        return {}
    drawn = {"throughput": _scatter(found, True), "volume": _scatter(found, False), "time": _curves(found)}
    return {name: _png(figure) for name, figure in drawn.items()}


def _panels(found: Sequence[Row]) -> tuple[Any, list[tuple[Any, list[Row]]], dict[str, Any]]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = grouped(found)
    columns = list(dict.fromkeys(group[0]["task"] for group in groups))
    kinds = list(dict.fromkeys(tuple(group[0][key] for key in GROUP[1:]) for group in groups))
    kinds = list(dict.fromkeys((kind[0], kind[1], kind[2], kind[4]) for kind in kinds))
    figure, axes = pyplot.subplots(
        len(kinds), len(columns), figsize=(3.1 * len(columns) + 0.6, 2.7 * len(kinds) + 0.7), squeeze=False
    )
    used = []
    for group in groups:
        head = group[0]
        row = kinds.index((head["toolkit"], head["workers"], head["scale"], head["real"]))
        axis = axes[row, columns.index(head["task"])]
        axis.set_title(f"{head['task']}, {NAMES[head['toolkit']]}, {head['workers']} workers", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
        used.append((axis, group))
    for axis in {*axes.flat} - {axis for axis, _ in used}:
        axis.set_axis_off()
    methods = sorted({line["method"] for line in found}, key=_order)
    colours = pyplot.get_cmap("tab10" if len(methods) <= 10 else "tab20")
    return figure, used, {method: colours(index % colours.N) for index, method in enumerate(methods)}


def _finished(figure: Any, handles: Sequence[Any], above: str) -> Any:
    rows = -(-len(handles) // 5)
    height = figure.get_size_inches()[1]
    figure.suptitle(above, fontsize=9, y=1 - 0.08 / height)
    figure.legend(handles=handles, loc="lower center", ncols=5, fontsize=7, frameon=False)
    figure.tight_layout(rect=(0, (0.1 + 0.2 * rows) / height, 1, 1 - 0.2 / height))
    return figure


def _where(found: Sequence[Row]) -> str:
    bandwidths = {bandwidth for line in found for bandwidth in line["times"]}
    if LOOPBACK in bandwidths:
        return "plain loopback"
    return "as measured on this cluster" if bandwidths == {AS_IS} else "emulated network"


def _logarithmic(axis: Any, which: str) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set(**{f"{which}scale": "log"})
    ticks = getattr(axis, f"{which}axis")
    ticks.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=9))
    ticks.set_major_formatter(StrMethodFormatter("{x:g}"))
    ticks.set_minor_formatter(NullFormatter())


def _scatter(found: Sequence[Row], throughput: bool) -> Any:
    from matplotlib.lines import Line2D

    figure, used, colours = _panels(found)
    bandwidths = sorted({b for line in found for b in line["times"]}, key=_rate)
    marks = dict(zip(bandwidths, "osD^vP*X", strict=False))
    for axis, group in used:
        task = task_of(group[0]["task"])
        for line in group:
            if line["quality"] is None:
                continue
            if throughput:
                for bandwidth, times in line["times"].items():
                    if times["x_throughput"]:
                        place = (times["x_throughput"], line["quality"])
                        axis.plot(*place, marks.get(bandwidth, "o"), color=colours[line["method"]], markersize=6)
            elif line["volume"]:
                axis.plot(1 / line["volume"], line["quality"], "o", color=colours[line["method"]], markersize=6)
        if group[0]["target"] is not None:
            axis.axhline(group[0]["target"], color="0.5", linewidth=0.8, linestyle="--")
        axis.axvline(1, color="0.5", linewidth=0.8, linestyle=":")
        _logarithmic(axis, "x")
        axis.set_xlabel("throughput, x dense" if throughput else "bytes sent, x dense", fontsize=7)
        axis.set_ylabel(f"{task.metric} ({'more' if task.higher else 'less'} is better)", fontsize=7)
        if not task.higher:
            axis.invert_yaxis()  # better is up in all panels
    handles = [Line2D([], [], color=c, marker="o", linestyle="", label=m) for m, c in colours.items()]
    if throughput:
        handles += [Line2D([], [], color="0.4", marker=m, linestyle="", label=b) for b, m in marks.items()]
    what = "Relative throughput against quality" if throughput else "Relative volume against quality"
    return _finished(figure, handles, f"{what} (dashed: target; up is better), {_where(found)}")


def _curves(found: Sequence[Row]) -> Any:
    from matplotlib.lines import Line2D

    figure, used, colours = _panels(found)
    for axis, group in used:
        task = task_of(group[0]["task"])
        slow = min((b for line in group for b in line["times"]), key=_rate)
        for line in group:
            if slow in line["times"]:
                points = [(step * line["times"][slow]["seconds"], q) for step, q in line["curves"][0] if q is not None]
                axis.plot(*zip(*points, strict=True), color=colours[line["method"]], linewidth=1.2)
        if group[0]["target"] is not None:
            axis.axhline(group[0]["target"], color="0.5", linewidth=0.8, linestyle="--")
        _logarithmic(axis, "x")
        axis.set_xlabel(f"seconds at {slow}", fontsize=7)
        axis.set_ylabel(task.metric, fontsize=7)
        if not task.higher:
            _logarithmic(axis, "y")
            axis.invert_yaxis()
    handles = [Line2D([], [], color=c, label=m) for m, c in colours.items()]
    return _finished(figure, handles, f"Quality over time (dashed: target; up is better), {_where(found)}")


# -- the page ----------------------------------------------------------------------------------------------------------
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 0.5em 0 1.5em; font-size: 13px }
th, td { padding: 3px 9px; text-align: right; border-bottom: 1px solid #ddd } th { background: #f4f4f4 }
th:first-child, td:first-child { text-align: left } img { max-width: 100% } h3 { margin-bottom: 0 }
div.wide { overflow-x: auto } pre { font-size: 12px; white-space: pre-wrap }
"""


def page(rows: Sequence[Row], pictures: Mapping[str, bytes], left_out: Sequence[str], command: str) -> str:
    """One HTML page with everything in it; ``pictures``: PNG files, by name."""
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
    parts.append("<h2>What lost</h2>" + listed(lost(found) or ["Nothing."]))
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
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Tasks</title><style>{STYLE}</style>'
    return f"{head}{''.join(parts)}</html>\n"


def _png(figure: Any) -> bytes:
    from matplotlib import pyplot

    made = BytesIO()
    figure.savefig(made, format="png", dpi=90)
    pyplot.close(figure)
    return made.getvalue()


def save(rows: Sequence[Row], folder: Path, left_out: Sequence[str] = (), command: str = "grace bench tasks") -> None:
    """Write report.html, report.md, results.jsonl, results.csv and the plots into a folder."""
    write(results(lines(rows)), folder)
    pictures = plots(rows)
    (folder / "report.html").write_text(page(rows, pictures, left_out, command))
    (folder / "report.md").write_text(markdown(rows))
    for name, file in pictures.items():
        (folder / f"{name}.png").write_bytes(file)
