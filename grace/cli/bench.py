"""`grace bench kernels`, `gpu`, `sidco`, `tasks`: the time of methods, and their effect on training."""

from __future__ import annotations

import importlib.util
import json
import math
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from grace.bench import kernels as bench
from grace.bench import plan, show
from grace.bench import sidco as thresholds
from grace.bench.lab import network
from grace.bench.tasks import cluster as task_cluster
from grace.bench.tasks import plan as task_plan
from grace.bench.tasks import run as task_run
from grace.bench.tasks import show as task_show
from grace.bench.tasks.tasks import TASKS
from grace.bench.tasks.tasks import tasks as every_task
from grace.cli import inputs

app = typer.Typer(name="bench", help="Measure the time of methods and their effect on training.", no_args_is_help=True)


Records = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", callback=inputs.output_file, help="Write all records as JSON."),
]


@app.callback()
def options() -> None:
    """Measure the time of methods and their effect on training."""


def _earlier(
    context: typer.Context, as_json: bool, output: Path | None, words: list[str]
) -> tuple[bool, Path | None, list[str]]:
    # `--json FILE` is the former form of --output. It still works, with a notice.
    files = [word for word in words if word.endswith(".json")]
    if not as_json or output is not None or len(files) != 1:
        return as_json, output, words
    Console(stderr=True).print(f"--json {files[0]} is written --output {files[0]} now; --json alone prints")
    return False, inputs.output_file(context, Path(files[0])), [word for word in words if word not in files]


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
    if not found or any(not 1 <= each < math.inf or each != int(each) for each in found):
        raise typer.BadParameter(f"{option} {text!r}: write whole numbers of at least 1, such as 1e4,25e6")
    return list(dict.fromkeys(map(int, found)))


@app.command()
def kernels(
    context: typer.Context,
    methods: Annotated[
        list[str] | None,
        typer.Argument(metavar="[METHOD]...", help="Methods, such as topk or topk:compress_ratio=0.001; default: all."),
    ] = None,
    as_json: inputs.AsJson = False,
    output: Records = None,
    plot_file: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", callback=inputs.chart_file, help="Write a chart."),
    ] = None,
    backend: Annotated[str, typer.Option(help="Toolkits; cuda: PyTorch on a CUDA device.")] = ",".join(plan.BACKENDS),
    sizes: Annotated[str, typer.Option(help="Elements per gradient.")] = "1e4,1e6,25e6",
    threads: Annotated[str, typer.Option(help="Threads of the toolkit.")] = "1,2",
    allocator: Annotated[str, typer.Option(help="malloc settings: default and tuned.")] = ",".join(plan.ALLOCATORS),
    tensors: Annotated[str, typer.Option(help="flat: one vector; resnet50: the tensors of ResNet-50.")] = "flat",
    native: Annotated[str, typer.Option("--kernels", help="Native kernels: on, off or on,off.")] = "on",
    forms: Annotated[
        str, typer.Option(help="Compare native, compiled and plain code in the same run; empty: the default.")
    ] = "",
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
    as_json, output, methods = _earlier(context, as_json, output, methods or [])
    limits = plan.Limits(rounds, budget, call_limit)
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
        whole = sum(map(_size, plan.resnet50().values()))
        counts, hows = numbers(threads, "--threads"), listed(allocator, plan.ALLOCATORS, "--allocator")
        configs = [
            plan.Config(name, count, how, size, kind, on)
            for name in listed(backend, (*plan.BACKENDS, *plan.DEVICES), "--backend")
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
    # A peer's path is private to the user.
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


@app.command()
def gpu(
    context: typer.Context,
    files: Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="With --show: results.")] = None,
    backend: Annotated[str, typer.Option(help="cuda, or cpu to test the command itself.")] = "cuda",
    quick: Annotated[bool, typer.Option("--quick", help="Small tensors and few methods.")] = False,
    minutes: Annotated[
        float, typer.Option(min=0.1, callback=inputs.finite("of minutes"), help="About how long it may take.")
    ] = 9.0,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            callback=inputs.output_file,
            help="Where to write; on a GPU by default benchmarks/results/gpu-NAME.json, or ./gpu-NAME.json.",
        ),
    ] = None,
    show_only: Annotated[bool, typer.Option("--show", help="Measure nothing: print tables of FILEs.")] = False,
    as_json: inputs.AsJson = False,
) -> None:
    """Laws, Triton kernels, times and exchanges on a CUDA device, in one call and one file."""
    listed(backend, ("cuda", "cpu"), "--backend")
    if show_only:
        inputs.alone(context, "--show", {"quick": "--quick", "minutes": "--minutes", "output": "--output"})
        _show_gpu(files or sorted(Path("benchmarks/results").glob("gpu-*.json")), backend == "cpu", as_json)
        return
    if files:
        raise typer.BadParameter(f"{str(files[0])!r}: FILE has a meaning with --show only; --output is where to write")
    if importlib.util.find_spec("torch") is None:
        raise typer.BadParameter(f"PyTorch is missing: {bench.REMEDIES['torch']}")
    from grace.bench import gpu as device

    if backend == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise typer.BadParameter(
                "PyTorch finds no CUDA device here, so there is nothing to measure. --backend cpu --quick tests the "
                "command itself"
            )
        if output is None:
            folder = Path("benchmarks/results")
            output = (folder if folder.is_dir() else Path()) / device.file_name(torch.cuda.get_device_name())
    console = Console(stderr=True)

    said = [""]

    def progress(text: str) -> None:
        if text != said[0]:
            console.print(text, markup=False, highlight=False)
        said[0] = text

    found = device.measure(backend, quick, minutes, output, progress)
    print(json.dumps(found, indent=2) if as_json else device.tables(found))
    for failure in (failures := device.failures(found)):
        console.print(failure, markup=False)
    if failures:
        raise typer.Exit(1)


