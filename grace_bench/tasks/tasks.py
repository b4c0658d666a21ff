"""The tasks: data, model, metric and target of each, defined once for both toolkits. Needs NumPy alone."""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np

from grace_bench.tasks import data
from grace_bench.tasks.data import Arrays, Data


@dataclass(frozen=True)
class Scale:
    """The size of a task."""

    steps: int
    every: int
    """Steps between two evaluations."""
    batch: int
    """Examples per worker and step."""
    lr: float
    model: dict[str, int]
    """Arguments of the model's builders, in addition to the sizes of the data."""


@dataclass(frozen=True)
class Task:
    """A task: its data, model, metric and target."""

    name: str
    title: str
    model: str
    """The name of a builder in `torch_models` and `keras_models`; or your own, as "package.{toolkit}_models:builder".

    A builder takes the data's sizes and the scale's ``model``, and returns a model whose outputs are logits.
    """
    metric: str
    higher: bool
    """Whether more of the metric is better."""
    target: float
    """Target quality with synthetic data at the quick scale: about the quality of dense training half-way.

    In other cases `near` derives the target from the quality of the dense run.
    """
    unit: str
    """The unit of throughput; an example has `unit_size` of them."""
    unit_size: int
    binary: bool
    """Whether the model has a single logit for yes or no, instead of one for each class."""
    optimizer: str
    """"sgd" with momentum 0.9, or "adam" with first beta 0.9; with a memory that has its own momentum, 0 instead."""
    quick: Scale
    full: Scale
    made: Callable[[], Data]
    real: tuple[tuple[str, Callable[[Path], Data]], ...] = ()
    """Files that a user's folder may have, with their readers; the first existing one is read."""

    def builder(self, toolkit: str, known: Mapping[str, Any]) -> Any:
        """The model's builder for "torch" or "keras"; ``known``: GRACE's own builders for this toolkit."""
        module, _, name = self.model.format(toolkit=toolkit).partition(":")
        return getattr(importlib.import_module(module), name) if name else known[self.model]

    def data(self, folder: Path | None = None) -> Data:
        """The user's real data, if ``folder`` has them; else synthetic data."""
        for file, read in self.real:
            if folder is not None and (folder / file).exists():
                return read(folder / file)
        return self.made()

    def scale(self, full: bool) -> Scale:
        """The size of the task."""
        return self.full if full else self.quick

    def reached(self, quality: float, target: float) -> bool:
        """Whether a quality is as good as a target."""
        return quality >= target if self.higher else quality <= target

    def near(self, dense: float) -> float:
        """The target if none is fixed: `TOLERANCE` worse than the quality of the dense run."""
        return dense * (1 - TOLERANCE if self.higher else 1 + TOLERANCE)


TOLERANCE = 0.03


def rate(scale: Scale, step: int) -> float:
    """The learning rate of a step: it rises over the first 5 % of the steps, then falls to a tenth along a cosine."""
    warm = max(scale.steps // 20, 1)
    done = min(step / scale.steps, 1.0)
    return scale.lr * min(1.0, (step + 1) / warm) * (0.55 + 0.45 * math.cos(math.pi * done))


def batch(found: Data, size: int, rank: int, step: int, seed: int = 0) -> tuple[Arrays, Any]:
    """The examples of a worker in a step: the same for every method and toolkit."""
    return found.batch(np.random.default_rng((seed, rank, step)), size)


def _ptb(file: Path) -> Data:
    return data.word_files(file, file.with_name("ptb.test.txt"), "Penn Treebank")


def _wikitext(file: Path) -> Data:
    return data.word_files(file, file.with_name(file.name.replace("train", "test")), "WikiText-2")


_TEXTS = (
    ("wikitext-2/wiki.train.tokens", _wikitext),
    ("wikitext-2/wiki.train.raw", _wikitext),
    ("ptb/ptb.train.txt", _ptb),
)
GROUP = "grace.bench.tasks"
"""The entry-point group of third-party tasks."""
TASKS = {
    task.name: task
    for task in (
        Task(
            name="image",
            title="image classification, ResNet",
            model="resnet",
            metric="accuracy",
            higher=True,
            target=0.8,
            unit="images",
            unit_size=1,
            binary=False,
            optimizer="sgd",
            quick=Scale(240, 20, 16, 0.06, {"width": 32, "blocks": 1}),
            full=Scale(12_000, 500, 128, 0.1, {"width": 64, "blocks": 3}),
            made=data.made_images,
            real=(("cifar-10-batches-py", data.cifar10),),
        ),
        Task(
            name="lstm",
            title="language model, LSTM",
            model="lstm",
            metric="perplexity",
            higher=False,
            target=52.0,
            unit="words",
            unit_size=32,
            binary=False,
            optimizer="adam",
            quick=Scale(240, 20, 8, 0.004, {"width": 192, "layers": 1}),
            full=Scale(12_000, 500, 32, 0.002, {"width": 650, "layers": 2}),
            made=data.python_sources,
            real=_TEXTS,
        ),
        Task(
            name="transformer",
            title="language model, Transformer",
            model="transformer",
            metric="perplexity",
            higher=False,
            target=38.0,
            unit="words",
            unit_size=32,
            binary=False,
            optimizer="adam",
            quick=Scale(240, 20, 8, 0.002, {"width": 128, "layers": 2, "heads": 4}),
            full=Scale(12_000, 500, 32, 0.0005, {"width": 512, "layers": 6, "heads": 8}),
            made=data.python_sources,
            real=_TEXTS,
        ),
        Task(
            name="ncf",
            title="recommendation, NCF",
            model="ncf",
            metric="HR@10",
            higher=True,
            target=0.58,
            unit="interactions",
            unit_size=1,
            binary=True,
            optimizer="adam",
            quick=Scale(600, 40, 500, 0.005, {"width": 64}),
            full=Scale(20_000, 1000, 1000, 0.001, {"width": 128}),
            made=data.made_interactions,
            real=(("ml-1m/ratings.dat", data.movielens), ("ml-100k/u.data", data.movielens)),
        ),
        Task(
            name="segmentation",
            title="segmentation, U-Net",
            model="unet",
            metric="IoU",
            higher=True,
            target=0.72,
            unit="images",
            unit_size=1,
            binary=False,
            optimizer="adam",
            quick=Scale(200, 20, 6, 0.003, {"width": 16, "levels": 4}),
            full=Scale(12_000, 500, 32, 0.001, {"width": 64, "levels": 5}),
            made=data.made_masks,
        ),
    )
}


@cache
def tasks() -> dict[str, Task]:
    """All tasks by name: GRACE's, and those that installed packages offer as entry points of "grace.bench.tasks".

    A task that fails to load, or has the name of another task, is omitted with a warning.
    """
    found = dict(TASKS)
    for entry in entry_points(group=GROUP):
        try:
            task = entry.load()
            if not isinstance(task, Task):
                raise TypeError(f"it is no {Task.__qualname__} but {task!r:.60}")
            if task.name in found:
                raise ValueError(f"there is a task {task.name!r} already")
        except Exception as error:  # third-party code: keep going without it
            owner = entry.dist.name if entry.dist else "a package"
            warnings.warn(f"{owner} offers the task {entry.value!r}, but: {error!r}", stacklevel=2)
        else:
            found[task.name] = task
    return found


def task_of(name: str) -> Task:
    """The task of that name; ValueError if there is none."""
    if name not in tasks():
        raise ValueError(
            f"there is no task {name!r}: install the package that offers it, or choose {', '.join(tasks())}"
        )
    return tasks()[name]
