"""`grace bench tasks`: the effect of methods on the training of whole tasks."""

from __future__ import annotations

import importlib.util
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from grace.cli import inputs
from grace.cli.inputs import listed, numbers
from grace_bench.lab import network
from grace_bench.tasks import cluster, plan, run, show
from grace_bench.tasks.tasks import TASKS
from grace_bench.tasks.tasks import tasks as every_task


def tasks(
    context: typer.Context,
    full: Annotated[
        bool,
        typer.Option(
            "--full/--quick", help="Write scripts for a cluster, or run half an hour on this machine with 2 cores."
        ),
    ] = False,
    task: Annotated[
        list[str] | None,
        typer.Option(help=f"Task, one of {', '.join(TASKS)}, or of an installed package; may be repeated."),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="dense, fp16, auto, or such as topk:compress_ratio=0.001, or local training such as "
            "diloco:sync_every=20,compressor=topk; may be repeated."
        ),
    ] = None,
    bandwidth: Annotated[
        str, typer.Option(help=f"Rates of emulated links, separated by commas: {inputs.RATES}.")
    ] = "100mbit,1gbit",
    workers: Annotated[str, typer.Option(help="Numbers of workers.")] = "2",
    toolkit: Annotated[str, typer.Option(help="Toolkits.")] = ",".join(plan.TOOLKITS),
    out: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER",
            callback=inputs.output_folder,
            help="Folder of results; existing ones are not measured again.",
        ),
    ] = Path("out/tasks"),
    data: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", exists=True, file_okay=False, help="Folder of real data sets, used if present."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings per method.")] = 1,
    first_seed: Annotated[
        int, typer.Option(min=0, help="Seed of the first training; later ones count up from it.")
    ] = 0,
    steps: Annotated[int, typer.Option(min=0, help="Steps per training; 0: the task's default.")] = 0,
    minutes: Annotated[
        float,
        typer.Option(callback=inputs.finite("of minutes", zero=True), help="Start no job that would end later."),
    ] = 28.0,
    limit: Annotated[
        float,
        typer.Option(min=1, callback=inputs.finite("of seconds"), help="Seconds after which a job is killed."),
    ] = 240.0,
    loopback: Annotated[bool, typer.Option("--loopback", help="Use no emulated network, even if possible.")] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Repeat failed measurements.")] = False,
    show_only: Annotated[
        bool, typer.Option("--show", help="Measure nothing: only redraw tables, plots and page.")
    ] = False,
    collect: Annotated[
        bool, typer.Option("--collect", help="Show tables of the results of the cluster's scripts.")
    ] = False,
    as_json: inputs.AsJson = False,
) -> None:
    """Train tasks with every method: time to a target quality, throughput, bytes, quality; plots and a page."""
    measuring = {"minutes": "--minutes", "limit": "--limit", "retry": "--retry", "loopback": "--loopback"}
    if show_only or collect:
        inputs.alone(context, "--show" if show_only else "--collect", measuring)
    elif full:
        inputs.alone(context, "--full", {**measuring, "bandwidth": "--bandwidth", "as_json": "--json"})
    if loopback:
        inputs.alone(context, "--loopback", {"bandwidth": "--bandwidth"})
    if full and not (collect or show_only) and len(numbers(workers, "--workers")) > 1:
        raise typer.BadParameter("--full writes scripts for one number of workers: give --workers once for each --out")
    toolkits = listed(toolkit, plan.TOOLKITS, "--toolkit")
    if not (full or show_only):
        toolkits = _present(toolkits)
    lacks = ["not --loopback"] if loopback else network.missing()
    rates = _rates(bandwidth)
    if full or lacks:
        rates = (plan.AS_IS,) if full else (plan.LOOPBACK,)
    common: dict[str, Any] = {
        "full": full,
        "data": str(data.resolve()) if data else "",
        "steps": steps,
    }
    names, methods = listed(",".join(task or TASKS), tuple(every_task()), "--task"), _methods(method or [], full)
    counts = numbers(workers, "--workers")
    chosen = names, methods, toolkits, counts, rates
    jobs = [job for seed in range(first_seed, first_seed + seeds) for job in plan.jobs(*chosen, **common, seed=seed)]
    console = Console(stderr=True)
    left_out: list[str] = []
    if not (collect or show_only):
        out.mkdir(parents=True, exist_ok=True)
    if full and not (collect or show_only):
        for path in cluster.write(jobs, out, counts[0]):
            console.print(f"written: {path}")
        console.print(f"{len(jobs)} jobs in {out / 'jobs'}; then: grace bench tasks --full --collect --out {out}")
        return
    if collect:
        rows = cluster.collect(out)
    else:
        try:
            store = run.Store(out / "rows.jsonl")
        except (OSError, ValueError) as error:
            raise typer.BadParameter(f"--out: {error}") from error
        if not show_only:
            if lacks and not loopback:
                console.print(f"over plain loopback: an emulated network needs {'; and '.join(lacks)}")
            left_out = _train(jobs, store, not lacks, limit, 60 * minutes, retry, console)
        rows = store.rows
    if unknown := sorted({row["task"] for row in rows if "task" in row} - set(every_task())):
        raise typer.BadParameter(f"--out: no installed package offers the tasks {', '.join(unknown)}")
    if not any(row["kind"] == run.TRAINED for row in rows):
        console.print(f"nothing was measured in {out}")
        raise typer.Exit(1)
    show.save(rows, out, left_out, " ".join(["grace", *sys.argv[1:]]))
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        show.render(rows, inputs.console())
    for line in left_out:
        console.print(f"not measured, time ran out: {line}; the same command goes on from here")
    console.print(
        f"page, tables, plots and results: {out / 'report.html'}, report.md, *.png, results.jsonl, results.csv"
    )


