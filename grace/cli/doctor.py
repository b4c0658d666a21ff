"""`grace doctor`: checks which packages are installed and work, and how to get missing ones."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grace
from grace.cli.probes import PROBES
from grace.engine.about import cores
from grace.kernels import library

if TYPE_CHECKING:
    from rich.console import Console

OLDEST = {
    "python": "3.10",
    "numpy": "2",
    "torch": "2.6",
    "tensorflow": "2.18",
    "keras": "3.7",
    "horovod": "0.28.1",
    "triton": "3.3",
}
"""The oldest supported versions, as in setup.cfg."""

REMEDIES = {
    "python": "use Python 3.10 or later",
    "numpy": "pip install numpy",
    "torch": "pip install '.[torch]' in GRACE's source tree",
    "tensorflow": "pip install '.[tensorflow]', or '.[tensorflow-cpu]', in GRACE's source tree",
    "keras": "pip install 'keras>=3.7'",
    "horovod": "python scripts/build_horovod.py, in GRACE's source tree",
    "triton": "pip install '.[triton]' in GRACE's source tree, on Linux",
    "kernels": "python -m grace.kernels.build, with a C++ compiler: methods are several times faster with them",
}


class Status(str, Enum):
    """Condition of a package."""

    OK = "ok"
    MISSING = "missing"
    OLD = "too old"
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """The condition of one package."""

    name: str
    status: Status
    version: str = ""
    detail: str = ""
    remedy: str = ""
    gpus: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Allocator:
    """Whether memory for large temporary arrays is cached, or requested from the system page by page each time."""

    tuned: bool | None  # None: unknown, since the C library is not glibc
    detail: str
    remedy: str = ""


@dataclass(frozen=True)
class Report:
    """The results of `grace doctor`."""

    grace: str
    findings: list[Finding]
    cores: int
    memory_gib: float | None
    gpus: list[str]
    allocator: Allocator

    @property
    def healthy(self) -> bool:
        """Whether NumPy and everything else that is installed work."""
        optional = ("torch", "tensorflow", "keras", "horovod", "triton", "kernels")
        return all(f.status is Status.OK or (f.status is Status.MISSING and f.name in optional) for f in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        return {**asdict(self), "healthy": self.healthy}


def examine() -> Report:
    """Check everything, the packages in parallel."""
    with ThreadPoolExecutor(max_workers=cores()) as pool:
        packages = list(pool.map(lambda name: judge(name, probe(name)), PROBES))
    return Report(
        grace=grace.__version__,
        findings=[judge("python", {"version": platform.python_version()}), *packages, native_kernels()],
        cores=cores(),
        memory_gib=_memory_gib(),
        gpus=next((found.gpus for found in packages if found.gpus), []),
        allocator=allocator(os.environ, platform.libc_ver(), _huge_pages()),
    )


def native_kernels() -> Finding:
    """Whether GRACE's own kernels are built, and for which instruction set."""
    found = library()
    if found is not None:
        return Finding("kernels", Status.OK, found.isa, "native kernels of GRACE")
    off = os.environ.get("GRACE_KERNELS", "").lower() in ("off", "0")
    return Finding("kernels", Status.MISSING, "", "GRACE_KERNELS says off" if off else "", REMEDIES["kernels"])


def probe(name: str, timeout: float = 120) -> dict[str, Any]:
    """Import `name` in another process and return its answer; see grace/cli/probes.py."""
    home = str(Path(grace.__file__).parents[1])  # last on the path, so that it shadows no package of the user's
    code = f"import sys; sys.path.append({home!r}); from grace.cli.probes import main; main()"
    quiet = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, name], capture_output=True, text=True, timeout=timeout, env=quiet, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"import takes more than {timeout:.0f} s"}
    try:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last_words = done.stderr.strip().splitlines()[-1:] or [""]
        return {"error": f"import ends the process with status {done.returncode}. {last_words[0]}".strip()}
    return answer


