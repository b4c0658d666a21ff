"""Reads a trace of PyTorch's profiler: a device's kernels, launches, busy time, and overlap of streams."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""The categories of a trace's events that occupy a device."""


class Work(NamedTuple):
    """Something that a device did. Times in microseconds."""

    name: str
    kernel: bool
    stream: int
    begin: float
    end: float


def traced(steps: Callable[[], None]) -> list[Work]:
    """The work of the CUDA device during a call of ``steps``."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        steps()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        return work_of(json.loads(file.read_text()))


def work_of(trace: Mapping[str, Any]) -> list[Work]:
    """A device's work in a trace in Chrome's format, by beginning."""
    events = [each for each in trace["traceEvents"] if each.get("cat") in ON_DEVICE and "dur" in each]
    found = [
        Work(each["name"], each["cat"] == "kernel", each["args"]["stream"], each["ts"], each["ts"] + each["dur"])
        for each in events
    ]
    return sorted(found, key=lambda each: each.begin)


def busy(work: Iterable[Work]) -> list[tuple[float, float]]:
    """The times at which something runs, as disjoint intervals in order."""
    found: list[tuple[float, float]] = []
    for each in sorted(work, key=lambda each: each.begin):
        if found and each.begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], each.end)
        else:
            found.append((each.begin, each.end))
    return found


def length(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of disjoint intervals."""
    return sum(end - begin for begin, end in intervals)


def beside(work: list[Work]) -> tuple[float, float]:
    """Microseconds in which streams other than the busiest one run: in total, and while the busiest one also runs."""
    streams = {each.stream for each in work}
    of = {stream: busy(each for each in work if each.stream == stream) for stream in streams}
    if not of:
        return 0.0, 0.0
    main = max(sorted(of), key=lambda stream: length(of[stream]))
    others = busy(each for each in work if each.stream != main)
    return length(others), sum(_shared(one, of[main]) for one in others)


def _shared(one: tuple[float, float], intervals: Iterable[tuple[float, float]]) -> float:
    return sum(max(0.0, min(one[1], end) - max(one[0], begin)) for begin, end in intervals)
