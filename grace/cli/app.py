"""The commands and their options; each is implemented in the module of its name."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

import grace
from grace.cli import advise as advise_
from grace.cli import bench as bench_
from grace.cli import catalog, inputs
from grace.cli import cluster as cluster_
from grace.cli import doctor as doctor_
from grace.cli import methods as methods_
from grace.cli import patch as patch_
from grace.cli import plan as plan_
from grace.cli import report as report_

app = typer.Typer(
    name="grace",
    help="Gradient compression for distributed training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench_.app)
app.add_typer(patch_.app)
app.command()(plan_.plan)
app.command()(advise_.advise)
app.command()(report_.report)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"grace {grace.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Gradient compression for distributed training."""


@app.command()
def doctor(
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Show the launcher's variables, join the workers, and compare them.")
    ] = False,
    as_json: inputs.AsJson = False,
) -> None:
    """Check which packages are installed and work, and show how to install missing ones.

    With --cluster, start it like the training: `srun grace doctor --cluster`. Worker 0 prints, and every worker that
    fails.
    """
    if cluster:
        found = cluster_.examine()
        if found.rank == 0:
            if as_json:
                print(json.dumps(asdict(found), indent=2))
            else:
                cluster_.render(found, inputs.console())
        if found.problems:
            raise typer.Exit(1)
        return
    with Console(stderr=True).status("Importing what is installed ..."):
        report = doctor_.examine()
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        doctor_.render(report, inputs.console())
    if not report.healthy:
        raise typer.Exit(1)


@app.command()
def methods(
    name: Annotated[str, typer.Argument(help="Show only this one, with its parameters, guarantee and paper.")] = "",
    as_json: inputs.AsJson = False,
) -> None:
    """List compressors, memories and communicators, with measured bits per element."""
    with Console(stderr=True).status("Measuring bits per element ..."):
        found = catalog.collect(name)
    if not any(found.values()):
        raise typer.BadParameter(f"nothing is registered under {name!r}; `grace methods` lists all names")
    if as_json:
        print(json.dumps({kind: [entry.to_dict() for entry in entries] for kind, entries in found.items()}, indent=2))
    elif name:
        for kind, entries in found.items():
            for entry in entries:
                methods_.render_one(kind, entry, inputs.console())
    else:
        methods_.render(found, inputs.console())