def judge(name: str, answer: Mapping[str, Any]) -> Finding:
    """Turn a probe's answer into a finding."""
    version, remedy = answer.get("version", ""), REMEDIES[name]
    if answer.get("missing"):
        return Finding(name, Status.MISSING, remedy=remedy)
    if error := answer.get("error"):
        return Finding(name, Status.BROKEN, detail=error, remedy=f"install it anew: {remedy}")
    if _numbers(version) < _numbers(OLDEST[name]):
        return Finding(name, Status.OLD, version, f"GRACE needs {OLDEST[name]} or later", remedy)
    return Finding(name, Status.OK, version, answer.get("detail", ""), gpus=answer.get("gpus", []))


def allocator(environ: Mapping[str, str], libc: tuple[str, str], huge_pages: str) -> Allocator:
    """Judge the settings that determine the cost of a fresh 100 MB array on a CPU.

    glibc returns a freed array of this size to the system, so the next one costs one page fault per 4 KB again: several
    times the arithmetic. Transparent huge pages fix that reliably. Thresholds alone usually suffice, but some runs trim
    and grow the heap at every step and are slower than without any setting.
    """
    tunables = dict(part.partition("=")[::2] for part in environ.get("GLIBC_TUNABLES", "").split(":"))
    if re.search("jemalloc|tcmalloc|mimalloc", environ.get("LD_PRELOAD", "")):
        return Allocator(True, "another allocator is preloaded")
    if libc[0] != "glibc":
        return Allocator(None, "not glibc")
    if tunables.get("glibc.malloc.hugetlb") in ("1", "2"):
        return Allocator(True, "glibc.malloc.hugetlb is set")
    if huge_pages == "always":
        return Allocator(True, "the system gives huge pages to everybody")
    thresholds = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} <= set(environ)
    if huge_pages == "madvise" and _numbers(libc[1]) >= (2, 35):
        remedy = "export GLIBC_TUNABLES=glibc.malloc.hugetlb=1"
    else:
        remedy = "" if thresholds else "export MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=4294967296"
    if thresholds:
        return Allocator(
            True, "MALLOC_..._THRESHOLD_ are set" + (", but alone they are unsteady" if remedy else ""), remedy
        )
    if environ.get("THP_MEM_ALLOC_ENABLE") == "1":
        return Allocator(True, "huge pages for PyTorch (THP_MEM_ALLOC_ENABLE)")
    return Allocator(False, "default: large temporaries in CPU training cost 3 to 6 times what they must", remedy)


def render(report: Report, console: Console) -> None:
    """Print the report as a table."""
    from rich.markup import escape
    from rich.table import Table

    colours = {Status.OK: "green", Status.MISSING: "yellow", Status.OLD: "red", Status.BROKEN: "red"}
    table = Table(title=f"GRACE {report.grace}", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("", "version", "status", "notes"):
        table.add_column(column, overflow="fold")
    for found in report.findings:
        notes = "\n".join(filter(None, (found.detail, found.remedy and f"get it: {found.remedy}")))
        colour = colours[found.status]
        table.add_row(found.name, found.version, f"[{colour}]{found.status.value}[/]", escape(notes))
    memory = f", {report.memory_gib:.0f} GiB of memory" if report.memory_gib else ""
    table.add_row("machine", "", "", f"{report.cores} cores{memory}")
    table.add_row("CUDA", "", "", escape(", ".join(report.gpus) or "no GPU seen by PyTorch or TensorFlow"))
    tuned = {True: "[green]tuned[/]", False: "[yellow]not set[/]", None: ""}[report.allocator.tuned]
    advice = "\n".join(filter(None, (report.allocator.detail, report.allocator.remedy)))
    table.add_row("malloc", "", tuned, escape(advice))
    console.print(table)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _memory_gib() -> float | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (AttributeError, OSError, ValueError):
        return None


def _huge_pages() -> str:
    """The system's setting, which its file has in square brackets: always, madvise or never."""
    try:
        match = re.search(r"\[(\w+)\]", Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text())
    except OSError:
        return "never"
    return match[1] if match else "never"
