#!/usr/bin/env python3
"""Build Horovod 0.28.1 for the PyTorch and TensorFlow of this environment, keep the wheel, install it.

Horovod's last release does not compile against current toolkits. Small patches of its build files fix that, and halve
the time of a build (see MENDS). A build takes minutes, so the finished wheel is cached outside the tree, under a key of
everything it was built with. Horovod's own environment variables take precedence, such as HOROVOD_WITH_MPI=1 or
HOROVOD_GPU_OPERATIONS=NCCL.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

VERSION = "0.28.1"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
BUILD_NEEDS = ("setuptools", "wheel", "packaging", "cloudpickle", "psutil", "pyyaml", "cffi")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


class Mend(NamedTuple):
    """One edit of one file of Horovod's sources."""

    file: str
    pattern: str
    replacement: str
    why: str


CXX_14 = r"(set\(\s*CMAKE_CXX_STANDARD\s+)14(\s*\))"
# One file per toolkit: its headers, which take longer than the sources, are read once instead of 30 times. Not with MPI
# or for GPUs, whose sources were not tried as one file.
ONE_FILE = """
if("$ENV{HOROVOD_GPU_OPERATIONS}$ENV{HOROVOD_WITH_MPI}" STREQUAL "")
    set(CMAKE_UNITY_BUILD ON)
    set(CMAKE_UNITY_BUILD_BATCH_SIZE 0)
endif()
foreach(toolkit tensorflow torch)
    add_subdirectory(horovod/${toolkit})
endforeach()
set(CMAKE_UNITY_BUILD OFF)
"""
MENDS = (
    Mend("CMakeLists.txt", CXX_14, r"\g<1>17\2", "the toolkits' headers are C++17"),
    Mend("horovod/torch/CMakeLists.txt", CXX_14, r"\g<1>17\2", "PyTorch's headers are C++17"),
    Mend(
        "horovod/tensorflow/CMakeLists.txt",
        r"(?m)^[^\n#]*xla_mpi_ops\.cc[^\n]*\n",
        "",
        "TensorFlow's wheel lacks a header that the optional XLA kernels include",
    ),
    Mend(
        "CMakeLists.txt",
        r'string\(REPLACE "-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO [^\n]*',
        'set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O3 -DNDEBUG")',
        "debug information takes time, and 30 MB of the wheel",
    ),
    Mend(
        "CMakeLists.txt",
        r"\nadd_subdirectory\(horovod/tensorflow\)\n(#[^\n]*\n)?add_subdirectory\(horovod/torch\)\n",
        ONE_FILE,
        "the build takes half the time",
    ),
)


class BuildError(RuntimeError):
    """A problem that the user must solve before Horovod can be built."""


def mend(text: str, rule: Mend) -> str:
    """Return `text` edited by `rule`; a rule without a match is an error."""
    mended, count = re.subn(rule.pattern, rule.replacement, text)
    if not count:
        raise BuildError(f"{rule.file}: nothing matches {rule.pattern!r} ({rule.why}). Is this Horovod {VERSION}?")
    return mended


def installed_version(*distributions: str) -> str | None:
    """The version of the first of `distributions` that is installed here; None if none is."""
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def toolkits() -> dict[str, str]:
    """The toolkits of this environment that Horovod can be built for, with their versions."""
    found = {
        "torch": installed_version("torch"),
        "tensorflow": installed_version("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "tf-nightly"),
    }
    return {name: version for name, version in found.items() if version}


def build_settings(found: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Horovod's build variables: the installed toolkits, over Gloo; `environ` takes precedence."""
    build_switch = re.compile(r"HOROVOD_(WITH|WITHOUT|GPU|CPU|CUDA|NCCL|MPI|ROCM)_")
    chosen = {key: value for key, value in environ.items() if build_switch.match(key)}
    wanted = {"PYTORCH": "torch" in found, "TENSORFLOW": "tensorflow" in found, "GLOO": True}
    for feature in ("PYTORCH", "TENSORFLOW", "GLOO", "MPI", "MXNET"):
        if not {f"HOROVOD_WITH_{feature}", f"HOROVOD_WITHOUT_{feature}"} & set(chosen):
            chosen[f"HOROVOD_{'WITH' if wanted.get(feature) else 'WITHOUT'}_{feature}"] = "1"
    return chosen


def compiler() -> str:
    """Name and version of the C++ compiler that CMake will use."""
    command = os.environ.get("CXX", "c++")
    if not shutil.which(command):
        raise BuildError("no C++ compiler found: install g++ (Debian: apt install g++ make), or name one in CXX")
    return subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]


def cache_key(found: Mapping[str, str], settings: Mapping[str, str], cxx: str) -> str:
    """A folder name that changes whenever an older wheel is unusable: readable versions, then a digest."""
    readable = [VERSION, f"cp{sys.version_info.major}{sys.version_info.minor}", platform.machine()]
    readable += [f"{name}{version}" for name, version in sorted(found.items())]
    everything = repr((readable, sorted(settings.items()), cxx, sys.platform, SHA256, MENDS))
    return "-".join([*readable, hashlib.sha256(everything.encode()).hexdigest()[:8]])


def cache_folder() -> Path:
    """The cache of sources and finished wheels. BuildError if there is no home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grace" / "horovod"
    except RuntimeError as error:  # HOME is not set, and the system does not know the user
        raise BuildError("there is no home folder: name a place that lasts in XDG_CACHE_HOME") from error


def cmake_3() -> str:
    """A CMake of version 3: CMake 4 refuses the version of gloo in Horovod's sources."""
    beside_python = Path(sys.executable).with_name("cmake")
    for candidate in ("cmake", str(beside_python)):
        if path := shutil.which(candidate):
            answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
            version = re.search(r"version (\d+)\.(\d+)", answer)
            if version and (3, 13) <= (int(version[1]), int(version[2])) < (4, 0):
                return path
    subprocess.run([*PIP, "install", "--quiet", "cmake<4"], check=True)
    return str(beside_python)


def sources(cache: Path, into: Path) -> Path:
    """Unpack Horovod's source archive below `into`; it is downloaded once, and checked each time."""
    archive = cache / f"horovod-{VERSION}.tar.gz"
    fresh = not archive.exists()
    if fresh:
        print(f"Downloading Horovod {VERSION} ...", flush=True)
        download = ["download", "--quiet", "--no-deps", "--no-build-isolation", "--no-binary=:all:"]
        subprocess.run([*PIP, *download, f"--dest={into}", f"horovod=={VERSION}"], check=True)
    source = into / archive.name if fresh else archive
    if (digest := hashlib.sha256(source.read_bytes()).hexdigest()) != SHA256:
        raise BuildError(f"{source} has SHA-256 {digest}, expected {SHA256}: delete it and try again")
    with tarfile.open(source) as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.10.0 to 3.10.11 have none
        tar.extractall(into)
    if fresh:
        move_whole(source, archive)
    return into / f"horovod-{VERSION}"


def move_whole(file: Path, target: Path) -> None:
    """Move a file, possibly between disks, so that `target` appears atomically."""
    arriving = shutil.move(file, target.with_name(f"{target.name}.{os.getpid()}"))
    os.replace(arriving, target)


def run_logged(command: list[str], log: Path, cwd: Path, env: dict[str, str]) -> None:
    """Run `command` with its output in `log`, and show its progress and time."""
    began, shown, live = time.monotonic(), 0.0, sys.stdout.isatty()
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=cwd, env=env)
    try:
        while process.poll() is None:
            time.sleep(0.5)
            elapsed = time.monotonic() - began
            if elapsed - shown >= (1 if live else 15):
                percent = re.findall(rb"\[ *(\d+)%\]", log.read_bytes())
                line = f"  building Horovod: {int(percent[-1]) if percent else 0:3d} %, {elapsed:.0f} s"
                print(f"\r{line}" if live else line, end="" if live else "\n", flush=True)
                shown = elapsed
    finally:
        if process.poll() is None:
            process.terminate()
    if live:
        print()
    if process.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        raise BuildError(f"{tail}\n\nHorovod's build failed; the whole log is in {log}")


