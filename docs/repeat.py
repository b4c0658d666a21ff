"""Run the commands of docs/seeds.md and compare their figures with the page: python docs/repeat.py [SYSTEM ...].

Without arguments, all rows: two hours on two idle cores, as root, for the network lab; --quick: rows that take minutes.
Times depend on the machine: theirs may differ by `TIMES`. The status is 1 if a command fails or a figure differs.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "seeds.md"
TIMES = 0.35
"""How far a ratio of times may be from the page, relative to it."""


class Figure(NamedTuple):
    """A text of the page with a number in place of each {}."""

    text: str
    values: tuple[float, ...]
    tolerance: float = 0.0

    def on(self, row: str) -> bool:
        """Whether the row has the text with these numbers, as rounded there, or as far off as the tolerance."""
        found = re.search(
            re.escape(self.text).replace(r"\{\}", r"(-?\d+(?:\.\d+)?)"), row
        )
        return found is not None and all(
            abs(float(shown) - value)
            <= self.tolerance * value + 0.5001 * 10.0 ** -len(shown.partition(".")[2])
            for shown, value in zip(found.groups(), self.values, strict=True)
        )

    def __str__(self) -> str:
        return self.text.format(*(f"{value:.4g}" for value in self.values))


def numbers(pattern: str, text: str) -> list[float]:
    """All numbers that the groups of a pattern find."""
    return [
        float(each) for found in re.finditer(pattern, text) for each in found.groups()
    ]


def tasks(printed: str) -> list[Figure]:
    """Of three seeds, how many times sooner than float32 each method had its quality, and in how many tasks."""
    rows = [
        json.loads(line)
        for line in (ROOT / "out" / "tasks" / "results.jsonl").read_text().splitlines()
    ]
    slow = [row for row in rows if row["bandwidth"] == "100mbit"]
    dense = {
        row["task"]: row["seconds_to_relative"]
        for row in slow
        if row["method"] == "dense"
    }
    sooner: dict[str, list[float]] = {}
    for row in slow:
        if row["seconds_to_relative"]:
            sooner.setdefault(row["method"], []).append(
                dense[row["task"]] / row["seconds_to_relative"]
            )
    methods = (
        "blockint:bits=4",
        "eden:bits=3,block_size=64",
        "auto",
        "eden:bits=2,block_size=64",
    )
    means = [statistics.geometric_mean(sooner[method]) for method in methods]
    reached = [len(sooner[method]) for method in methods]
    return [
        Figure(
            "4-bit integers in {}, eden of 3 bits in {}, `auto` in {}, eden of 2 bits in {}",
            (*reached,),
        ),
        Figure("at 100 Mbit/s {}, {} and {} times sooner", (*means[:3],), TIMES),
    ]


def sidco(printed: str) -> list[Figure]:
    """K / k of SIDCo-P with stages and without, and how its time compares with the other ways to find the largest."""
    found = json.loads(printed)
    own = {
        (row["method"], row["ratio"]): row["own"]["mean"]
        for row in found["training"]
        if row["ratio"]
    }
    several, one = (
        [own[name, ratio] for ratio in (0.01, 0.001)]
        for name in ("SIDCo-P robust", "SIDCo-P one stage")
    )
    rows = [
        row
        for row in found["speed"]
        if (row["backend"], row["n"]) == ("torch", 10_000_000)
    ]
    faster = {(row["method"], row["ratio"]): row["faster"] for row in rows}
    own_topk = [faster["SIDCo-E, 2 stages", ratio] for ratio in (0.1, 0.01, 0.001)]
    ours = [
        faster["GRACE's exact top-k", ratio] / each
        for ratio, each in zip((0.1, 0.01, 0.001), own_topk, strict=True)
    ]
    return [
        Figure(
            "K / k is {} and {} with several stages, {} and {} with one",
            (*several, *one),
            0.1,
        ),
        Figure(
            "{} to {} times as fast as PyTorch's top-k",
            (min(own_topk), max(own_topk)),
            TIMES,
        ),
        Figure(
            "GRACE's exact one is {} to {} times as fast as it",
            (min(ours), max(ours)),
            TIMES,
        ),
    ]


def accordion(printed: str) -> list[Figure]:
    """Recovered accuracy and sent floats without error feedback; how often each control was beaten."""
    plain, fed = printed.split("memory residual")
    recovered, floats = numbers(r"recovered ([\d.]+), floats ([\d.]+)", plain)
    same, fixed, fixed_fed = (
        numbers(
            rf"better than {control} in (\d+) of 5 seeds, one-sided p ([\d.]+)", text
        )
        for control, text in (("placebo", plain), ("static", plain), ("static", fed))
    )
    return [
        Figure(
            "{} % of the lost accuracy recovered with {} % of the floats",
            (100 * recovered, 100 * floats),
        ),
        Figure("better in {} of 5 seeds (p = {})", (*same,)),
        Figure(
            "ahead in {} of 5 without error feedback (p = {}), in {} with it (p = {})",
            (*fixed, *fixed_fed),
        ),
    ]


def pufferfish(printed: str) -> list[Figure]:
    """Accuracy and parameters of the hybrid, and the time of its steps."""
    (dense,) = numbers(r"(?m)^dense .* ([\d.]+)% ", printed)
    share, hybrid = numbers(r"(?m)^hybrid, warm-up  .* ([\d.]+)  ([\d.]+)% ", printed)
    return [
        Figure(
            "{} % with {} % of the parameters (dense: {} %)",
            (hybrid, 100 * share, dense),
        ),
        Figure(
            "steps of {} and {} of the dense time",
            tuple(numbers(r"ratio ([\d.]+)", printed)),
            TIMES,
        ),
    ]


def search(printed: str) -> list[Figure]:
    """The distances to the optimum, of the refined search and of the paper's; the plan among measured assignments."""
    gaps, _, plans = printed.partition(" passed")
    refined, worst, paper, most = (
        100 * each for each in numbers(r"(?:mean|max) ([\d.]+)", gaps)
    )
    (best,) = (line for line in plans.splitlines() if "plan / best" in line)
    return [
        Figure("{} % from the optimum on average, {} % at worst", (paper, most)),
        Figure("`refined`: {} and {} %", (refined, worst)),
        Figure(
            "at most {} times as long as the best",
            (max(numbers(r"(\d\.\d+)", best)),),
            0.1,
        ),
    ]


