"""Compile the kernels for AArch64 (NEON), run them in an emulator, and hold them against those of this x86-64 machine.

    sudo apt-get install g++-aarch64-linux-gnu qemu-user
    python scripts/try_aarch64.py

All results must have the same bits, but those of left, right and cosines, whose sums are compared to five digits. Ends
with 1 if any differ, and with 2 if a tool is missing.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from grace.kernels.build import FLAGS, HERE, ISAS, objects

TOOLS = ("g++", "aarch64-linux-gnu-g++", "qemu-aarch64")
DRIVER = Path(__file__).with_name("kernels_driver.cc")


def built(cxx: str, isas: dict[str, tuple[str, ...]], folder: Path) -> Path:
    """The driver with the kernels, for the instruction sets named and the compiler's own."""
    folder.mkdir()
    kernels, driver = objects(cxx, folder, isas=isas), folder / "driver"
    static = *FLAGS, "-static", "-I", str(HERE), str(DRIVER), *kernels
    subprocess.run([cxx, *static, "-o", str(driver)], check=True)
    return driver


def told(*command: str | Path) -> list[str]:
    """What the driver prints; nothing where the machine lacks the instruction set."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode not in (0, 2):
        sys.exit(f"{command} ended with {done.returncode}: {done.stderr}")
    return done.stdout.splitlines()


def main() -> int:
    """Compare, and say how it went."""
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        print(f"{', '.join(missing)} not found: apt-get install g++ g++-aarch64-linux-gnu qemu-user")
        return 2
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        theirs = built("aarch64-linux-gnu-g++", {}, Path(name, "aarch64"))
        wanted = told("qemu-aarch64", theirs, "")
        ours = built("g++", ISAS, Path(name, "x86"))
        for isa in ("scalar", *ISAS):
            found = told(ours, isa)
            if not found:
                print(f"{isa}: not on this machine")
                continue
            other = [line for line, mine in zip(wanted, found, strict=True) if line != mine]
            print(f"AArch64 and {isa}: {len(found) - len(other)} of {len(found)} results are the same")
            for line in other[:10]:
                print(f"  {line}")
            failed |= bool(other)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
