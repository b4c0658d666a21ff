"""`grace bench kernels`, `gpu`, `sidco`, `tasks`: the time of methods, and their effect on training."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from grace.bench import kernels as bench
from grace.bench import plan, show
from grace.cli import inputs
from grace.cli.inputs import listed, numbers

app = typer.Typer(name="bench", help="Measure the time of methods and their effect on training.", no_args_is_help=True)


@app.callback()
def options() -> None:
    """Measure the time of methods and their effect on training."""


@app.command()
def kernels(
    context: typer.Context,
    methods: Annotated[
        list[str] | None,
        typer.Argument(metavar="[METHOD]...", help="Methods, such as topk or topk:compress_ratio=0.001; default: all."),
    ] = None,
    as_json: inputs.AsJson = False,
    output: inputs.Records = None,
    plot_file: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", callback=inputs.chart_file, help="Write a chart."),
    ] = None,
    backend: Annotated[str, typer.Option(help="Toolkits; cuda: PyTorch on a device; jax: compiled.")] = ",".join(
        plan.BACKENDS
    ),
    sizes: Annotated[str, typer.Option(help="Elements per gradient.")] = "1e4,1e6,25e6",
    threads: Annotated[str, typer.Option(help="Threads of the toolkit.")] = "1,2",
    allocator: Annotated[str, typer.Option(help="malloc settings: default and tuned.")] = ",".join(plan.ALLOCATORS),
    tensors: Annotated[str, typer.Option(help="flat: one vector; resnet50: the tensors of ResNet-50.")] = "flat",
    native: Annotated[str, typer.Option("--kernels", help="Native kernels: on, off or on,off.")] = "on",
    forms: Annotated[str, typer.Option(help="Compare native and plain code in the same run; empty: the default.")] = "",
    rounds: Annotated[int, typer.Option(min=0, help="Maximum number of rounds; 0: 7 to 21, by size.")] = 0,
    budget: Annotated[
        float,
        typer.Option(callback=inputs.finite("of seconds", zero=True), help="Seconds per case and configuration."),
    ] = 6.0,
    call_limit: Annotated[
        float,
        typer.Option(min=0.1, callback=inputs.finite("of seconds"), help="Seconds after which a call is aborted."),
    ] = 60.0,
    peer: Annotated[
        Path | None, typer.Option(metavar="PATH", help="A checkout of upstream GRACE to measure in the same run.")
    ] = None,
    memory: Annotated[bool, typer.Option(help="Also measure the extra memory of a step.")] = True,
    targets: Annotated[bool, typer.Option("--targets", help="Only check the project's own targets.")] = False,
) -> None:
    """Time every method's encode, commit and decode as multiples of a memcpy, in interleaved runs."""
    as_json, output, methods = inputs.earlier(context, as_json, output, methods or [])
    limits = plan.Limits(rounds, budget, call_limit)
    if peer is not None and not inputs.BENCH:
        raise typer.BadParameter(f"--peer {inputs.WITHOUT_BENCH}")
    if peer is not None and not (peer / "grace_dl" / "dist").is_dir():
        raise typer.BadParameter(f"--peer {str(peer)!r} has no grace_dl/dist: give the root of a checkout")
    left_out: dict[str, str] = {}
    if targets:
        if methods:
            raise typer.BadParameter("--targets measures its own cases: leave out METHOD")
        own = {"backend": "--backend", "threads": "--threads", "tensors": "--tensors", "forms": "--forms"}
        inputs.alone(context, "--targets", {**own, "native": "--kernels"})
        given = numbers(sizes, "--sizes")
        configs, cases = _targets(max(given), listed(allocator, plan.ALLOCATORS, "--allocator"), peer is not None)
    else:
        chosen, left_out = _chosen(methods or [], peer is not None)
        if forms:
            chosen = plan.in_forms(chosen, listed(forms, plan.HOWS, "--forms"))
        kinds = listed(tensors, ("flat", "resnet50"), "--tensors")
        cases = dict.fromkeys(kinds, chosen)
        whole = sum(map(math.prod, plan.resnet50().values()))
        counts, hows = numbers(threads, "--threads"), listed(allocator, plan.ALLOCATORS, "--allocator")
        configs = [
            plan.Config(name, count, how, size, kind, on)
            for name in listed(backend, tuple(plan.MODES), "--backend")
            for count in (counts[:1] if name in plan.DEVICES else counts)
            for kind in kinds
            for size in ([whole] if kind == "resnet50" else numbers(sizes, "--sizes"))
            for on in listed(native, ("on", "off"), "--kernels")
            for how in (hows[:1] if name in plan.DEVICES else hows)  # allocator settings concern the host
        ]
    console = Console(stderr=True)
    total = sum(len(cases[config.tensors]) for config in configs)
    console.print(f"{len(configs)} processes, {total} measurements of at most about {budget:g} s each, and set-up")

    def save(results: bench.Results) -> dict[str, Any]:
        found = {**results.to_dict(), **({"targets": show.check(results)} if targets else {})}
        if output is not None:
            output.write_text(json.dumps(found, indent=1) + "\n")
        return found

    results = bench.Results(bench.machine())
    # Record only that there was a peer: its path is the user's.
    results.options = {**plan.to_dict(limits), "peer": peer is not None}
    for label, reason in left_out.items():
        results.omit(label, reason)
    said = [""]
    with console.status("") as status:

        def keep(results: bench.Results) -> None:
            save(results)

        def progress(text: str) -> None:
            status.update(text)
            config = text.partition(": ")[0]
            if config != said[0] and not console.is_terminal:  # a log has one line per process
                console.print(config)
            said[0] = config

        bench.measure(results, cases, configs, limits, str(peer or ""), memory and not targets, progress, keep)
    found = save(results)
    wide = inputs.console()
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        show.render(results, wide)
    if targets and not as_json:
        if not bench.native():
            wide.print("native kernels are not built for this machine: python -m grace.kernels.build")
        elif not any(record["native"] for record in results.records):
            wide.print("native kernels are built, but nothing that was measured used them")
        show.render_check(show.check(results), wide)
    if plot_file is not None and results.records:
        show.plot(results, str(plot_file))
    if not results.records:
        raise typer.Exit(1)


