"""The C interface of the kernels: the schema, the code generated from it, and the code that must match it."""

import ast
import inspect
import os
import re
import shutil
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
from grace.kernels.quantisers import Quantisers
from grace.kernels.sparsifiers import Sparsifiers
from grace.kernels.transforms import Transforms

ROOT = Path(__file__).parent.parent
FAMILIES_OF_KERNELS = {each.__name__: each for each in (Quantisers, Sparsifiers, Transforms)}


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
    methods = {module.rpartition(".")[2] for modules in FAMILIES.values() for module in modules}
    methods -= {"chain", "stc", "qsparse"}  # combinations of other methods
    methods -= {"fp16"}  # a cast of the toolkit
    missing = {method for method in methods if not re.search(rf"\b{method}\b", sources)}
    assert not missing


def test_the_driver_calls_every_kernel():
    called = set(re.findall(r"\bgrace_(\w+)\(", (ROOT / "scripts" / "kernels_driver.cc").read_text()))
    assert called >= schema.KERNELS.keys()


def test_the_kernels_that_swap_are_those_of_recipes_with_a_residual():
    """Groups give a method no residual if its payload does not show values that are not finite (`kind_of`)."""
    fed = {kind: find(kind(), Context(NumpyBackend(), "w", (8192,))) for kind, find in RECIPES.items()}
    named = {each.encode for kind, each in fed.items() if each is not None and kind().traits.nonfinite_in_payload}
    swaps = {kernel.name for kernel in schema.KERNELS.values() if "swap" in {each.name for each in kernel.arguments}}
    assert swaps == named


def test_the_library_has_a_method_for_every_row():
    assert schema.KERNELS.keys() <= vars(Library).keys()


def test_the_host_calls_only_kernels_that_there_are():
    files = [HERE / f"{name}.py" for name in ("arrays", "calls", "quantisers", "sparsifiers", "transforms")]
    called = {name for file in files for name in re.findall(r"\blibrary\.(\w+)", file.read_text())}
    assert len(called) > 30
    assert called <= schema.KERNELS.keys()


