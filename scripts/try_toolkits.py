"""Run a core set of the tests with a wheel of GRACE, on the oldest toolkits and trainers of setup.cfg and the newest.

    python scripts/try_toolkits.py dist/*_x86_64.whl           # all ends: oldest, newest, oldest-keras, newest-keras
    python scripts/try_toolkits.py dist/*_x86_64.whl newest    # one

Each end has a clean environment: the oldest with the oldest Python from 3.10 that this machine has, the newest with the
newest Python for which pip finds a build. The tests see the wheel, not this checkout. Several gigabytes are downloaded
where PyTorch's index of CPU builds cannot be reached. Exits with 1 if an end fails.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from set_up_demo import cpu_build
from try_pythons import VERSIONS, find

ROOT = Path(__file__).resolve().parents[1]
TRAINERS = ("tests/test_trainers.py", "tests/test_trainers_huggingface.py", "tests/test_trainers_others.py")
TORCH = ("tests/test_torch.py", *TRAINERS)
KERAS = ("tests/test_keras_layout.py",)
# grace.torch.stages overrides private methods of PipelineStage. Its test hangs with the oldest PyTorch: 1F1B over gloo
# never ends in PyTorch 2.6; 2.13 and 2.15 pass.
STAGES = ("tests/test_stages.py",)
NEEDS = ("pytest>=8", "pytest-timeout", "psutil", "scikit-learn")


class End(NamedTuple):
    """The Pythons of an end (the first available one is used), its requirements and its tests."""

    versions: tuple[str, ...]
    requirements: tuple[str, ...]
    tests: tuple[str, ...]


def ends() -> dict[str, End]:
    """The ends by name."""
    text = (ROOT / "setup.cfg").read_text()

    def least(name: str) -> str:
        bound = max(re.findall(rf"^    {name}>=([\d.]+)", text, re.MULTILINE), key=len)
        return f"{name}=={bound if '.' in bound else bound + '.0'}.*"

    trainers = ("torch", "accelerate", "lightning", "transformers", "trl")
    keras = ("tensorflow-cpu", "keras")
    return {
        "oldest": End(VERSIONS, tuple(map(least, ("numpy", *trainers))), TORCH),
        "newest": End(VERSIONS[::-1], trainers, (*TORCH, *STAGES)),
        "oldest-keras": End(VERSIONS, tuple(map(least, ("numpy", *keras))), KERAS),
        "newest-keras": End(VERSIONS[::-1], keras, KERAS),
    }


def use(python: str, wheel: Path, requirements: tuple[str, ...], chosen: tuple[str, ...], folder: Path) -> bool | None:
    """Whether the tests pass; None if pip finds no such packages for this Python."""
    own = str(folder / "venv" / "bin" / "python")
    subprocess.run([python, "-m", "venv", str(folder / "venv")], check=True)
    pip = [own, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-compile", *cpu_build()]
    if subprocess.run([*pip, *requirements, *NEEDS]).returncode:
        return None
    subprocess.run([*pip, "--no-deps", str(wheel)], check=True)
    skipped = shutil.ignore_patterns("grace", ".*", "build", "dist", "out", "site", "*.egg-info", "__pycache__")
    tree = shutil.copytree(ROOT, folder / "tree", ignore=skipped)
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "GRACE_KERNELS")}
    environment["OMP_NUM_THREADS"] = "1"
    told = "import grace, sys; print('Python', sys.version.split()[0], grace.__file__)"
    subprocess.run([own, "-c", told], cwd=tree, env=environment, check=True)
    names = [re.split("[=<>]", each)[0] for each in requirements]
    found = subprocess.run([own, "-m", "pip", "list", "--format=freeze"], capture_output=True, text=True, check=True)
    print(*(each for each in found.stdout.split() if each.split("==")[0] in names), flush=True)
    tests = [own, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    return subprocess.run(tests, cwd=tree, env=environment).returncode == 0


def main() -> int:
    """Try both ends, or those that are named after the wheel."""
    wheel, *names = sys.argv[1:]
    failed = []
    for name, end in ends().items():
        if names and name not in names:
            continue
        passed = None
        for python in filter(None, map(find, end.versions)):
            with tempfile.TemporaryDirectory() as folder:
                passed = use(python, Path(wheel).resolve(), end.requirements, end.tests, Path(folder))
            if passed is not None:
                break
        print(f"{name}: {'passed' if passed else 'failed' if passed is False else 'not found'}", flush=True)
        failed += [name] * (not passed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
