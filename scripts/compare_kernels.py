"""Compare the kernels of wheels with those of this machine's compiler: results must have the same bits.

    pip install ziglang
    python scripts/compare_kernels.py dist/*.whl

Wheels for AArch64 run in an emulator: apt-get install qemu-user libc6-arm64-cross. Of the kernels lowrank_left,
lowrank_right and demo, sums are compared to five digits. Ends with 1 if results differ or a wheel has no kernels; names
what cannot run here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from grace.kernels.build import HERE, ISAS, MACHINE, build, compiler, find

DRIVER = Path(__file__).with_name("kernels_driver.cc")
EMULATOR = "qemu-aarch64"
SYSTEM = os.environ.setdefault("QEMU_LD_PREFIX", "/usr/aarch64-linux-gnu")  # folder of the emulated machine's C library


def results(cxx: list[str], kernels: Path, loops: Path, isa: str, run: list[str], folder: Path) -> list[str]:
    """Compile and run the driver; returns its lines, none if the machine lacks the instruction set."""
    driver = str(folder / "driver")
    options = ["-std=c++17", "-O3", "-pthread", "-ffp-contract=off", "-I", str(HERE)]
    subprocess.run([*cxx, *options, str(DRIVER), str(kernels), str(loops), "-o", driver], check=True)
    done = subprocess.run([*run, driver, isa], capture_output=True, text=True)
    if done.returncode not in (0, 2):
        sys.exit(f"{loops.name}: the driver ended with {done.returncode}: {done.stderr}")
    return done.stdout.splitlines()


def compare(wheel: str, wanted: list[str], cxx: list[str], folder: Path) -> bool:
    """Whether a wheel's kernels give the expected results."""
    folder.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        made = [archive.extract(each, folder) for each in archive.namelist() if each.endswith(".so")]
    files = {Path(each).name.partition("-")[0]: Path(each) for each in made}
    if not {"kernels", "scalar"} <= files.keys():
        print(f"{wheel}: no kernels")
        return False
    machine = files["kernels"].name.split("-")[2]
    run = [] if machine == MACHINE else [EMULATOR]
    if run and not (machine == "aarch64" and shutil.which(EMULATOR) and Path(SYSTEM).exists()):
        print(f"{machine}: not tried: apt-get install qemu-user libc6-arm64-cross")
        return True
    if run:
        cxx = [sys.executable, "-m", "ziglang", "c++", "-target", f"{machine}-linux-gnu.2.17", "-s"]
    same = True
    for isa, file in (("neon" if machine == "aarch64" else "scalar", "scalar"), *((isa, isa) for isa in ISAS)):
        if file not in files:
            continue
        found = results(cxx, files["kernels"], files[file], isa, run, folder)
        if not found:
            print(f"{machine}, {isa}: not on this machine")
            continue
        other = [line for line, mine in zip(found, wanted, strict=True) if line != mine]
        print(f"{machine}, {isa}: {len(found) - len(other)} of {len(found)} results are the same")
        print(*(f"  {line}\n" for line in other[:10]), sep="", end="")
        same &= not other
    return same


def main(wheels: list[str]) -> int:
    """Compare all wheels, and print the results."""
    build("kernels", "scalar")
    cxx, kernels, loops = compiler(), find("kernels"), find("scalar")
    if not (cxx and kernels and loops):
        print("no C++ compiler to compare with")
        return 1
    with tempfile.TemporaryDirectory() as name:
        wanted = results(cxx, kernels, loops, "scalar", [], Path(name))
        same = [compare(wheel, wanted, cxx, Path(name, Path(wheel).stem)) for wheel in wheels]
    return int(not all(same))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
