"""Shows results: as tables, and as a plot of seconds per step against the link rate."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.lab.bench import Row
from benchmarks.lab.cases import ALONE, CASES, DENSE
from grace_bench.lab.network import bits_per_second

EMULATED = "emulated network"
HEAD = (
    *("case", "s/step", "spread", "x dense", "MB on wire", "MB sent"),
    *("cpu s", "kernel s", "compute s", "wait s", "bound s", "held", "loss", "steps to", "s to loss"),
)

NOTE = (
    "In brackets: times as fast as the faster of the dense float32 ones; bold: slower than it. *: over the bound of "
    "1.3 x (the step of `alone` + bytes on the wire / rate) + 15 ms for each round."
)


def groups(lines: Sequence[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """The lines of each table: by hosts, model and rate; fastest first."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for line in lines:
        found.setdefault((line["hosts"], line["model"], line["rate"]), []).append(line)
    for group in found.values():
        group.sort(key=lambda line: line.get("seconds", float("inf")))
    order = sorted(found, key=lambda key: (key[0], key[1], bits_per_second(key[2])))
    return {key: found[key] for key in order}


def cells(line: Row, dense: float | None) -> tuple[str, ...]:
    """One line of a table; `HEAD` has the columns."""
    if "seconds" not in line:
        return (line["case"], "failed", *[""] * (len(HEAD) - 3), line.get("error", ""))
    times = line.get("times", {})
    return (
        line["case"],
        f"{line['seconds']:.3f}",
        f"{line['spread']:.2f}",
        f"{dense / line['seconds']:.1f}" if dense else "",
        f"{line['wire'] / 1e6:.2f}",
        f"{line['sent'] / 1e6:.2f}" if "sent" in line else "",
        f"{line['cpu']:.3f}",
        f"{line['kernel']:.3f}",
        f"{times['compress'] + times['decompress']:.3f}" if times else "",
        f"{times['wait']:.3f}" if "wait" in times else "",
        f"{line['bound']:.3f}" if "bound" in line else "",
        ("yes" if line["held"] else "NO") if "held" in line else "",
        f"{line['loss']:.4f}" if "loss" in line else "",
        *_to_loss(line),
    )


def _to_loss(line: Row) -> tuple[str, str]:
    if "steps_to" not in line:
        return "", ""
    return ("never", "never") if line["steps_to"] is None else (f"{line['steps_to']:.0f}", f"{line['to_loss']:.1f}")


def dense_seconds(group: Sequence[Row]) -> float | None:
    """Seconds per step of the faster dense fp32 baseline; None if none was measured."""
    found = [line["seconds"] for line in group if line["case"] in DENSE and "seconds" in line]
    return min(found, default=None)


def title(hosts: str, model: str, *rate: str) -> str:
    """The title of a table or plot."""
    return ", ".join([model, f"{hosts} hosts", *rate, EMULATED])


def tables(lines: Sequence[Row]) -> list[Table]:
    """One table for each number of hosts, model and rate."""
    out = []
    for key, group in groups(lines).items():
        table = Table(*HEAD, title=title(*key))
        for column in table.columns[1:]:
            column.justify = "right"
        dense = dense_seconds(group)
        for line in group:
            table.add_row(*cells(line, dense), style="bold" if line["ours"] else None)
        out.append(table)
    return out


def markdown(lines: Sequence[Row]) -> str:
    """Markdown: a table for each model and number of hosts, with seconds per step by rate."""
    found: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for (hosts, model, rate), group in groups(lines).items():
        found.setdefault((hosts, model), {})[rate] = group
    return "\n".join(_by_rate(title(*key), by_rate) for key, by_rate in found.items())


def _by_rate(of: str, by_rate: dict[str, list[Row]]) -> str:
    # One table and its notes.
    found = {(line["case"], rate): line for rate, group in by_rate.items() for line in group}
    dense = {rate: dense_seconds(group) for rate, group in by_rate.items()}
    head, rows = ["case", *by_rate, "MB on wire", "steps to"], []
    for name in _ordered(name for name, _ in found):
        steps = [_cell(found.get((name, rate)), dense[rate]) for rate in by_rate]
        measured = [found[name, rate] for rate in by_rate if (name, rate) in found]
        rows.append([name, *steps, *_same_at_all_rates(measured)])
    kept = [column for column in range(len(head)) if column <= len(by_rate) or any(row[column] for row in rows)]
    rows = [head, ["---", *("---:" for _ in head[1:])], *rows]
    text = "\n".join("| " + " | ".join(row[column] for column in kept) + " |" for row in rows)
    failed = [f"{name} failed at {rate}: {line['error']}\n" for (name, rate), line in found.items() if "error" in line]
    return "\n".join([f"**{of}**: {_repeats(list(found.values()))}\n", f"{text}\n", f"{NOTE}\n", *failed])


