"""The C interface of the kernels: one table, what is written from it, and who must follow it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from grace.backends.numpy import NumpyBackend
from grace.core import Context
from grace.engine.codecs.table import FAMILIES
from grace.engine.groups.recipes import RECIPES
from grace.kernels import Library, schema
from grace.kernels.build import HERE, compiler, libraries

ROOT = Path(__file__).parent.parent


def exported():
    """Names of the functions that the C++ sources export."""
    sources = "".join((HERE / name).read_text() for name in ("kernels.cc", "loops.cc", "interface-methods-inl.h"))
    return set(re.findall(r"^API [^(]*\bgrace_(\w+)\(", sources, re.MULTILINE))


def test_the_header_is_up_to_date():
    assert schema.HEADER.read_text() == schema.header(), "run python -m grace.kernels.schema"


def test_every_exported_function_has_a_row():
    assert exported() == schema.KERNELS.keys() | {"loops", "name", "stream_from", "supports"}


def test_the_sources_name_the_methods_of_each_loop():
    sources = "".join(path.read_text() for path in (*HERE.glob("*.h"), *HERE.glob("*.cc")) if path.name != "api.h")
    methods = {
        module.rpartition(".")[2] for modules in FAMILIES.values() for module in modules if "compressors" in module
    }
    methods -= {"chain", "stc", "qsparse"}  # they combine others
    missing = {method for method in methods if not re.search(rf"\b{method}\b", sources)}
    assert not missing


def test_the_driver_calls_every_kernel():
    called = set(re.findall(r"\bgrace_(\w+)\(", (ROOT / "scripts" / "kernels_driver.cc").read_text()))
    assert called >= schema.KERNELS.keys()


def test_the_kernels_that_swap_are_those_that_recipes_name():
    made = (find(kind(), Context(NumpyBackend(), "w", (8192,))) for kind, find in RECIPES.items())
    swaps = {kernel.name for kernel in schema.KERNELS.values() if "swap" in {each.name for each in kernel.arguments}}
    assert swaps == {each.encode for each in made if each is not None}


def test_the_library_has_a_method_for_every_row():
    assert schema.KERNELS.keys() <= vars(Library).keys()


def test_the_host_calls_only_kernels_that_there_are():
    files = [HERE / f"{name}.py" for name in ("arrays", "calls", "quantisers", "sparsifiers", "transforms")]
    called = {name for file in files for name in re.findall(r"\blibrary\.(\w+)", file.read_text())}
    assert len(called) > 30
    assert called <= schema.KERNELS.keys()


# -- headers -----------------------------------------------------------------------------------------------------------
HEADERS = sorted(path.name for path in HERE.glob("*.h"))


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_compiles_alone(header):
    cxx = compiler()
    if cxx is None:
        pytest.skip("no C++ compiler")
    for flags in sorted({tuple(flags) for _, *flags in libraries().values()}):
        command = [*cxx, *flags, "-fsyntax-only", "-I", str(HERE), "-x", "c++", "-"]
        done = subprocess.run(command, input=f'#include "{header}"\n', capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_no_source_includes_a_source():
    sources = [*HERE.glob("*.cc"), *HERE.glob("*.h")]
    included = {path.name: re.findall(r'#include "([^"]+)"', path.read_text()) for path in sources}
    assert not {name: each for name, each in included.items() if any(file.endswith(".cc") for file in each)}


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
