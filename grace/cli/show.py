"""Shared parts of a record's terminal view and page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from grace.engine.record import Run

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#8a8f98", "#cc79a7", "#56b4e9", "#d55e00")
"""A palette for colour-blind readers (Okabe and Ito); the fourth colour is for time outside GRACE."""


BARS = "▁▂▃▄▅▆▇█"


def spark(values: Sequence[float]) -> str:
    """A sparkline of block characters, from the smallest value to the largest."""
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)


def size(count: float) -> str:
    """A number of bytes in three digits, with decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


def spans(run: Run, name: str) -> list[tuple[int, int, str]]:
    """A tensor's levels over time: (first step, last step, level)."""
    held = [(line.step - line.steps, line.step, line.tensors[place]["level"]) for line, place in run.of_tensor(name)]
    groups = [list(group) for _, group in groupby(held, key=lambda span: span[2])]
    return [(group[0][0], group[-1][1], group[0][2]) for group in groups]
