"""Third-party methods: an installed package is found by name, listed, and checked against the laws."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs a command where the example package is installed."""
    tree, site = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "examples" / "own_method", tree / "own_method")
    install = ["install", "--quiet", "--no-deps", "--no-build-isolation", f"--target={site}", str(tree / "own_method")]
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *install], check=True)

    def run(*command, check=True):
        paths = {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]), "TF_CPP_MIN_LOG_LEVEL": "3"}
        return subprocess.run(
            [sys.executable, *command],
            env={**os.environ, **paths},
            cwd=tree / "own_method",
            check=check,
            capture_output=True,
            text=True,
        )

    return run


def test_it_is_known_by_name(run):
    code = (
        "import grace, numpy; out = grace.simulate({'compressor': 'nearest4', 'block_size': 128},"
        " [{'w': numpy.ones(4096, 'float32')}]); print(out.report.bytes_sent, out.report.method)"
    )
    assert run("-c", code).stdout.split("\n")[0] == f"{4096 // 2 + 4 * 32} nearest4 + residual + allgather"


def test_it_is_listed(run):
    found = json.loads(run("-m", "grace.cli", "methods", "--json").stdout)
    (entry,) = [each for each in found["compressors"] if each["name"] == "nearest4"]
    assert entry["parameters"] == {"block_size": 64}


@pytest.mark.slow
def test_its_own_tests_hold_it_against_the_laws(run):
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", "-k", "numpy", check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


def test_a_package_that_fails_is_named_and_the_rest_still_works(run, tmp_path):
    broken = tmp_path / "broken-1.0.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (broken / "entry_points.txt").write_text("[grace.compressors]\nbroken = broken_module_that_is_absent\n")
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import grace.registry as r; print(len(r.compressors))"
    done = run("-W", "always", "-c", code, check=False)
    assert "broken offers the compressor 'broken'" in done.stderr
    assert "Upgrade or uninstall broken" in done.stderr
    assert int(done.stdout) >= 20
