"""Defines the measurements: jobs (a task, a method, a toolkit, a number of workers), and estimates of their time."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grace import local
from grace.bench.plan import Case, parse, words
from grace_bench.tasks.tasks import Scale, task_of

TOOLKITS = ("torch", "keras")
LAUNCHERS = {"torch": "torchrun", "keras": "horovodrun"}
BASELINES = ("dense", "fp16")
"""Exchanges of whole gradients, in float32 and in float16."""
LIMIT = "limit"
"""No exchange: each worker steps alone, and the training is taken to learn as with dense gradients."""
AUTO = "auto"
CHOICE = ("chosen", "trials", "noise", "predicted")
"""The fields of a report that describe the choice of method "auto"."""
LOOPBACK = "loopback"
"""The bandwidth of workers that share a machine without emulated links."""
AS_IS = "as it is"
"""The bandwidth of a cluster, which is not changed."""
QUICK = {
    "torch": (LIMIT, "dense", "fp16", "topk", "efsignsgd:block_size=512", "blockint:bits=8", "powersgd"),
    "keras": (LIMIT, "dense", "fp16", "topk", "powersgd"),  # a launch over Horovod takes twice as long
}
FULL = (
    *(LIMIT, "dense", "fp16", "topk", "topk:compress_ratio=0.001", "randomk", "dgc", "sidco", "threshold", "adacomp"),
    *("efsignsgd:block_size=512", "onebit", "signum", "blockint:bits=8", "blockint:bits=4", "qsgd", "terngrad"),
    *("natural", "fp8", "sketch", "powersgd", "powersgd:compress_rank=1"),
)


@dataclass(frozen=True)
class Job:
    """One launch: a training, and the times of steps at some bandwidths."""

    task: str
    toolkit: str
    workers: int
    method: str
    """A baseline's name, a method such as ``topk:compress_ratio=0.001``, or local training such as
    ``diloco:sync_every=20,compressor=topk``.
    """
    bandwidths: tuple[str, ...]
    full: bool = False
    train: bool = True
    """Whether to train to the end, or only to measure times."""
    shaped: bool = False
    """Whether the launcher sets each bandwidth on the links when the worker asks for it."""
    seed: int = 0
    data: str = ""
    """A folder with real data sets."""
    steps: int = 0
    """Steps of the training; 0: the task's own number."""
    seconds: float = 2.0
    """Seconds of timed steps per bandwidth."""
    most: int = 20
    """Maximum number of timed steps per bandwidth."""
    trained_at: str | None = None
    """The bandwidth during training; None: the links are not limited, since the method learns the same at any."""
    rivals: tuple[str, ...] = ()
    """Methods whose steps are timed in turn with the training's, in the same processes."""

    @property
    def params(self) -> dict[str, Any] | str:
        """The trainer's argument."""
        return params_of(self.method)

    @property
    def sync_every(self) -> int | None:
        """Steps between two exchanges in local training; None: gradients are exchanged in every step."""
        params = self.params
        return params["local"]["sync_every"] if isinstance(params, dict) and "local" in params else None

    @property
    def sized(self) -> Scale:
        """The size of its task."""
        scale = task_of(self.task).scale(self.full)
        if not self.steps:
            return scale
        return replace(scale, steps=self.steps, every=min(scale.every, max(self.steps // 4, 1)))

    @property
    def head(self) -> dict[str, Any]:
        """The key of its training: equal keys are the same measurement."""
        return self.head_of(self.method)

    def head_of(self, method: str) -> dict[str, Any]:
        """The key of its own method's training, or of a rival's."""
        keys = ("task", "toolkit", "workers", "method", "seed")
        found = {**{key: getattr(self, key) for key in keys}, "method": method}
        found |= {"scale": "full" if self.full else "quick", "steps": self.sized.steps, "real": bool(self.data)}
        return {**found, "trained_at": self.trained_at if method == self.method else None}

    @property
    def times(self) -> list[tuple[str, str]]:
        """The methods whose steps it times, and at which bandwidth."""
        mine = [(self.method, bandwidth) for bandwidth in self.bandwidths]
        return mine + [(rival, self.trained_at) for rival in self.rivals if self.trained_at]

    def write(self, file: Path) -> None:
        """Write the job as JSON."""
        file.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, file: Path) -> Job:
        """Read a job that `write` wrote."""
        found = json.loads(file.read_text())
        return cls(**{**found, **{key: tuple(found[key]) for key in ("bandwidths", "rivals")}})

    def __str__(self) -> str:
        at = f" at {self.trained_at}" if self.trained_at else ""
        return f"{self.task} {self.toolkit} x{self.workers} {self.method}{at}"


def jobs(
    tasks: Sequence[str],
    methods: Mapping[str, Sequence[str]],
    toolkits: Sequence[str],
    workers: Sequence[int],
    bandwidths: tuple[str, ...],
    **common: Any,
) -> list[Job]:
    """All combinations as jobs; ``methods``: by toolkit. Method "auto" measures the links, so it trains at each
    bandwidth, and the steps of the other methods are timed in turn with its own.

    A task's methods run one after another, baselines first, since a shared machine's speed drifts.
    """
    found = []
    for count, toolkit, task in itertools.product(workers, toolkits, tasks):
        given = sorted(methods[toolkit], key=lambda method: order(method)[0])
        rivals = tuple(method for method in given if _in_turn(method)) if any(map(_is_auto, given)) else ()
        for method in given:
            rates = () if method in rivals else bandwidths
            job = Job(task, toolkit, count, method, rates, train=method != LIMIT, **common)
            if _is_auto(method):
                found += [replace(job, bandwidths=(rate,), trained_at=rate, rivals=rivals) for rate in rates]
            elif job.train or rates:
                found.append(job)
    return found


def _in_turn(method: str) -> bool:
    return not _is_auto(method) and method.partition(":")[0] not in local.PRESETS


def order(method: str) -> tuple[int, str]:
    """Sort key of methods: the limit and the baselines first."""
    first = (LIMIT, *BASELINES)
    return (first.index(method) if method in first else len(first)), method


def known(method: str) -> str:
    """The method's label in tables. Raises ValueError, naming the remedy, for an unknown one."""
    return method if method in (LIMIT, *BASELINES) else _parsed(method).label


def params_of(method: str) -> dict[str, Any] | str:
    """The trainer's argument: keys of `grace_from_params` or `grace.local.from_params`, or a baseline's name."""
    return method if method in (LIMIT, *BASELINES) else _parsed(method).params


def level(method: str) -> dict[str, Any]:
    """The method as a policy's level, such as a candidate of "auto"."""
    return {"compressor": "none"} if method == "dense" else _parsed(method).params


def _parsed(method: str) -> Case:
    # Like `parse`, but also accepts local training, and "auto" with settings, which are not compressors.
    if method.partition(":")[0] in local.PRESETS:
        return _local(method)
    case = parse(method)
    if not _is_auto(method):
        return case
    return replace(case, label=method, params={**case.params, "compressor": AUTO})


def _is_auto(method: str) -> bool:
    return method.partition(":")[0] == AUTO


def _local(method: str) -> Case:
    # Parses local training: a preset with its settings, and the parameters of its Grace, which is dense by default.
    name, rest = words(method)
    known = (*(field.name for field in dataclasses.fields(local.Settings)), *local.PLAIN)
    given = {key: rest.pop(key) for key in known if key in rest}
    settings = {**local.PRESETS[name], **given}
    if "sync_every" not in settings:
        raise ValueError(f"{method!r}: say how often workers exchange, such as {name}:sync_every=20,compressor=topk")
    params = {"local": {"preset": name, **settings}, **rest}
    try:
        local.from_params(params, "local")
    except (TypeError, ValueError) as error:
        raise ValueError(f"{method!r}: {error}") from error
    return Case(method, params)


# Seconds of a launch, and of a training including evaluations: measured with 2 workers on 2 cores.
START = {"torch": 7.0, "keras": 16.0}
TRAINING = {
    "torch": {"image": 9.0, "lstm": 11.0, "transformer": 14.0, "ncf": 13.0, "segmentation": 10.0},
    "keras": {"image": 14.0, "lstm": 12.0, "transformer": 21.0, "ncf": 15.0, "segmentation": 21.0},
}


def estimate(found: Iterable[Job]) -> float:
    """Expected seconds of jobs, from the times above; more if workers outnumber cores."""
    return sum(map(seconds_of, found))


def seconds_of(job: Job) -> float:
    """Expected seconds of one job. A training over limited links is assumed to take three times as long, and the steps
    of a rival half as long as the training without limits.
    """
    crowd = max(1.0, job.workers / (os.cpu_count() or 1))
    scale, quick, known = job.sized, task_of(job.task).quick, TRAINING[job.toolkit]
    usual = known.get(job.task, max(known.values())) * scale.steps / quick.steps
    trained = usual * job.train * (3 if job.trained_at else 1) + usual * len(job.rivals) / 2
    return START[job.toolkit] * crowd + trained * crowd + len(job.bandwidths) * (job.seconds + 1) * crowd