def _cell(line: Row | None, dense: float | None) -> str:
    # Seconds per step, the speed-up over dense, and a mark if it is below 1 or the bound is missed.
    if line is None or "seconds" not in line:
        return "" if line is None else "failed"
    text = f"{line['seconds']:.3g}" + ("" if line.get("held", True) or not line["ours"] else "*")
    if dense is None or line["case"] in ALONE:
        return text
    return f"{text} ({dense / line['seconds']:.1f})" if line["seconds"] <= dense else f"**{text}**"


def _same_at_all_rates(lines: Sequence[Row]) -> tuple[str, str]:
    # Bytes on the wire, and steps to the loss of dense training.
    wire = [f"{line['wire'] / 1e6:.2f}" for line in lines if "wire" in line]
    steps = [_to_loss(line)[0] for line in lines if "steps_to" in line]
    return (wire or [""])[0], (steps or [""])[0]


def _repeats(lines: Sequence[Row]) -> str:
    good = [line for line in lines if "seconds" in line]
    repeats = min((line["repeats"] for line in good), default=0)
    if repeats <= 1:
        return "seconds per step, one run"
    spreads = [line["spread"] for line in good]
    return (
        f"seconds per step, medians of {repeats} runs; slowest over fastest: "
        f"{statistics.median(spreads):.2f} (median), {max(spreads):.2f} (largest)"
    )


def plot(lines: Sequence[Row], path: Path) -> None:
    """Draw seconds per step against the links' rate: a panel for each number of hosts and model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = {}
    for line in lines:
        if "seconds" in line and line["rate"] != "unshaped":
            curves = panels.setdefault((line["hosts"], line["model"]), {})
            curves.setdefault(line["case"], []).append((bits_per_second(line["rate"]) / 1e6, line["seconds"]))
    figure, all_axes = plt.subplots(1, max(len(panels), 1), figsize=(9 * max(len(panels), 1), 6), squeeze=False)
    looks = _looks([name for curves in panels.values() for name in curves])
    for axes, ((hosts, model), curves) in zip(all_axes[0], sorted(panels.items()), strict=False):
        for name in _ordered(curves):
            axes.plot(*zip(*sorted(curves[name]), strict=True), label=name, **looks[name])
        axes.set(xscale="log", yscale="log", xlabel="link rate, Mbit/s", ylabel="seconds per step")
        axes.set_title(title(hosts, model))
        axes.grid(which="both", alpha=0.3)
        axes.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


DOORS = {
    "grace-torch-": {"linestyle": "-", "marker": "o"},
    "grace-hvd-": {"linestyle": "-", "marker": "s"},
    "grace-ddp-": {"linestyle": "-", "marker": "^"},
    "upstream-": {"linestyle": ":", "marker": "v"},
    "ddp-": {"linestyle": "--", "marker": "x"},
    "hvd-": {"linestyle": "--", "marker": "+"},
    "": {"linestyle": "-.", "marker": "d"},
}
"""Line styles by prefix of a case's name: GRACE's are solid."""


def _looks(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    # One colour per method for all integrations; line style and marker per integration.
    from matplotlib import colormaps

    parts = {name: _door_and_method(name) for name in _ordered(names)}
    methods = list(dict.fromkeys(method for _, method in parts.values()))
    colours = colormaps["tab20" if len(methods) <= 20 else "turbo"].resampled(max(20, len(methods)))
    return {name: {**DOORS[door], "color": colours(methods.index(method))} for name, (door, method) in parts.items()}


def _door_and_method(name: str) -> tuple[str, str]:
    door = next(door for door in DOORS if name.startswith(door))
    return door, name.removeprefix(door)


def _ordered(names: Iterable[str]) -> list[str]:
    # In the order of CASES; old files may have removed cases.
    order = {case.name: place for place, case in enumerate(CASES)}
    return sorted(set(names), key=lambda name: (order.get(name, len(order)), name))