def lab(printed: str) -> list[Figure]:
    """How many times as fast as dense gradients PowerSGD's steps are, at the two rates, and the share of its bytes."""
    pattern = r" +│ +([\d.]+) +│ +[\d.]+ +│ +[\d.]+ +│ +([\d.]+)"
    rows = {
        name: numbers(name + pattern, printed)
        for name in ("ddp-fp32", "grace-torch-powersgd")
    }
    dense, powersgd = rows.values()
    sooner = (dense[0] / powersgd[0], dense[2] / powersgd[2])
    return [
        Figure(
            "{} times as fast as dense at 100 Mbit/s, {} at 1 Gbit/s", sooner, TIMES
        ),
        Figure("1/{} of the bytes", (dense[1] / powersgd[1],), 0.1),
    ]


def gossip(printed: str) -> list[Figure]:
    """How many times fewer bytes CHOCO sends than PowerGossip, over both kinds of matrices."""
    rows = [
        re.split(r" *\| *", line.replace("`", ""))[1:-1]
        for line in printed.splitlines()
        if "(" in line
    ]
    sent = {
        (kind, name.split(", steps")[0]): int(size.replace(",", ""))
        for kind, name, _, size, _ in rows
    }
    choco = "Choco(compressor=EFSignSGD(block_size=0), gamma=1.0)"
    shares = [
        sent[kind, f"PowerGossip(rank={rank}"] / sent[kind, choco]
        for kind in ("random", "rank 4")
        for rank in (1, 4)
    ]
    return [Figure("{} to {} times fewer bytes", (min(shares), max(shares)))]


def kashin(printed: str) -> list[Figure]:
    """The squared errors of kashin and of eden."""
    own, other = numbers(r"(0\.\d+)", printed.splitlines()[-1])
    return [Figure("its error is {}", (own,)), Figure("`eden` has {}", (other,))]


def stages(printed: str) -> list[Figure]:
    """Quality in use of digits and text: without compression, with int8 both ways, and with top-k of 10 %."""
    rows = {
        line.split(" | ")[0].strip("| "): line.split(" | ")
        for line in printed.splitlines()
        if line.count("|") > 3
    }
    chosen = ("none", "8 bits, gradients 8", "top 10 %")
    cells = [
        float(rows[name][column].partition(" ")[0])
        for name in chosen
        for column in (2, 5)
    ]
    return [
        Figure("no compression: {} % and perplexity {}", tuple(cells[:2])),
        Figure("int8 both ways: {} % and {}", tuple(cells[2:4])),
        Figure("top-k of 10 %: {} % and {}", tuple(cells[4:])),
    ]


def accuracies(printed: str) -> list[Figure]:
    """Mean accuracies of three seeds each: synchronous, DiLoCo, SparseLoCo."""
    found = numbers(r"epoch 20: .*test accuracy ([\d.]+)%", printed)
    means = [statistics.mean(found[first : first + 3]) for first in (0, 3, 6)]
    return [
        Figure("{} % synchronous", (means[0],)),
        Figure("{} % with 1/20", (means[1],)),
        Figure("{} % with 1/2049", (means[2],)),
    ]


def passed(printed: str) -> list[Figure]:
    """Tests have no figure of their own: they hold the row's."""
    assert re.search(r"\d+ passed", printed), printed[-500:]
    return []


READ: dict[str, Callable[[str], list[Figure]]] = {
    "GRACE": tasks,
    "SIDCo": sidco,
    "Accordion": accordion,
    "Pufferfish": pufferfish,
    "Espresso": search,
    "PowerSGD": lab,
    "PowerGossip": gossip,
    "EF21": passed,
    "Biased compressors": passed,
    "Kashin's representation": kashin,
    "Pipeline compression": stages,
    "DiLoCo": accuracies,
    "Dion": passed,
}
"""By system: what its commands print, as figures of the row."""
QUICK = [
    "PowerGossip",
    "EF21",
    "Biased compressors",
    "Kashin's representation",
    "DiLoCo",
    "Dion",
]
"""Rows that take five minutes together."""


def rows() -> dict[str, tuple[str, list[str]]]:
    """By system: its row, and its commands."""
    found = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if name := re.match(r"\| \*\*(.+?)\*\*", line):
            found[name[1]] = line, re.findall(r"`([^`]+)`", line.rpartition(" | ")[2])
    return found


def main(names: list[str]) -> int:
    """Print a line for each figure; returns the exit status."""
    wrong = 0
    for name in QUICK if names == ["--quick"] else names or READ:
        row, commands = rows()[name]
        printed = ""
        for command in commands:
            print(f"{name}: {command}", flush=True)
            done = subprocess.run(
                ["bash", "-c", command],
                capture_output=True,
                text=True,
                check=False,
                cwd=ROOT,
            )
            printed += done.stdout
            if done.returncode:
                print(done.stderr[-1000:])
                wrong += 1
        for figure in READ[name](printed):
            right = figure.on(row)
            print(
                f"  {'as on the page' if right else 'NOT ON THE PAGE'}: {figure}",
                flush=True,
            )
            wrong += not right
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
