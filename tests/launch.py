"""Start real workers with horovodrun or torchrun, and leave no process behind."""

from __future__ import annotations

import atexit
import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil

TESTS = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent
LOG = "GRACE_TEST_LOG"
"""An environment variable that tells the workers of one launch from others."""
IMPORTED = {"torch": "torch._dynamo", "tensorflow": "tensorflow"}  # optimizers of PyTorch import _dynamo


def launcher(name: str, size: int, options: Sequence[str] = ()) -> list[str]:
    """The command line that starts ``size`` workers, up to the script; ``options``: more of the launcher's."""
    if name == "horovodrun":
        return [str(BIN / "horovodrun"), "-np", str(size), "--gloo", *options, sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", *options]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def environ(**more: str) -> dict[str, str]:
    """The environment of the processes of tests."""
    return {
        **os.environ,
        **more,
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
    }


def run(
    *command: Any,
    log: Path,
    timeout: float = 600,
    meanwhile: Callable[[subprocess.Popen[bytes]], None] = lambda process: None,
    fails: bool = False,
    **more: str,
) -> str:
    """Run a command and return its output; fails with the output if the command fails or takes too long.

    ``meanwhile``: called once the command has started. ``fails``: it must fail. ``more``: environment variables.
    """
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environ(**more),
            start_new_session=True,
        )
        late = False
        try:
            meanwhile(process)
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            end(process)
    printed = log.read_text()
    assert not late, f"{command} took longer than {timeout} seconds:\n{printed[-5000:]}"
    assert (process.returncode != 0) == fails, f"{command} ended with {process.returncode}:\n{printed[-5000:]}"
    return printed


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its descendants."""
    if process.poll() is not None:
        return
    # horovodrun puts its workers into sessions of their own, so a process group would not name them all.
    family = [process, *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


def launch(name: str, size: int, script: str, out: Path, *args: str, timeout: float = 600) -> list[Any]:
    """Run tests/workers/<script> on ``size`` workers; returns what each saved, in rank order.

    Workers are forked from processes that have imported their toolkit (see forks.py), where the system can.
    """
    command = command_of(name, size, TESTS / "workers" / script, out, *args)
    run(*command, log=out / "output.txt", timeout=timeout)
    return [pickle.loads((out / f"{rank}.pickle").read_bytes()) for rank in range(size)]


def command_of(name: str, size: int, script: Path, *args: Any, options: Sequence[str] = ()) -> list[Any]:
    """The command line that runs a script on ``size`` workers, forked as by `launch`; ``options``: the launcher's."""
    linux = sys.platform == "linux"
    command = _forked(name, size, script, args, options) if linux else launcher(name, size, options)
    return [*command, script, *args]


def alone(script: Path, toolkit: str = "torch") -> list[str]:
    """The command line that runs a script of a toolkit as the only worker, RANK=0, forked as by `launch`."""
    if sys.platform == "linux":
        _serve(toolkit, "0", IMPORTED[toolkit])
        return [*_client(toolkit), str(script)]
    return [sys.executable, str(script)]


def _forked(name: str, size: int, script: Path, args: Sequence[Any], options: Sequence[str]) -> list[str]:
    # The command line of `launcher`, but servers fork the workers, and also the launcher itself if it imports PyTorch.
    source = script.read_text()
    # Keras reads its backend when TensorFlow imports it, and TensorFlow has no transport under torchrun.
    either = re.search("import (tensorflow|keras)", source) and name == "horovodrun" and "torch" not in args
    toolkit = "tensorflow" if either and ("import torch" not in source or "tensorflow" in args) else "torch"
    for rank in range(size):
        _serve(toolkit, str(rank), IMPORTED[toolkit])
    worker = _client(toolkit)
    if name == "horovodrun":
        # horovodrun imports Horovod's extension for TensorFlow in every launch, to check for Gloo.
        _serve("horovodrun", "launcher", "horovod.runner.launch", "horovod.tensorflow")
        _, *given, _ = launcher(name, size, options)
        return [*_client("horovodrun"), "-m", "horovod.runner.launch", *given, *worker]
    _serve("torch", "launcher", "torch.distributed.run")
    _, *torchrun = launcher(name, size, options)
    return [*_client("torch"), *torchrun, "--no-python", *worker]


