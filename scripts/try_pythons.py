"""Install a wheel in a clean environment of each Python from 3.10 to 3.13 that this machine has, and use it there.

    python scripts/try_pythons.py dist/*.whl

NumPy and the `cli` extra come from the package index. Tried in each: import without NumPy, `grace methods`, `grace
report` and `simulate` on NumPy. Ends with 1 if one of them fails; a Python that is not here is named.
"""

from __future__ import annotations

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


def find(version: str) -> str | None:
    """An interpreter of that version: on the path, or pyenv's."""
    known = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    beside = [each / "bin" / "python" for each in sorted(known.glob(f"{version}.*"))]
    for each in (shutil.which(f"python{version}"), *beside):
        asked = "import sys; print('%d.%d' % sys.version_info[:2])"
        if each and subprocess.run([each, "-c", asked], capture_output=True, text=True).stdout.strip() == version:
            return str(each)
    return None


def use(python: str, wheel: Path, folder: Path) -> bool:
    """Whether the wheel works there."""
    own, grace = str(folder / "bin" / "python"), str(folder / "bin" / "grace")
    commands = (
        [python, "-m", "venv", str(folder)],
        [own, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", f"{wheel}[cli]"],
        [own, "-c", USE],
        [grace, "methods", "topk"],
        [grace, "report", "run.jsonl"],
        [grace, "report", "run.jsonl", "--html", "run.html"],
    )
    folder.mkdir(parents=True)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    for command in commands:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            print(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
            return False
        if command[-1] == USE:
            print(done.stdout.strip(), flush=True)
    return True


def main() -> int:
    """Try them all."""
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
