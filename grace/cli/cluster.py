"""`grace doctor --cluster`: shows the launcher's variables, and whether all workers agree."""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import grace
from grace.start import exchange
from grace.transports.jobs import VARIABLES, detect, promised

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Worker:
    """The facts that one worker reports about itself."""

    rank: int
    size: int
    host: str
    local_rank: str
    launcher: str
    grace: str
    python: str
    torch: str
    promised: dict[str, int] = field(default_factory=dict)
    """The numbers of workers that this worker's environment variables state."""


@dataclass(frozen=True)
class Cluster:
    """The results of `grace doctor --cluster`."""

    variables: dict[str, dict[str, str]]
    """The variables that are set on this worker, by launcher."""
    workers: list[Worker] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    rank: int = 0


def examine(environ: Mapping[str, str] = os.environ) -> Cluster:
    """Join the other workers and compare what they report."""
    groups = {launcher: {n: environ[n] for n in names if n in environ} for launcher, names in VARIABLES.items()}
    variables = {launcher: found for launcher, found in groups.items() if found}
    try:
        job, transport = detect(environ), grace.init()
    except (RuntimeError, ValueError, ImportError) as error:
        return Cluster(variables, [], [str(error)])
    me = Worker(
        rank=transport.rank,
        size=transport.size,
        host=socket.gethostname(),
        local_rank="" if job is None else os.environ.get("LOCAL_RANK", ""),
        launcher="" if job is None else job.launcher,
        grace=grace.__version__,
        python=platform.python_version(),
        torch=str(getattr(sys.modules.get("torch"), "__version__", "")),
        promised=promised(environ),
    )
    workers = [Worker(**json.loads(text)) for text in exchange(transport, json.dumps(asdict(me)))]
    return Cluster(variables, workers, compared(workers), transport.rank)


def compared(workers: list[Worker]) -> list[str]:
    """What would disturb a training: differences between workers, and workers that did not join."""
    problems = [
        f"{worker.size} of {count} workers came: {name}={count} on worker {worker.rank}"
        for worker in workers
        for name, count in worker.promised.items()
        if count > worker.size
    ][:1]
    for name in ("launcher", "grace", "python", "torch"):
        if len(values := {getattr(worker, name) for worker in workers}) > 1:
            problems.append(f"workers differ in {name}: {', '.join(sorted(map(repr, values)))}")
    seen: dict[tuple[str, str], int] = {}
    for worker in workers:
        place = worker.host, worker.local_rank
        if worker.local_rank and (other := seen.setdefault(place, worker.rank)) != worker.rank:
            problems.append(
                f"workers {other} and {worker.rank} have local rank {worker.local_rank} on {worker.host}: both would "
                "take the same GPU"
            )
    return problems


def render(found: Cluster, console: Console) -> None:
    """Print variables, workers and problems."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="Launcher variables of this worker", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("launcher", "variable", "value"):
        table.add_column(column, overflow="fold")
    for launcher, values in found.variables.items():
        for name, value in values.items():
            table.add_row(launcher, name, escape(value))
    if found.variables:
        console.print(table)
    else:
        console.print("No launcher's variables are set.")
    for worker in found.workers:
        by = f", {worker.launcher} local rank {worker.local_rank}" if worker.launcher else ""
        about = f"grace {worker.grace}, Python {worker.python}, PyTorch {worker.torch or 'not imported'}"
        console.print(escape(f"worker {worker.rank} of {worker.size} on {worker.host}{by}: {about}"))
    for problem in found.problems:
        console.print(f"[red]{escape(problem)}[/]")
    if not found.problems:
        console.print("All workers agree." if len(found.workers) > 1 else "This worker is alone, as its variables say.")
