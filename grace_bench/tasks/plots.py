"""Plots of figures, drawn with Matplotlib."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from io import BytesIO
from typing import Any

from grace_bench.tasks.figures import GROUP, NAMES, grouped, lines, rate
from grace_bench.tasks.plan import AS_IS, LOOPBACK, order
from grace_bench.tasks.run import Row
from grace_bench.tasks.tasks import task_of

LEGEND, LETTERS = 1.7, 14
"""Inches of a method in a legend, and letters of a title in an inch."""


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
    methods = sorted({line["method"] for line in found}, key=order)
    colours = pyplot.get_cmap("tab10" if len(methods) <= 10 else "tab20")
    return figure, used, {method: colours(index % colours.N) for index, method in enumerate(methods)}


def _finished(figure: Any, handles: Sequence[Any], above: str) -> Any:
    width, height = figure.get_size_inches()
    columns = min(5, max(1, int(width / LEGEND)))
    rows = -(-len(handles) // columns)
    heads = textwrap.wrap(above, int(width * LETTERS))
    figure.suptitle("\n".join(heads), fontsize=9, y=1 - 0.08 / height)
    figure.legend(handles=handles, loc="lower center", ncols=columns, fontsize=7, frameon=False)
    figure.set_size_inches(width, height + 0.2 * (rows - 1) + 0.15 * (len(heads) - 1))
    height = figure.get_size_inches()[1]
    figure.tight_layout(rect=(0, (0.1 + 0.2 * rows) / height, 1, 1 - (0.05 + 0.15 * len(heads)) / height))
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
    bandwidths = sorted({b for line in found for b in line["times"]}, key=rate)
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
            axis.invert_yaxis()  # better values are higher up in all panels
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
        slow = min((b for line in group for b in line["times"]), key=rate)
        for line in group:
            if slow in line["times"]:
                steps, qualities = zip(*line["curves"][0], strict=True)
                clock = line["clocks"][0] if line["trained_at"] else [s * line["times"][slow]["seconds"] for s in steps]
                points = [(at, q) for at, q in zip(clock, qualities, strict=True) if q is not None]
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


def _png(figure: Any) -> bytes:
    from matplotlib import pyplot

    made = BytesIO()
    figure.savefig(made, format="png", dpi=90, bbox_inches="tight", pad_inches=0.05)
    pyplot.close(figure)
    return made.getvalue()
