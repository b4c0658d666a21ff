"""Compile the kernels: ``python -m grace.kernels.build``. Optional: GRACE works without a compiler, only slower.

Each library is compiled from one source file. A wheel (setup.py) contains ``kernels``, the C interface; ``scalar``,
``avx2`` and ``avx512``, the loops of an instruction set; and ``timeline``, for the planner. ``tensorflow`` is compiled
for the installed TensorFlow. No library uses Python's ABI. File names contain a hash of sources and flags, so that a
stale library is never loaded.

``--native`` compiles only the loops of this CPU's best instruction set, as `pip install .` does; all take three times
as long. ``--strict`` installs nothing, and fails on a warning. It adds $CXXFLAGS: -O1 takes one minute, not three.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent
# Results must be exact: no -ffast-math, and no fused multiply-add unless the source asks for it.
FLAGS: tuple[str, ...] = ("-std=c++17", "-O3", "-g0", "-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing")
FLAGS = (*FLAGS, "-fno-trapping-math", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra")
X86 = ("-mfma", "-mbmi", "-mbmi2", "-mpopcnt")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
ISAS: dict[str, tuple[str, ...]] = {
    "avx512": (*X86, *AVX512, "-DGRACE_AVX512"),
    "avx2": (*X86, "-mavx2", "-DGRACE_AVX2"),
}
TENSORFLOW = ("tensorflow_ops.cc", "-O2", "-fPIC", "-Wall", "-Wextra", "-pthread")
MACHINE = platform.machine().lower()


def libraries(machine: str = MACHINE) -> dict[str, tuple[str, ...]]:
    """Source and flags of each library in a machine's wheel, slowest to compile first."""
    isas = ISAS if machine in ("x86_64", "amd64") else {}
    loops = {isa: ("loops.cc", *FLAGS, *flags) for isa, flags in isas.items()}
    others = {"scalar": "loops.cc", "kernels": "kernels.cc", "timeline": "timeline.cc"}
    return {**loops, **{name: (source, *FLAGS) for name, source in others.items()}}


@cache
def native() -> tuple[str, ...]:
    """Names of the libraries that this CPU loads, with only its best loops; all if the compiler cannot tell."""
    cxx, macros = compiler(), set[str]()
    if cxx:
        command = [*cxx, "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
        asked = subprocess.run(command, capture_output=True, text=True)
        macros = set() if asked.returncode else set(asked.stdout.split())
    if not macros:
        return tuple(libraries())
    for isa in (*ISAS, "scalar"):
        needed = {f"__{flag[2:].upper()}__" for flag in ISAS.get(isa, ()) if flag[:2] == "-m" and "=" not in flag}
        if isa in libraries() and needed <= macros:
            break
    return tuple(name for name in libraries() if name == isa or name not in (*ISAS, "scalar"))


@cache
def file_name(name: str, machine: str = MACHINE) -> str | None:
    """A library's file name; None for ``tensorflow`` without TensorFlow."""
    version = _tensorflow_version() if name == "tensorflow" else ""
    if version is None:
        return None
    source, *flags = TENSORFLOW if name == "tensorflow" else libraries(machine)[name]
    digest = hashlib.sha256(repr((flags, version)).encode() + _text(source)).hexdigest()[:16]
    return f"{name}-{sys.platform}-{machine}-{digest}.so"


def folders() -> list[Path]:
    """Folders of libraries: the package, or the user's cache if the package is read-only.

    Without a home (HOME is not set, and the system does not know the user, as in some containers), the cache is in the
    temporary directory, in a folder that no other user can write to.
    """
    home = _cache()
    if home is None:
        home = Path(tempfile.gettempdir(), f"grace-{os.getuid()}")
        if home.is_symlink() or (home.exists() and (home.stat().st_uid != os.getuid() or home.stat().st_mode & 0o022)):
            return [HERE / "_lib"]  # another user made it
    return [HERE / "_lib", home / "grace" / "kernels"]


def _cache() -> Path | None:
    if home := os.environ.get("XDG_CACHE_HOME"):
        return Path(home)
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        return None


def find(name: str) -> Path | None:
    """The file of a library built from these sources; None if there is none."""
    file = file_name(name)
    return next((path for folder in folders() if file and (path := folder / file).is_file()), None)


def compiler() -> list[str] | None:
    """The command of a C++ compiler: $CXX, which may include arguments, or the first usual name found."""
    names = (shlex.split(os.environ.get("CXX", "")), ["g++"], ["c++"], ["clang++"])
    return next((name for name in names if name and shutil.which(name[0])), None)


def compile_library(name: str, target: Path, machine: str = MACHINE, more: Sequence[str] = ()) -> None:
    """Compile one library. RuntimeError has the compiler's message, or says that there is no compiler."""
    cxx = compiler()
    if cxx is None:
        raise RuntimeError("no C++ compiler found ($CXX, g++, c++, clang++)")
    source, *flags = TENSORFLOW if name == "tensorflow" else libraries(machine)[name]
    headers, linked = _tensorflow_flags() if name == "tensorflow" else ([], [])
    # Several processes may compile at once: each writes its own file, and the last rename wins.
    own = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    with tempfile.TemporaryDirectory() as scratch:
        # Link without instruction-set flags: Zig would compile its C++ library anew for each set.
        made = str(Path(scratch, "made.o"))
        compiled = [*cxx, *headers, *flags, *more, "-c", str(HERE / source), "-o", made]
        for command in (compiled, [*cxx, "-O3", "-pthread", "-shared", made, "-o", str(own), *linked]):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                own.unlink(missing_ok=True)
                raise RuntimeError(f"{shlex.join(cxx)} failed: {done.stderr.strip() or done.returncode}")
    own.replace(target)


def build(*names: str) -> bool:
    """Compile the libraries that are missing, by default those of a wheel; print one line if this fails."""
    missing = [name for name in names or libraries() if file_name(name) and not find(name)]
    if not missing:
        return True
    folder = next(filter(_writable, folders()), None)
    failed = {} if folder else dict.fromkeys(missing, f"none of {', '.join(map(str, folders()))} can be written to")

    def attempt(name: str) -> None:
        try:
            compile_library(name, folder / str(file_name(name)))  # type: ignore[operator]
        except (OSError, RuntimeError) as error:
            lines = str(error).splitlines() or [type(error).__name__]
            failed[name] = next((line for line in lines if "rror" in line), lines[0])

    if folder:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(attempt, missing))
        if _cache() is None and folder != HERE / "_lib":
            print(f"kernels: there is no home folder, so they are in {folder}; XDG_CACHE_HOME names a lasting place")
    if failed:
        print(f"kernels: without {', '.join(failed)} GRACE works, only slower: {next(iter(failed.values()))}")
    return not failed


