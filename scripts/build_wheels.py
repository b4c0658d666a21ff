"""Build the wheels for Linux, x86-64 and AArch64, that run with glibc 2.17 or later: Zig compiles for all of them.

    pip install build ziglang
    python scripts/build_wheels.py dist

The first run takes minutes, in which Zig compiles its C++ library.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MACHINES = ("x86_64", "aarch64")
ROOT = Path(__file__).parents[1]


def build(machine: str, folder: Path) -> None:
    """Build the wheel for one machine."""
    environment = {
        **os.environ,
        "CXX": f"{sys.executable} -m ziglang c++ -target {machine}-linux-gnu.2.17 -s",
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
        "GRACE_ISAS": "all",
    }
    options = ["--wheel", f"-C--build-option=--plat-name=manylinux_2_17_{machine}", "--outdir", str(folder)]
    subprocess.run([sys.executable, "-m", "build", *options, str(ROOT)], env=environment, check=True)


if __name__ == "__main__":
    for each in MACHINES:
        build(each, Path(sys.argv[1]))
