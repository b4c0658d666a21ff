"""The C interface of the kernels: one table, what is written from it, and who must follow it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from grace.kernels import Library, schema
from grace.kernels.build import HERE, compiler

ROOT = Path(__file__).parent.parent


def exported():
    """Names of the functions that the C++ sources export."""
    sources = "".join((HERE / name).read_text() for name in ("kernels.cc", "loops.cc", "methods.cc"))
    return set(re.findall(r"^API [^(]*\bgrace_(\w+)\(", sources, re.MULTILINE))


def test_the_header_is_up_to_date():
    assert schema.HEADER.read_text() == schema.header(), "run python -m grace.kernels.schema"


def test_every_exported_function_has_a_row():
    assert exported() == schema.KERNELS.keys() | {"loops", "name", "stream_from", "supports"}


def test_the_driver_calls_every_kernel():
    called = set(re.findall(r"\bgrace_(\w+)\(", (ROOT / "scripts" / "kernels_driver.cc").read_text()))
    assert called >= schema.KERNELS.keys()


def test_the_library_has_a_method_for_every_row():
    assert schema.KERNELS.keys() <= vars(Library).keys()


def test_the_host_calls_only_kernels_that_there_are():
    files = [HERE / f"{name}.py" for name in ("arrays", "calls", "memories", "quantisers", "sparsifiers", "transforms")]
    called = {name for file in files for name in re.findall(r"\blibrary\.(\w+)", file.read_text())}
    assert len(called) > 30
    assert called <= schema.KERNELS.keys()


# -- minutes of compiling ----------------------------------------------------------------------------------------------
def compiled(*command, **environment):
    """What a command says that compiles the kernels."""
    if compiler() is None:
        pytest.skip("no C++ compiler")
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run([sys.executable, *command], env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.processes
@pytest.mark.timeout(1200)
def test_the_compiler_warns_of_nothing():
    compiled("-m", "grace.kernels.build", "--strict", CXXFLAGS="-O1")


@pytest.mark.exhaustive
@pytest.mark.processes
@pytest.mark.timeout(2400)
def test_sanitizers_find_nothing():
    assert "nothing found" in compiled("scripts/sanitize_kernels.py", "scalar")
