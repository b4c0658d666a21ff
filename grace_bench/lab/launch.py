"""Runs the real horovodrun and torchrun across the hosts of a lab; keeps every rank's output, and kills hung runs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grace_bench.lab.network import Lab, LabError, Loopback

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parents[2]  # folder that contains the imported packages
GRACE_PERIOD = 20.0  # seconds for the other launchers to end after the first one

# Wrapper of a rank: stores the rank's output and exit code. $0 is the folder.
KEEP = """rank=${HOROVOD_RANK:-$RANK}; "$@" >"$0/$rank.out" 2>&1; code=$?; echo $code >"$0/$rank.code"; exit $code"""


@dataclass
class Outcome:
    """The outcome of a launch."""

    launcher: str
    codes: dict[int, int | None]
    """Exit code of each rank; None for a rank that was killed, or never started."""
    outputs: dict[int, str]
    """Output of each rank."""
    log: str
    """Output of the launcher itself."""
    reason: str = ""
    """Why the launch was stopped; empty if it ended by itself."""
    failed: bool = field(init=False)

    def __post_init__(self) -> None:
        self.failed = bool(self.reason) or any(code != 0 for code in self.codes.values())

    def __str__(self) -> str:
        lines = [f"{self.launcher}: {self.reason or 'ended'}; exit codes {self.codes}"]
        for rank, text in self.outputs.items():
            if self.codes[rank] != 0 and text.strip():
                lines.append(f"--- rank {rank} ---\n{text[-3000:].rstrip()}")
        if self.failed and self.log.strip() and len(lines) == 1:  # no rank has output, which would say more
            lines.append(f"--- {self.launcher} ---\n{self.log[-3000:].rstrip()}")
        return "\n".join(lines)

    def check(self) -> Outcome:
        """Return this outcome; raises LabError with the output if the launch failed."""
        if self.failed:
            raise LabError(str(self))
        return self


def horovodrun(lab: Lab | Loopback, *command: Any, **options: Any) -> Outcome:
    """Run a command on all workers with ``horovodrun --gloo``, started on host 0."""
    slots = ",".join(f"{host.address}:{lab.workers_per_host}" for host in lab.hosts)
    words = [_tool("horovodrun"), "--gloo", "--disable-cache", "-np", lab.size, "-H", slots]
    words += ["--network-interface", lab.interface, "--start-timeout", 120]
    words += ["--ssh-identity-file", lab.key] if lab.key else []
    return _run(lab, "horovodrun", [(0, words)], command, **options)


def torchrun(lab: Lab | Loopback, *command: Any, **options: Any) -> Outcome:
    """Run a command on all workers with one ``torchrun`` per host."""
    words = [_tool("torchrun"), "--nnodes", len(lab.hosts), "--nproc-per-node", lab.workers_per_host]
    words += ["--master-addr", lab.hosts[0].address, "--master-port", lab.port, "--max-restarts", 0, "--no-python"]
    starts = [(h.index, [*words, "--node-rank", h.index, "--local-addr", h.address]) for h in lab.hosts]
    return _run(lab, "torchrun", starts, command, **options)


LAUNCHERS = {"horovodrun": horovodrun, "torchrun": torchrun}


def _tool(name: str) -> Path:
    tool = BIN / name
    if not tool.exists():
        raise LabError(f"{name} is not in {BIN}: run `make install` and use its Python")
    return tool


def _run(
    lab: Lab | Loopback,
    launcher: str,
    starts: Sequence[tuple[int, Sequence[Any]]],
    command: Sequence[Any],
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 300,
    alive: Callable[[], Any] | None = None,
) -> Outcome:
    # Stops after ``timeout`` seconds, counted from the start or from the last change of the result of ``alive()``.
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": lab.interface,
        "PYTHONUNBUFFERED": "1",
        **(env or {}),
    }
    with tempfile.TemporaryDirectory(prefix="launch-", dir=lab.folder) as folder:
        kept = ["sh", "-c", KEEP, folder, *command]
        log = Path(folder, "log")
        processes: list[subprocess.Popen[bytes]] = []
        try:
            with log.open("wb") as output:
                for index, words in starts:
                    start = lab.hosts[index].popen
                    processes.append(
                        start(*words, *kept, env=environment, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
                    )
            reason = _watch(processes, timeout, alive)
        finally:
            for process in processes:
                process.kill()
            lab.stop()
            for process in processes:
                process.wait()
        ranks = range(lab.size)
        texts = {r: Path(folder, f"{r}.out") for r in ranks}
        codes = {r: Path(folder, f"{r}.code") for r in ranks}
        return Outcome(
            launcher,
            {r: int(path.read_text()) if path.exists() and path.read_text() else None for r, path in codes.items()},
            {r: path.read_text(errors="replace") if path.exists() else "" for r, path in texts.items()},
            log.read_text(errors="replace"),
            reason,
        )


def _watch(processes: Sequence[subprocess.Popen[bytes]], timeout: float, alive: Callable[[], Any] | None) -> str:
    # Wait until all launchers have ended, one has failed, or nothing has happened for too long.
    began, seen = time.monotonic(), None
    first_end: float | None = None
    while True:
        codes = [process.poll() for process in processes]
        if all(code == 0 for code in codes):
            return ""
        if bad := [code for code in codes if code]:
            return f"a launcher ended with {bad[0]}"
        now = time.monotonic()
        if alive is not None and (sign := alive()) != seen:
            began, seen = now, sign
        if any(code is not None for code in codes):
            first_end = first_end or now
            if now - first_end > GRACE_PERIOD:
                return f"some launchers did not end within {GRACE_PERIOD:.0f} seconds of the first"
        if now - began > timeout:
            return f"nothing happened for {timeout:.0f} seconds"
        time.sleep(0.1)
