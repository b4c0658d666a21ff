"""The commands of ``python -m benchmarks.lab``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.lab import bench, choice, fidelity, pipeline, table
from benchmarks.lab.cases import CASES, SETS, select
from grace.bench.kernels import machine
from grace.bench.plan import UNSHAPED
from grace.cli.inputs import as_tc
from grace_bench.lab import network
from grace_bench.lab.launch import ROOT, torchrun
from grace_bench.lab.network import Lab, LabError
from grace_bench.lab.probe import probe as probe_

app = typer.Typer(
    help="Training over an emulated network on one machine: hosts are network namespaces, links are rate-limited.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Rates = Annotated[str, typer.Option(help="Link rates (10, 10Gbit, 100Mbit/s), or 'unshaped'; separated by commas.")]
Hosts = Annotated[str, typer.Option(help="Numbers of hosts; 2x2 is 2 hosts with 2 workers each.")]
Burst = Annotated[int, typer.Option(help="Bytes an idle link may send at once; 0: 4.2 ms of its rate.")]


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _rates(text: str) -> list[str]:
    return [as_tc(word) for word in _words(text)]


@contextmanager
def _plain_errors() -> Iterator[None]:
    # Remove the lab also when its process receives SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


@app.command()
def run(
    rates: Rates = "100mbit,1gbit",
    hosts: Hosts = "4",
    models: Annotated[str, typer.Option(help="mlp, cnn, lm.")] = "mlp",
    cases: Annotated[str, typer.Option(help=f"Names (with * and ?) or sets: {', '.join(SETS)}.")] = "quick",
    steps: Annotated[int, typer.Option(help="Timed steps of each job.")] = 20,
    budget: Annotated[float, typer.Option(help="Seconds after which a job runs fewer steps; 0: never.")] = 8.0,
    repeats: Annotated[int, typer.Option(help="Repeats, interleaved; medians are shown.")] = 1,
    losses: Annotated[int, typer.Option(help="Number of evaluations of the held-out loss during training.")] = 0,
    decay: Annotated[bool, typer.Option(help="Decay the learning rate to zero over the steps.")] = False,
    peer: Annotated[Path | None, typer.Option(help="A checkout of upstream GRACE, for the upstream-* cases.")] = None,
    out: Annotated[Path, typer.Option("--json", help="Append results to this file, as lines of JSON.")] = Path(
        "out/lab.jsonl"
    ),
    plot: Annotated[Path | None, typer.Option(help="Draw seconds per step against rate.")] = None,
    burst: Burst = 0,
    delay: Annotated[
        float, typer.Option(help="Milliseconds by which each link delays packets, in each direction.")
    ] = 0.0,
    isolated: Annotated[bool, typer.Option(help="Launch every job separately.")] = False,
    timeout: Annotated[float, typer.Option(help="Time limit per job in seconds.")] = 240.0,
    env: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the workers; may be repeated.")] = None,
    seed: int = 0,
) -> None:
    """Train every case, and show seconds per step, bytes on the wire and loss."""
    with _plain_errors():
        if unknown := set(_words(models)) - {"mlp", "cnn", "lm"}:
            raise LabError(f"no model is named {sorted(unknown)[0]!r}: choose of mlp, cnn, lm")
        if peer is not None and not (peer / "grace_dl").is_dir():
            raise LabError(f"{peer} is no checkout of upstream GRACE: it has no folder grace_dl")
        if bad := [pair for pair in env or () if "=" not in pair]:
            raise LabError(f"--env {bad[0]!r}: write NAME=VALUE")
        options = bench.Options(
            steps=steps,
            budget=budget,
            repeats=repeats,
            seed=seed,
            losses=losses,
            decay=decay,
            burst=burst or None,
            delay=delay,
            isolated=isolated,
            timeout=timeout,
            peer=str(peer.resolve()) if peer else "",
            env=dict(pair.split("=", 1) for pair in env or ()),
        )
        names = _words(cases)
        select(names)
        if peer is None:
            _tell("the upstream-* cases are left out: --peer PATH names a checkout")
        out.parent.mkdir(parents=True, exist_ok=True)
        rows: list[bench.Row] = []
        head = machine()
        with out.open("a") as lines:
            for row in bench.measure(
                _words(hosts),
                _rates(rates),
                _words(models),
                lambda workers: select(names, workers, peer is not None),
                options,
                _tell,
            ):
                rows.append(row)
                print(json.dumps({**row, "machine": head}), file=lines, flush=True)
        _show(rows, plot)


@app.command()
def show(
    files: Annotated[list[Path], typer.Argument(help="Files written by `run`.")],
    plot: Annotated[Path | None, typer.Option(help="Draw seconds per step against rate.")] = None,
    markdown: Annotated[bool, typer.Option(help="Print Markdown tables.")] = False,
) -> None:
    """Show earlier measurements, from one or several files."""
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    _show(rows, plot, markdown)


@app.command()
def cases() -> None:
    """List the cases that can be compared."""
    listed = Table("case", "launcher", "exchange", "parameters", "rounds")
    for case in CASES:
        listed.add_row(case.name, case.launcher, case.door, json.dumps(case.params), str(case.rounds))
    Console().print(listed)


@app.command()
def probe(rates: Rates = "50mbit,100mbit,200mbit,500mbit,1gbit", hosts: Hosts = "2", burst: Burst = 0) -> None:
    """Measure the throughput of one TCP connection between two hosts at each rate."""
    with _plain_errors(), Lab(network.parse_topology(hosts)[0], burst=burst or None) as lab:
        found = Table("rate", "Mbit/s", "share", title=table.EMULATED)
        for rate in _rates(rates):
            lab.shape(rate, burst or None)
            reached = probe_(lab)
            share = "" if rate == UNSHAPED else f"{reached / network.bits_per_second(rate):.1%}"
            found.add_row(rate, f"{reached / 1e6:.1f}", share)
        Console().print(found)


@app.command()
def plans(
    rates: Rates = "50mbit,200mbit,1gbit",
    hosts: Hosts = "2",
    burst: Burst = 0,
    out: Annotated[Path | None, typer.Option("--json", help="Write all figures as JSON.")] = None,
    timeout: Annotated[float, typer.Option(help="Time limit per rate in seconds.")] = 600.0,
) -> None:
    """Compare the planner's predictions with measured steps: random strategies, methods, and the plan itself."""
    found = {}
    with _plain_errors():
        for rate, read in _measured(_rates(rates), hosts, burst, timeout):
            found[rate] = read("fidelity")
            _tell(f"{rate}: {len(found[rate]['rows'])} steps measured and predicted")
    _write(out, found)
    console = Console() if sys.stdout.isatty() else Console(width=170)
    for shown in fidelity.tables(found):
        console.print(shown)


