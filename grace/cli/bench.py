"""How long methods take on this machine, and how well thresholds are estimated: `grace bench kernels`, `sidco`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from grace.bench import kernels as bench
from grace.bench import plan, show
from grace.bench import sidco as thresholds

WIDE = 160  # columns of a table that goes to a file or a pipe

app = typer.Typer(name="bench", help="Measure how long methods take.", no_args_is_help=True)


@app.callback()
def options() -> None:
    """Measure how long methods take."""


def listed(text: str, allowed: tuple[str, ...], option: str) -> list[str]:
    """A comma-separated list of names."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in allowed:
            raise typer.BadParameter(f"{option} {name!r}: choose from {', '.join(allowed)}")
    if not names:
        raise typer.BadParameter(f"{option} is empty: choose from {', '.join(allowed)}")
    return list(dict.fromkeys(names))


def numbers(text: str, option: str) -> list[int]:
    """A comma-separated list of positive whole numbers, such as 1e6."""
    try:
        found = [float(each) for each in text.split(",")]
    except ValueError:
        found = []
    if not found or any(each < 1 or each != int(each) for each in found):
        raise typer.BadParameter(f"{option} {text!r}: write whole numbers of at least 1, such as 1e4,25e6")
    return list(dict.fromkeys(map(int, found)))


