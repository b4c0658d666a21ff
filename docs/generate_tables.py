"""Prints the tables of docs/advise.md, planner.md and systems-measured.md anew, from stored costs or measurements.

python docs/generate_tables.py advise               # half a minute; advise.png, too
python docs/generate_tables.py plan                 # of planner.md
python docs/generate_tables.py sidco                # ten minutes; also sidco.png
python docs/generate_tables.py sidco sidco.json     # of what `grace bench sidco --output sidco.json` found before

A table stands between `<!-- COMMAND -->` or `<!-- NAME -->` and `<!-- end -->`; the text around it is left alone.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grace_bench.sidco import RATIOS

DOCS = Path(__file__).parent
BLOCK = re.compile(r"(<!-- (?P<what>[^>]+) -->\n).*?(<!-- end -->)", re.DOTALL)
METHODS = {
    "exact top-k": "exact top-k",
    "DGC sampling": "`sampled`",
    "SIDCo-P robust": "SIDCo-P, robust",
    "SIDCo-P paper": "SIDCo-P, paper",
    "SIDCo-E robust": "SIDCo-E, robust",
    "SIDCo-E paper": "SIDCo-E, paper",
    "SIDCo-GP robust": "SIDCo-GP, robust",
    "SIDCo-P one stage": "SIDCo-P, one stage",
    "one sample of 1%": "one sample of 1 %, uncorrected",
    "GaussianKSGD": "`gaussian`",
    "RedSync bisection": "`bisect`",
}
TIMED = {
    "the toolkit's top-k": "the toolkit's own top-k of magnitudes",
    "SIDCo-E, 2 stages": "SIDCo-E, two stages",
    "SIDCo-P, 2 stages": "SIDCo-P, two stages",
    "SIDCo-GP, 2 stages": "SIDCo-GP, two stages",
    "GRACE's DGC sampling": "`sampled`",
    "GRACE's GaussianKSGD": "`gaussian`",
    "GRACE's RedSync bisection": "`bisect`",
    "GRACE's exact top-k": "GRACE's `exact`",
}
"""What the page shows of the methods, and how it calls them."""


def replaced(page: Path, made: Callable[[str], str]) -> None:
    """Put what ``made`` gives for each block's name into the page."""
    page.write_text(filled(page.read_text(encoding="utf-8"), made), encoding="utf-8")


def filled(text: str, made: Callable[[str], str]) -> str:
    """A page with what ``made`` gives for each block's name."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{made(found['what'])}\n\n{found[3]}", text)


def shown(command: str) -> str:
    """What a command prints, as a block of text."""
    return f"```text\n{grace(command)}\n```"


def grace(command: str) -> str:
    """What a command prints on 80 columns."""
    words = [sys.executable, "-m", "grace", *shlex.split(command)[1:]]
    environment = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, encoding="utf-8", check=True)
    return "\n".join(line.rstrip() for line in done.stdout.rstrip().splitlines())


def advise() -> None:
    """The commands of advise.md, and its figure."""
    replaced(DOCS / "advise.md", shown)
    grace(f"grace advise resnet50 --costs epyc --plot {DOCS / 'advise.png'}")


def plan() -> None:
    """The commands of planner.md, with stored costs."""
    replaced(DOCS / "planner.md", lambda command: shown(f"{command} --costs epyc"))


def kept(found: dict[str, Any]) -> str:
    """K / k and accuracy of each method in a training of its own."""
    rows = {(record["method"], record["ratio"]): record for record in found["training"]}
    lines = [f"| | {' | '.join(f'{r:g}' for r in RATIOS)} | accuracy at {', '.join(f'{r:g}' for r in RATIOS)} |"]
    lines.append("|---" * (len(RATIOS) + 2) + "|")
    for method, name in METHODS.items():
        cells = []
        for ratio in RATIOS:
            own = rows[method, ratio]["own"]
            band = "" if own["low"] == own["high"] else f" ({own['low']:.2f}-{own['high']:.2f})"
            cells.append(f"{own['mean']:.2f}{band}")
        cells.append(" ".join(f"{rows[method, ratio]['accuracy']:.3f}" for ratio in RATIOS))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    dense = rows["dense", None]["accuracy"]
    return "\n".join([*lines, "", f"Dense training ends at {dense:.3f}."])


def times(found: dict[str, Any]) -> str:
    """Milliseconds of each method at the largest size, by toolkit and ratio."""
    largest = max(record["n"] for record in found["speed"])
    rows = {(r["backend"], r["method"], r["ratio"]): r for r in found["speed"] if r["n"] == largest}
    toolkits = {"torch": "PyTorch", "tensorflow": "TensorFlow graph"}
    heads = [f"{title}, {r:g}" if r == RATIOS[0] else f"{r:g}" for title in toolkits.values() for r in RATIOS]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for method, name in TIMED.items():
        cells = [f"{rows[toolkit, method, ratio]['ms']:.0f}" for toolkit in toolkits for ratio in RATIOS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    machine = found["machine"]
    load = f", load {machine['load']:.1f} when it began" if machine.get("load") is not None else ""
    return "\n".join([*lines, "", f"{largest:,} elements, {machine['cpu']}, {machine['cores']} cores{load}."])


def sidco(file: str = "") -> None:
    """Both tables, and the figure if they are measured now."""
    path = Path(file or DOCS / "sidco.json")
    if not file:
        grace(f"grace bench sidco --output {path} --plot {DOCS / 'sidco.png'}")
    found = json.loads(path.read_text(encoding="utf-8"))
    if not file:
        path.unlink()
    replaced(DOCS / "systems-measured.md", lambda name: {"sidco: K / k": kept, "sidco: times": times}[name](found))


if __name__ == "__main__":
    wanted = {"advise": advise, "plan": plan, "sidco": sidco}
    if len(sys.argv) < 2 or sys.argv[1] not in wanted:
        sys.exit(__doc__)
    wanted[sys.argv[1]](*sys.argv[2:])