def partial_families():
    """Each class that has some kernels of a family for another toolkit: the family's name, and its functions."""
    found = []
    for path in (HERE / "tensorflow.py", *sorted((HERE / "triton").glob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            for mark in node.decorator_list if isinstance(node, ast.ClassDef) else ():
                if isinstance(mark, ast.Call) and mark.func.id == "partly":
                    functions = [each for each in node.body if isinstance(each, ast.FunctionDef)]
                    public = [each for each in functions if not each.name.startswith("_")]
                    found.append(pytest.param(mark.args[0].id, public, id=node.name))
    return found


def host_arguments(family, function):
    """The names of a host kernel's arguments, and the number of optional ones."""
    host = inspect.signature(getattr(FAMILIES_OF_KERNELS[family], function)).parameters.values()
    names = [each.name for each in host if each.kind is not each.VAR_POSITIONAL]
    if len(names) < len(host):  # generated from a row of the schema, whose attributes are further arguments
        row = schema.CODECS[function.rpartition("_")[0]].sizes.__wrapped__
        names += [each for each in inspect.signature(row).parameters if each not in ("n", "_")]
    return names, sum(each.default is not each.empty for each in host)


@pytest.mark.parametrize(("family", "functions"), partial_families())
def test_toolkits_take_the_arguments_of_the_host(family, functions):
    """Methods call one signature on all toolkits."""
    assert functions
    for function in functions:
        host, optional = host_arguments(family, function.name)
        own = [each.arg for each in function.args.args]
        assert not function.args.vararg
        assert own == host[: len(own)], function.name
        assert len(host) - len(own) <= optional, function.name


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
    """The output of a command that compiles the kernels."""
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


# Sends half of each element, added as a user would: the edits of all files that a kernel needs.
TOY = {
    "grace/kernels/schema.py": (
        'codec(\n    "onebit",',
        """codec(
    "toy",
    {"halves": "float32[n]"},
    "",
    \"\"\"Encode: half of each element. Method: tests.\"\"\",
    swaps=True,
)
""",
    ),
    "grace/kernels/kernels.cc": (
        "API void grace_onebit_encode(",
        """API void grace_toy_encode(const Loops*, const float* x, const float* residual, float* out, float* halves,
                          int64_t n, int64_t, int64_t swap) {
  for (int64_t i = 0; i < n; i++) {
    const float last = residual ? residual[i] : 0, v = x[i] + last;
    halves[i] = v / 2;
    if (out) out[i] = v - halves[i];
    if (swap) const_cast<float*>(x)[i] = last;
  }
}

API void grace_toy_mean(const Loops*, const float* const* halves, int64_t workers, float* out, int64_t n, int64_t) {
  for (int64_t i = 0; i < n; i++) {
    float sum = 0;
    for (int64_t w = 0; w < workers; w++) sum += halves[w][i];
    out[i] = sum / float(workers);
  }
}

""",
    ),
    "grace/engine/groups/recipes.py": (
        "RECIPES: dict",
        """from toy import Toy


def _toy(compressor: Toy, ctx: Context) -> Recipe:
    return _coded("toy", ctx.size, {})


""",
    ),
    "scripts/kernels_driver.cc": (
        "  grace_onebit_encode(",
        """  grace_toy_encode(loops, x.data(), residual.data(), residual.data(), mean.data(), n, threads, swap);
  grace_toy_mean(loops, scaled, 0, mean.data(), n, threads);
""",
    ),
}
METHOD = """
from dataclasses import dataclass
from grace.core import Compressor, Traits
from grace.ops.validate import fitting


@dataclass(frozen=True)
class Toy(Compressor):
    traits = Traits(block_size=1, nonfinite_in_payload=True)

    def compress(self, x, state, ctx):
        return (x / 2,), state

    def decompress(self, payload, ctx):
        return fitting(ctx.xp, payload[0], "float32", ctx.size, "halves")
"""
TRAINED = """
import os
import numpy as np
import grace
from grace.kernels.build import build
from toy import Toy

assert build("kernels", "scalar")
found = {}
for kernels in ("scalar", "off"):
    os.environ["GRACE_KERNELS"] = kernels
    grc = grace.grace_from_params({"compressor": Toy(), "min_numel": 0}, "local")
    draw = np.random.default_rng(0)
    grc.build({f"t{n}": np.zeros(n, np.float32) for n in (7, 100)})
    for _ in range(3):
        means = grc.step({f"t{n}": draw.standard_normal(n).astype("float32") for n in (7, 100)})
    (layout,) = grc.setup.groups._known.values()
    assert [len(each.units) for each in layout.groups] == ([2] if kernels == "scalar" else [])
    found[kernels] = means
for name, mean in found["scalar"].items():
    np.testing.assert_array_equal(mean, found["off"][name])
"""


@pytest.mark.exhaustive
@pytest.mark.processes
def test_a_kernel_takes_four_files_and_the_header_that_is_written(tmp_path):
    if compiler() is None:
        pytest.skip("no C++ compiler")
    for name in ("grace", "scripts", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("_lib", "__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "grace" / "kernels" / "_lib").mkdir()
    (tmp_path / "toy.py").write_text(METHOD)
    for name, (anchor, added) in TOY.items():
        text = (tmp_path / name).read_text()
        assert anchor in text
        (tmp_path / name).write_text(text.replace(anchor, added + anchor, 1))
    recipes = tmp_path / "grace" / "engine" / "groups" / "recipes.py"
    recipes.write_text(recipes.read_text().replace("    TopK: _largest,\n", "    TopK: _largest,\n    Toy: _toy,\n"))
    tests = ["-m", "pytest", "-q", "tests/test_kernels_schema.py", "-m", "not processes and not exhaustive"]
    for command in (["-m", "grace.kernels.schema"], ["-c", TRAINED], [*tests, "-k", "not header_compiles"]):
        env = {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run([sys.executable, *command], env=env, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
