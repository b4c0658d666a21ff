"""Compares the steps of the compressor "auto", after its choice, with those of fixed methods (`BY_HAND`).

Every worker runs this file, by torchrun: MODEL SECONDS FOLDER. Worker 0 writes FOLDER/choice.json.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

import grace.torch
from benchmarks.lab.cases import METHODS
from benchmarks.lab.rounds import medians
from benchmarks.lab.table import EMULATED
from benchmarks.lab.tasks import TASKS
from grace import grace_from_params
from grace.backends import get_backend
from grace.core import Transport
from grace.engine.session import Grace
from grace.transports import get_transport

WARM_UP = 2
AUTO, DENSE = "auto", "none"
BY_HAND = (DENSE, "fp16", "topk", "sign", "powersgd", "int8-2stage", "int4-2stage")


def training(model: str, params: Mapping[str, Any], carrier: Transport) -> tuple[Callable[[], float], Grace]:
    """Set up a model's training; returns a function that runs a step and returns its seconds, and the Grace."""
    task = TASKS[model]()
    torch.manual_seed(0)
    made = task.model()
    optimizer = torch.optim.SGD(made.parameters(), task.lr, momentum=task.momentum)
    grc = grace_from_params(params)
    joined = grace.torch.DistributedOptimizer(optimizer, grc, made.named_parameters())
    batch = task.batch(carrier.rank, 0, task.batch_size)

    def step() -> float:
        carrier.exchange("")  # all workers start together
        began = time.perf_counter()
        joined.zero_grad()
        task.loss(made, batch).backward()
        joined.step()
        return time.perf_counter() - began

    return step, grc


def run(model: str, seconds: float, folder: Path) -> None:
    """Let "auto" choose, then time it and the fixed methods. All workers call it together."""
    dist.init_process_group("gloo")
    carrier = get_transport("torch").bind(get_backend("torch"))
    settings = {name: params for name, params, _ in METHODS if name in (AUTO, *BY_HAND)}
    steps, chooses = {}, None
    for name, params in settings.items():
        step, grc = training(model, params, carrier)
        steps[name] = step
        for _ in range(WARM_UP):
            step()
        if name == AUTO:
            chooses = grc
            while grc.trying:
                step()
    found = medians(carrier, steps, seconds)
    assert chooses is not None
    if carrier.rank == 0:
        report = chooses.report()
        rows = {"seconds": found, "chosen": report.method, "trials": report.trials}
        (folder / "choice.json").write_text(json.dumps(rows))
    carrier.exchange("")
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the group


# -- output ------------------------------------------------------------------------------------------------------------
def judged(seconds: Mapping[str, float]) -> tuple[str, float, float]:
    """The best fixed method, and the time of auto's step relative to that method and to dense."""
    best = min((name for name in seconds if name != AUTO), key=lambda name: seconds[name])
    return best, seconds[AUTO] / seconds[best], seconds[AUTO] / seconds[DENSE]


def table(found: Mapping[tuple[str, str], Mapping[str, Any]]) -> Table:
    """A line for each model and rate."""
    names = [*BY_HAND, AUTO]
    shown = Table("model", "rate", *names, "chosen", "best", "auto / best", "auto / dense", title=f"ms, {EMULATED}")
    for (model, rate), each in found.items():
        best, of_best, of_dense = judged(each["seconds"])
        steps = (f"{1e3 * each['seconds'][name]:.0f}" for name in names)
        shown.add_row(model, rate, *steps, each["chosen"].split()[0], best, f"{of_best:.2f}", f"{of_dense:.2f}")
    return shown


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]))
