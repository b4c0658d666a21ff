"""The commands of `grace bench` that this package has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from grace.bench import plan
from grace.cli import inputs
from grace.cli.inputs import listed, numbers
from grace_bench import sidco as bench
from grace_bench import sidco_show
from grace_bench.tasks.command import tasks


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


COMMANDS = (sidco, tasks)
