"""Trackers: send the numbers of a training to TensorBoard, Weights & Biases, MLflow, or anywhere else.

    tracker = grace.trackers.tensorboard("runs/topk")
    params = {"compressor": "topk", "record": "run.jsonl", "tracker": tracker}

A tracker is a function of a step and a dictionary of numbers. Worker 0 calls it with every line of the record: the
metrics given to `Grace.record`, and the numbers of `grace.engine.record.Run.history`, whose totals count from the start
of this process. If it raises an exception, a warning says so and the training continues. The tracker's package is
imported at the first call.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

__all__ = ["Tracker", "mlflow", "tensorboard", "wandb"]

Tracker = Callable[[int, Mapping[str, float]], None]
PREFIX = "grace/"


def tensorboard(folder: str | os.PathLike[str]) -> Tracker:
    """Write event files to ``folder`` with PyTorch's ``SummaryWriter``, under "grace/" and each number's name.

    Raises ModuleNotFoundError if PyTorch or TensorBoard is not installed.
    """
    _require("torch", "tensorboard")
    return partial(_tensorboard, os.fspath(folder))


def wandb() -> Tracker:
    """Log to the active run of Weights & Biases, under "grace/" and each number's name, over the axis "grace/step".

    Call ``wandb.init`` on worker 0 before the first line. Every line is one step of W&B's own count, and W&B drops what
    a script logs with a ``step=`` below that count: give the script's metrics an axis by ``define_metric`` instead.
    Raises ModuleNotFoundError if wandb is not installed.
    """
    _require("wandb")
    return _wandb


def mlflow() -> Tracker:
    """Log to MLflow's active run, under "grace/" and each number's name; without a run MLflow starts one.

    Raises ModuleNotFoundError if MLflow is not installed.
    """
    _require("mlflow")
    return _mlflow


def _require(*packages: str) -> None:
    # Check on all workers, although only worker 0 will import the package, so that all fail together.
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(f"this tracker needs {package}: pip install {package}", name=package)


def _named(numbers: Mapping[str, float]) -> dict[str, float]:
    return {f"{PREFIX}{name}": value for name, value in numbers.items()}


def _tensorboard(folder: str, step: int, numbers: Mapping[str, float]) -> None:
    writer = _writer(folder)
    for name, value in _named(numbers).items():
        writer.add_scalar(name, value, step)
    writer.flush()


@cache
def _writer(folder: str) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder)


def _wandb(step: int, numbers: Mapping[str, float]) -> None:
    import wandb

    if wandb.run is None:
        raise RuntimeError("there is no active run: call wandb.init() on worker 0")
    _set_axis(wandb.run)
    # Do not pass step=: it would raise W&B's own count to Grace's, and W&B drops what is logged below its count.
    wandb.run.log({f"{PREFIX}step": step, **_named(numbers)})


@cache
def _set_axis(run: Any) -> None:
    run.define_metric(f"{PREFIX}*", step_metric=f"{PREFIX}step")


def _mlflow(step: int, numbers: Mapping[str, float]) -> None:
    import mlflow

    mlflow.log_metrics(_named(numbers), step=step)
