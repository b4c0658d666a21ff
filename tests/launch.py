"""Start several real workers with horovodrun or torchrun and collect what each of them found."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

WORKERS = Path(__file__).parent / "workers"
BIN = Path(sys.executable).parent


def launch(launcher: str, size: int, script: str, out: Path, *args: str, timeout: float = 240) -> list[Any]:
    """Run tests/workers/<script> on ``size`` workers; the list of what they saved, in rank order.

    Fails with the workers' output when one of them does, or when they take longer than ``timeout`` seconds.
    """
    command = {
        "horovodrun": [BIN / "horovodrun", "-np", size, "--gloo", sys.executable],
        "torchrun": [BIN / "torchrun", "--standalone", f"--nproc-per-node={size}"],
    }[launcher]
    root = Path(__file__).parent.parent
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")]),
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": "",
    }
    out.mkdir(parents=True, exist_ok=True)
    log = out / "output.txt"
    with log.open("w") as stream:
        process = subprocess.Popen(
            [str(part) for part in [*command, WORKERS / script, out, *args]],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(30)
    assert code == 0, f"{launcher} {script} " + ("took too long" if code is None else f"ended with {code}") + tail(log)
    return [pickle.loads((out / f"{rank}.pickle").read_bytes()) for rank in range(size)]


def save(out: str, rank: int, found: Any) -> None:
    """What a worker calls at its end."""
    Path(out, f"{rank}.pickle").write_bytes(pickle.dumps(found))


def tail(log: Path) -> str:
    """The end of a log, for a failure's message."""
    return ":\n" + "\n".join(log.read_text().splitlines()[-60:])
