"""Draw docs/time_to_quality.png from stored results: python docs/generate_picture.py.

Dots are measured: seconds until a training reached the quality of its dense run less the tolerance, the geometric mean
over the trainings of `generate_choose.FRESH` in which all of these methods did. Lines are computed: in each training a
step takes `computation + bytes / rate`, with both numbers from its two measured rates, so that a line passes through
its dots. `auto` chooses another method at another rate: it has dots only.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grace_bench.lab.network import bits_per_second

from generate_choose import FRESH, STORE, common, load, training

SHOWN = {
    "dense": "no compression (float32)",
    "fp16": "16-bit floats",
    "blockint:bits=4": "4-bit integers (blockint)",
    "eden:bits=3,block_size=64": "3 bits (eden)",
    "auto": "auto: measures, then chooses",
    "limit": "an exchange that costs nothing",
}
RATES = [50e6 * 10 ** (step / 20) for step in range(47)]
"""Bits per second of the computed lines: 50 Mbit/s to 10 Gbit/s."""
COLOURS = ("#444444", "#1f77b4", "#2ca02c", "#d62728", "#9467bd", "#999999")


def measured(rows: list[dict[str, Any]], method: str) -> dict[float, float]:
    """By bits per second: the geometric mean of the seconds to the quality; none where a training did not reach it."""
    found: dict[float, list[Any]] = {}
    for row in rows:
        if row["method"] == method:
            found.setdefault(bits_per_second(row["bandwidth"]), []).append(row["seconds_to_relative"])
    return {rate: statistics.geometric_mean(each) for rate, each in sorted(found.items()) if None not in each}


def computed(rows: list[dict[str, Any]], method: str) -> Callable[[float], float]:
    """Seconds to the quality at a rate in bits per second, from the two measured ones of each training."""
    cells: dict[tuple[Any, ...], dict[float, dict[str, Any]]] = {}
    for row in rows:
        if row["method"] == method:
            cells.setdefault(training(row), {})[bits_per_second(row["bandwidth"])] = row
    parts = []
    for each in cells.values():
        (slow, one), (fast, other) = sorted(each.items())
        bits = (one["seconds"] - other["seconds"]) / (1 / slow - 1 / fast)
        parts.append((one["seconds_to_relative"] / one["seconds"], one["seconds"] - bits / slow, bits))
    return lambda rate: statistics.geometric_mean(
        steps * (computation + bits / rate) for steps, computation, bits in parts
    )


def draw(file: Path) -> None:
    """The picture."""
    from matplotlib import pyplot

    rows = common(row for run in load(STORE, *FRESH) for row in run["results"])
    figure, axes = pyplot.subplots(figsize=(7, 3.9), dpi=120)
    for (method, name), colour in zip(SHOWN.items(), COLOURS, strict=True):
        dots = measured(rows, method)
        axes.plot([*dots], [*dots.values()], "D" if method == "auto" else "o", color=colour, label=name, markersize=5)
        if method != "auto":
            line = computed(rows, method)
            style = "dotted" if method == "limit" else "solid"
            axes.plot(RATES, [line(rate) for rate in RATES], color=colour, linewidth=1.2, linestyle=style)
    axes.set(xscale="log", yscale="log", xlabel="rate of the links")
    axes.set_ylabel("seconds to the quality of float32, less 3 %")
    ticks = {1e8: "100 Mbit/s", 1e9: "1 Gbit/s", 1e10: "10 Gbit/s"}
    axes.set_xticks([*ticks], [*ticks.values()])
    axes.set_yticks([5, 10, 20, 50, 100], ["5", "10", "20", "50", "100"])
    axes.minorticks_off()
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.legend(frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(file, metadata={"Software": None})


if __name__ == "__main__":
    draw(Path(__file__).with_name("time_to_quality.png"))
