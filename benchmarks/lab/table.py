"""Show what was measured: a table, and a plot of seconds per step against the links' rate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.lab.bench import Row
from benchmarks.lab.cases import DENSE
from grace.bench.lab.network import bits_per_second

EMULATED = "emulated network"
HEAD = (
    *("case", "s/step", "spread", "x dense", "MB on wire", "MB sent"),
    *("cpu s", "kernel s", "compute s", "wait s", "bound s", "held", "loss", "steps to", "s to loss"),
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
    """One line of a table, as `HEAD` names it."""
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
    """The faster of the dense fp32 baselines."""
    found = [line["seconds"] for line in group if line["case"] in DENSE and "seconds" in line]
    return min(found, default=None)


def title(hosts: str, model: str, rate: str) -> str:
    """What a table or plot is of."""
    return f"{model}, {hosts} hosts, {rate}, {EMULATED}"


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
    """The same tables, for a page."""
    out = []
    for key, group in groups(lines).items():
        dense = dense_seconds(group)
        rows = [HEAD, ("---", *("---:" for _ in HEAD[1:])), *(cells(line, dense) for line in group)]
        out.append(f"**{title(*key)}**\n\n" + "\n".join("| " + " | ".join(row) + " |" for row in rows))
    return "\n\n".join(out) + "\n"


def plot(lines: Sequence[Row], path: Path) -> None:
    """Seconds per step against the links' rate: a panel for each number of hosts and model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = {}
    for line in lines:
        if "seconds" in line and line["rate"] != "unshaped":
            curves = panels.setdefault((line["hosts"], line["model"]), {})
            curves.setdefault(line["case"], []).append((bits_per_second(line["rate"]) / 1e6, line["seconds"]))
    figure, all_axes = plt.subplots(1, max(len(panels), 1), figsize=(7 * max(len(panels), 1), 6), squeeze=False)
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    colours = plt.get_cmap("tab20")
    for axes, ((hosts, model), curves) in zip(all_axes[0], sorted(panels.items()), strict=False):
        for name, points in curves.items():
            points.sort()
            ours = name.startswith("grace-")
            style: dict[str, Any] = {"linestyle": "-" if ours else "--", "marker": "o" if ours else "x"}
            axes.plot(*zip(*points, strict=True), label=name, color=colours(names.index(name) % 20), **style)
        axes.set(xscale="log", yscale="log", xlabel="link rate, Mbit/s", ylabel="seconds per step")
        axes.set_title(f"{model}, {hosts} hosts, {EMULATED}")
        axes.grid(which="both", alpha=0.3)
        axes.legend(fontsize="x-small", ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
