"""Tables and a chart of `grace_bench.sidco`'s results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from grace_bench.sidco import RATIOS, Record, Results

if TYPE_CHECKING:
    from rich.console import Console


def render(results: Results, console: Console) -> None:
    """Print the tables of training, laws and speed, and what was left out."""
    from rich.markup import escape
    from rich.table import Table

    def table(title: str, *heads: str) -> Table:
        gap = 2 if console.width > 80 else 1
        made = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, gap, 0, 0))
        for head in heads:
            made.add_column(head, justify="left" if head in ("method", "law") else "right", no_wrap=True)
        return made

    def shown(found: dict[str, float]) -> str:
        return f"{found['mean']:.2f} ({found['low']:.2f}-{found['high']:.2f})"

    if results.training:
        base: dict[float, float] = {r["ratio"]: r["us"] for r in results.training if r["method"] == "exact top-k"}
        for ratio in base:
            title = f"Handwritten digits, {ratio:g}: K / k, mean and 5-95 %"
            made = table(title, "method", "own\ntraining", "same\ngradients", "time,\nx top-k", "accuracy")
            for record in results.training:
                if record["ratio"] is None:
                    made.add_row(record["method"], "", "", "", f"{record['accuracy']:.3f}")
                elif record["ratio"] == ratio:
                    cells = (shown(record["own"]), shown(record["same"]), f"{record['us'] / base[ratio]:.2f}")
                    made.add_row(escape(record["method"]), *cells, f"{record['accuracy']:.3f}")
            console.print(made, "")
    if results.laws:
        heads = [name if console.width > 80 else name.replace(" ", "\n") for name in _columns(results.laws)]
        made = table("Gradients of one law: K / k, and stages in the end", "law", "ratio", *heads)
        for name in dict.fromkeys(record["law"] for record in results.laws):
            for ratio in RATIOS:
                mine = {_column(r): r for r in results.laws if (r["law"], r["ratio"]) == (name, ratio)}
                cells_ = [f"{r['mean']:.2f}, {r['stages'] or 1}" for r in mine.values()]
                made.add_row(name, f"{ratio:g}", *cells_)
        console.print(made, "")
    keys = dict.fromkeys((r["backend"], r["n"]) for r in results.speed)
    for backend, n in keys:
        title = f"{backend}, n = {n:,}, one thread: times faster than the toolkit's own top-k; ms"
        made = table(title, "method", *(f"{ratio:g}" for ratio in RATIOS))
        mine_ = [r for r in results.speed if (r["backend"], r["n"]) == (backend, n)]
        for method in dict.fromkeys(r["method"] for r in mine_):
            cells_ = [f"{r['faster']:.2f}x  {r['ms']:.4g}" for r in mine_ if r["method"] == method]
            made.add_row(escape(method), *cells_)
        console.print(made, "")
    for line in results.left_out:
        console.print(f"Left out: {line}")


def _columns(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(map(_column, records)))


def _column(record: Record) -> str:
    return f"{record['sid'].upper()} {record['rule']}"


PLOTTED = {
    "one sample of 1%": "tab:gray",
    "GaussianKSGD": "tab:red",
    "RedSync bisection": "tab:orange",
    "SIDCo-P one stage": "tab:purple",
    "SIDCo-P robust": "tab:blue",
}


def plot(results: Results, path: str) -> None:
    """Plot elements sent / elements wanted against the step of each training: running means of 20 steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(RATIOS), figsize=(11, 3.2), sharey=True, layout="constrained")
    for axis, ratio in zip(axes, RATIOS, strict=True):
        axis.axhspan(0.8, 1.2, color="0.9")
        for label, color in PLOTTED.items():
            (record,) = (r for r in results.training if (r["method"], r["ratio"]) == (label, ratio))
            window = min(20, len(record["steps"]))
            means = np.convolve(record["steps"], np.ones(window) / window, "valid")
            axis.plot(np.arange(len(means)) + window, means, color=color, linewidth=1, label=label)
        axis.set_yscale("log")
        axis.set_ylim(0.01, 30)
        axis.set_title(f"compress_ratio = {ratio:g}", fontsize=9)
        axis.set_xlabel("step")
    axes[0].set_ylabel("K / k")
    axes[0].legend(fontsize=7, loc="upper right")
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
