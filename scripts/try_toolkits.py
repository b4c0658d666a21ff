"""Run a core set of the tests with a wheel of GRACE, on the oldest PyTorch and NumPy of setup.cfg and on the newest.

    python scripts/try_toolkits.py dist/*_x86_64.whl

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

from set_up_demo import cpu_build
from try_pythons import VERSIONS, find

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("tests/test_torch.py",)
# grace.torch.stages overrides private methods of PipelineStage. With the oldest PyTorch its test stands still: 1F1B
# over gloo waits for ever in PyTorch 2.6; 2.13 and 2.14 pass.
MORE = {"newest": ("tests/test_stages.py",)}
NEEDS = ("pytest>=8", "pytest-timeout", "psutil")


def ends() -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Name of an end -> its Pythons, the first that works first, and its requirements."""
    bounds = dict(re.findall(r"^    (numpy|torch)>=([\d.]+)$", (ROOT / "setup.cfg").read_text(), re.MULTILINE))
    return {
        "oldest": (
            VERSIONS,
            tuple(f"{name}=={bound if '.' in bound else bound + '.0'}.*" for name, bound in bounds.items()),
        ),
        "newest": (VERSIONS[::-1], ("torch",)),
    }


def use(python: str, wheel: Path, requirements: tuple[str, ...], chosen: tuple[str, ...], folder: Path) -> bool | None:
    """Whether the tests pass; None if pip finds no such PyTorch for this Python."""
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
    told = (
        "import grace, sys, torch; print('Python', sys.version.split()[0], 'torch', torch.__version__, grace.__file__)"
    )
    subprocess.run([own, "-c", told], cwd=tree, env=environment, check=True)
    tests = [own, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    return subprocess.run(tests, cwd=tree, env=environment).returncode == 0


def main() -> int:
    """Try both ends, or those that are named after the wheel."""
    wheel, *names = sys.argv[1:]
    failed = []
    for name, (versions, requirements) in ends().items():
        if names and name not in names:
            continue
        passed = None
        for python in filter(None, map(find, versions)):
            with tempfile.TemporaryDirectory() as folder:
                chosen = (*TESTS, *MORE.get(name, ()))
                passed = use(python, Path(wheel).resolve(), requirements, chosen, Path(folder))
            if passed is not None:
                break
        print(f"the {name} PyTorch: {'passed' if passed else 'failed' if passed is False else 'not found'}", flush=True)
        failed += [name] * (not passed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