def check() -> bool:
    """Compile everything without warnings, or print the compiler's message."""
    more = ("-Werror", *shlex.split(os.environ.get("CXXFLAGS", "")))
    # No header declares the timeline's exports. Older TensorFlows lack the replacements of deprecated names.
    special = {"timeline": [], "tensorflow": ["-Wno-deprecated-declarations"]}
    with tempfile.TemporaryDirectory() as scratch:
        try:
            for name in filter(file_name, (*libraries(), "tensorflow")):
                compile_library(name, Path(scratch, name), more=(*more, *special.get(name, ["-Wmissing-declarations"])))
        except RuntimeError as error:
            print(error)
            return False
    return True


def main(arguments: Sequence[str] = ()) -> int:
    """Build what can be built; a missing compiler is no error."""
    parser = argparse.ArgumentParser(prog="python -m grace.kernels.build", description="Compile the kernels.")
    parser.add_argument("--strict", action="store_true", help="install nothing, and fail on a warning")
    parser.add_argument("--native", action="store_true", help="of all instruction sets only this CPU's best")
    options = parser.parse_args(arguments)
    if options.strict:
        return 0 if check() else 1
    names = (*(native() if options.native else libraries()), "tensorflow")
    build(*names)
    for path in filter(None, map(find, names)):
        print(f"kernels: {path}")
    return 0


def _text(source: str) -> bytes:
    """The text of a source file and of all GRACE files that it includes."""
    text = (HERE / source).read_bytes()
    included = re.findall(r'^#include "([\w.-]+)"', text.decode(), re.MULTILINE)
    return text + b"".join(_text(each) for each in included)


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _tensorflow_version() -> str | None:
    if importlib.util.find_spec("tensorflow") is None:
        return None
    for distribution in ("tensorflow", "tensorflow-cpu", "tf-nightly", "tensorflow-macos"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def _tensorflow_flags() -> tuple[list[str], list[str]]:
    """Compile and link flags. Queried in a separate process: TensorFlow is slow to import."""
    code = "import json, tensorflow.sysconfig as s; print(json.dumps([s.get_compile_flags(), s.get_link_flags()]))"
    quiet = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    answer = subprocess.run([sys.executable, "-c", code], env=quiet, capture_output=True, text=True)
    if answer.returncode:
        raise RuntimeError(f"import tensorflow failed: {answer.stderr.strip()}")
    compiled, linked = json.loads(answer.stdout.splitlines()[-1])
    system = [f"-isystem{flag[2:]}" if flag.startswith("-I") else flag for flag in compiled]  # ignore its warnings
    return system, [*linked, "-ldl"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
