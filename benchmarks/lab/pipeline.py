"""A pipeline of one stage per host: steps with and without compression between stages, predicted and measured.

Every worker runs this file, by torchrun: FOLDER. Worker 0 writes FOLDER/pipeline.json.
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
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe

from benchmarks.lab.fidelity import WIDTH, network
from benchmarks.lab.rounds import medians
from benchmarks.lab.table import EMULATED
from benchmarks.lab.train import traffic
from grace.backends import get_backend
from grace.bench import costs as measure
from grace.core import Transport
from grace.planner.costs import codec
from grace.planner.stages import edge_seconds, step_seconds
from grace.planner.torch import profile
from grace.torch import PipelineStage
from grace.transports import get_transport

LAYERS, ROWS, MICROBATCHES = 2, 256, 4  # linear layers of a stage, rows of a micro-batch
SECONDS = 40.0
METHODS: Mapping[str, dict[str, Any] | None] = {
    "dense": None,
    "8 bits": {"compressor": "blockint", "bits": 8, "block_size": WIDTH},
    "4 bits": {"compressor": "blockint", "bits": 4, "block_size": WIDTH},
}
"""Compressors of activations and of their gradients."""


def training(carrier: Transport, params: dict[str, Any] | None, sent: list[int]) -> Callable[[], float]:
    """Set up this worker's stage; returns a function that runs a step, and returns its seconds.

    ``sent``: each call appends the bytes that this host sent.
    """
    model = network(LAYERS)
    stage = PipelineStage(
        model, carrier.rank, carrier.size, torch.device("cpu"), forward=params, backward=params, feedback="none"
    )
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    inputs, target = torch.randn(2, ROWS * MICROBATCHES, WIDTH)

    def timed() -> float:
        optimizer.zero_grad()
        carrier.exchange("")  # all workers start together
        before, began = traffic()[0], time.perf_counter()
        schedule.step(*([inputs] if stage.is_first else []), **({"target": target} if stage.is_last else {}))
        found = time.perf_counter() - began
        sent.append(traffic()[0] - before)
        optimizer.step()
        return found

    return timed


def run(folder: Path) -> None:
    """Measure and predict. All workers call it together."""
    dist.init_process_group("gloo")
    carrier = get_transport("torch").bind(get_backend("torch"))
    link = measure.links(carrier, repeats=3).inter
    whole, batch = network(LAYERS * carrier.size), torch.randn(ROWS * MICROBATCHES, WIDTH)
    alone = profile(whole, lambda: whole(batch).square().mean(), 5, 1)
    codecs = {
        label: None if params is None else codec(measure.compressor(params, backend="torch").to_dict())
        for label, params in METHODS.items()
    }
    sent: dict[str, list[int]] = {label: [] for label in METHODS}
    trainings = {label: training(carrier, params, sent[label]) for label, params in METHODS.items()}
    for train in trainings.values():
        train()  # ranks compare their settings
        train()
    found = medians(carrier, trainings, SECONDS)
    rows = []
    for label, priced in codecs.items():
        edge = edge_seconds(4.0 * ROWS * WIDTH, link, priced)
        predicted = step_seconds(alone, carrier.size, MICROBATCHES, edge)
        rows.append({"name": label, "predicted": predicted, "measured": found[label], "sent": min(sent[label][2:])})
    if carrier.rank == 0:
        (folder / "pipeline.json").write_text(json.dumps(rows))
    carrier.exchange("")
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the group


def table(found: Mapping[str, list[dict[str, Any]]]) -> Table:
    """A row per rate and method."""
    shown = Table("rate", "between stages", "predicted", "measured", "x dense", "MB sent by the first", title=EMULATED)
    for rate, rows in found.items():
        for row in rows:
            seconds = [f"{1e3 * row[key]:.0f} ms" for key in ("predicted", "measured")]
            faster = f"{rows[0]['measured'] / row['measured']:.2f}"
            shown.add_row(rate, row["name"], *seconds, faster, f"{row['sent'] / 1e6:.2f}")
    return shown


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Path(sys.argv[1]))