@app.command()
def stages(
    rates: Rates = "100mbit,1gbit",
    hosts: Hosts = "2",
    burst: Burst = 0,
    out: Annotated[Path | None, typer.Option("--json", help="Write all figures as JSON.")] = None,
    timeout: Annotated[float, typer.Option(help="Time limit per rate in seconds.")] = 300.0,
) -> None:
    """Compare the steps of a pipeline, a stage on each host, with and without compression between stages."""
    found = {}
    with _plain_errors():
        for rate, read in _measured(_rates(rates), hosts, burst, timeout):
            found[rate] = read("pipeline")
    _write(out, found)
    (Console() if sys.stdout.isatty() else Console(width=170)).print(pipeline.table(found))


@app.command()
def auto(
    rates: Rates = "50mbit,200mbit,1gbit",
    models: Annotated[str, typer.Option(help="mlp, cnn, lm.")] = "mlp,cnn",
    hosts: Hosts = "2",
    burst: Burst = 0,
    seconds: Annotated[float, typer.Option(help="Seconds of timed rounds per model and rate.")] = 30.0,
    out: Annotated[Path | None, typer.Option("--json", help="Write all figures as JSON.")] = None,
    timeout: Annotated[float, typer.Option(help="Time limit per model and rate in seconds.")] = 600.0,
) -> None:
    """Time the compressor "auto" against fixed methods, in alternating steps."""
    found = {}
    with _plain_errors():
        for rate, read in _measured(_rates(rates), hosts, burst, timeout):
            for model in _words(models):
                found[model, rate] = read("choice", model, seconds)
                _tell(f"{model}, {rate}: {found[model, rate]['chosen']}")
    _write(out, [{"model": model, "rate": rate, **each} for (model, rate), each in found.items()])
    console = Console() if sys.stdout.isatty() else Console(width=170)
    console.print(choice.table(found))


@app.command()
def shell(
    rate: Annotated[str, typer.Option(help="Link rate.")] = "100mbit", hosts: Hosts = "2", burst: Burst = 0
) -> None:
    """Open a shell on host 0 of a new lab, which is removed when the shell ends."""
    with _plain_errors():
        count, workers = network.parse_topology(hosts)
        with Lab(count, rate, workers, burst or None) as lab:
            slots = ",".join(f"{host.address}:{workers}" for host in lab.hosts)
            print(f"hosts: {' '.join(host.address for host in lab.hosts)}")
            if not network.missing(ssh=True):
                print(f"ssh -i {lab.key} ADDRESS reaches the others")
                print(
                    f"horovodrun --gloo -np {lab.size} -H {slots} --network-interface eth0 "
                    f"--ssh-identity-file {lab.key} python train.py"
                )
            subprocess.run(lab.hosts[0].command(os.environ.get("SHELL", "/bin/sh")))


@app.command()
def clean(
    everything: Annotated[bool, typer.Option("--all", help="Also remove labs in use.")] = False,
) -> None:
    """Remove labs whose process has ended."""
    with _plain_errors():
        removed = network.clean(everything)
        print("removed " + ", ".join(removed) if removed else "nothing to remove")


def _measured(rates: Sequence[str], hosts: str, burst: int, timeout: float) -> Iterator[tuple[str, Callable[..., Any]]]:
    # Yield each rate with a function that, at this rate, runs a file of this folder on all workers with the given
    # arguments, and returns the JSON that it wrote.
    count, workers = network.parse_topology(hosts)
    with Lab(count, "1gbit", workers, burst or None) as lab:
        for rate in rates:
            lab.shape(rate, burst or None)

            def read(name: str, *arguments: object) -> Any:
                with TemporaryDirectory(dir=lab.folder) as folder:
                    command = (sys.executable, ROOT / "benchmarks" / "lab" / f"{name}.py", *arguments, folder)
                    torchrun(lab, *command, timeout=timeout).check()
                    return json.loads(Path(folder, f"{name}.json").read_text())

            yield rate, read


def _write(out: Path | None, found: Any) -> None:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(found, indent=1) + "\n")


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show(rows: list[Any], plot: Path | None, markdown: bool = False) -> None:
    lines = bench.summary(rows)
    if markdown:
        print(table.markdown(lines))
    else:
        console = Console() if sys.stdout.isatty() else Console(width=170)
        for found in table.tables(lines):
            console.print(found)
    if plot is not None:
        table.plot(lines, plot)
        _tell(f"{table.EMULATED}: plot in {plot}")
