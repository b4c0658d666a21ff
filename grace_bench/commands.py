"""The commands of `grace bench` that this package has."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from grace.bench import plan
from grace.bench.kernels import REMEDIES
from grace.cli import inputs
from grace.cli.inputs import listed, numbers
from grace_bench import sidco as bench
from grace_bench import sidco_show
from grace_bench.tasks.command import tasks


def gpu(
    context: typer.Context,
    files: Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="With --show: results.")] = None,
    backend: Annotated[str, typer.Option(help="cuda, or cpu to test the command itself.")] = "cuda",
    quick: Annotated[bool, typer.Option("--quick", help="Small tensors and few methods.")] = False,
    part: Annotated[
        str, typer.Option(help="What to run: kernels, loops, steps, training, or several with commas.")
    ] = "kernels,loops,steps,training",
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
    """Test methods, kernels and training runs on a CUDA device, time methods and exchanges, and write one file."""
    listed(backend, ("cuda", "cpu"), "--backend")
    if show_only:
        others = {"quick": "--quick", "part": "--part", "minutes": "--minutes", "output": "--output"}
        inputs.alone(context, "--show", others)
        _show_gpu(files or sorted(Path("benchmarks/results").glob("gpu-*.json")), backend == "cpu", as_json)
        return
    if files:
        raise typer.BadParameter(f"{str(files[0])!r}: FILE has a meaning with --show only; --output is where to write")
    if importlib.util.find_spec("torch") is None:
        raise typer.BadParameter(f"PyTorch is missing: {REMEDIES['torch']}")
    from grace_bench import gpu as device
    from grace_bench import gpu_tables

    parts = listed(part, device.PARTS, "--part")
    if backend == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise typer.BadParameter(
                "PyTorch finds no CUDA device here, so there is nothing to measure. --backend cpu --quick tests the "
                "command itself"
            )
        if output is None:
            folder = Path("benchmarks/results")
            output = (folder if folder.is_dir() else Path()) / gpu_tables.file_name(torch.cuda.get_device_name())
    console = Console(stderr=True)

    said = [""]

    def progress(text: str) -> None:
        if text != said[0]:
            console.print(text, markup=False, highlight=False)
        said[0] = text

    found = device.measure(backend, quick, minutes, output, progress, parts)
    print(json.dumps(found, indent=2) if as_json else gpu_tables.tables(found))
    for failure in (failures := gpu_tables.failures(found)):
        console.print(failure, markup=False)
    if failures:
        raise typer.Exit(1)


def _show_gpu(files: Sequence[Path], with_cpu: bool, as_json: bool) -> None:
    # By default the tables omit files that were measured on a CPU.
    from grace_bench import gpu_tables

    try:
        found = gpu_tables.read(files)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    measured = [data for data in found if data["gpu"] or with_cpu]
    if not measured:
        raise typer.BadParameter("none of these files is of a GPU: run `grace bench gpu` on a machine with one")
    if as_json:
        print(json.dumps(measured, indent=2))
        return
    for data in measured:
        print(gpu_tables.tables(data))


def sidco(
    context: typer.Context,
    files: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    as_json: inputs.AsJson = False,
    output: inputs.Records = None,
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
    as_json, output, others = inputs.earlier(context, as_json, output, files or [])
    if others:
        raise typer.BadParameter(f"{others[0]!r} is no option: `grace bench sidco` compares methods of its own")
    backends = listed(backend, plan.BACKENDS, "--backend") if backend else []
    results = bench.Results()
    results.options = {"epochs": epochs, "seeds": seeds, "law_size": int(law_size)}
    if plot_file is not None and not epochs:
        raise typer.BadParameter("--plot draws what trainings found: leave out --epochs 0")
    with Console(stderr=True).status("") as status:
        bench.measure(
            results, epochs, seeds, int(law_size), backends, numbers(sizes, "--sizes"), lambda text: status.update(text)
        )
    if as_json:
        print(json.dumps(results.to_dict(), indent=1))
    else:
        sidco_show.render(results, inputs.console())
    if output is not None:
        output.write_text(json.dumps(results.to_dict(), indent=1) + "\n")
    if plot_file is not None and results.training:
        sidco_show.plot(results, str(plot_file))


COMMANDS = (gpu, sidco, tasks)
