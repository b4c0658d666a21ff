"""grace.patch measured: densities of fine-tuning, bytes of each encoding, rates, memory; times of a sync computed.

    python -m benchmarks.patch --json benchmarks/results/patch.json     # 10 to 15 minutes
    python -m benchmarks.patch --show                                   # the tables of docs/patch.md

A small GPT learns the text of Python's standard library, and is then fine-tuned on other parts of it by Adam; float32
masters, bf16 weights. Rates are those of one core and one tensor of 2^27 bf16 values; memcpy copies both inputs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import grace
from grace.patch.changes import Patch
from grace.patch.coding import ENCODINGS, decode
from grace.patch.delta import Delta
from grace.patch.files import pack
from grace.patch.tensors import View, everything

RESULT = Path(__file__).parent / "results" / "patch.json"
RATES = (1e-6, 3e-6, 1e-5, 1e-4)
INTERVALS = (1, 8)
"""Steps of fine-tuning between two versions."""
WARM, PATCHES = 24, 3
LINKS = {"100 Mbit/s": 0.0125, "1 Gbit/s": 0.125, "10 Gbit/s": 1.25}
"""GB/s."""
LARGE = 1 << 27
DENSITIES = (0.01, 0.04, 0.08)
"""Shares of changed values for which rates are measured."""


def densities(quick: bool = False) -> dict[str, Any]:
    """Density and bytes of patches between versions of a fine-tuned model, relative to dense bf16."""
    import torch

    from grace_bench.text import Gpt2, Size, text

    size = Size(4, 256, 4, 256, 64, 64, 8, 4 if quick else 300, 1 << 21, 1e-3)
    corpus = torch.frombuffer(bytearray(text(size.corpus)), dtype=torch.uint8).long()
    half = len(corpus) // 2
    model = Gpt2(size)
    names = [name for name, _ in model.named_parameters()]
    drawn = torch.Generator().manual_seed(1)

    def batch(begin: int, end: int) -> Any:
        starts = torch.randint(begin, end - size.length - 1, (size.batch,), generator=drawn).tolist()
        return torch.stack([corpus[at : at + size.length + 1] for at in starts])

    def train(masters: list[Any], optimizer: Any, steps: int, begin: int, end: int) -> float:
        for _ in range(steps):
            with torch.no_grad():
                for weight, master in zip(model.parameters(), masters, strict=True):
                    weight.copy_(master.bfloat16())
            model.zero_grad()
            loss = model(batch(begin, end))
            loss.backward()
            for weight, master in zip(model.parameters(), masters, strict=True):
                master.grad = weight.grad
            optimizer.step()
        return float(loss.detach())

    def weights(masters: list[Any]) -> dict[str, Any]:
        return {name: master.detach().bfloat16() for name, master in zip(names, masters, strict=True)}

    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    found: dict[str, Any] = {"parameters": sum(p.numel() for p in masters), "rows": []}
    found["loss"] = train(masters, torch.optim.Adam(masters, lr=size.rate), size.steps, 0, half)
    dense = weights(masters)
    total = sum(p.numel() * 2 for p in masters)
    found["zstd of dense"] = total / sum(len(pack(each.view(torch.uint8).numpy())) for each in dense.values())
    for rate in RATES:
        own = [p.detach().clone().requires_grad_() for p in masters]
        optimizer = torch.optim.Adam(own, lr=rate)
        train(own, optimizer, 2 if quick else WARM, half, len(corpus))
        for interval in INTERVALS:
            row: dict[str, Any] = {"rate": rate, "steps": interval, "density": 0.0}
            sizes = dict.fromkeys(ENCODINGS, 0.0)
            for _ in range(1 if quick else PATCHES):
                before = weights(own)
                train(own, optimizer, interval, half, len(corpus))
                patch = grace.patch.diff(weights(own), before)
                assert patch.density is not None
                row["density"] += patch.density / (1 if quick else PATCHES)
                for encoding in ENCODINGS:
                    sizes[encoding] += sum(len(patch.data_of(each, encoding)) for each in patch.entries if each.changed)
            count = 1 if quick else PATCHES
            row["times"] = {encoding: total * count / each for encoding, each in sizes.items()}
            found["rows"].append(row)
            print(row, flush=True)
    return found


def simulated(n: int, density: float, seed: int = 0) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Two versions of n bf16 numbers N(0, 0.02) as uint16; 86 % of the changes are by one step."""
    rng = np.random.default_rng(seed)
    base = np.empty(n, np.uint16)
    for begin in range(0, n, 1 << 24):
        part = rng.normal(0, 0.02, min(1 << 24, n - begin)).astype(np.float32)
        base[begin : begin + part.size] = part.view(np.uint32) >> 16
    new = base.copy()
    where = np.flatnonzero(rng.random(n, np.float32) < density)
    steps = np.where(rng.random(where.size) < 0.86, 1, 2).astype(np.uint16)
    new[where] += np.where(rng.random(where.size) < 0.5, steps, -steps.astype(np.int32)).astype(np.uint16)
    return new, base


def peak(function: Callable[[], Any]) -> tuple[int, Any]:
    """The most bytes that a call takes beyond those held before, by Linux' account; and its result."""

    def read(key: str) -> int:
        return 1024 * int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0])

    Path("/proc/self/clear_refs").write_text("5")
    before = read("VmRSS")
    result = function()
    return read("VmHWM") - before, result


def rates(n: int = LARGE, repeats: int = 7) -> list[dict[str, Any]]:
    """`rate` at each density."""
    return [rate(n, density, repeats) for density in DENSITIES]


