"""Run the commands of docs/seeds.md and compare their figures with the page: python docs/repeat.py [SYSTEM ...].

Without arguments, the rows of `FIGURES`, which take about ten minutes on two cores. The other rows' figures are times
of one machine, or need hours or root: run their commands by hand. The status is 1 if a command fails or a figure
differs.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "seeds.md"


def search(printed: str) -> list[str]:
    """The distances to the optimum: of the refined search, then of the paper's."""
    found = [float(each) for each in re.findall(r"(?:mean|max) ([\d.]+)", printed)]
    refined, worst, paper, most = (100 * each for each in found)
    return [
        f"{paper:.1f} % from the optimum on average, {most:.0f} % at worst",
        f"{refined:.2f} and {worst:.2f} %",
    ]


def gossip(printed: str) -> list[str]:
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
    return [f"{min(shares):.1f} to {max(shares):.0f} times fewer bytes"]


def kashin(printed: str) -> list[str]:
    """The squared errors of kashin and of eden."""
    own, other = re.findall(r"0\.\d+", printed.splitlines()[-1])
    return [f"its error is {float(own):.4f}", f"`eden` has {float(other):.4f}"]


def accuracies(printed: str) -> list[str]:
    """Mean accuracies of three seeds each: synchronous, DiLoCo, SparseLoCo."""
    found = [
        float(each)
        for each in re.findall(r"epoch 20: .*test accuracy ([\d.]+)%", printed)
    ]
    means = [statistics.mean(found[first : first + 3]) for first in (0, 3, 6)]
    return [
        f"{means[0]:.1f} % synchronous",
        f"{means[1]:.1f} % with 1/20",
        f"{means[2]:.1f} % with 1/2049",
    ]


def passed(printed: str) -> list[str]:
    """Tests have no figure of their own: they hold the row's."""
    assert re.search(r"\d+ passed", printed), printed[-500:]
    return []


FIGURES: dict[str, tuple[int, Callable[[str], list[str]]]] = {
    "Espresso": (1, search),
    "PowerGossip": (1, gossip),
    "EF21": (1, passed),
    "Biased compressors": (1, passed),
    "Kashin's representation": (2, kashin),
    "DiLoCo": (3, accuracies),
    "Dion": (1, passed),
}
"""By system: how many of its commands to run, and what their output means for the row."""


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
    for name in names or FIGURES:
        row, commands = rows()[name]
        count, read = FIGURES[name]
        printed = ""
        for command in commands[:count]:
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
        for figure in read(printed):
            print(
                f"  {'as on the page' if figure in row else 'NOT ON THE PAGE'}: {figure}"
            )
            wrong += figure not in row
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