def _show_gpu(files: Sequence[Path], with_cpu: bool, as_json: bool) -> None:
    # Tables of GPUs; a CPU's file only on request.
    from grace.bench import gpu as device

    try:
        found = device.read(files)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    measured = [data for data in found if data["gpu"] or with_cpu]
    if not measured:
        raise typer.BadParameter("none of these files is of a GPU: run `grace bench gpu` on a machine with one")
    if as_json:
        print(json.dumps(measured, indent=2))
        return
    for data in measured:
        print(device.tables(data))


@app.command()
def sidco(
    context: typer.Context,
    files: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    as_json: inputs.AsJson = False,
    output: Records = None,
    plot_file: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE", callback=inputs.chart_file, help="Write a chart of K / k over the steps."
        ),
    ] = None,
    epochs: Annotated[int, typer.Option(min=0, help="Epochs per training on handwritten digits; 0: no training.")] = 30,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings per method.")] = 3,
    law_size: Annotated[
        float,
        typer.Option(
            callback=inputs.finite("of elements", zero=True), help="Elements drawn from each distribution; 0: none."
        ),
    ] = 1e6,
    backend: Annotated[str, typer.Option(help="Toolkits to time; empty: none.")] = "torch,tensorflow",
    sizes: Annotated[str, typer.Option(help="Elements to time.")] = "1e6,1e7",
) -> None:
    """Compare estimated thresholds on gradients of a training, on known distributions, and in time (ten minutes)."""
    as_json, output, others = _earlier(context, as_json, output, files or [])
    if others:
        raise typer.BadParameter(f"{others[0]!r} is no option: `grace bench sidco` compares methods of its own")
    backends = listed(backend, plan.BACKENDS, "--backend") if backend else []
    results = thresholds.Results()
    results.options = {"epochs": epochs, "seeds": seeds, "law_size": int(law_size)}
    if plot_file is not None and not epochs:
        raise typer.BadParameter("--plot draws what trainings found: leave out --epochs 0")
    with Console(stderr=True).status("") as status:
        thresholds.measure(
            results, epochs, seeds, int(law_size), backends, numbers(sizes, "--sizes"), lambda text: status.update(text)
        )
    if as_json:
        print(json.dumps(results.to_dict(), indent=1))
    else:
        thresholds.render(results, inputs.console())
    if output is not None:
        output.write_text(json.dumps(results.to_dict(), indent=1) + "\n")
    if plot_file is not None and results.training:
        thresholds.plot(results, str(plot_file))


