"""`grace doctor` and `grace methods`: toolkits are stub packages here, so nothing heavy is imported."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from io import StringIO
from pathlib import Path
from typing import ClassVar

import pytest

pytest.importorskip("typer", reason="the grace command needs the extra [cli]")
from rich.console import Console

from grace.cli import doctor, methods
from grace.cli.doctor import Status

ROOT = Path(__file__).parents[1]
WORKS = {
    "torch": "import types\n__version__ = '9.0'\nones = lambda n: types.SimpleNamespace(sum=int)\n"
    "distributed = types.SimpleNamespace(is_gloo_available=lambda: True)\n"
    "cuda = types.SimpleNamespace(device_count=lambda: 1, get_device_name=lambda i: 'a GPU')\n",
    "tensorflow": "import types\n__version__ = '9.0'\n"
    "config = types.SimpleNamespace(list_physical_devices=lambda kind: [])\n",
    "keras": "import types\n__version__ = '9.0'\nbackend = types.SimpleNamespace(backend=lambda: 'stub')\n",
    "horovod": "__version__ = '9.0'\n",
}
HOROVOD_TORCH = "gloo_built = lambda: True\nmpi_built = nccl_built = lambda: 0\n"


@pytest.fixture
def stubs(tmp_path, monkeypatch):
    """A folder of working stub toolkits, ahead of the installed ones for every process started here."""
    for name, text in WORKS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    (tmp_path / "horovod" / "torch").mkdir()
    (tmp_path / "horovod" / "torch" / "__init__.py").write_text(HOROVOD_TORCH)
    (tmp_path / "horovod" / "torch" / "mpi_lib_v2.stub.so").touch()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    return tmp_path


def grace_command(*arguments):
    """Run the command as a user does."""
    return subprocess.run([sys.executable, "-m", "grace.cli", *arguments], capture_output=True, text=True, check=False)


def findings(done):
    return {found["name"]: found for found in json.loads(done.stdout)["findings"]}


def test_everything_works(stubs):
    done = grace_command("doctor", "--json")
    assert done.returncode == 0, done.stderr
    assert {found["status"] for found in findings(done).values()} == {"ok"}
    assert findings(done)["horovod"]["detail"] == "built for torch; over gloo"
    assert json.loads(done.stdout)["gpus"] == ["a GPU"]
    assert json.loads(done.stdout)["healthy"] is True
    assert done.stderr == ""


@pytest.mark.parametrize(
    "text, reason",
    [
        ("raise RuntimeError('wrong ABI')", "RuntimeError: wrong ABI"),
        ("import no_such_dependency", "ModuleNotFoundError: No module named 'no_such_dependency'"),
        ("import os; os._exit(7)", "import ends the process with status 7"),
        ("import os; os.abort()", "import ends the process with status -6"),
    ],
)
def test_a_broken_toolkit_is_named_and_the_others_are_still_examined(stubs, text, reason):
    (stubs / "torch" / "__init__.py").write_text(text)
    (stubs / "horovod" / "torch" / "__init__.py").write_text(HOROVOD_TORCH)
    done = grace_command("doctor", "--json")
    assert done.returncode == 1
    assert findings(done)["torch"]["status"] == "broken"
    assert findings(done)["torch"]["detail"].startswith(reason)
    assert findings(done)["torch"]["remedy"]
    assert findings(done)["tensorflow"]["status"] == "ok"


def test_an_old_toolkit_is_told_apart(stubs):
    (stubs / "keras" / "__init__.py").write_text(WORKS["keras"].replace("9.0", "2.15.0"))
    done = grace_command("doctor")
    assert done.returncode == 1
    assert re.search(r"keras +2\.15\.0 +too old", done.stdout)


def test_a_missing_package_is_found_missing_and_a_hanging_one_broken(stubs):
    (stubs / "keras" / "__init__.py").write_text("import time; time.sleep(60)")
    assert doctor.probe("no_such_package") == {"missing": True}
    assert "more than 1 s" in doctor.probe("keras", timeout=1)["error"]


@pytest.mark.parametrize("name", ["torch", "tensorflow", "keras", "horovod"])
def test_missing_is_healthy_and_names_the_remedy(name):
    found = doctor.judge(name, {"missing": True})
    assert found.status is Status.MISSING
    assert doctor.REMEDIES[name] in rendered(report(found))
    assert report(found).healthy


def test_without_numpy_nothing_is_healthy():
    assert not report(doctor.judge("numpy", {"missing": True})).healthy


def report(*found):
    return doctor.Report("1.0", list(found), 2, 8.0, [], doctor.Allocator(None, ""))


def rendered(result):
    console = Console(file=StringIO(), width=120)
    doctor.render(result, console)
    return console.file.getvalue()


def test_oldest_versions_are_those_of_setup_cfg():
    text = (ROOT / "setup.cfg").read_text()
    asked = dict(re.findall(r"^ +(numpy|torch|tensorflow|keras|horovod)[>=]=([\d.]+)$", text, re.MULTILINE))
    asked["python"] = re.search(r"python_requires = >=([\d.]+)", text)[1]
    assert asked == doctor.OLDEST


GLIBC = ("glibc", "2.36")
THRESHOLDS = {"MALLOC_MMAP_THRESHOLD_": "1", "MALLOC_TRIM_THRESHOLD_": "1"}


@pytest.mark.parametrize(
    "environ, libc, huge_pages, tuned, remedy",
    [
        ({}, GLIBC, "madvise", False, "hugetlb=1"),
        ({}, GLIBC, "never", False, "MALLOC_TRIM_THRESHOLD_"),
        ({}, ("glibc", "2.31"), "madvise", False, "MALLOC_TRIM_THRESHOLD_"),
        ({}, GLIBC, "always", True, ""),
        ({}, ("", ""), "never", None, ""),
        ({"GLIBC_TUNABLES": "glibc.malloc.check=0:glibc.malloc.hugetlb=1"}, GLIBC, "madvise", True, ""),
        ({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}, GLIBC, "madvise", True, ""),
        ({"THP_MEM_ALLOC_ENABLE": "1"}, GLIBC, "madvise", True, ""),
        (THRESHOLDS, GLIBC, "madvise", True, "hugetlb=1"),
        (THRESHOLDS, GLIBC, "never", True, ""),
    ],
)
def test_allocator(environ, libc, huge_pages, tuned, remedy):
    judged = doctor.allocator(environ, libc, huge_pages)
    assert judged.tuned is tuned
    assert remedy in judged.remedy
    assert bool(judged.remedy) == bool(remedy)


class Kind(Enum):
    MEAN = "mean"


@dataclass(frozen=True)
class Halve:
    """Send ``half``.

    More words.
    """

    ratio: float = 0.5
    ragged: ClassVar[bool] = False
    memory: ClassVar[str] = "none"

    @property
    def combine(self):
        return Kind.MEAN


def test_methods_describe_what_the_class_declares():
    entry = methods.describe("halve", Halve, ["half"])
    assert entry.to_dict() == {
        "name": "halve",
        "aliases": ["half"],
        "summary": "Send `half`.",
        "parameters": {"ratio": 0.5},
        "combine": "mean",
        "ragged": False,
        "memory": "none",
    }
    console = Console(file=StringIO(), width=100)
    methods.render({"compressors": [entry]}, console)
    assert "ratio=0.5" in console.file.getvalue()


def test_methods_lists_the_registry():
    done = grace_command("methods", "--json")
    assert done.returncode == 0, done.stderr
    listed = json.loads(done.stdout)
    topk = next(entry for entry in listed["compressors"] if entry["name"] == "topk")
    assert topk["parameters"]["compress_ratio"] == 0.01
    assert topk["combine"] == "gather"
    assert all(entry["summary"] for entries in listed.values() for entry in entries)


def test_version():
    import grace

    assert grace_command("--version").stdout.strip() == f"grace {grace.__version__}"


def test_without_typer_the_command_names_the_remedy(stubs):
    (stubs / "typer.py").write_text("raise ModuleNotFoundError('No module named typer', name='typer')")
    done = grace_command("doctor")
    assert done.returncode == 1
    assert "typer" in done.stderr
    assert "pip install 'grace-compression[cli]'" in done.stderr
    assert "Traceback" not in done.stderr
