"""Compile the kernels: ``python -m grace.kernels.build``. Optional: without a compiler GRACE works, only slower.

A library's name carries a hash of its sources, flags and machine, so that one of other sources is never loaded.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = ("kernels.h", "vectors.h", "loops.cc", "kernels.cc")
# Results are exact: no -ffast-math, and no product is fused with a sum unless the source says so.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing", "-fPIC", "-pthread")
FLAGS += ("-fvisibility=hidden", "-w")
X86 = ("-mfma", "-mbmi", "-mbmi2", "-mpopcnt")
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
    content = [(HERE / name).read_bytes() for name in SOURCES]
    return f"kernels-{_digest(*content, repr((FLAGS, ISAS)).encode())}.so"


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


def main() -> int:
    """Build what can be built; having no compiler is no error."""
    path = build()
    if path:
        print(f"kernels: {path}")
    return 0


def _digest(*contents: bytes) -> str:
    digest = hashlib.sha256(repr((sys.platform, platform.machine())).encode())
    for content in contents:
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()[:16]


def _compile_kernels(cxx: str, scratch: Path) -> Path:
    objects, x86 = [], on_x86()
    units = [("kernels.cc", "driver", ()), ("loops.cc", "baseline", ())]
    units += [("loops.cc", isa, flags) for isa, flags in ISAS.items() if x86]
    for source, name, flags in units:
        objects.append(str(scratch / f"{name}.o"))
        _run(cxx, *FLAGS, *(("-DGRACE_X86",) if x86 else ()), *flags, "-c", str(HERE / source), "-o", objects[-1])
    made = scratch / "kernels.so"
    _run(cxx, "-shared", "-pthread", *objects, "-o", str(made))
    return made


def _make(name: str, compile: object) -> Path | None:
    """What ``compile(cxx, scratch)`` makes, put under that name in the first folder that takes it."""
    cxx = compiler()
    if cxx is None:
        print("kernels: no C++ compiler found ($CXX, g++, c++, clang++); GRACE works without, only slower")
        return None
    with tempfile.TemporaryDirectory() as scratch:
        try:
            made = compile(cxx, Path(scratch))  # type: ignore[operator]
        except subprocess.CalledProcessError as error:
            lines = (error.stderr or "").strip().splitlines()
            reason = next((line for line in lines if "error" in line), lines[-1] if lines else str(error))
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
    sys.exit(main())