def _present(toolkits: list[str]) -> list[str]:
    # Returns the toolkits whose packages, and those of their transport, are all installed; reports the other toolkits.
    found = []
    for toolkit in toolkits:
        needed = {"torch": ("torch",), "keras": ("tensorflow", "keras", "horovod")}[toolkit]
        lacks = [name for name in needed if importlib.util.find_spec(name) is None]
        if lacks:
            Console(stderr=True).print(f"left out: {toolkit}, since {', '.join(lacks)} is missing: see `grace doctor`")
        else:
            found.append(toolkit)
    if not found:
        raise typer.BadParameter("--toolkit: none of them is installed; `grace doctor` says how to get them")
    return found


def _methods(specs: list[str], full: bool) -> dict[str, Sequence[str]]:
    # Returns the methods for each toolkit; with "dense" also the limit, which takes dense's steps.
    try:
        given = list(dict.fromkeys(map(plan.known, specs or (plan.FULL if full else ()))))
        given = [plan.LIMIT] * ("dense" in given and plan.LIMIT not in given) + given
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return {toolkit: given or plan.QUICK[toolkit] for toolkit in plan.TOOLKITS}


def _rates(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(inputs.as_tc(word.strip()) for word in text.split(",")))


def _train(
    jobs: list[plan.Job],
    store: run.Store,
    shaped: bool,
    limit: float,
    budget: float,
    retry: bool,
    console: Console,
) -> list[str]:
    # Run the remaining jobs, with a progress bar; returns descriptions of the jobs not started.
    todo = run.remaining(jobs, store.rows, retry)
    expected = plan.estimate(todo) / 60
    said = f"{len(todo)} launches" + (f", {len(jobs) - len(todo)} are done already" if len(todo) < len(jobs) else "")
    console.print(f"{said}; about {expected:.0f} minutes on 2 cores, {budget / 60:.0f} at most")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # SystemExit removes the emulated network
    with Progress(
        *(TextColumn("{task.completed}/{task.total}"), BarColumn(), TimeElapsedColumn()),
        TextColumn("{task.description}", markup=False),
        console=console,
        disable=not console.is_terminal,
    ) as bars:
        bar = bars.add_task("", total=len(todo))

        def tell(text: str) -> None:
            bars.update(bar, description=text)
            if not console.is_terminal and ": step" not in text:
                console.print(text, markup=False)

        left = run.run(todo, store, shaped, limit, budget, tell, lambda: bars.advance(bar))
    return list(map(str, left))