@app.command()
def kernels(
    methods: Annotated[
        list[str] | None,
        typer.Argument(metavar="[METHOD]...", help="Such as topk or topk:compress_ratio=0.001; default: all."),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all records there.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw a chart there.")] = None,
    backend: Annotated[str, typer.Option(help="Toolkits.")] = ",".join(plan.BACKENDS),
    sizes: Annotated[str, typer.Option(help="Elements of the gradient.")] = "1e4,1e6,25e6",
    threads: Annotated[str, typer.Option(help="Threads of the toolkit.")] = "1,2",
    allocator: Annotated[str, typer.Option(help="malloc as it comes, and tuned.")] = ",".join(plan.ALLOCATORS),
    tensors: Annotated[str, typer.Option(help="One flat tensor (flat), or those of ResNet-50 (resnet50).")] = "flat",
    native: Annotated[str, typer.Option("--kernels", help="Native kernels: on, off or on,off.")] = "on",
    rounds: Annotated[int, typer.Option(min=0, help="At most so many rounds; 0: by size, 7 to 21.")] = 0,
    budget: Annotated[float, typer.Option(min=0, help="Seconds for each case in each configuration.")] = 6.0,
    call_limit: Annotated[float, typer.Option(min=0.1, help="Seconds after which a call is given up.")] = 60.0,
    peer: Annotated[
        Path | None, typer.Option(metavar="PATH", help="A checkout of upstream GRACE to measure in the same run.")
    ] = None,
    memory: Annotated[bool, typer.Option(help="Also count the extra memory of a step.")] = True,
    targets: Annotated[
        bool, typer.Option("--targets", help="Check the project's own targets, and nothing else.")
    ] = False,
) -> None:
    """Time every method's encode, commit and decode as multiples of a memcpy, in interleaved runs."""
    limits = plan.Limits(rounds, budget, call_limit)
    if peer is not None and not (peer / "grace_dl" / "dist").is_dir():
        raise typer.BadParameter(f"--peer {str(peer)!r} has no grace_dl/dist: give the root of a checkout")
    left_out: dict[str, str] = {}
    if targets:
        if methods:
            raise typer.BadParameter("--targets measures its own cases: leave out METHOD")
        given = numbers(sizes, "--sizes")
        configs, cases = _targets(max(given), listed(allocator, plan.ALLOCATORS, "--allocator"), peer is not None)
    else:
        chosen, left_out = _chosen(methods or [], peer is not None)
        kinds = listed(tensors, ("flat", "resnet50"), "--tensors")
        cases = dict.fromkeys(kinds, chosen)
        whole = sum(map(_size, plan.resnet50().values()))
        configs = [
            plan.Config(name, count, how, size, kind, on)
            for name in listed(backend, plan.BACKENDS, "--backend")
            for count in numbers(threads, "--threads")
            for kind in kinds
            for size in ([whole] if kind == "resnet50" else numbers(sizes, "--sizes"))
            for on in listed(native, ("on", "off"), "--kernels")
            for how in listed(allocator, plan.ALLOCATORS, "--allocator")
        ]
    console = Console(stderr=True)
    total = sum(len(cases[config.tensors]) for config in configs)
    console.print(f"{len(configs)} processes, {total} measurements of at most about {budget:g} s each, and set-up")

    def save(results: bench.Results) -> None:
        found = {**results.to_dict(), **({"targets": show.check(results)} if targets else {})}
        if json_file is not None:
            json_file.write_text(json.dumps(found, indent=1) + "\n")

    results = bench.Results(bench.machine())
    # The path of a peer is the user's own business.
    results.options = {**plan.to_dict(limits), "peer": peer is not None}
    for label, reason in left_out.items():
        results.omit(label, reason)
    said = [""]
    with console.status("") as status:

        def progress(text: str) -> None:
            status.update(text)
            config = text.partition(": ")[0]
            if config != said[0] and not console.is_terminal:  # a log has one line for each process
                console.print(config)
            said[0] = config

        bench.measure(results, cases, configs, limits, str(peer or ""), memory and not targets, progress, save)
    save(results)
    wide = Console() if sys.stdout.isatty() else Console(width=WIDE)
    show.render(results, wide)
    if targets:
        if not bench.native():
            wide.print("native kernels are not built for this machine: python -m grace.kernels.build")
        elif not any(record["native"] for record in results.records):
            wide.print("native kernels are built, but nothing that was measured used them")
        show.render_check(show.check(results), wide)
    if plot_file is not None and results.records:
        show.plot(results, str(plot_file))
    if not results.records:
        raise typer.Exit(1)


@app.command()
def sidco(
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all records there.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw K / k over the steps.")] = None,
    epochs: Annotated[int, typer.Option(min=0, help="Of each training on handwritten digits; 0: none.")] = 30,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each method.")] = 3,
    law_size: Annotated[float, typer.Option(min=0, help="Elements drawn from each law; 0: none.")] = 1e6,
    backend: Annotated[str, typer.Option(help="Toolkits to time; empty: none.")] = "torch,tensorflow",
    sizes: Annotated[str, typer.Option(help="Elements that are timed.")] = "1e6,1e7",
) -> None:
    """Compare estimated thresholds: on the gradients of a training, on laws, and in time. About ten minutes."""
    backends = listed(backend, plan.BACKENDS, "--backend") if backend else []
    results = thresholds.Results()
    results.options = {"epochs": epochs, "seeds": seeds, "law_size": int(law_size)}
    if plot_file is not None and not epochs:
        raise typer.BadParameter("--plot draws what trainings found: leave out --epochs 0")
    with Console(stderr=True).status("") as status:
        thresholds.measure(
            results, epochs, seeds, int(law_size), backends, numbers(sizes, "--sizes"), lambda text: status.update(text)
        )
    thresholds.render(results, Console() if sys.stdout.isatty() else Console(width=WIDE))
    if json_file is not None:
        json_file.write_text(json.dumps(results.to_dict(), indent=1) + "\n")
    if plot_file is not None and results.training:
        thresholds.plot(results, str(plot_file))


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
    sizes = {"flat": size, "resnet50": sum(map(_size, plan.resnet50().values()))}
    kernels = ("off", "on") if bench.native() else ("off",)
    configs = [
        plan.Config("torch", 1, how, sizes[kind], kind, on) for kind in sizes for on in kernels for how in allocators
    ]
    return configs, {kind: plan.target_cases(kind, with_peers) for kind in sizes}


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
