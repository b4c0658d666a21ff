"""Shared parts of the Pufferfish examples: forms of a model, command line and table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import digits

from grace import Grace

WIDTHS = (64, 1024, 1024, 1024, 10)
"""Width of the examples' network, so that arithmetic and gradients take most of a step: 2,176,010 parameters."""

Form = tuple["dict[str, Any] | None", int]
"""Settings of `grace.factorize.plan` (None: dense) and epochs of full rank."""

FORMS: dict[str, Callable[[argparse.Namespace], Form]] = {
    "dense": lambda options: (None, 0),
    "low rank": lambda options: ({"rank_ratio": options.rank_ratio, "keep_first": 0}, 0),
    "hybrid": lambda options: ({"rank_ratio": options.rank_ratio, "keep_first": 1}, options.warm_up),
}


def arguments(description: str) -> argparse.ArgumentParser:
    parser = digits.arguments(description, one_method=False)
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    parser.add_argument("--rank-ratio", type=float, default=0.125)
    parser.add_argument("--warm-up", type=int, default=4, help="epochs at full rank, of the hybrid form")
    parser.add_argument("--method", default="none", help="compressor of the gradients, also of the factors'")
    parser.add_argument("--params", type=json.loads, default={}, metavar="JSON", help="further keys, as its ratio")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there")
    return parser


def outcome(form: str, parameters: int, grc: Grace, seconds: float, accuracy: float) -> dict[str, Any]:
    """A row of the table. Bytes and seconds are of the median epoch after the switch, if there was one."""
    report = grc.report()
    gradients = sum(tensor.bytes_sent for tensor in report.tensors)  # without 4 bytes of flags for present gradients
    return {
        "form": form,
        "parameters": parameters,
        "bytes_per_step": gradients / report.steps,
        "seconds_per_step": seconds,
        "accuracy": accuracy,
    }


def show(toolkit: str, rows: list[dict[str, Any]], rank: int, workers: int, path: Path | None) -> None:
    """On worker 0, print the table and write it."""
    if rank != 0:
        return
    print(f"{toolkit}, {workers} worker{'s' if workers > 1 else ''}")
    print(f"{'':10}  {'parameters':>10}  {'bytes/step':>10}  {'ms/step':>8}  {'accuracy':>8}")
    for row in rows:
        numbers = f"{row['parameters']:10,}  {row['bytes_per_step']:10,.0f}  {row['seconds_per_step'] * 1e3:8.2f}"
        print(f"{row['form']:10}  {numbers}  {row['accuracy']:8.1%}")
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"toolkit": toolkit, "workers": workers, "rows": rows}, indent=1) + "\n")
