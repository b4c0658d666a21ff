"""Timing of steps: totals for the report and, on request, the last steps as a Chrome trace."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import NamedTuple

KINDS = ("compress", "wait", "decompress")


class Event(NamedTuple):
    """A timed event, in seconds of `time.perf_counter`."""

    name: str
    kind: str
    began: float
    ended: float


class Trace:
    """Timed events. Kinds: "backward", "compress", "communicate", "wait", "decompress", and names of pool threads.

    ``steps``: number of latest steps whose events are stored; 0: totals only, so that memory does not grow.
    """

    def __init__(self, steps: int = 0) -> None:
        self.totals: dict[str, float] = dict.fromkeys(KINDS, 0.0)
        self.steps = steps
        self._past: deque[list[Event]] = deque(maxlen=steps)
        self._events: list[Event] = []  # events of the current step

    def add(self, kind: str, name: str, began: float, ended: float | None = None) -> None:
        """Record an event from ``began`` to now, or to ``ended``."""
        ended = time.perf_counter() if ended is None else ended
        if kind in self.totals:
            self.totals[kind] += ended - began
        if self.steps:
            self._events.append(Event(name, kind, began, ended))

    def end_step(self) -> None:
        """End a step: later events belong to the next one."""
        if self.steps:
            self._past.append(self._events)
            self._events = []

    @contextmanager
    def span(self, kind: str, name: str) -> Iterator[None]:
        """Time a block."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(kind, name, began)

    def save(self, path: str | os.PathLike[str], rank: int) -> None:
        """Write the events of the last steps in Chrome's trace format, for chrome://tracing or ui.perfetto.dev.

        Each worker is a process with the tracks "backward" and "worker" (compress, wait, decompress), one track per
        pool thread, and one for the messages of each bucket, which overlap with the others. ValueError if no events are
        stored.
        """
        if not self.steps:
            raise ValueError(
                "no trace was kept: give the number of steps to keep, as grace_from_params({..., 'trace': 20})"
            )
        rows = []
        for event in [*chain.from_iterable(self._past), *self._events]:
            track = "worker" if event.kind in KINDS else event.kind
            if event.kind == "communicate":
                track = f"messages of {event.name.rsplit('.', 1)[0]}"
            rows.append((track, event))
        write(path, rows, f"worker {rank}", rank, ("backward", "worker"))


def write(
    path: str | os.PathLike[str],
    rows: Sequence[tuple[str, Event]],
    process: str,
    number: int = 0,
    tracks: Iterable[str] = (),
) -> None:
    """Write events, each with its track, in Chrome's trace format, as one process.

    ``tracks``: the first tracks, even if they have no events.
    """
    first = min((event.began for _, event in rows), default=0.0)
    numbers = {track: place for place, track in enumerate(tracks)}
    found: list[dict[str, object]] = [
        {
            "name": f"{event.kind} {event.name}".strip(),
            "cat": event.kind,
            "ph": "X",
            "ts": (event.began - first) * 1e6,
            "dur": (event.ended - event.began) * 1e6,
            "pid": number,
            "tid": numbers.setdefault(track, len(numbers)),
        }
        for track, event in rows
    ]
    names = [_meta("process_name", number, 0, process)]
    names += [_meta("thread_name", number, place, track) for track, place in numbers.items()]
    Path(path).write_text(json.dumps({"traceEvents": [*names, *found], "displayTimeUnit": "ms"}))


def _meta(kind: str, rank: int, track: int, name: str) -> dict[str, object]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": track, "args": {"name": name}}