def _client(toolkit: str) -> list[str]:
    return [sys.executable, "-IS", str(TESTS / "forks.py"), "run", str(_sockets() / toolkit)]


_servers: list[subprocess.Popen[bytes]] = []


@atexit.register
def _end_servers() -> None:
    for server in _servers:
        server.kill()
        server.wait()


@cache
def _sockets() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="grace"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def _serve(toolkit: str, name: str, *modules: str) -> None:
    path = _sockets() / toolkit / name
    path.parent.mkdir(exist_ok=True)
    command = [sys.executable, TESTS / "forks.py", "serve", path, *modules]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, env=environ(), start_new_session=True)
    _servers.append(server)
    while not path.exists():
        assert server.poll() is None, f"the server of {toolkit} ended with {server.returncode}"
        time.sleep(0.01)


def elastic(script: Path, *args: Any, log: Path, at: str, timeout: float = 600) -> str:
    """Run a script on 4 elastic Horovod workers; one is killed once the log contains ``at``, and another joins later.

    The killed worker and its successor are alone on their "host", so that the others stay.
    """
    hosts = log.with_name("hosts.sh")
    hosts.write_text("#!/bin/sh\necho localhost:3\necho 127.0.0.1:1\n")
    hosts.chmod(0o755)

    def kill_one(launcher: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + timeout
        while at not in log.read_text():
            assert launcher.poll() is None, f"{script} ended before {at!r}:\n{log.read_text()[-5000:]}"
            assert time.monotonic() < end, f"{script} has not come to {at!r}:\n{log.read_text()[-5000:]}"
            time.sleep(0.05)
        (victim,) = (process for process in psutil.process_iter() if _on_other_host(process, str(log)))
        time.sleep(0.3)  # kill in the next epoch, during the commit of the epoch in ``at``
        victim.kill()

    flags = ["--min-np", "2", "--max-np", "4", "--network-interface", "lo", "--blacklist-cooldown-range", "2", "4"]
    command = command_of("horovodrun", 4, script, *args, options=["--host-discovery-script", str(hosts), *flags])
    more = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "20", LOG: str(log)}  # survivors notice a death after 20 s
    return run(*command, log=log, timeout=timeout, meanwhile=kill_one, **more)


def _on_other_host(process: psutil.Process, log: str) -> bool:
    # Whether a process is the worker of host 127.0.0.1, or has it forked. Other processes come and go meanwhile.
    try:
        python, environment = process.exe() == os.path.realpath(sys.executable), process.environ()
        return python and environment.get("HOROVOD_HOSTNAME") == "127.0.0.1" and environment.get(LOG) == log
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def save(out: str, rank: int, found: Any) -> None:
    """Called by a worker at its end."""
    Path(out, f"{rank}.pickle").write_bytes(pickle.dumps(found))


def error_of(call, *args, **options):
    """The kind and text of the error that a call raises; empty if it raises none."""
    try:
        call(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def join_torch(transport: str) -> tuple[int, int]:
    """Start a worker of PyTorch on one thread, over torch.distributed ("torch") or Horovod; returns rank and size."""
    import torch

    torch.set_num_threads(1)
    if transport == "torch":
        import torch.distributed as dist

        dist.init_process_group("gloo")
        return dist.get_rank(), dist.get_world_size()
    import horovod.torch as hvd

    hvd.init()
    return hvd.rank(), hvd.size()


def leave_gloo() -> None:
    """End a gloo worker that has saved its findings, without Python's own clean-up.

    PyTorch's gloo threads are not joined while anything (DistributedDataParallel, a future) still holds their group.
    Sometimes they then abort the worker during the clean-up.
    """
    import torch.distributed as dist

    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
