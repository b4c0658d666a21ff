"""Run every kernel under AddressSanitizer and UndefinedBehaviorSanitizer.

    python scripts/sanitize_kernels.py [ISA ...]

By default on all instruction sets of this machine. Prints the first finding and exits with 1; exits with 2 if there is
no compiler, or it lacks the sanitizers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from grace.kernels.build import HERE, compiler, libraries

DRIVER = Path(__file__).with_name("kernels_driver.cc")
# At -O0: with sanitizers, -O1 takes twice as long to compile, -O3 many minutes.
SANITIZE = ("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")


def main(isas: list[str]) -> int:
    """Compile, and run the driver on each instruction set."""
    cxx, known = compiler(), {name: flags for name, (source, *flags) in libraries().items() if source == "loops.cc"}
    if cxx is None:
        print("no C++ compiler found ($CXX, g++, c++, clang++)")
        return 2
    with tempfile.TemporaryDirectory() as name:
        driver = str(Path(name, "driver"))
        sources = (str(DRIVER), str(HERE / "kernels.cc"), str(HERE / "loops.cc"))
        for isa in isas or reversed(known):
            command = [*cxx, *known[isa], *SANITIZE, "-I", str(HERE), *sources, "-o", driver]
            made = subprocess.run(command, capture_output=True, text=True)
            if made.returncode:
                print(made.stderr)
                return 2
            done = subprocess.run(
                [driver, isa], env={**os.environ, "UBSAN_OPTIONS": "print_stacktrace=1"}, capture_output=True, text=True
            )
            if done.returncode == 2:
                print(f"{isa}: not on this machine")
            elif done.returncode:
                print(done.stderr)
                return 1
            else:
                print(f"{done.stderr.strip()}: {len(done.stdout.splitlines())} results, nothing found")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
