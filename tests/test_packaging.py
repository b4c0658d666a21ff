"""What a wheel of GRACE holds and asks for, and that importing it imports no toolkit."""

import email
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel, built from a copy: setuptools leaves its build folder in the tree it builds from."""
    pytest.importorskip("setuptools", "77", reason="builds a wheel")
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "grace", tree / "grace", ignore=shutil.ignore_patterns("__pycache__"))
    options = ["--quiet", "--no-deps", "--no-build-isolation", f"--wheel-dir={out}"]
    subprocess.run([*PIP, "wheel", *options, str(tree)], check=True, cwd=tree)
    (made,) = out.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def requirements(wheel):
    """The requirements in the wheel's metadata: extra -> names of distributions; "" are those that everybody needs."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        lines = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist")
    found = {}
    for line in lines:
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        found.setdefault(extra[1] if extra else "", set()).add(re.match(r"[\w.-]+", line)[0].lower())
    return found


def test_wheel_holds_every_subpackage_and_the_typing_marker(wheel):
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "grace").rglob("*.py")}
    assert modules - inside == set()
    assert "grace/py.typed" in inside
    assert {name.split("/")[0] for name in inside} - {"grace"} == {wheel.name.rsplit("-", 3)[0] + ".dist-info"}
    folders = {path.parent for path in (ROOT / "grace").rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_numpy_is_all_that_everybody_needs(requirements):
    assert requirements[""] == {"numpy"}


def test_extras_of_one_toolkit_ask_for_no_other(requirements):
    assert requirements["torch"] == {"torch"}
    assert requirements["tensorflow"] == {"tensorflow", "keras"}
    for extra in ("cli", "dev", "docs"):
        assert not requirements[extra] & {"torch", "tensorflow", "tensorflow-cpu", "keras", "horovod"}


def test_installed_wheel_imports_without_any_toolkit(wheel, tmp_path):
    subprocess.run([*PIP, "install", "--quiet", "--no-deps", f"--target={tmp_path / 'site'}", str(wheel)], check=True)
    code = (
        "import sys, grace\n"
        f"assert grace.__file__.startswith({str(tmp_path)!r}), grace.__file__\n"
        "assert grace.__version__\n"
        "heavy = {'torch', 'tensorflow', 'keras', 'horovod', 'numpy', 'typer', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    env = {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