@app.command()
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
    toolkit: Annotated[str, typer.Option(help="Toolkits.")] = ",".join(task_plan.TOOLKITS),
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
    toolkits = listed(toolkit, task_plan.TOOLKITS, "--toolkit")
    if not (full or show_only):
        toolkits = _present(toolkits)
    lacks = ["not --loopback"] if loopback else network.missing()
    rates = _rates(bandwidth)
    common = {
        "bandwidths": (task_plan.AS_IS,) if full else (task_plan.LOOPBACK,) if lacks else rates,
        "full": full,
        "data": str(data.resolve()) if data else "",
        "steps": steps,
    }
    names, methods = listed(",".join(task or TASKS), tuple(every_task()), "--task"), _methods(method or [], full)
    counts = numbers(workers, "--workers")
    jobs = [
        job for seed in range(seeds) for job in task_plan.jobs(names, methods, toolkits, counts, **common, seed=seed)
    ]
    console = Console(stderr=True)
    left_out: list[str] = []
    if not (collect or show_only):
        out.mkdir(parents=True, exist_ok=True)
    if full and not (collect or show_only):
        for path in task_cluster.write(jobs, out, counts[0]):
            console.print(f"written: {path}")
        console.print(f"{len(jobs)} jobs in {out / 'jobs'}; then: grace bench tasks --full --collect --out {out}")
        return
    if collect:
        rows = task_cluster.collect(out)
    else:
        try:
            store = task_run.Store(out / "rows.jsonl")
        except (OSError, ValueError) as error:
            raise typer.BadParameter(f"--out: {error}") from error
        if not show_only:
            if lacks and not loopback:
                console.print(f"over plain loopback: an emulated network needs {'; and '.join(lacks)}")
            left_out = _train(jobs, store, not lacks, limit, 60 * minutes, retry, console)
        rows = store.rows
    if unknown := sorted({row["task"] for row in rows if "task" in row} - set(every_task())):
        raise typer.BadParameter(f"--out: no installed package offers the tasks {', '.join(unknown)}")
    if not any(row["kind"] == task_run.TRAINED for row in rows):
        console.print(f"nothing was measured in {out}")
        raise typer.Exit(1)
    task_show.save(rows, out, left_out, " ".join(["grace", *sys.argv[1:]]))
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        task_show.render(rows, inputs.console())
    for line in left_out:
        console.print(f"not measured, time ran out: {line}; the same command goes on from here")
    console.print(
        f"page, tables, plots and results: {out / 'report.html'}, report.md, *.png, results.jsonl, results.csv"
    )


def _present(toolkits: list[str]) -> list[str]:
    # Toolkits that are installed, with the transport for their gradients.
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
    # Methods by toolkit.
    try:
        given = list(dict.fromkeys(map(task_plan.known, specs or (task_plan.FULL if full else ()))))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return {toolkit: given or task_plan.QUICK[toolkit] for toolkit in task_plan.TOOLKITS}


def _rates(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(inputs.as_tc(word.strip()) for word in text.split(",")))


def _train(
    jobs: list[task_plan.Job],
    store: task_run.Store,
    shaped: bool,
    limit: float,
    budget: float,
    retry: bool,
    console: Console,
) -> list[str]:
    # Run the remaining jobs, with a progress bar; returns descriptions of the jobs not started.
    todo = task_run.remaining(jobs, store.rows, retry)
    expected = task_plan.estimate(todo) / 60
    said = f"{len(todo)} launches" + (f", {len(jobs) - len(todo)} are done already" if len(todo) < len(jobs) else "")
    console.print(f"{said}; about {expected:.0f} minutes on 2 cores, {budget / 60:.0f} at most")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the network is removed, too
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

        left = task_run.run(todo, store, shaped, limit, budget, tell, lambda: bars.advance(bar))
    return list(map(str, left))


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
