"""Triton's kernels: in its interpreter, compiled for absent devices, and unavailable.

Triton reads TRITON_INTERPRET when it is imported, so most tests are in files that a process of their own runs.
"""

import os
import platform
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from methods import backend

WORKERS = Path(__file__).parent / "workers"
APART = Path(sys.prefix) / "triton"
"""Where `make test` installs Triton: beside the packages that tests with TensorFlow see."""


@pytest.fixture(autouse=True)
def needed():
    backend("torch")


def in_another_process(*command, **environment):
    if platform.system() != "Linux":
        pytest.skip("Triton is for Linux")  # there `make test` installs it
    folders = [WORKERS.parents[1], WORKERS.parent, APART, os.environ.get("PYTHONPATH")]
    path = os.pathsep.join(str(folder) for folder in folders if folder)
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "GRACE_", "TRITON_"))}
    mine |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=mine, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def passing(name, *options, **environment):
    """How many tests of a file pass, all of them."""
    said = in_another_process("-m", "pytest", "-q", "-p", "no:cacheprovider", *options, WORKERS / name, **environment)
    (summary,) = re.findall(r"(?m)^(?:\d+ deselected, )?(\d+) passed.* in ", said)
    assert "skipped" not in said
    return int(summary)


@pytest.mark.slow
@pytest.mark.parametrize("part, least", [("encode", 80), ("mean", 80), ("not encode and not mean", 10)])
def test_interpreted(part, least):
    assert passing("triton_interpreted.py", "-k", part, TRITON_INTERPRET="1") >= least


@pytest.mark.slow
@pytest.mark.parametrize("part, least", [("encodes_and", 20), ("bits_of", 20), ("not encodes_and and not bits_of", 25)])
def test_groups_interpreted(part, least):
    assert passing("triton_groups.py", "-k", part, TRITON_INTERPRET="1") >= least


@pytest.mark.exhaustive
@pytest.mark.parametrize("name, least", [("triton_interpreted.py", 600), ("triton_groups.py", 120)])
def test_interpreted_in_every_combination(name, least):
    assert passing(name, "-m", "", TRITON_INTERPRET="1") >= least


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, pytest.param(90, marks=pytest.mark.exhaustive)])
def test_compiled(architecture, tmp_path):
    assert passing("triton_compiled.py", "-k", f"{architecture} or tried or full", TRITON_CACHE_DIR=str(tmp_path)) == 15


def kernels_on(device, before="", **environment):
    """Which kernels a backend has in another process, and whether it loads Triton."""
    code = f"{before}\nimport sys, grace.backends as b; k = b.get_backend('torch', '{device}').kernels; "
    code += "print(getattr(k, 'isa', 'none'), sys.modules.get('triton') is not None)"
    return in_another_process("-c", code, **environment).split()


@pytest.mark.slow
def test_run_on_devices_by_default_and_on_hosts_only_in_the_interpreter():
    assert kernels_on("cuda") == ["triton", "True"]
    assert kernels_on("cuda", GRACE_KERNELS="avx2") == ["triton", "True"]
    assert kernels_on("cuda", GRACE_KERNELS="off") == ["none", "False"]
    assert kernels_on("cpu", TRITON_INTERPRET="1", GRACE_KERNELS="triton") == ["triton", "True"]
    asked = kernels_on("cpu", GRACE_KERNELS="triton")
    assert asked == kernels_on("cpu", TRITON_INTERPRET="1")
    assert asked[0] != "triton"
    assert asked[1] == "False"


@pytest.mark.slow
def test_are_not_loaded_beside_tensorflow():
    loaded = "import sys, warnings; sys.modules['tensorflow'] = sys; warnings.simplefilter('ignore')"
    assert kernels_on("cuda", loaded) == ["none", "False"]
    with pytest.raises(AssertionError, match="TensorFlow is loaded"):
        kernels_on("cuda", loaded.replace("ignore", "error"))


@pytest.mark.slow
def test_are_left_out_without_a_word_where_triton_is_not_installed():
    missing = "import sys, warnings; sys.modules['triton'] = None; warnings.simplefilter('error')"
    assert kernels_on("cuda", missing) == ["none", "False"]


@pytest.mark.parametrize("broken", [ImportError("No module named 'triton'"), RuntimeError("driver")], ids=repr)
def test_where_triton_is_missing_one_warning_says_so(monkeypatch, broken):
    from grace.backends.torch import TorchBackend

    class Finder:
        def find_spec(self, name, *rest):
            if name == "grace.kernels.triton":
                raise broken

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("GRACE_KERNELS", "triton")
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    monkeypatch.delitem(sys.modules, "grace.kernels.triton", raising=False)
    monkeypatch.delattr("grace.kernels.triton", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    xp = TorchBackend()
    with pytest.warns(UserWarning, match=f"Triton.s kernels cannot be used, .*: {broken}"):
        kernels = xp.kernels
    assert getattr(kernels, "isa", "") != "triton"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert type(xp.kernels) is type(kernels)
