"""Make a small virtual environment for the demo: PyTorch's CPU build, GRACE and this CPU's kernels.

    python scripts/set_up_demo.py .venv-demo

The kernels are compiled while packages are installed. Prints what each part took. Needs Python 3.10 or later with venv;
without a C++ compiler GRACE works, only slower.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PACKAGES = ("torch", "matplotlib", "rich", "typer", "scikit-learn", "psutil", "setuptools", "wheel")


def main() -> None:
    """Set up the environment named on the command line."""
    venv = Path(sys.argv[1]).resolve()
    began = time.monotonic()

    def run(*command: str) -> float:
        subprocess.run(command, cwd=ROOT, check=True)
        return time.monotonic() - began

    took: list[float] = []
    kernels = threading.Thread(
        target=lambda: took.append(run(sys.executable, "-m", "grace.kernels.build", "--native")), daemon=True
    )
    kernels.start()
    run(sys.executable, "-m", "venv", str(venv))
    # No bytecode of modules that nobody imports: it takes longer than all the rest.
    pip = (str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-compile")
    limits = ("-c", "constraints.txt") if sys.version_info >= (3, 11) else ()  # some of them need 3.11
    packages = run(*pip, *limits, *cpu_build(), *PACKAGES)
    kernels.join()
    if not took:
        sys.exit("the kernels' build failed")
    every = run(*pip, "--no-deps", "--no-build-isolation", "-e", ".")
    print(f"set-up {every:.0f} s: packages {packages:.0f} s, kernels {took[0]:.0f} s beside them", flush=True)


def cpu_build() -> tuple[str, ...]:
    """Options that make pip find PyTorch's CPU build; the package index alone has CUDA's, of gigabytes, on Linux."""
    if sys.platform == "darwin":
        return ()
    try:
        urllib.request.urlopen(f"{CPU_INDEX}/torch/", timeout=5).close()
    except OSError as error:
        print(f"PyTorch's index of CPU builds cannot be reached ({error}): pip installs the build that it finds")
        return ()
    return ("--extra-index-url", CPU_INDEX)


if __name__ == "__main__":
    main()
