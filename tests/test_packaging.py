"""Releases: contents and requirements of wheel and sdist, Python versions, and citations."""

import configparser
import email
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import grace
from grace.kernels import build, library

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of this tree to build from, since setuptools leaves its build folder in the tree."""
    tree = tmp_path_factory.mktemp("tree")
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, tree)
    for name in ("grace", "grace_bench", "docs", "examples", "scripts", "tests", "benchmarks"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tree


@pytest.fixture(scope="module")
def wheel(tree, tmp_path_factory):
    pytest.importorskip("setuptools", "77", reason="builds a wheel")
    build.build()  # the copy gets these kernels, and need not compile its own
    if (ROOT / "grace" / "kernels" / "_lib").exists():
        shutil.copytree(ROOT / "grace" / "kernels" / "_lib", tree / "grace" / "kernels" / "_lib", dirs_exist_ok=True)
    return wheel_of(tree, tmp_path_factory.mktemp("wheel"), GRACE_ISAS="all")[0]


def wheel_of(tree, out, **environment):
    """The wheel of a tree, and pip's output."""
    options = ["--verbose", "--no-deps", "--no-build-isolation", f"--wheel-dir={out}"]
    env = {key: value for key, value in os.environ.items() if key != "CXX"} | environment
    done = subprocess.run([*PIP, "wheel", *options, str(tree)], cwd=tree, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = out.glob("*.whl")
    return made, done.stdout + done.stderr


def libraries_of(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name.rpartition("/")[2] for name in archive.namelist() if name.endswith(".so")}


@pytest.fixture(scope="module")
def requirements(wheel):
    """The requirements in the wheel's metadata: names of distributions by extra; "": requirements without an extra."""
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
    assert requirements["jax"] == {"jax", "optax"}
    for extra in ("cli", "dev", "docs"):
        assert not requirements[extra] & {"torch", "tensorflow", "tensorflow-cpu", "keras", "horovod", "jax"}


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


# -- kernels in wheels -----------------------------------------------------------------------------------------------
def names(machine=build.MACHINE):
    return {build.file_name(name, machine) for name in build.libraries(machine)}


def test_a_wheel_with_kernels_is_of_any_python_and_one_platform(wheel):
    if not build.find("kernels"):
        pytest.skip("no C++ compiler on this machine")
    assert libraries_of(wheel) == names()
    tag = re.sub(r"\W", "_", sysconfig.get_platform())
    assert wheel.name.endswith(f"-py3-none-{tag}.whl")


def native_of(monkeypatch, macros, fails=False):
    """`build.native()` with a compiler that reports these macros for the CPU."""
    told = subprocess.CompletedProcess([], int(fails), "".join(f"#define {name} 1\n" for name in macros))
    monkeypatch.setattr(build.subprocess, "run", lambda *_, **__: told)
    return set(build.native.__wrapped__())


@pytest.mark.skipif("avx2" not in build.libraries(), reason="a machine with one instruction set")
def test_of_the_loops_this_cpu_asks_for_its_best_alone(monkeypatch):
    others, macros = {"kernels", "timeline"}, {"__FMA__", "__BMI__", "__BMI2__", "__POPCNT__", "__AVX2__"}
    assert native_of(monkeypatch, macros) == others | {"avx2"}
    assert native_of(monkeypatch, macros - {"__FMA__"}) == others | {"scalar"}
    macros |= {"__AVX512F__", "__AVX512BW__", "__AVX512DQ__"}
    assert native_of(monkeypatch, macros) == others | {"avx2"}
    assert native_of(monkeypatch, macros | {"__AVX512VL__"}) == others | {"avx512"}
    assert native_of(monkeypatch, macros, fails=True) == set(build.libraries())


def test_the_loops_of_this_cpu_are_those_that_are_loaded():
    best = library("")
    if best is None or len(build.native()) == len(build.libraries()):
        pytest.skip("no kernels, or a machine with one instruction set")
    assert build.native() == (best.isa, "kernels", "timeline")


def test_an_install_compiles_the_loops_of_this_cpu_alone(wheel, tree, tmp_path):
    if not build.find("kernels"):
        pytest.skip("no C++ compiler on this machine")
    one, _ = wheel_of(tree, tmp_path)
    assert libraries_of(one) == {build.file_name(name) for name in build.native()}
    assert libraries_of(one) <= libraries_of(wheel)


def test_the_released_wheels_have_every_instruction_set(monkeypatch):
    made = []
    wheels = script("build_wheels")
    monkeypatch.setattr(wheels.subprocess, "run", lambda command, env, check: made.append(env))
    wheels.build("x86_64", Path("dist"))
    assert made[0]["GRACE_ISAS"] == "all"


def test_kernels_of_an_installed_wheel_are_used(wheel, tmp_path):
    if not build.find("kernels"):
        pytest.skip("no C++ compiler on this machine")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = "from grace.kernels import library, timeline; print(library().path); assert timeline._library()"
    env = {"PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))


@pytest.mark.parametrize("cxx", [None, sys.executable], ids=["no compiler", "a compiler that fails"])
def test_without_a_compiler_a_wheel_has_no_kernels_and_says_so(cxx, tree, tmp_path):
    pytest.importorskip("setuptools", "77", reason="builds a wheel")
    shutil.copytree(tree, tmp_path / "tree", ignore=shutil.ignore_patterns("_lib", "build", "tests", "docs"))
    own = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), **({"CXX": cxx} if cxx else {})}
    wheel, said = wheel_of(tmp_path / "tree", tmp_path, **own)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert libraries_of(wheel) == set()
    assert "GRACE works without, only slower: compression on CPUs" in said
    assert (f"{cxx} failed" if cxx else "no C++ compiler found") in said