def _absent(name: str) -> Callable[[], None]:
    def command() -> None:
        raise typer.BadParameter(f"`grace bench {name}` {inputs.WITHOUT_BENCH}")

    return command


if inputs.BENCH:
    from grace_bench.commands import COMMANDS

    for each in COMMANDS:
        app.command()(each)
else:
    for name in ("gpu", "sidco", "tasks"):
        app.command(name, context_settings=inputs.ANYTHING, help=f"Not installed: {inputs.INSTALL_BENCH}.")(
            _absent(name)
        )


def _chosen(specs: list[str], with_peers: bool) -> tuple[list[plan.Case], dict[str, str]]:
    try:
        named = [plan.parse(spec) for spec in specs]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    left_out: dict[str, str] = {}
    if not named:
        named, left_out = plan.everything()
    peers: list[plan.Case] = []
    if with_peers:
        compressors = {case.params["compressor"] for case in named}
        wanted = [
            name for name, ours in plan.PAIRS.items() if compressors & {spec.partition(":")[0] for spec in ours[:1]}
        ]
        peers, refused = plan.pairs(wanted)
        left_out.update(refused)
    return plan.merged(named, peers), left_out


def _targets(
    size: int, allocators: list[str], with_peers: bool
) -> tuple[list[plan.Config], dict[str, list[plan.Case]]]:
    sizes = {"flat": size, "resnet50": sum(map(math.prod, plan.resnet50().values()))}
    kernels = ("off", "on") if bench.native() else ("off",)
    configs = [
        plan.Config("torch", 1, how, sizes[kind], kind, on) for kind in sizes for on in kernels for how in allocators
    ]
    return configs, {kind: plan.target_cases(kind, with_peers) for kind in sizes}
