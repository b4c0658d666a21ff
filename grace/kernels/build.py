"""Compile the kernels: ``python -m grace.kernels.build``. Optional: without a compiler GRACE works, only slower.

A library's name carries a hash of its sources, flags and machine, so that one of other sources is never loaded.

``--strict`` installs nothing and fails on a warning; it adds $CXXFLAGS: -O1 takes a minute in place of three.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = (
    "api.h",
    "kernels.h",
    "vectors-inl.h",
    "levels-inl.h",
    "floats-inl.h",
    "rotations-inl.h",
    "cosines-inl.h",
    "methods-inl.h",
    "methods.cc",
    "loops.cc",
    "kernels.cc",
)
TIMELINE_SOURCES = ("timeline.cc",)
TENSORFLOW_SOURCES = ("api.h", "tensorflow_ops.cc")
TENSORFLOW_FLAGS = ("-O2", "-fPIC", "-Wall", "-Wextra", "-shared", "-pthread")
# Results are exact: no -ffast-math, and no product is fused with a sum unless the source says so.
FLAGS: tuple[str, ...] = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing")
FLAGS = (*FLAGS, "-fno-trapping-math", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra")
X86 = ("-mfma", "-mbmi", "-mbmi2", "-mpopcnt")
# Not part of a build, which a newer compiler with other warnings must not fail.
STRICT = ("-Werror",)
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
ISAS: dict[str, tuple[str, ...]] = {
    "avx512": (*X86, *AVX512, "-DGRACE_AVX512"),
    "avx2": (*X86, "-mavx2", "-DGRACE_AVX2"),
}


def on_x86() -> bool:
    """The instruction sets of x86-64 can be compiled for."""
    return platform.machine().lower() in ("x86_64", "amd64")


def folders() -> list[Path]:
    """Where a library may lie: in the package, or in the user's cache where the package cannot be written to."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return [HERE / "_lib", Path(home) / "grace" / "kernels"]


@cache
def library_name() -> str:
    """File name of the library that fits these sources and this machine."""
    return f"kernels-{_digest(SOURCES, FLAGS, ISAS)}.so"


@cache
def timeline_name() -> str:
    """File name of the planner's library that fits its sources and this machine."""
    return f"timeline-{_digest(TIMELINE_SOURCES, FLAGS)}.so"


@cache
def tensorflow_name() -> str | None:
    """File name of TensorFlow's operations that fit these sources and the TensorFlow installed; None without one."""
    version = _tensorflow_version()
    return version and f"tensorflow-{_digest(TENSORFLOW_SOURCES, TENSORFLOW_FLAGS, version)}.so"


def find(name: str) -> Path | None:
    """A built library of that name."""
    return next((folder / name for folder in folders() if (folder / name).is_file()), None)


