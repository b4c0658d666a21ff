"""The floors of the library: a module imports only from its own floor and lower ones, without cycles."""

import ast
from functools import cache
from pathlib import Path

import pytest

from grace import Compressor
from grace.compressors.measured.bf16 import BF16
from grace.compressors.measured.fp16 import FP16
from grace.compressors.measured.none import NoCompression
from grace.compressors.measured.oktopk import OkTopK
from grace.compressors.measured.powersgd import PowerSGD
from grace.compressors.measured.topk import TopK
from grace.core import Context
from grace.core.registry import compressors
from grace.engine.groups.recipes import RECIPES

ROOT = Path(__file__).parents[1]
FLOORS = (
    ("core",),
    ("ops",),
    ("compressors", "memories", "communicators", "policies", "transports"),
    ("kernels",),
    ("backends",),
    ("engine",),
    (
        *("checkpoint", "factory", "gossip", "local", "patch", "planner"),
        *("simulate", "stages", "start", "testing", "trackers"),
    ),
    ("elastic", "factorize", "jax", "keras", "tensorflow", "torch"),
    ("__main__", "bench", "cli"),
)
TOOLS = FLOORS[-1]


def name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports():
    """The imports of each module, including those inside functions and for type checkers."""
    paths = {name(path): path for path in (ROOT / "grace").rglob("*.py")}
    found = {}
    for module, path in paths.items():
        named = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path}: imports are absolute"
                each = {f"{node.module}.{alias.name}" for alias in node.names}
                named |= {one if one in paths else node.module for one in each}
        found[module] = sorted(named & paths.keys() - {module})
    return found


def floor(module):
    package = module.split(".")[1]
    (found,) = [number for number, packages in enumerate(FLOORS) if package in packages]
    return found


def test_every_package_has_one_floor():
    packages = {module.split(".")[1] for module in imports() if "." in module}
    assert packages == {package for packages in FLOORS for package in packages} | {"aliases"}


def test_imports_go_down():
    up = [
        f"{module} imports {other}"
        for module, others in imports().items()
        for other in others
        if module not in ("grace", "grace.aliases")
        and (floor(module) < floor(other) if other != "grace" else floor(module) < len(FLOORS) - 1)
    ]
    assert up == []


def test_nothing_imports_the_tools():
    users = [
        f"{module} imports {other}"
        for module, others in imports().items()
        for other in others
        if other.split(".")[1:2] and other.split(".")[1] in TOOLS and module.split(".")[1] not in TOOLS
    ]
    assert users == []


def test_what_trains_needs_no_package_of_benchmarks():
    """grace_bench may use all of grace; the commands find it where it is installed."""
    users = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "grace").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for named in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
        if named.split(".")[0] == "grace_bench"
    }
    assert users == {"grace/cli/bench.py", "grace/bench/worker.py"}


def test_a_test_module_imports_no_other():
    found = [
        f"{path.name} imports {node.module}"
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("test_")
    ]
    assert found == []


def packages():
    """The packages that each package imports, except its parents and children. A package may be a single module."""
    folders = {name(path) for path in (ROOT / "grace").rglob("__init__.py")}

    def package(module):
        return module if module in folders or module.count(".") == 1 else module.rpartition(".")[0]

    found = {}
    for module, others in imports().items():
        own = package(module)
        apart = {package(other) for other in others if not f"{own}.".startswith(f"{package(other)}.")}
        found.setdefault(own, set()).update(other for other in apart if not other.startswith(f"{own}."))
    return found


@pytest.mark.parametrize("graph", [imports, packages])
def test_imports_form_no_circle(graph):
    graph = graph()
    done, path = set(), []

    def visit(module):
        if module in path:
            pytest.fail("a circle of imports: " + " -> ".join([*path[path.index(module) :], module]))
        if module not in done:
            path.append(module)
            for other in sorted(graph[module]):
                if other not in ("grace", "grace.aliases"):
                    visit(other)
            done.add(path.pop())

    for module in graph:
        if module not in ("grace", "grace.aliases"):
            visit(module)


def test_files_and_classes_are_short():
    long = []
    for path in (ROOT / "grace").rglob("*.py"):
        text = path.read_text()
        if len(text.splitlines()) > 500:
            long.append(str(path))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and node.end_lineno - node.lineno >= 300:
                long.append(node.name)
    # Exceptions to the limit: a backend is one list of array functions, local training is one loop.
    assert set(long) <= {"TorchBackend", "DiLoCo"}


def test_only_transports_ask_for_the_name_of_a_toolkit():
    """Other modules ask a backend for its properties. Transports bind a toolkit; the test kit compares toolkits."""
    found = {
        str(path)
        for path in (ROOT / "grace").rglob("*.py")
        if path.relative_to(ROOT / "grace").parts[0] not in ("backends", "transports", "testing")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare)
        if any(ast.unparse(each).endswith("xp.name") for each in (node.left, *node.comparators))
    }
    assert not found


def test_measured_methods_have_kernels_for_buckets_and_need_no_study():
    measured = {cls for cls in compressors.values() if cls.__module__.startswith("grace.compressors.measured.")}
    assert measured <= {*RECIPES, NoCompression, FP16, BF16, PowerSGD, OkTopK}, "these five need no recipe"
    assert {cls.__module__.split(".")[2] for cls in set(compressors.values()) - measured} == {"studies"}
    users = {
        module
        for module, others in imports().items()
        if module.startswith("grace.compressors.") and "studies" not in module
        if any(other.startswith("grace.compressors.studies.") for other in others)
    }
    assert users == {"grace.compressors.selectors"}, "whose table has SIDCo, which `topk` takes as a selector"


def test_methods_name_no_toolkit():
    for package in ("core", "ops", "compressors", "memories", "communicators", "policies"):
        for path in (ROOT / "grace" / package).rglob("*.py"):
            named = {
                (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).split(".")[0]
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, (ast.Import, ast.ImportFrom))
            }
            assert not named & {"numpy", "torch", "tensorflow", "keras", "horovod"}, path


def test_a_context_has_few_names():
    names = [name for name in dir(Context(None, "w", (3,))) if not name.startswith("_")]
    assert len(names) <= 17, names


def test_a_method_author_sees_few_names():
    for cls, most in ((Compressor, 12), (TopK, 16)):
        names = {*dir(cls), *getattr(cls, "__dataclass_fields__", ())}
        public = sorted(each for each in names if not each.startswith("_"))
        assert len(public) <= most, public
