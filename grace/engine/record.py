"""The record of a training run: `report()` data as JSON lines, at intervals. `grace report` shows it."""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grace.engine.report import Report

FORMAT = 1
# names of the facts about a tensor, which are written again when they change
FACTS = ("name", "shape", "method", "reason", "strategy", "level")
BEGIN = ("world_size", "toolkit", "step", "every", "graph")  # required keys of the first line
START: dict[str, Any] = {
    "seconds": 0.0,
    "bytes_sent": 0,
    "bytes_received": 0,
    "bytes_dense": 0,
    "ratio": None,
    "ms_per_step": None,
    "residual": None,
}
"""The numbers of `Run.history` before the first line."""
GROWN = 1.5  # a residual that has grown by this factor since the middle of a record causes a warning


class Recorder:
    """Writes one worker's record: a first line of facts, then the changes since the previous line.

    Each line opens the file and appends to it, so others may read it at any time. If a write fails during the training,
    a warning says so and the training goes on without it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        every: int,
        tracker: Callable[[int, Mapping[str, float]], None] | None = None,
    ):
        folder = Path(path).resolve().parent
        if not folder.is_dir():
            raise FileNotFoundError(f"record={os.fspath(path)!r}: there is no folder {str(folder)!r}: make it first")
        self._path, self._every, self._tracker = path, every, tracker
        self._numbers = START
        self._passed = 0  # steps since the last line
        self._last: Report | None = None
        self._step, self._clock = 0, 0.0
        self._facts: list[dict[str, Any]] = []

    @property
    def begun(self) -> bool:
        """Whether `begin` was called."""
        return self._last is not None

    def passed(self) -> bool:
        """Count a step; True if a line is due."""
        self._passed += 1
        return self._passed >= self._every

    def begin(self, report: Report, step: int, about: Mapping[str, Any]) -> None:
        """Write the first line: constant facts, including ``about``. Call again after counts or steps were reset."""
        self._facts, self._numbers = [], START
        head = {"format": FORMAT, "when": time.time(), "step": step, "every": self._every, **about}
        self._append([{"kind": "begin", **head, "world_size": report.world_size}, *self._news(report)])
        self._note(report, step)

    def write(self, report: Report, step: int, metrics: Mapping[str, float | None] | None = None) -> None:
        """Write a line: the changes since the last one, if there was a step, and ``metrics``, if there are any."""
        last = self._last
        if last is None or (step == self._step and not metrics):
            return
        rows: list[dict[str, Any]] = []
        if step != self._step:
            line = self._line(last, report, step)
            rows = [*self._news(report), {"kind": "steps", **line}]
            self._numbers = advanced(self._numbers, Line(tensors=self._facts, **line))
        if metrics:
            rows.append({"kind": "metrics", "step": step, "values": dict(metrics)})
        self._append(rows)
        self._track(step, {**self._numbers, **(metrics or {})})
        if step != self._step:
            self._note(report, step)

    def _track(self, step: int, numbers: Mapping[str, Any]) -> None:
        if self._tracker is not None:
            try:
                self._tracker(step, {name: value for name, value in numbers.items() if value is not None})
            except Exception as error:  # any error of a tracker, such as a lost connection
                warnings.warn(f"the tracker failed at step {step}: {error!r}. The training goes on", stacklevel=2)

    def _line(self, last: Report, report: Report, step: int) -> dict[str, Any]:
        before = {tensor.name: tensor for tensor in last.tensors}
        sent, dense = [], []
        for tensor in report.tensors:
            old = before.get(tensor.name)
            sent.append(tensor.bytes_sent - (old.bytes_sent if old else 0))
            dense.append(tensor.bytes_dense - (old.bytes_dense if old else 0))
        return {
            "step": step,
            "steps": step - self._step,
            "seconds": round(time.perf_counter() - self._clock, 6),
            "bytes_sent": report.bytes_sent - last.bytes_sent,
            "bytes_received": report.bytes_received - last.bytes_received,
            "bytes_dense": report.bytes_dense - last.bytes_dense,
            "times": {name: round(total - last.times.get(name, 0.0), 6) for name, total in report.times.items()},
            "skipped": report.skipped - last.skipped,
            "sent": sent,
            "dense": dense,
            "residual": [_short(tensor.residual_norm) for tensor in report.tensors],
        }

    def _note(self, report: Report, step: int) -> None:
        self._last, self._step, self._passed = report, step, 0
        self._clock = time.perf_counter()

    def _news(self, report: Report) -> list[dict[str, Any]]:
        facts = [{key: getattr(tensor, key) for key in FACTS} for tensor in report.tensors]
        if facts == self._facts:
            return []
        self._facts = facts
        return [{"kind": "tensors", "method": report.method, "tensors": facts}]

    def _append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            warnings.warn(
                f"the record cannot be written, and has a gap here: {error}. The training goes on", stacklevel=2
            )


def checked(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """Metrics as plain numbers; those that are not finite are None. Raises as `Grace.record`."""
    found: dict[str, float | None] = {}
    for name, value in metrics.items():
        if name in ("step", *START):
            raise ValueError(f"record({name}=...): the record has a {name!r} of its own: use another name")
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise TypeError(f"record({name}={value!r:.60}): a metric is one number") from None
        found[name] = number if math.isfinite(number) else None
    return found


def _short(norm: float | None) -> float | None:
    return None if norm is None or not math.isfinite(norm) else float(f"{norm:.6g}")


@dataclass(frozen=True)
class Line:
    """A line of a record: facts about consecutive steps, and the tensors as they were then."""

    step: int
    """The number of all steps up to this line."""
    steps: int
    seconds: float
    """Wall time of these steps, including everything outside GRACE."""
    bytes_sent: int
    bytes_received: int
    bytes_dense: int
    times: dict[str, float]
    """Seconds in these steps, with the keys of `grace.engine.report.Report.times`."""
    skipped: int
    sent: list[int]
    """Bytes sent, in the order of ``tensors``; ``dense``: bytes of the gradients; ``residual``: norms at the end."""
    dense: list[int]
    residual: list[float | None]
    tensors: list[dict[str, Any]]
    """Name, shape, method, reason, strategy and level of each tensor."""

    @property
    def ratio(self) -> float:
        """bytes_dense / bytes_sent."""
        return self.bytes_dense / self.bytes_sent if self.bytes_sent else 1.0

    @property
    def names(self) -> list[str]:
        """Names of the tensors."""
        return [tensor["name"] for tensor in self.tensors]

    @property
    def norm(self) -> float | None:
        """Norm of all finite residuals together; None if there are none."""
        known = [norm for norm in self.residual if norm is not None]
        return math.hypot(*known) if known else None


def advanced(numbers: Mapping[str, Any], line: Line) -> dict[str, Any]:
    """The numbers after a line, given the ``numbers`` before it: new totals, and the values of the line's own steps."""
    names = ("seconds", "bytes_sent", "bytes_received", "bytes_dense")
    totals = {name: round(numbers[name] + getattr(line, name), 6) for name in names}
    return {**totals, "ratio": line.ratio, "ms_per_step": line.seconds / line.steps * 1e3, "residual": line.norm}


