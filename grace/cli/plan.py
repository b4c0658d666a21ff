"""`grace plan`: a strategy for each tensor of a model."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from grace.bench.plan import parse
from grace.cli import inputs
from grace.engine.about import cores
from grace.planner import measured, models, profile, ways
from grace.planner import plan as planner
from grace.planner.costs import Cluster, Codec, Costs, Link, cluster, codec
from grace.planner.profile import Profile, read_json
from grace.planner.search import MODES

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        callback=inputs.model_file,
        help=f"{', '.join(models.MODELS)}, or a JSON profile (see docs/planner.md).",
    ),
]
Workers = Annotated[int, typer.Option(help="Total number of workers.", min=1)]
PerNode = Annotated[int, typer.Option(help="Workers per machine.", min=1)]
Bandwidth = Annotated[
    float,
    typer.Option(
        parser=inputs.gbit,
        metavar="RATE",
        help="Bandwidth of a machine's link to others: Gbit/s, or with a unit, such as 100Mbit/s.",
    ),
]
Latency = Annotated[
    float,
    typer.Option(
        callback=inputs.finite("of microseconds", zero=True), help="Latency between machines in microseconds."
    ),
]
IntraBandwidth = Annotated[
    float,
    typer.Option(
        parser=inputs.gbit, metavar="RATE", help="Bandwidth between workers of a machine, in the same format."
    ),
]
IntraLatency = Annotated[
    float,
    typer.Option(
        callback=inputs.finite("of microseconds", zero=True), help="Latency within a machine in microseconds."
    ),
]
ClusterFile = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        metavar="FILE",
        callback=inputs.input_file,
        help="A cluster in JSON, instead of the options above.",
    ),
]
CostsFile = Annotated[
    Path | None,
    typer.Option(
        "--costs",
        metavar="FILE",
        callback=inputs.costs_file,
        help=f"Compression costs in JSON, or those stored of a device: {', '.join(measured.devices())}; default: "
        "measured on this machine.",
    ),
]
SaveCosts = Annotated[
    Path | None,
    typer.Option(metavar="FILE", callback=inputs.output_file, help="Write the compression costs for --costs."),
]
Speed = Annotated[
    float,
    typer.Option(
        callback=inputs.finite("that says how many times as fast"),
        help="Speed of compression on the training device, relative to this machine.",
    ),
]
Backend = Annotated[
    str | None,
    typer.Option(
        metavar="TOOLKIT",
        callback=inputs.toolkit,
        help="Toolkit to measure compression; default: the first installed one of torch, tensorflow, numpy.",
    ),
]
Backward = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        callback=inputs.finite("of seconds"),
        help="Measured time of a backward pass; default: assumed from FLOPs.",
    ),
]
Batch = Annotated[int | None, typer.Option(help="Samples per worker and step, for assumed times.", min=1)]
DTYPES = {"float32": 4.0, "bf16": 2.0, "fp16": 2.0}
"""Bytes of an element, by the dtype of gradients."""
Gradients = Annotated[
    str | None,
    typer.Option(metavar="DTYPE", help=f"Dtype of the gradients: {', '.join(DTYPES)}; default: float32."),
]
AsJson = inputs.AsJson

LINKS = {
    "workers": "--workers",
    "per_node": "--per-node",
    "bandwidth": "--bandwidth",
    "latency": "--latency",
    "intra_bandwidth": "--intra-bandwidth",
    "intra_latency": "--intra-latency",
}
"""Options that a cluster file replaces: names of parameters and of their flags."""


# -- inputs of `grace plan` and `grace advise` -----------------------------------------------------------------------
def read_model(name: str, backward: float | None, batch: int | None) -> Profile:
    """A named model's profile, or one from a file. ``backward``: measured seconds of a backward pass."""
    if batch is not None and (backward is not None or name not in models.MODELS):
        raise typer.BadParameter("--batch is only for named models with assumed times: leave it out, or --backward")
    try:
        if name in models.MODELS:
            return models.profile(name, backward, batch)
        if not Path(name).exists():
            raise ValueError(f"no model and no file {name!r}: choose from {', '.join(models.MODELS)}, or give a file")
        found = profile.load(name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if backward is None:
        return found
    if not found.backward:
        work = ((tensor.name, tensor.shape, float(tensor.size)) for tensor in found.tensors)
        return profile.apportioned(work, backward, "measured as a whole, apportioned by elements")
    return found.scaled(backward, f"{found.source}, scaled to the backward pass given")


def read_cluster(
    file: Path | None,
    workers: int,
    per_node: int,
    rates: Sequence[float],
    latencies: Sequence[float],
    gradients: str | None = None,
) -> Cluster:
    """The cluster, from a file or options. ``rates`` (Gbit/s), ``latencies`` (us): between and within machines."""
    if gradients is not None and gradients not in DTYPES:
        raise typer.BadParameter(f"--gradients {gradients!r}: choose from {', '.join(DTYPES)}")
    found = _cluster(file, workers, per_node, rates, latencies)
    return found if gradients is None else replace(found, element=DTYPES[gradients])


def _cluster(
    file: Path | None, workers: int, per_node: int, rates: Sequence[float], latencies: Sequence[float]
) -> Cluster:
    try:
        if file is not None:
            data = read_json(file)
            try:
                return cluster(data)
            except ValueError as error:
                raise ValueError(f"{file}: {error}") from error
        if workers % per_node:
            raise ValueError(f"--per-node {per_node} does not divide {workers} workers")
        inter, intra = (Link(us * 1e-6, gbit / 8e-9) for gbit, us in zip(rates, latencies, strict=True))
        return Cluster(workers // per_node, per_node, inter, intra)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def read_codecs(
    specs: Sequence[str], costs: Path | None, backend: str | None, speed: float, save: Path | None = None
) -> dict[str, Codec]:
    """The costs of these methods, by label: from a file if it has them, otherwise measured."""
    try:
        cases = [parse(spec) for spec in specs]
        given = _given(costs)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        found = {}
        for case in cases:
            known = next((each for each in given if each.params == case.params), None)
            if known is None and str(costs) in measured.devices():
                stored = ", ".join(measured.label(each.params) for each in given)
                raise ValueError(f"no costs of {case.label} are stored of {costs}, only of {stored}: leave out --costs")
            found[case.label] = _measured(case.label, case.params, backend) if known is None else known
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if save is not None:
        save.write_text(json.dumps([each.to_dict() for each in found.values()], indent=1) + "\n")
    if speed == 1:
        return found
    return {
        label: replace(each.slowed(1 / speed), source=f"{each.source}, divided by {speed:g}")
        for label, each in found.items()
    }


def _given(costs: Path | None) -> list[Codec]:
    # Compression costs from a file or of a device.
    if costs is None:
        return []
    if str(costs) in measured.devices():
        return measured.costs(str(costs))
    data = read_json(costs)
    try:
        return [codec(each) for each in (data if isinstance(data, list) else [data])]
    except ValueError as error:
        raise ValueError(f"{costs}: {error}") from error


def _measured(label: str, params: dict[str, Any], backend: str | None) -> Codec:
    from grace.bench import costs as measure

    backend = backend or inputs.installed()
    with Console(stderr=True).status(f"Measuring {label} ..."):
        try:
            return measure.compressor(params, backend=backend)
        except ImportError as error:
            others = ", ".join(name for name in inputs.TOOLKITS if name != backend)
            raise typer.BadParameter(f"{backend} cannot be imported ({error}); --backend takes {others}") from error


def _enough_cores(threads: int, speed: float, workers: int) -> None:
    free = max(cores() // workers - 1, 0)
    if speed == 1 and threads > free:
        raise typer.BadParameter(
            f"--offload {threads}: {cores()} cores leave {free} free for the pool of each of {workers} workers. If "
            "another device trains, give its speed with --compress-speed"
        )


def _offloaded(codecs: list[Codec], speed: float) -> list[Codec]:
    # Add the costs of compression on a CPU pool to codecs without them. If this CPU is also the training device, the
    # pool is slower by a factor that is measured beside a matrix product.
    from grace.bench import costs as measure

    here = speed == 1
    found = []
    for each in codecs:
        if each.devices == ("gpu",):
            factor = measure.contention(measure.product(), each.params) if here else 1.0
            text = f"{each.source}; {factor:.2f} times as long on the pool" if here else each.source
            each = replace(each.offloaded(1 / speed, factor), source=text)
        found.append(each)
    return found


def describe(cluster: Cluster) -> str:
    """A cluster in one line."""
    if cluster.nodes == 1:
        where = f"1 machine, {cluster.intra.bandwidth * 8e-9:g} Gbit/s, {cluster.intra.latency * 1e6:g} us"
    else:
        where = (
            f"{cluster.nodes} machines, {cluster.inter.bandwidth * 8e-9:g} Gbit/s, {cluster.inter.latency * 1e6:g} us"
        )
    how = "measured" if cluster.source == "measured" else "simulated"
    halves = ", gradients of 16 bits" if cluster.element == 2 else ""
    return f"{cluster.workers} workers on {where} ({how}){halves}"


# -- the command ------------------------------------------------------------------------------------------------------
def plan(
    context: typer.Context,
    model: Model,
    compressor: Annotated[str, typer.Option(help="Method, such as topk or topk:compress_ratio=0.001.")] = "topk",
    workers: Workers = 8,
    per_node: PerNode = 1,
    bandwidth: Bandwidth = 10.0,
    latency: Latency = 50.0,
    intra_bandwidth: IntraBandwidth = 800.0,
    intra_latency: IntraLatency = 5.0,
    cluster_file: ClusterFile = None,
    costs: CostsFile = None,
    save_costs: SaveCosts = None,
    compress_speed: Speed = 1.0,
    backend: Backend = None,
    backward: Backward = None,
    batch: Batch = None,
    gradients: Gradients = None,
    mode: Annotated[str, typer.Option(help="refined, paper, or (for very few tensors) exact.")] = "refined",
    offload: Annotated[
        int, typer.Option(metavar="THREADS", help="Threads of a CPU pool for compression during training.", min=0)
    ] = 0,
    max_compressions: Annotated[
        int | None, typer.Option(help="Maximum compressions per tensor: each loses information.", min=0)
    ] = None,
    level: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Another setting of the compressor, for a policy; may be repeated.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", callback=inputs.output_file, help="Write the plan."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=inputs.output_file,
            help="Write the predicted timeline as a Chrome trace.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Choose a strategy for each tensor: whether and where to compress it, and which collectives to use."""
    if mode not in MODES:
        raise typer.BadParameter(f"--mode {mode!r}: choose from {', '.join(MODES)}")
    found = read_model(model, backward, batch)
    if cluster_file is not None:
        inputs.alone(context, "--cluster", LINKS)
    there = read_cluster(
        cluster_file, workers, per_node, (bandwidth, intra_bandwidth), (latency, intra_latency), gradients
    )
    if offload:
        _enough_cores(offload, compress_speed, there.per_node)
    try:
        planner.refuse(parse(compressor).params)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    specs = [compressor, *(f"{compressor}{',' if ':' in compressor else ':'}{setting}" for setting in level or ())]
    codecs = list(read_codecs(specs, costs, backend, 1 if offload else compress_speed, save_costs).values())
    if offload:
        codecs = _offloaded(codecs, compress_speed)
    priced, *others = codecs
    began, cpu = time.perf_counter(), time.process_time()
    try:
        costed = Costs(there, priced, priced.devices if offload else ("gpu",), max_compressions)
        made = planner.make(found, costed, mode, max(offload, 1), others=others)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    seconds = {"elapsed": time.perf_counter() - began, "cpu": time.process_time() - cpu}
    if output is not None:
        made.plan.save(output)
    if trace is not None:
        made.save_trace(trace)
    if as_json:
        search = {"simulations": made.selection.simulations, "seconds": seconds}
        data = made.plan.to_dict()
        print(json.dumps({**data, "exchange": _exchange(made, output), "search": search}, indent=2))
    else:
        render(made, found, there, seconds, output, inputs.console())


def _exchange(made: planner.Planned, output: Path | None) -> dict[str, Any] | None:
    # Keys of `grace_from_params`; None if they would name a file that was not written.
    return None if output is None and made.plan.way == ways.PLAN else dict(made.plan.exchange(output or ""))


def render(
    made: planner.Planned,
    found: Profile,
    there: Cluster,
    seconds: dict[str, float],
    output: Path | None,
    console: Console,
) -> None:
    """Print a plan: a line per strategy, the prediction, and the settings to use."""
    result = made.plan
    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in ("tensors", "elements", "strategy"):
        table.add_column(head, justify="left" if head == "strategy" else "right", overflow="fold")
    sizes = {tensor.name: tensor.size for tensor in found.tensors}
    counts, elements = Counter[str](), Counter[str]()
    for name, option in result.tensors.items():
        counts[str(option)] += 1
        elements[str(option)] += sizes[name]
    for text, total in elements.most_common():
        table.add_row(str(counts[text]), f"{total:,}", escape(text))
    console.print(table)
    now = result.predicted
    label = result.params["compressor"]
    alone = f"{now.step * 1e3:.1f} ms" if result.way == ways.PLAN else f"{made.seconds[ways.PLAN] * 1e3:.1f} ms"
    how = {
        ways.PLAN: "A message for each tensor.",
        ways.DENSE.name: f"Do not compress: dense gradients in buckets. Strategies by tensor take {alone}.",
    }
    by = f"The communicator does this in buckets: {result.way}. Strategies by tensor take {alone}."
    exchange = _exchange(made, output)
    use = "-o FILE writes this plan, and prints how to use it." if exchange is None else f"Use {exchange}"
    console.print(
        f"{escape(str(label))}: {len(result.compressed)} of {len(result.tensors)} tensors are compressed, on "
        f"{describe(there)}.",
        f"Predicted step {now.step * 1e3:.1f} ms, dense {now.dense * 1e3:.1f} ms: {now.dense / now.step:.2f}x. "
        f"Backward pass {now.backward * 1e3:.1f} ms, not hidden: messages {now.communication * 1e3:.1f} ms, "
        f"compression {now.compression * 1e3:.1f} ms.",
        escape(f"{how.get(result.way, by)} {use}"),
        f"Backward times: {result.profile['source']}. Compression: {result.costs['compressor']}.",
        f"{result.mode} search: {made.selection.simulations} timelines, {seconds['elapsed'] * 1e3:.0f} ms (CPU "
        f"{seconds['cpu'] * 1e3:.0f} ms).",
        sep="\n",
        highlight=False,
    )
