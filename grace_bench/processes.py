"""Measurements in several processes of this machine, which stop together."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NO_TIME = "no time was left"
"""Begins the message of processes that stop because their time is over."""

Measurement = tuple[str, Callable[[], dict[str, Any]]]
"""A label for errors, and a function that all processes call; the row that it returns on rank 0 counts."""


def measure(
    measurements: Callable[..., Iterator[Measurement]], size: int, seconds: float, network: str, device: str, *args: Any
) -> tuple[list[Any], str]:
    """Make the measurements of ``measurements(device, *args)`` in a process group of ``size``; see `in_processes`."""
    return in_processes(_work, size, seconds, size, network, device, measurements, args)


def in_processes(target: Callable[..., None], size: int, seconds: float, *args: Any) -> tuple[list[Any], str]:
    """Run ``target(rank, folder, end, *args)`` in ``size`` processes, for ``seconds`` and 30 more at most.

    Returns the rows that they wrote to rows.jsonl in the folder, and the reason of a failure or "": error.txt if a
    process wrote it, else the exit codes.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        ends = time.time() + seconds
        workers = [context.Process(target=target, args=(rank, folder, ends, *args)) for rank in range(size)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(max(1.0, ends + 30 - time.time()))
        codes = [worker.exitcode for worker in workers]
        for worker in workers:
            if worker.is_alive():
                worker.kill()
                worker.join()
        written, failed = Path(folder, "rows.jsonl"), Path(folder, "error.txt")
        rows = [json.loads(line) for line in written.read_text().splitlines()] if written.exists() else []
        error = failed.read_text() if failed.exists() else ""
    if codes == [0] * size:
        return rows, ""
    if error:
        return rows, error
    return rows, f"the processes ended with {codes}" if any(codes) else NO_TIME


def _work(rank: int, folder: str, ends: float, *args: Any) -> None:
    faulthandler.enable()
    try:
        _measure(rank, folder, ends, *args)
    except Exception as error:
        Path(folder, "error.txt").write_text(f"rank {rank}: {type(error).__name__}: {error}"[:500])
        os._exit(1)  # do not wait for the other processes


def _measure(
    rank: int, folder: str, ends: float, size: int, network: str, device: str, measurements: Any, args: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    store = dist.FileStore(f"{folder}/store", size)
    backends = network if device == "cpu" else f"cpu:gloo,{device}:{network}"
    dist.init_process_group(backends, store=store, rank=rank, world_size=size)
    for label, measurement in measurements(device, *args):
        late = torch.tensor([float(time.time() > ends)])
        dist.all_reduce(late)
        if late.item():  # all processes stop together
            raise TimeoutError(f"{NO_TIME} for {label}")
        try:
            row = measurement()
        except Exception as error:
            raise RuntimeError(f"{label}: {type(error).__name__}: {error}") from error
        if rank == 0:
            with Path(folder, "rows.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
    dist.destroy_process_group()