@dataclass(frozen=True)
class Metrics:
    """The metrics given to `Grace.record` at a step; None: not finite."""

    step: int
    values: dict[str, float | None]


@dataclass(frozen=True)
class Run:
    """A record read from a file."""

    about: dict[str, Any]
    """The facts of the last `begin` line: start time, method, number of workers, toolkit ..."""
    tensors: list[dict[str, Any]]
    """The tensors at the end."""
    lines: list[Line]
    metrics: list[Metrics] = field(default_factory=list)

    def history(self) -> list[dict[str, Any]]:
        """A dictionary for each recorded step: the totals of seconds and bytes up to it; the last line's ratio,
        milliseconds per step and norm of residuals; the metrics, if there are any at this step. None: unknown.
        """
        numbers, found = START, list[dict[str, Any]]()
        rows: list[Line | Metrics] = [*self.lines, *self.metrics]
        for each in sorted(rows, key=lambda row: (row.step, isinstance(row, Metrics))):
            if isinstance(each, Line):
                numbers = advanced(numbers, each)
            if not found or found[-1]["step"] != each.step:
                found.append({"step": each.step, **numbers})
            if isinstance(each, Metrics):
                found[-1].update(each.values)
        return found

    def total(self, key: str) -> Any:
        """The sum of a field over all lines."""
        return sum(getattr(line, key) for line in self.lines)

    @property
    def ratio(self) -> float:
        """bytes_dense / bytes_sent of the whole record."""
        return self.total("bytes_dense") / self.total("bytes_sent") if self.total("bytes_sent") else 1.0

    @property
    def times(self) -> dict[str, float]:
        """Total seconds: GRACE's own, and "elsewhere" for all other time (computation, data). Empty if unknown."""
        names = self.lines[-1].times if self.lines else {}
        own = {name: sum(line.times.get(name, 0.0) for line in self.lines) for name in names}
        return {**own, "elsewhere": max(self.total("seconds") - sum(own.values()), 0.0)} if own else {}

    def thinned(self, most: int) -> list[Line]:
        """The lines of this record, joined with their neighbours if there are more than about ``most``."""
        width = max(-(-len(self.lines) // most), 1)
        found: list[Line] = []
        for number, line in enumerate(self.lines):
            if number % width and line.names == found[-1].names:
                found[-1] = _joined(found[-1], line)
            else:
                found.append(line)
        return found

    def of_tensor(self, name: str) -> list[tuple[Line, int]]:
        """The lines that include a tensor, with its index in each."""
        return [(line, line.names.index(name)) for line in self.lines if name in line.names]


def _joined(one: Line, two: Line) -> Line:
    return Line(
        step=two.step,
        steps=one.steps + two.steps,
        seconds=one.seconds + two.seconds,
        bytes_sent=one.bytes_sent + two.bytes_sent,
        bytes_received=one.bytes_received + two.bytes_received,
        bytes_dense=one.bytes_dense + two.bytes_dense,
        times={name: seconds + one.times.get(name, 0.0) for name, seconds in two.times.items()},
        skipped=one.skipped + two.skipped,
        sent=[a + b for a, b in zip(one.sent, two.sent, strict=True)],
        dense=[a + b for a, b in zip(one.dense, two.dense, strict=True)],
        residual=two.residual,
        tensors=two.tensors,
    )


def read(path: str | os.PathLike[str]) -> Run:
    """Read a record, even while it is being written.

    If the training restarted at an earlier step, as from a checkpoint, the new lines replace the old ones from there
    on. Raises ValueError, with the line number, for an invalid file.
    """
    about: dict[str, Any] = {}
    tensors: list[dict[str, Any]] = []
    lines: list[Line] = []
    metrics: list[Metrics] = []
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{os.fspath(path)} is no record: it is not text in UTF-8") from None
    for number, row in enumerate(text.split("\n")[:-1], 1):  # an unfinished line is still being written
        try:
            found = json.loads(row)
            kind = found.pop("kind")
            if kind == "begin":
                if found["format"] != FORMAT:
                    raise ValueError(f"its format is {found['format']}, and this version of grace reads {FORMAT}")
                about = {key: found[key] for key in BEGIN} | found
                lines = [line for line in lines if line.step <= found["step"]]
                metrics = [each for each in metrics if each.step <= found["step"] > 0]
            elif kind == "tensors":
                tensors, about = found["tensors"], {**about, "method": found["method"]}
            elif kind == "steps":
                lines.append(Line(tensors=tensors, **found))
            elif kind == "metrics":
                values = {name: None if value is None else float(value) for name, value in found["values"].items()}
                metrics.append(Metrics(int(found["step"]), values))
            else:
                raise ValueError(f"its kind is {kind!r}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{os.fspath(path)}, line {number}, is not part of a record: {_plain(error)}") from None
    if "method" not in about:
        what = "no record" if text else "no record: it is empty"
        example = "grace_from_params({..., 'record': 'run.jsonl'})"
        raise ValueError(f"{os.fspath(path)} is {what}: train with {example}")
    return Run(about, tensors, lines, metrics)


def _plain(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON ({error})"
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def warnings_of(run: Run) -> list[str]:
    """Warnings about a run, one sentence each."""
    found = []
    if not run.lines:
        graph = " Inside a graph, use grace.tensorflow.RecordCallback or grc.record()." * run.about["graph"]
        return [f"No steps are recorded yet: a line is written every {run.about['every']} steps.{graph}"]
    if skipped := run.total("skipped"):
        found.append(f"{skipped} times a tensor's mean was not finite, so that its state rested.")
    if run.ratio < 1:
        found.append("More bytes leave than dense gradients have: use another method, or none.")
    found += _growing(run)
    found += _dense(run)
    notes: dict[str, list[str]] = {}
    for tensor in run.tensors:
        if tensor["reason"] and tensor["method"] != "dense":
            notes.setdefault(tensor["reason"], []).append(tensor["name"])
    found += [f"{_listed(names)}: {reason}." for reason, names in notes.items()]
    if run.about.get("kernels") is False:
        found.append("Native kernels are not in use, so compression is slower: python -m grace.kernels.build.")
    return found


def _growing(run: Run) -> list[str]:
    # A residual levels off if its method sends enough; one that still grows in the second half may never do so.
    grown = []
    for tensor in run.tensors:
        held = [(line.residual[at], line.tensors[at]["level"]) for line, at in run.of_tensor(tensor["name"])]
        known = [norm for norm, level in held if norm is not None and level == tensor["level"]]
        half = len(known) // 2
        if half < 4:
            continue
        middle, late, last = known[half], max(known[half : -len(known) // 4]), known[-1]
        if middle > 0 and last > GROWN * middle and last >= late:
            grown.append((last / middle, tensor["name"]))
    if not grown:
        return []
    grown.sort(reverse=True)
    names, most = _listed([name for _, name in grown]), grown[0][0]
    remedy = "Send more of each gradient, lower the learning rate, or use memory 'ef21'."
    return [f"Residuals are growing: {names} (up to {most:.1f} times in the second half of the record). {remedy}"]


def _dense(run: Run) -> list[str]:
    reasons: dict[str, list[tuple[str, int]]] = {}
    for tensor, sent in zip(run.tensors, run.lines[-1].sent, strict=False):
        if tensor["method"] == "dense" and tensor["reason"]:  # dense, but not by a policy's choice
            reasons.setdefault(tensor["reason"], []).append((tensor["name"], sent))
    total = max(run.lines[-1].bytes_sent, 1)
    return [
        f"{_listed([name for name, _ in group])} {'go' if len(group) > 1 else 'goes'} dense, "
        f"{sum(sent for _, sent in group) / total:.0%} of the bytes sent: {reason}."
        for reason, group in reasons.items()
    ]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"
