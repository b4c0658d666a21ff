"""Install a wheel in a clean environment of each Python from 3.10 to 3.13 that this machine has, and use it there.

    python scripts/try_pythons.py dist/*.whl

NumPy and the `cli` extra come from the package index; no compiler is on the path. Tried in each: import without NumPy,
`grace doctor`, `grace methods`, `grace report` and `simulate` on NumPy, where the kernels of each instruction set give
the bits of the plain functions. Exits with 1 if any fails; names missing Pythons.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

VERSIONS = ("3.10", "3.11", "3.12", "3.13")
USE = """
import sys
import grace
assert "numpy" not in sys.modules
import numpy as np
params = {"compressor": "topk", "record": "run.jsonl", "record_every": 1}
out = grace.simulate(params, [{"w": np.ones((64, 64), "float32")}] * 2)
assert out.report.ratio > 40, out.report
print("Python", sys.version.split()[0], "NumPy", np.__version__, "grace", grace.__version__)
"""
BITS = """
import hashlib
import numpy as np
import grace
rng = np.random.default_rng(1)
steps = [[{"w": rng.standard_normal((61, 1031), dtype="float32")} for worker in range(3)] for step in range(3)]
digest = hashlib.sha256()
for name in ("blockint", "eden", "efsignsgd", "fp8", "natural", "qsgd", "terngrad", "thc", "topk"):
    out = grace.simulate({"compressor": name}, steps)
    means = (worker["w"] for step in out.history for worker in step)
    states = (array for worker in out.state for array in worker["tensors"].get("w", {}).values())
    for array in (*means, *states):
        digest.update(np.ascontiguousarray(array).tobytes())
print(digest.hexdigest())
"""
ISAS = "from grace.kernels import ISAS, library; assert library(); print(*(isa for isa in ISAS if library(isa)))"


def find(version: str) -> str | None:
    """An interpreter of that version, on the path or pyenv's; None if there is none."""
    known = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    beside = [each / "bin" / "python" for each in sorted(known.glob(f"{version}.*"))]
    for each in (shutil.which(f"python{version}"), *beside):
        asked = "import sys; print('%d.%d' % sys.version_info[:2])"
        if each and subprocess.run([each, "-c", asked], capture_output=True, text=True).stdout.strip() == version:
            return str(each)
    return None


def use(python: str, wheel: Path, folder: Path) -> bool:
    """Install the wheel for ``python`` in ``folder``; returns whether it works there."""
    own, grace = str(folder / "bin" / "python"), str(folder / "bin" / "grace")
    # Hide compilers, and all kernels except the wheel's.
    hidden = ("PYTHONPATH", "CXX", "GRACE_KERNELS")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    environment |= {"PATH": str(folder / "bin"), "XDG_CACHE_HOME": str(folder)}

    def told(*command: str, **more: str) -> str:
        done = subprocess.run(command, cwd=folder, env=environment | more, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout.strip()

    folder.mkdir(parents=True)
    try:
        told(python, "-m", "venv", str(folder), PATH=os.environ["PATH"])
        told(own, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", f"{wheel}[cli]")
        print(told(own, "-c", USE), flush=True)
        isas = told(own, "-c", ISAS).split()
        bits = {isa: told(own, "-c", BITS, GRACE_KERNELS=isa) for isa in ("off", *isas)}
        if len(set(bits.values())) > 1:
            raise RuntimeError(f"kernels differ from the plain functions: {bits}")
        print(f"  kernels: {', '.join(isas)}: the bits of the plain functions", flush=True)
        status = {each["name"]: each["status"] for each in json.loads(told(grace, "doctor", "--json"))["findings"]}
        if status["kernels"] != "ok":
            raise RuntimeError(f"grace doctor says {status}")
        told(grace, "methods", "topk")
        told(grace, "report", "run.jsonl")
        told(grace, "report", "run.jsonl", "--html", "run.html")
    except RuntimeError as error:
        print(error)
        return False
    return True


def main() -> int:
    """Try all Pythons."""
    (wheel,) = map(Path, sys.argv[1:])
    good = True
    with tempfile.TemporaryDirectory() as folder:
        for version in VERSIONS:
            python = find(version)
            if python is None:
                print(f"Python {version} is not here: not tried")
            else:
                good &= use(python, wheel.resolve(), Path(folder) / version)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
