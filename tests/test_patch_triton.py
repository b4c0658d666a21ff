"""Triton's kernels of grace.patch, in processes of their own: Triton reads TRITON_INTERPRET when it is imported."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

WORKERS = Path(__file__).parent / "workers"


@pytest.mark.slow
@pytest.mark.parametrize("part, count", [("interpreted", 20), ("compiled", 16)])
def test_triton(part, count, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("zstandard")
    pytest.importorskip("xxhash")
    if platform.system() != "Linux":
        pytest.skip("Triton is for Linux")  # there `make test` installs it, apart from the other packages
    folders = [WORKERS.parents[1], WORKERS.parent, Path(sys.prefix) / "triton", os.environ.get("PYTHONPATH", "")]
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "GRACE_", "TRITON_"))}
    mine |= {"PYTHONPATH": os.pathsep.join(map(str, folders)), "TRITON_CACHE_DIR": str(tmp_path)}
    mine |= {"TRITON_INTERPRET": "1"} if part == "interpreted" else {}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        part,
        WORKERS / "triton_patches.py",
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=mine, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) == count