def compiler() -> str | None:
    """A C++ compiler: $CXX, or the first of the usual names."""
    names = (os.environ.get("CXX") or "", "g++", "c++", "clang++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def build() -> Path | None:
    """The built library, compiled if it is missing; None, and one line that says why, if that cannot be."""
    return find(library_name()) or _make(library_name(), _compile_kernels)


def build_timeline() -> Path | None:
    """The planner's built library, likewise."""
    return find(timeline_name()) or _make(timeline_name(), _compile_timeline)


def build_tensorflow() -> Path | None:
    """The built operations for TensorFlow, likewise; None, without a line, where TensorFlow is not installed."""
    name = tensorflow_name()
    return name and (find(name) or _make(name, _compile_tensorflow))  # type: ignore[return-value]


def main(arguments: Sequence[str] = ()) -> int:
    """Build what can be built; having no compiler is no error."""
    parser = argparse.ArgumentParser(prog="python -m grace.kernels.build", description="Compile the kernels.")
    parser.add_argument("--strict", action="store_true", help="install nothing, and fail on a warning")
    if parser.parse_args(arguments).strict:
        return check()
    path = build()
    if path:
        print(f"kernels: {path}")
        for path in (build_timeline(), build_tensorflow()):
            if path:
                print(f"kernels: {path}")
    return 0


def check() -> int:
    """Compile all without a warning, else 1 and what the compiler said."""
    cxx = compiler()
    if cxx is None:
        print("kernels: no C++ compiler found ($CXX, g++, c++, clang++)")
        return 1
    strict = (*STRICT, *shlex.split(os.environ.get("CXXFLAGS", "")))
    with tempfile.TemporaryDirectory() as scratch:
        try:
            objects(cxx, Path(scratch), (*strict, "-Wmissing-declarations"))  # all exports are in api.h
            _compile_timeline(cxx, Path(scratch), strict)
            if tensorflow_name():
                # Older TensorFlows have no other names for what newer ones deprecate.
                _compile_tensorflow(cxx, Path(scratch), (*strict, "-Wno-deprecated-declarations"))
        except subprocess.CalledProcessError as error:
            print(error.stderr)
            return 1
    return 0


def objects(
    cxx: str, folder: Path, more: Sequence[str] = (), isas: Mapping[str, Sequence[str]] | None = None
) -> list[str]:
    """Compile the kernels into object files in a folder. ``isas``: flags of each, by default of this machine's."""
    isas = (ISAS if on_x86() else {}) if isas is None else isas
    macros = ("-DGRACE_X86",) if isas else ()
    units: list[tuple[str, str, Sequence[str]]] = [("kernels.cc", "kernels", ()), ("loops.cc", "baseline", ())]
    units += [("loops.cc", isa, flags) for isa, flags in isas.items()]
    made = []
    for source, name, flags in units:
        made.append(str(folder / f"{name}.o"))
        _run(cxx, *FLAGS, *macros, *flags, *more, "-c", str(HERE / source), "-o", made[-1])
    return made


def _digest(sources: tuple[str, ...], *settings: object) -> str:
    digest = hashlib.sha256(repr((sys.platform, platform.machine(), *settings)).encode())
    for name in sources:
        digest.update(hashlib.sha256((HERE / name).read_bytes()).digest())
    return digest.hexdigest()[:16]


def _tensorflow_version() -> str | None:
    if importlib.util.find_spec("tensorflow") is None:
        return None
    for distribution in ("tensorflow", "tensorflow-cpu", "tf-nightly", "tensorflow-macos"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def _compile_kernels(cxx: str, scratch: Path) -> Path:
    made = scratch / "kernels.so"
    _run(cxx, "-shared", "-pthread", *objects(cxx, scratch), "-o", str(made))
    return made


def _compile_timeline(cxx: str, scratch: Path, more: Sequence[str] = ()) -> Path:
    made = scratch / "timeline.so"
    _run(cxx, *FLAGS, *more, "-shared", str(HERE / "timeline.cc"), "-o", str(made))
    return made


def _compile_tensorflow(cxx: str, scratch: Path, more: Sequence[str] = ()) -> Path:
    # Asked in a process of its own: TensorFlow takes long to import, and whoever builds may not want it here.
    code = "import json, tensorflow.sysconfig as s; print(json.dumps([s.get_compile_flags(), s.get_link_flags()]))"
    quiet = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    answer = subprocess.run([sys.executable, "-c", code], env=quiet, check=True, capture_output=True, text=True)
    compiled, linked = json.loads(answer.stdout.splitlines()[-1])
    system = [f"-isystem{flag[2:]}" if flag.startswith("-I") else flag for flag in compiled]  # its warnings are its own
    made = scratch / "tensorflow.so"
    source = str(HERE / "tensorflow_ops.cc")
    _run(cxx, *system, *TENSORFLOW_FLAGS, *more, source, "-o", str(made), *linked, "-ldl")
    return made


def _make(name: str, compile: Callable[[str, Path], Path]) -> Path | None:
    """What ``compile(cxx, scratch)`` makes, put under that name in the first folder that takes it."""
    cxx = compiler()
    if cxx is None:
        print("kernels: no C++ compiler found ($CXX, g++, c++, clang++); GRACE works without, only slower")
        return None
    with tempfile.TemporaryDirectory() as scratch:
        try:
            made = compile(cxx, Path(scratch))
        except subprocess.CalledProcessError as error:
            lines = (error.stderr or "").strip().splitlines()
            reason = next((line for line in lines if "rror" in line), lines[-1] if lines else str(error))
            print(f"kernels: {cxx} failed, GRACE works without, only slower: {reason}")
            return None
        for folder in folders():
            # Several processes may build at once: each writes its own file, and the last to rename wins.
            own = folder / f"{name}.{os.getpid()}.tmp"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copy(made, own)
                os.replace(own, folder / name)
            except OSError:
                own.unlink(missing_ok=True)
                continue
            return folder / name
    print(f"kernels: none of {', '.join(map(str, folders()))} can be written to; GRACE works without, only slower")
    return None


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