def build(found: Mapping[str, str], settings: dict[str, str], wheels: Path, jobs: int) -> Path:
    """Build the wheel and move it into `wheels`; an interrupted build leaves no wheel there."""
    wheels.mkdir(parents=True, exist_ok=True)
    built_for = " and ".join(f"{name} {version}" for name, version in found.items())
    print(f"Building Horovod {VERSION} for {built_for}. This takes minutes, once.", flush=True)
    with tempfile.TemporaryDirectory(prefix="horovod-") as scratch:
        tree = sources(wheels.parent, Path(scratch))
        for rule in MENDS:
            file = tree / rule.file
            file.write_text(mend(file.read_text(), rule))
        env = {**os.environ, **settings, "HOROVOD_CMAKE": cmake_3(), "MAKEFLAGS": f"-j{jobs}"}
        options = ["-v", "--no-cache-dir", "--no-build-isolation", "--no-deps", f"--wheel-dir={scratch}/wheel"]
        run_logged([*PIP, "wheel", *options, "."], wheels / "build.log", tree, env)
        (made,) = Path(scratch, "wheel").glob("horovod-*.whl")
        move_whole(made, wheels / made.name)
    return wheels / made.name


def verify(found: Mapping[str, str]) -> None:
    """Compare the installed Horovod's own build information with what was requested."""
    print("Asking the installed Horovod what it supports (horovodrun --check-build) ...", flush=True)
    command = [sys.executable, "-m", "horovod.runner.launch", "--check-build"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tempfile.gettempdir())
    print(answer.stdout.strip(), flush=True)
    names = {"torch": "PyTorch", "tensorflow": "TensorFlow"}
    if missing := [name for toolkit, name in names.items() if toolkit in found and f"[X] {name}" not in answer.stdout]:
        raise BuildError(f"the Horovod just installed lacks {', '.join(missing)}\n{answer.stderr[-2000:]}")


def main() -> None:
    """Build or find the wheel, install it, check it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-c", "--constraint", help="a pip constraints file for what the build itself needs")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 1, help="compiler processes at a time")
    parser.add_argument("--rebuild", action="store_true", help="do not use a cached wheel")
    args = parser.parse_args()

    found = toolkits()
    if not found:
        raise BuildError("install PyTorch or TensorFlow first: Horovod is compiled against them")
    constraint = [f"--constraint={args.constraint}"] if args.constraint else []
    subprocess.run([*PIP, "install", "--quiet", *constraint, *BUILD_NEEDS], check=True)
    settings = build_settings(found, os.environ)
    wheels = cache_folder() / cache_key(found, settings, compiler())
    wheel = next(iter(wheels.glob("*.whl")), None)
    if wheel and not args.rebuild:
        print(f"Horovod was built before: {wheel}")
    else:
        wheel = build(found, settings, wheels, args.jobs)
    subprocess.run([*PIP, "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel)], check=True)
    verify(found)


if __name__ == "__main__":
    try:
        main()
    except (BuildError, subprocess.CalledProcessError) as error:
        sys.exit(f"build_horovod: {error}")