def rate(n: int, density: float, repeats: int) -> dict[str, Any]:
    """Seconds of memcpy, diff, apply, encode and decode of one tensor on one core; memory.

    The least processor time of all repeats: other work on the machine counts less than in the time on the clock.
    """
    new, base = simulated(n, density)
    one, two, target = ({"w": View(each, "bfloat16", (n,), everything((n,)))} for each in (new, base, base.copy()))
    first, second = np.empty_like(new), np.empty_like(base)
    memory, patch = peak(lambda: grace.patch.diff(one, two))
    calls: dict[str, Callable[[], Any]] = {
        "memcpy": lambda: (np.copyto(first, new), np.copyto(second, base)),
        "diff": lambda: grace.patch.diff(one, two),
        "apply": lambda: grace.patch.apply(patch, target),
    }
    seconds = dict.fromkeys(calls, float("inf"))
    for _ in range(repeats):
        for name, call in calls.items():
            np.copyto(target["w"].words, base)
            began = time.thread_time()
            call()
            seconds[name] = min(seconds[name], time.thread_time() - began)
    delta = patch.entries[0].delta
    assert delta is not None
    row = {"density": density, "n": n, "seconds": seconds, "patch memory": delta.nbytes}
    row |= {"diff memory": memory, **coders(patch, delta, base)}
    print(row, flush=True)
    return row


def coders(patch: Patch, delta: Delta, base: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Seconds to encode and decode with each encoding, and bytes relative to dense."""
    found: dict[str, Any] = {"encode": {}, "decode": {}, "times": {}}
    for encoding in ENCODINGS:
        for _ in range(3 if encoding == "steps" else 1):
            began = time.thread_time()
            data = patch.data_of(patch.entries[0], encoding)
            found["encode"][encoding] = min(found["encode"].get(encoding, 1e9), time.thread_time() - began)
            began = time.thread_time()
            decode(data, encoding, base)
            found["decode"][encoding] = min(found["decode"].get(encoding, 1e9), time.thread_time() - began)
        found["times"][encoding] = delta.size * 2 / len(data)
    return found


# -- tables ------------------------------------------------------------------------------------------------------------
def sync(row: dict[str, Any], link: float, encoding: str, parameters: float) -> tuple[float, float]:
    """Computed seconds to bring ``parameters`` bf16 weights over a link: as a patch, and dense."""
    scale = parameters / row["n"]
    work = row["seconds"]["diff"] + row["encode"][encoding] + row["decode"][encoding] + row["seconds"]["apply"]
    dense = 2 * parameters / 1e9 / link
    return work * scale + dense / row["times"][encoding], dense


def tables(found: dict[str, Any]) -> dict[str, str]:
    """The tables of docs/patch.md, by name."""
    shown: dict[str, list[str]] = {}
    lines = shown["densities"] = [
        "| learning rate | steps between versions | changed | `steps` | `xor` | `overwrite` |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["densities"]["rows"]:
        times = " | ".join(f"{row['times'][each]:.1f}" for each in ENCODINGS)
        lines.append(f"| {row['rate']:g} | {row['steps']} | {100 * row['density']:.1f} % | {times} |")
    lines = shown["rates"] = [
        "| changed | memcpy, ms | diff, ms | share | apply, ms | share | encode, decode `steps`, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found["rates"]:
        ms = {name: 1e3 * each for name, each in row["seconds"].items()}
        coded = f"{1e3 * row['encode']['steps']:.0f}, {1e3 * row['decode']['steps']:.0f}"
        lines.append(
            f"| {100 * row['density']:.0f} % | {ms['memcpy']:.0f} | {ms['diff']:.0f} | "
            f"{ms['memcpy'] / ms['diff']:.2f} | {ms['apply']:.0f} | {ms['memcpy'] / ms['apply']:.2f} | {coded} |"
        )
    for name, parameters in (("sync", 2**29), ("paper", 7e9)):
        lines = shown[name] = [f"| changed | encoding | {' | '.join(LINKS)} |", f"|---|---|{'---|' * len(LINKS)}"]
        dense = [f"{2 * parameters / 1e9 / link:.1f}" for link in LINKS.values()]
        lines.append(f"| any | dense | {' | '.join(dense)} |")
        for row in found["rates"]:
            for encoding in ENCODINGS:
                cells = []
                for link in LINKS.values():
                    patch, whole = sync(row, link, encoding, parameters)
                    cells.append(f"{patch:.1f}" if patch < whole else f"**{patch:.1f}**")
                lines.append(f"| {100 * row['density']:.0f} % | `{encoding}` | {' | '.join(cells)} |")
    return {name: "\n".join(lines) for name, lines in shown.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to store the result")
    parser.add_argument("--show", action="store_true", help="print the tables of the stored result")
    parser.add_argument("--only", choices=("densities", "rates"), help="measure this part anew")
    parser.add_argument("--quick", action="store_true", help="a few steps and small tensors")
    options = parser.parse_args()
    if options.show:
        for name, table in tables(json.loads(RESULT.read_text())).items():
            print(f"<!-- {name} -->\n{table}\n")
        return 0
    found: dict[str, Any] = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    work = {
        "densities": lambda: densities(options.quick),
        "rates": lambda: rates(1 << 20, 2) if options.quick else rates(),
    }
    for name in [options.only] if options.only else work:
        began = time.perf_counter()
        found[name] = work[name]()
        found.setdefault("took", {})[name] = round(time.perf_counter() - began, 1)
        found.setdefault("load", {})[name] = os.getloadavg()[0]
        found["machine"] = {"cpu": cpu(), "cores": os.cpu_count(), "python": platform.python_version()}
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def cpu() -> str:
    """The processor's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    sys.exit(main())
