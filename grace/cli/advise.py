"""`grace advise`: does compression pay off on a cluster, and which method?"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from grace.cli import inputs
from grace.cli import plan as shared
from grace.core.local_training import Settings
from grace.planner import advise as adviser
from grace.planner import local, measured, stages, ways
from grace.planner import plan as planner
from grace.planner.costs import Cluster, Codec
from grace.planner.profile import Profile
from grace.stages.settings import compressor_of

MOST = 4096  # maximum number of workers in the plot
DEVICE = "h100"
"""The device whose stored costs are compared with those measured on this machine."""
USUAL = ("allreduce", "allgather")  # default communicators, which the table does not name
STAGED = ("fp16", "blockint:bits=8", "blockint:bits=4")
"""The default methods between pipeline stages."""
SHARED = {
    **shared.LINKS,
    "cluster_file": "--cluster",
    "costs": "--costs",
    "compress_speed": "--compress-speed",
    "backend": "--backend",
    "backward": "--backward",
    "batch": "--batch",
    "gradients": "--gradients",
}
"""Options shared with `grace plan`: names of parameters and of their flags."""
GRADIENTS = {"gradients": "--gradients"}
SCHEDULE = {"fragments": "--fragments", "fragment_sync_delay": "--fragment-sync-delay"}
"""Options of local training: names of parameters and of their flags."""


def advise(
    context: typer.Context,
    model: shared.Model,
    methods: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[METHOD]...",
            help="Methods, such as topk:compress_ratio=0.001; default: those that grace methods recommends.",
        ),
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
    gradients: shared.Gradients = None,
    bucket_mb: Annotated[
        float, typer.Option(callback=inputs.finite("of megabytes"), help="Size of GRACE's buckets in MB.")
    ] = adviser.BUCKET_MB,
    plot_file: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE",
            callback=inputs.chart_file,
            help="Write a chart of speed-ups against bandwidth and workers.",
        ),
    ] = None,
    stage_bytes: Annotated[
        float | None,
        typer.Option(
            metavar="BYTES",
            callback=inputs.finite("of bytes"),
            help="Compare compression between pipeline stages instead, one on each worker: float32 bytes of a "
            "micro-batch's activations at an edge.",
        ),
    ] = None,
    microbatches: Annotated[int, typer.Option(help="Micro-batches per step, with --stage-bytes.", min=1)] = 8,
    sync_every: Annotated[
        int | None,
        typer.Option(
            metavar="STEPS",
            min=1,
            help="Compare local training instead, which exchanges pseudo-gradients every so many steps.",
        ),
    ] = None,
    fragments: Annotated[
        int, typer.Option(min=1, help="Fragments of the model that take turns, with --sync-every.")
    ] = 1,
    fragment_sync_delay: Annotated[
        int | None,
        typer.Option(
            metavar="STEPS",
            min=0,
            help="Steps of training during which an exchange is in flight, with --sync-every; default: 1 if it fits.",
        ),
    ] = None,
    as_json: shared.AsJson = False,
) -> None:
    """Predict each method's speed-up over well-overlapped dense gradients, and what limits it.

    For each method, every communicator that carries it and a plan are tried; the fastest counts. Nothing is sent: steps
    are simulated, for up to thousands of workers.
    """
    schedule = _schedule(context, sync_every, fragments, fragment_sync_delay)
    found = shared.read_model(model, backward, batch)
    if cluster_file is not None:
        inputs.alone(context, "--cluster", shared.LINKS)
    rates, latencies = (bandwidth, intra_bandwidth), (latency, intra_latency)
    there = shared.read_cluster(cluster_file, workers, per_node, rates, latencies, gradients)
    usual = _usual(costs) if stage_bytes is None else STAGED
    codecs = shared.read_codecs(methods or usual, costs, backend, compress_speed, save_costs)
    sources = list(dict.fromkeys(codec.source for codec in codecs.values()))
    if stage_bytes is not None:
        inputs.alone(context, "--stage-bytes", {"plot_file": "--plot", "bucket_mb": "--bucket-mb", **GRADIENTS})
        advise_stages(found, there, codecs, stage_bytes, microbatches, as_json)
        return
    inputs.alone(context, "gradients: without --stage-bytes", {"microbatches": "--microbatches"})
    if schedule is not None:
        try:
            with Console(stderr=True).status("Comparing ..."):
                comparison = local.compare(found, there, codecs, schedule, bucket_mb)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        if as_json:
            about = {"model": model, "cluster": there.to_dict(), "costs": sources}
            print(json.dumps({**about, **comparison.to_dict()}, indent=2))
        else:
            render_local(comparison, there, found, sources, inputs.console())
        return
    candidates = [adviser.candidate(label, codec) for label, codec in codecs.items()]
    with Console(stderr=True).status("Comparing ..."):
        try:
            advice = adviser.advise(found, there, candidates, bucket_mb)
            elsewhere = [] if costs or backend else _elsewhere(found, there, list(codecs.values()), bucket_mb)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    if plot_file is not None:
        plot(found, there, candidates, bucket_mb, plot_file, model)
    if as_json:
        about = {"model": model, "cluster": there.to_dict(), "costs": sources}
        print(json.dumps({**about, **advice.to_dict()}, indent=2))
    else:
        best = advice.best if advice.best in codecs else next(iter(codecs), "topk")
        render(advice, there, sources, _plan_command(context, model, best), inputs.console(), elsewhere)


def _usual(costs: Path | None) -> list[str]:
    # Returns the recommended methods; for a device with stored costs, those that have costs.
    stored = None if str(costs) not in measured.devices() else [each.params for each in measured.costs(str(costs))]
    return [measured.label(each) for each in measured.RECOMMENDED if stored is None or each in stored]


def _elsewhere(found: Profile, there: Cluster, codecs: Sequence[Codec], bucket_mb: float) -> Sequence[adviser.Verdict]:
    # Returns verdicts on these methods on DEVICE, omitting methods without stored costs.
    asked = [each.params for each in codecs]
    stored = [each for each in measured.costs(DEVICE) if each.params in asked]
    methods = [adviser.candidate(measured.label(each.params), each) for each in stored]
    return adviser.advise(found, there, methods, bucket_mb).verdicts


def advise_stages(
    found: Profile, there: Cluster, codecs: dict[str, Codec], stage_bytes: float, microbatches: int, as_json: bool
) -> None:
    """Compare and print methods between the stages of a pipeline, one on each worker, in both directions."""
    count, link = there.workers, there.link("flat")
    edges = {"dense": stages.edge_seconds(stage_bytes, link)}
    for label, codec in codecs.items():
        try:
            compressor_of({key: value for key, value in codec.params.items() if key != "memory"}, label)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        edges[label] = stages.edge_seconds(stage_bytes, link, codec)
    steps = {label: stages.step_seconds(found, count, microbatches, edge) for label, edge in edges.items()}
    order = sorted(steps, key=steps.__getitem__)
    if as_json:
        rows = {label: {**vars(edges[label]), "step": steps[label]} for label in order}
        about = {"cluster": there.to_dict(), "stages": count, "microbatches": microbatches}
        print(json.dumps({"best": order[0], **about, "methods": rows}, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("method", overflow="fold")
    for head in ("step", "speed-up", "fewer\nbytes", "wire,\nms", "codec,\nms"):
        table.add_column(head, justify="right", no_wrap=True)
    for label in order:
        edge = edges[label]
        cells = [f"{steps[label] * 1e3:.1f} ms", f"{steps['dense'] / steps[label]:.2f}x"]
        cells += [f"{stage_bytes / edge.nbytes:.1f}x", f"{edge.wire * 1e3:.1f}", f"{edge.codec * 1e3:.1f}"]
        table.add_row(escape(label), *cells, style="bold" if label == "dense" else None)
    console = inputs.console()
    console.print(table)
    console.print(
        f"GPipe with {count} stages and {microbatches} micro-batches; wire and codec are of one message, in each "
        f"direction. {shared.describe(there)}. Computation {(found.forward + found.backward) * 1e3:.1f} ms, "
        f"{found.source}.",
        highlight=False,
    )


def _schedule(context: typer.Context, sync_every: int | None, fragments: int, delay: int | None) -> Settings | None:
    # Returns the settings of local training, or None for synchronous training.
    if sync_every is None:
        inputs.alone(context, "synchronous training: without --sync-every", SCHEDULE)
        return None
    inputs.alone(context, "--sync-every", {"plot_file": "--plot", "stage_bytes": "--stage-bytes", **GRADIENTS})
    if delay is None:
        delay = 1 if sync_every // fragments > 1 else 0
    try:
        return Settings(sync_every, fragments=fragments, fragment_sync_delay=delay)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def render_local(
    comparison: local.Comparison, there: Cluster, found: Profile, sources: Sequence[str], console: Console
) -> None:
    """Print a comparison of local training with each method and synchronous training, and which is faster."""
    schedule, (name, least) = comparison.settings, comparison.synchronous
    every, delay = schedule.sync_every, schedule.fragment_sync_delay
    table = Table(box=None, pad_edge=False, padding=(0, 2 if console.width > 80 else 1, 0, 0))
    table.add_column("method", overflow="fold")
    heads = ("every\nstep,\nms", f"every\n{every},\nms", f"delay\n{delay},\nms", "speed-up", "kB\nper step")
    for head in (*heads, "pays\nbelow,\nGbit/s"):
        table.add_column(head, justify="right", no_wrap=True)
    for verdict in comparison.verdicts:
        way = "" if verdict.way in (*USUAL, local.DENSE) else f"\n  by {verdict.way}"
        cells = [f"{s * 1e3:.1f}" for s in (verdict.synchronous, verdict.seconds, verdict.delayed)]
        cells += [f"[{'green' if verdict.pays else 'red'}]{verdict.speedup:.2f}x[/]", f"{verdict.nbytes / 1e3:,.1f}"]
        bold = "bold" if verdict.label == local.DENSE else None
        table.add_row(escape(f"{verdict.label}{way}"), *cells, _rate(verdict.break_even), style=bold)
    console.print(table)
    best = comparison.best
    if best is None:
        answer = f"Exchange every step: local training is no faster than {name} synchronously"
    else:
        faster = f"{least / best.delayed:.2f} times as fast as {name} synchronously"
        answer = f"Exchange every {every} steps with {best.label}: {faster}"
    shown = best or comparison.verdicts[0]
    if shown.hiding_delay is None:
        hidden = f"No delay hides all messages of {shown.label}: a fragment has its turn every {schedule.slot} steps."
    elif shown.hiding_delay:
        hidden = f"A delay of {shown.hiding_delay} steps hides all messages of {shown.label}."
    else:
        hidden = f"Compression hides all messages of {shown.label}, without a delay."
    console.print(
        escape(f"{answer}. This holds for compression times {'; and '.join(sources)}."),
        *([] if best is None else [escape(str(comparison.params(best)))]),
        escape(hidden),
        "Local training changes the result: compare the quality, by grace bench tasks.",
        f"{shared.describe(there)}. Computation {comparison.computation * 1e3:.1f} ms per step, {found.source}.",
        sep="\n",
        highlight=False,
    )


def _plan_command(context: typer.Context, model: str, method: str) -> str:
    # Returns the `grace plan` command for the same question.
    words = ["grace", "plan", model, "--compressor", method]
    for name in inputs.given(context):
        if name in SHARED:
            words += [SHARED[name], str(context.params[name])]
    return shlex.join([*words, "-o", "plan.json"])


KEPT = "that kept the quality of dense gradients"


def render(
    advice: adviser.Advice,
    there: Cluster,
    sources: Sequence[str],
    plan_command: str,
    console: Console,
    elsewhere: Sequence[adviser.Verdict] = (),
) -> None:
    """Print the comparison, including losing methods, and the advice.

    ``plan_command``: the command that writes the best method's plan. ``elsewhere``: verdicts with the
    stored costs of `DEVICE`.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2 if console.width > 80 else 1, 0, 0))
    table.add_column("method", overflow="fold")
    # In 80 columns, method names of up to 25 characters fit.
    for head in ("step,\nms", "speed-\nup", "quality\nkept", "fewer\nbytes", "codec,\nms", "pays\nbelow,\nGbit/s"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("limited by", no_wrap=True)
    rows: list[tuple[float, tuple[str, ...]]] = [
        (advice.dense, _dense_row("dense", advice.dense, advice, advice.dense_limit))
    ]
    for name, seconds in advice.dense_ways.items():
        if name != ways.DENSE.name:
            label = "dense, plan" if name == ways.PLAN else name
            rows.append((seconds, _dense_row(label, seconds, advice)))
    for verdict in advice.verdicts:
        colour = "green" if verdict.pays else "red"
        way = f"\n  by {verdict.way}" if verdict.way not in USUAL else ""
        row = (
            escape(f"{verdict.label}{way}"),
            _ms(verdict.seconds),
            f"[{colour}]{verdict.speedup:.2f}x[/]",
            "?" if verdict.quality is None else str(verdict.quality),
            f"{verdict.ratio:.1f}x",
            _ms(verdict.codec_seconds),
            _rate(verdict.break_even),
            verdict.limit,
        )
        rows.append((verdict.seconds, row))
    for _, cells in sorted(rows, key=lambda row: row[0]):
        table.add_row(*cells, style="bold" if cells[0].startswith("dense") else None)
    console.print(table)
    dense, speedup = advice.fastest_dense, advice.dense / min([advice.dense, *advice.dense_ways.values()])
    best = advice.chosen
    if best is not None:
        answer = f"Use {best.label} by {best.way}: {best.speedup:.2f} times as fast as dense gradients"
        planned, exchange = best.way == ways.PLAN, best.exchange
    elif dense == ways.DENSE.name:
        answer = f"Do not compress: no method {KEPT} is faster than dense gradients here"
        planned, exchange = False, ways.exchange(dense, {})
    else:
        answer = (
            f"Do not compress: no method {KEPT} is faster than dense gradients by {dense.removeprefix('dense, ')}, "
            f"{speedup:.2f} times as fast as by one allreduce"
        )
        planned = dense == ways.PLAN
        exchange = planner.exchange() if planned else ways.exchange(dense, {})
    hidden = {
        None: "Latency alone keeps dense messages from being hidden.",
        1.0: "Dense messages are hidden behind the backward pass as it is.",
    }
    needed = advice.needed
    behind = (
        hidden.get(needed) or f"Dense messages would be hidden if they were {needed:.1f} times as small, for nothing."
    )
    notes = []
    first = next(iter(advice.verdicts), None)
    if first and first.label == advice.fastest and first is not best:
        notes.append(
            f"{first.label} is faster ({first.speedup:.2f} times), but {_unsure(first)}: train with it before you "
            "use it (grace bench tasks)."
        )
    if elsewhere:
        times = ", ".join(f"{verdict.label} {verdict.speedup:.2f}x" for verdict in elsewhere)
        notes.append(f"With stored compression times of an {DEVICE.upper()}: {times}.")
    console.print(
        escape(f"{answer}. This holds for compression times {'; and '.join(sources)}."),
        escape(f"{plan_command}: then {exchange}" if planned else str(dict(exchange))),
        *map(escape, notes),
        behind,
        f"{shared.describe(there)}. Backward pass {advice.backward * 1e3:.1f} ms, {advice.profile}.",
        sep="\n",
        highlight=False,
    )


def _unsure(verdict: adviser.Verdict) -> str:
    if verdict.quality is None:
        return "no training of it is stored"
    if verdict.quality.lost:
        return f"it lost quality in {', '.join(verdict.quality.lost)}"
    return "it was not trained in all tasks"


def _dense_row(label: str, seconds: float, advice: adviser.Advice, limit: str = "") -> tuple[str, ...]:
    return label, _ms(seconds), f"{advice.dense / seconds:.2f}x", "", "1.0x", "", "", limit


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds < 1 else f"{seconds * 1e3:.0f}"


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