def test_another_compiler_makes_the_wheel_of_another_machine(tree, tmp_path):
    pytest.importorskip("setuptools", "77", reason="builds a wheel")
    shutil.copytree(tree, tmp_path / "tree", ignore=shutil.ignore_patterns("tests", "docs"))
    build_lib = tmp_path / "tree" / "build" / f"lib.linux-aarch64-{sys.implementation.cache_tag}"
    left = build_lib / "grace" / "kernels" / "_lib"
    left.mkdir(parents=True)
    (left / "kernels-of-older-sources.so").touch()
    (tmp_path / "cxx.py").write_text("import sys; open(sys.argv[sys.argv.index('-o') + 1], 'w').close()")
    cxx = {"CXX": f"{sys.executable} {tmp_path / 'cxx.py'}", "_PYTHON_HOST_PLATFORM": "linux-aarch64"}
    wheel, _ = wheel_of(tmp_path / "tree", tmp_path, **cxx)
    assert wheel.name.endswith("-py3-none-linux_aarch64.whl")
    assert libraries_of(wheel) == names("aarch64")


def test_an_editable_install_is_found_from_the_folder_that_holds_its_checkout(tree, tmp_path):
    pytest.importorskip("setuptools", "77", reason="builds a wheel")
    checkout = tmp_path / "grace"  # a namespace package for a Python started in tmp_path
    shutil.copytree(tree, checkout, ignore=shutil.ignore_patterns("build", "tests", "docs"))
    code = f"from setuptools.build_meta import build_editable; build_editable({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=checkout, check=True, capture_output=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = "import grace, grace.kernels as k; print(grace.__file__, k.library() is not None, grace.simulate)"
    env = {"PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": str(tmp_path)}
    python = str(tmp_path / "venv" / "bin" / "python")
    done = subprocess.run([python, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:2] == [str(checkout / "grace" / "__init__.py"), str(build.find("kernels") is not None)]


def test_an_editable_install_of_a_fresh_checkout_leaves_its_libraries_there(tree, tmp_path):
    pytest.importorskip("setuptools", "77", reason="builds a wheel")
    checkout = tmp_path / "checkout"
    shutil.copytree(tree, checkout, ignore=shutil.ignore_patterns("build", "_lib", "tests", "docs"))
    (tmp_path / "cxx.py").write_text("import sys; open(sys.argv[sys.argv.index('-o') + 1], 'w').close()")
    env = os.environ | {"CXX": f"{sys.executable} {tmp_path / 'cxx.py'}"}
    code = f"from setuptools.build_meta import build_editable; build_editable({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=checkout, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = {path.name for path in (checkout / "grace" / "kernels" / "_lib").iterdir()}
    assert found == names(build.MACHINE)


NOBODY = """
import pwd, shutil, sys, tempfile
from pathlib import Path
def unknown(_):
    raise KeyError("uid not found")
pwd.getpwuid = unknown
tempfile.tempdir = sys.argv[1]
from grace.kernels import build, library
print(library() is None)
build.HERE = Path(sys.argv[1], "read-only")  # where nothing can be written to
shutil.copytree(Path(build.__file__).parent, build.HERE, ignore=lambda *_: ["_lib"])
(build.HERE / "_lib").touch()
print(build.build("kernels"), build.find("kernels"))
"""


@pytest.mark.parametrize("whose", ["nobody's", "another's", "open to all"])
def test_an_unknown_user_without_a_home_keeps_kernels_in_the_temporary_folder(tmp_path, whose):
    (tmp_path / "cxx.py").write_text("import sys; open(sys.argv[sys.argv.index('-o') + 1], 'w').close()")
    env = {key: value for key, value in os.environ.items() if key not in ("HOME", "XDG_CACHE_HOME")}
    env |= {"CXX": f"{sys.executable} {tmp_path / 'cxx.py'}", "PYTHONPATH": str(ROOT)}
    own = tmp_path / f"grace-{os.getuid()}"
    if whose == "another's":
        own.symlink_to(tmp_path)
    elif whose == "open to all":
        own.mkdir()
        own.chmod(0o777)
    done = subprocess.run([sys.executable, "-c", NOBODY, str(tmp_path)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if whose == "nobody's":
        made = own / "grace" / "kernels"
        assert f"there is no home folder, so they are in {made}; XDG_CACHE_HOME names a lasting place" in done.stdout
        assert f"True {made}" in done.stdout
    else:  # no libraries of other users are loaded, and none are written
        assert "False None" in done.stdout
        assert "can be written to" in done.stdout


@pytest.fixture(scope="module")
def sdist(tree, tmp_path_factory):
    pytest.importorskip("setuptools", "77", reason="builds a source distribution")
    out = tmp_path_factory.mktemp("sdist")
    build = f"from setuptools.build_meta import build_sdist; build_sdist({str(out)!r})"
    subprocess.run([sys.executable, "-c", build], check=True, cwd=tree, capture_output=True)
    (made,) = out.glob("*.tar.gz")
    return made


def test_sdist_holds_what_tests_and_docs_need_and_nothing_built(sdist):
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("grace", "grace_bench", "tests", "docs", "examples", "scripts", "benchmarks"):
        sources = {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.py")}
        assert sources - inside == set()
    assert {"CITATION.cff", "CHANGELOG.md", "LICENSE", "Makefile", "constraints.txt", "grace/py.typed"} <= inside
    assert {"grace/kernels/kernels.cc", "docs/gradient.svg"} <= inside
    assert [name for name in inside if re.search(r"\.so$|\.pyc$|__pycache__", name)] == []


def test_the_version_stands_in_one_place(wheel, sdist):
    version = grace.__version__
    assert f"-{version}-" in wheel.name
    assert sdist.name.endswith(f"-{version}.tar.gz")
    files = [ROOT / "setup.cfg", ROOT / "pyproject.toml", *(ROOT / "grace").rglob("*.py")]
    assert [
        path.name for path in files if f'"{version}"' in path.read_text() or f"= {version}" in path.read_text()
    ] == ["version.py"]
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_benches_are_a_distribution_of_their_own(tree, wheel, tmp_path):
    other, _ = wheel_of(tree / "grace_bench", tmp_path)
    assert other.name == f"grace_compression_bench-{grace.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(other) as archive:
        inside = set(archive.namelist())
        (name,) = [name for name in inside if name.endswith(".dist-info/METADATA")]
        asked = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist")
    assert asked == [f"grace-compression[cli]=={grace.__version__}"]
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "grace_bench").rglob("*.py")}
    assert {name for name in inside if not name.split("/")[0].endswith(".dist-info")} == modules
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if "bench" in name.split("/")[0]]


def test_the_conda_recipe_says_what_setup_cfg_says():
    yaml = pytest.importorskip("yaml")
    recipe = yaml.safe_load((ROOT / "scripts" / "conda" / "recipe.yaml").read_text())
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert recipe["context"]["version"] == grace.__version__
    assert recipe["about"]["summary"] in setup["metadata"]["description"]
    python, numpy = f"python {setup['options']['python_requires']}", setup["options"]["install_requires"].strip()
    assert recipe["requirements"]["run"] == [python, numpy.replace(">=", " >=")]
    extras = setup["options.extras_require"]
    for pin in recipe["requirements"]["run_constraints"]:
        pin = pin.replace("pytorch", "torch").replace(" ", "")
        assert any(pin in text for text in extras.values()), pin


def test_the_index_would_take_them(wheel, sdist):
    pytest.importorskip("twine", reason="in the extra `release`")
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", wheel, sdist], check=True)


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_each_python_reads_all_sources_and_imports_grace(version, wheel, tmp_path):
    python = script("try_pythons").find(version)
    if python is None:
        pytest.skip(f"there is no Python {version} on this machine")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    for code in ("import compileall; assert compileall.compile_dir('grace', quiet=1)", "import grace; grace.Grace"):
        done = subprocess.run([python, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert f"Programming Language :: Python :: {version}" in (ROOT / "setup.cfg").read_text()


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- citation -------------------------------------------------------------------------------------------------------
NUMBER = r"arXiv:\d+\.\d+|10\.\d{4}/[\w.]*\w"


@pytest.fixture(scope="module")
def citation():
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_the_citation_file_has_the_form_of_its_standard(citation):
    assert str(citation["cff-version"]) == "1.2.0"
    assert {"message", "title", "authors"} <= set(citation), "what the standard requires"
    assert "version" not in citation, "the version stands in one place"
    for reference in [citation["preferred-citation"], *citation["references"]]:
        assert {"type", "title", "authors"} <= set(reference), reference
        assert reference["type"] in ("article", "conference-paper")
        assert isinstance(reference["year"], int)
        for author in reference["authors"]:
            assert set(author) in ({"name"}, {"family-names"}, {"family-names", "given-names"}), author
            assert all(isinstance(part, str) and part for part in author.values())
    titles = [reference["title"] for reference in citation["references"]]
    assert len(set(titles)) == len(titles)


def test_every_paper_of_the_sources_is_cited_and_no_other():
    sources = "".join(path.read_text() for path in (ROOT / "grace").rglob("*.py"))
    numbers = set(re.findall(NUMBER, sources))
    assert len(numbers) > 40
    assert set(re.findall(NUMBER, (ROOT / "CITATION.cff").read_text())) == numbers


def test_titles_are_those_of_the_docstrings(citation):
    texts = [path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]]
    texts += [path.read_text() for path in (ROOT / "grace").rglob("*.py")]
    text = re.sub(r"\s+", " ", " ".join(texts))
    for reference in [citation["preferred-citation"], *citation["references"]]:
        assert f'"{reference["title"]}' in text, reference["title"]
