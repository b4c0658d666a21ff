"""Write grace/planner/measured.json from benchmarks/results: python docs/generate_measured.py; --check compares."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from grace.bench.plan import parse
from grace.planner.codecs import Codec, Curve, Speed, codec
from grace_bench.tasks.tasks import TOLERANCE

from generate_choose import STORE, load, loss

FILE = Path(__file__).parents[1] / "grace" / "planner" / "measured.json"
GPU = STORE / "gpu-nvidia-h100-80gb-hbm3.json"
TIMED = {"fp16": "fp16", "blockint:bits=4": "blockint", "powersgd:compress_rank=4": "powersgd"}
"""By method, its label among the times of GPU."""
COPIES = {"eden:bits=3,block_size=64": (3.1, 5.8)}
"""Encode, and decode of four payloads, in copies on the device, from the table "One H100" of docs/benchmarks.md: in GPU
the decoding of eden includes the compilation of its kernel."""
PIECES = 4


def quality() -> tuple[list[str], list[dict[str, Any]]]:
    """The tasks, and by method those in which all trainings kept the quality of dense gradients, and the others."""
    rows = [row for run in load() for row in run["results"]]
    cell = ("task", "toolkit", "workers", "bandwidth")
    dense = {tuple(row[key] for key in cell): row for row in rows if row["method"] == "dense"}
    worst: dict[str, dict[str, float]] = {}
    for row in rows:
        found = worst.setdefault(row["method"], {})
        each = loss(row, dense[tuple(row[key] for key in cell)])
        found[row["task"]] = max(each, found.get(row["task"], each))
    made = []
    for method, losses in worst.items():
        if method not in ("dense", "auto"):
            lost = {task: round(each, 4) for task, each in losses.items() if each > TOLERANCE}
            finite = {task: None if each == float("inf") else each for task, each in lost.items()}
            params = {"compressor": "fp16"} if method == "fp16" else parse(method).params
            made.append({"params": params, "kept": sorted(losses.keys() - lost.keys()), "lost": finite})
    return sorted({row["task"] for row in rows}), made


def gpu(here: list[Codec]) -> list[dict[str, Any]]:
    """Costs on the GPU: bytes as measured on the CPU, seconds in proportion to elements."""
    data = json.loads(GPU.read_text())
    size = data["times"]["elements"]
    records = {record["label"]: record for record in data["times"]["records"]}
    seconds = {}
    for method, name in TIMED.items():
        us = {part: records[name][part]["us"] for part in ("encode", "commit", "decode")}
        seconds[method] = ((us["encode"] + us["commit"]) * 1e-6, us["decode"] * 1e-6)
    copy = records["fp16"]["memcpy"]["us"] * 1e-6
    seconds |= {method: (encode * copy, decode * copy) for method, (encode, decode) in COPIES.items()}
    made = []
    for method, (encode, decode) in seconds.items():
        params = parse(method).params
        wire = next(each.wire for each in here if each.params == params)
        values = (encode, decode / PIECES, decode / PIECES)
        curves = [Curve((1.0, float(size)), (value / size, value)) for value in values]
        source = f"measured on an {data['device']} at {size:,} elements, in proportion to elements"
        made.append(Codec(params, wire, {"gpu": Speed(*curves)}, source).to_dict())
    return made


def text() -> str:
    """The content of the file."""
    tasks, methods = quality()
    stored = json.loads((STORE / "costs-epyc.json").read_text())
    here = [codec(each) for each in stored]
    return json.dumps({"tasks": tasks, "quality": methods, "costs": {"epyc": stored, "h100": gpu(here)}}) + "\n"


if __name__ == "__main__":
    if "--check" not in sys.argv:
        FILE.write_text(text())
    elif FILE.read_text() != text():
        sys.exit(f"{FILE.name} is out of date: run python docs/generate_measured.py")
