"""`grace advise`: does compression pay on a cluster, and which method?"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from grace.cli import inputs
from grace.cli import plan as shared
from grace.planner import advise as adviser
from grace.planner.costs import Cluster
from grace.planner.profile import Profile

MOST = 4096  # workers of the plot


def advise(
    context: typer.Context,
    model: shared.Model,
    methods: Annotated[
        list[str] | None,
        typer.Argument(metavar="[METHOD]...", help="Such as topk:compress_ratio=0.001; default: eight of them."),
    ] = None,
    workers: shared.Workers = 8,
    per_node: shared.PerNode = 1,
    bandwidth: shared.Bandwidth = 10.0,
    latency: shared.Latency = 50.0,
    intra_bandwidth: shared.IntraBandwidth = 800.0,
    intra_latency: shared.IntraLatency = 5.0,
    cluster_file: shared.ClusterFile = None,
    costs: shared.CostsFile = None,
    save_costs: shared.SaveCosts = None,
    compress_speed: shared.Speed = 1.0,
    backend: shared.Backend = None,
    backward: shared.Backward = None,
    batch: shared.Batch = None,
    bucket_mb: Annotated[
        float, typer.Option(callback=inputs.finite("of megabytes"), help="Size of GRACE's buckets, in MB.")
    ] = adviser.BUCKET_MB,
    plot_file: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE",
            callback=inputs.chart_file,
            help="Draw speed-ups against bandwidth and workers there.",
        ),
    ] = None,
    as_json: shared.AsJson = False,
) -> None:
    """Predict each method's speed-up over dense gradients that overlap well, and say what limits it.

    Nothing is sent: steps are simulated, for up to thousands of workers.
    """
    found = shared.read_model(model, backward, batch)
    if cluster_file is not None:
        inputs.alone(context, "--cluster", shared.LINKS)
    rates, latencies = (bandwidth, intra_bandwidth), (latency, intra_latency)
    there = shared.read_cluster(cluster_file, workers, per_node, rates, latencies)
    codecs = shared.read_codecs(methods or adviser.METHODS, costs, backend, compress_speed, save_costs)
    candidates = [adviser.candidate(label, codec) for label, codec in codecs.items()]
    advice = adviser.advise(found, there, candidates, bucket_mb)
    sources = list(dict.fromkeys(codec.source for codec in codecs.values()))
    if plot_file is not None:
        plot(found, there, candidates, bucket_mb, plot_file, model)
    if as_json:
        about = {"model": model, "cluster": there.to_dict(), "costs": sources}
        print(json.dumps({**about, **advice.to_dict()}, indent=2))
    else:
        render(advice, there, sources, inputs.console())


def render(advice: adviser.Advice, there: Cluster, sources: Sequence[str], console: Console) -> None:
    """Print the comparison, methods that lose included, and the advice."""
    table = Table(box=None, pad_edge=False, padding=(0, 2 if console.width > 80 else 1, 0, 0))
    table.add_column("method", overflow="fold")
    # In 80 columns there is room for methods of 27 characters.
    for head in ("step", "speed-up", "fewer\nbytes", "codec,\nms", "pays\nbelow,\nGbit/s"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("limited by", no_wrap=True)
    rows = [(v.seconds, v) for v in advice.verdicts]
    shown = False
    for seconds, verdict in rows:
        if not shown and seconds >= advice.dense:
            shown = True
            _dense(table, advice)
        colour = "green" if verdict.pays else "red"
        table.add_row(
            escape(verdict.label),
            f"{verdict.seconds * 1e3:.1f} ms",
            f"[{colour}]{verdict.speedup:.2f}x[/]",
            f"{verdict.ratio:.1f}x",
            f"{verdict.codec_seconds * 1e3:.1f}",
            _rate(verdict.break_even),
            verdict.limit,
        )
    if not shown:
        _dense(table, advice)
    console.print(table)
    if advice.best == "dense":
        answer = "Do not compress: no method is faster than dense gradients here"
    else:
        best = advice.verdicts[0]
        answer = f"Use {best.label}: {best.speedup:.2f} times as fast as dense gradients"
    hidden = {
        None: "Latency alone keeps dense messages from being hidden.",
        1.0: "Dense messages are hidden behind the backward pass as it is.",
    }
    needed = advice.needed
    behind = (
        hidden.get(needed) or f"Dense messages would be hidden if they were {needed:.1f} times as small, for nothing."
    )
    console.print(
        escape(f"{answer}. This holds for compression times {'; and '.join(sources)}."),
        behind,
        f"{shared.describe(there)}. Backward pass {advice.backward * 1e3:.1f} ms, {advice.profile}.",
        sep="\n",
        highlight=False,
    )


def _dense(table: Table, advice: adviser.Advice) -> None:
    table.add_row("dense", f"{advice.dense * 1e3:.1f} ms", "1.00x", "1.0x", "", "", advice.dense_limit, style="bold")


def _rate(bytes_per_second: float | None) -> str:
    if bytes_per_second is None:
        return "never"
    if bytes_per_second == math.inf:
        return "always"
    return f"{bytes_per_second * 8e-9:.3g}"


def plot(
    found: Profile,
    there: Cluster,
    candidates: Sequence[adviser.Candidate],
    bucket_mb: float,
    path: Path,
    model: str,
) -> None:
    """Draw speed-ups over dense gradients: against the link's bandwidth, and against the number of workers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5), sharey=True, layout="constrained")
    factors = [10 ** (i / 6 - 2) for i in range(25)]
    gbit = [there.link("flat").bandwidth * 8e-9 * factor for factor in factors]
    for label, curve in adviser.against_bandwidth(found, there, candidates, factors, bucket_mb).items():
        left.plot(gbit, curve, label=label)
    left.set_xlabel(f"bandwidth, Gbit/s, at {there.workers} workers")
    left.axvline(there.link("flat").bandwidth * 8e-9, color="grey", linewidth=1, linestyle=":")
    nodes = [2**i for i in range(1, 13) if 2**i * there.per_node <= MOST]
    for label, curve in adviser.against_nodes(found, there, candidates, nodes, bucket_mb).items():
        right.plot([count * there.per_node for count in nodes], curve, label=label)
    right.set_xlabel(f"workers, {there.per_node} on each machine, at {gbit[12]:g} Gbit/s")
    for axes in (left, right):
        axes.axhline(1, color="black", linewidth=1, linestyle="--")
        axes.set(xscale="log", yscale="log")
        axes.grid(which="both", alpha=0.3)
    left.set_ylabel("speed-up over dense")
    right.legend(fontsize="small")
    figure.suptitle(f"{model}, simulated; backward pass {found.backward * 1e3:.0f} ms, {found.source}", fontsize=10)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
