"""`grace doctor` and `grace methods`: toolkits are stub packages here, so nothing heavy is imported."""

import json
import os
import re
import subprocess
import sys
from enum import Enum
from io import StringIO
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the grace command needs the extra [cli]")
from rich.console import Console

from grace.cli import doctor
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
    "triton": "__version__ = '9.0'\n",
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


@pytest.mark.parametrize("name", ["torch", "tensorflow", "keras", "horovod", "triton"])
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
    asked = dict(
        re.findall(r"^ +(numpy|torch|tensorflow|keras|horovod|triton)[>=]=([\d.]+)(?:;|$)", text, re.MULTILINE)
    )
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


def test_methods_lists_the_registry():
    done = grace_command("methods", "--json")
    assert done.returncode == 0, done.stderr
    listed = json.loads(done.stdout)
    (topk,) = [entry for entry in listed["compressors"] if entry["name"] == "topk"]
    assert topk["parameters"] == {"index_coding": "int32", "compress_ratio": 0.01, "selector": "exact"}
    assert (topk["family"], topk["memory"], topk["allreduce"]) == ("sparsification", "residual", False)
    two = ["reducescatter", "twostage"]
    assert topk["communicators"] == ["allgather", "auto", "broadcast", "hierarchical", "planned", *two]
    assert "EMNLP 2017, arXiv:1704.05021" in topk["citation"]
    assert topk["bits_per_element"] == pytest.approx(0.64, rel=1e-4)
    assert (topk["unbiased"], topk["variance"]) == (False, None)
    assert topk["contraction"] == pytest.approx(0.01, rel=1e-4)
    for entries in listed.values():
        assert all(entry["summary"] for entry in entries)
    assert all(entry["citation"] for entry in listed["compressors"] if entry["name"] not in ("none", "fp16", "bf16"))
    # Upstream's methods are there, and at least twenty more.
    upstream = (
        "none fp16 onebit signsgd signum efsignsgd qsgd terngrad natural u8bit inceptionn randomk topk threshold dgc "
        "adaq sketch powersgd"
    )
    known = {name for entry in listed["compressors"] for name in (entry["name"], *entry["aliases"])}
    assert set(upstream.split()) <= known
    assert len(listed["compressors"]) >= 18 + 20


VALUES = r"\d|\"|positive|number|name|as text|as in the memory|`plan`"


def test_every_parameter_has_its_meaning_its_values_and_an_example():
    from grace.cli import catalog

    for kind, registry in catalog.KINDS.items():
        for name in registry:
            known, meanings = catalog.keys(registry[name]), catalog.meanings(registry[name])
            assert known.keys() <= meanings.keys(), name
            silent = {key: meanings[key] for key in known if not isinstance(known[key], bool)}
            silent = {key: text for key, text in silent.items() if not re.search(VALUES, text)}
            assert not silent, (name, silent)
            assert name in catalog.example(name, kind).values()


@pytest.mark.slow
def test_methods_prints_tables_and_single_methods():
    done = grace_command("methods")
    assert done.returncode == 0, done.stderr
    assert re.search(r"topk +0.64 +residual +Send the elements of", done.stdout)
    one = grace_command("methods", "u8bit").stdout
    assert "dettmers8 (also u8bit)" in one
    for part in (
        'grace_from_params({"compressor": "dettmers8", "table": "dynamic8", "block_size": 4096})',
        "elements that share a scale, a multiple of 8;",
        "block_size=4096",
        "8.008 (measured)",
        "contraction d =",
        "allgather, auto, broadcast",
        "arXiv:1511.04561",
    ):
        assert part in one
    assert "memories" not in one
    unknown = grace_command("methods", "topkk")
    assert unknown.returncode != 0
    assert "nothing is registered under 'topkk'" in unknown.stderr


BITS = {  # formulas for 2^20 elements: ratio 0.01 (0.001 for dgc, sketch_sgd), rank 4 of 1024 x 1024
    "none": 32,
    "fp16": 16,
    "bf16": 16,
    "fp8": 8 + 32 / 128,
    "onebit": 1,
    "signsgd": 1,
    "signum": 1,
    "efsignsgd": 1,
    "qsgd": 8 + 32 / 512,
    "terngrad": 2,
    "natural": 8,
    "natural_dithering": 4 + 32 / 512,
    "dettmers8": 8 + 32 / 4096,
    "blockint": 4 + 32 / 512,
    "geometric": 8,
    "damped": 4 + 32 / 512,
    "kashin": 2 * 4 + 32 / 512,
    "shared_int": 8,
    "eden": 4,
    "thc": 8,
    "sketch": 6,
    "randomk": 0.32,
    "topk": 0.64,
    "threshold": 0.64,
    "dgc": 0.064,
    "adaq": 0.32,
    "gtopk": 0.64,
    "oktopk": 0.8,  # half of k elements to the other worker, then three quarters: a step that finds thresholds
    "cltk": 0.64,
    "demo": 0.34,
    "powersgd": 0.25,
    "acpsgd": 0.125,
    "gradzip": 0.25,
    "gradiveq": 32,  # in the first step
    "dion": 32 * 256 * 2048 / 2**20,
    "atomo": 0.25,
    "chunktopk": 64 / 4096 * 14 + 64 / 4096,
    "stc": 0.01 * (6.64 + 2.5),
    "qsparse": 0.01 * (32 + 5),
    "chain": 0.01 * (32 + 8),
}


def test_measured_bits_are_those_of_the_formulas():
    from grace.cli.catalog import bits

    for name, expected in BITS.items():
        chance = {"dgc": 0.15, "stc": 0.15, "atomo": 0.5}  # atomo draws few vectors, 4 on average
        assert bits(name) == pytest.approx(expected, rel=chance.get(name, 0.02)), name
    for name, low, high in (
        ("3lc", 1.6 / 14, 1.6),
        ("inceptionn", 2, 34),
        ("wangni", 0.5, 0.05 * 64),
        ("adacomp", 0.3, 3),
        ("variance", 0, 0.001),  # a first step sends its scale alone
    ):
        assert low <= bits(name) <= high, name


def test_version():
    import grace

    assert grace_command("--version").stdout.strip() == f"grace {grace.__version__}"


def test_without_typer_the_command_names_the_remedy(stubs):
    (stubs / "typer.py").write_text("raise ModuleNotFoundError('No module named typer', name='typer')")
    done = grace_command("doctor")
    assert done.returncode == 1
    assert "typer" in done.stderr
    assert "pip install '.[cli]'" in done.stderr
    assert "Traceback" not in done.stderr
