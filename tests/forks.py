"""Processes that start at once, because they are forked from servers that have imported a toolkit.

    python forks.py serve SOCKET MODULE ...         a server that imports modules; it ends when its standard input does
    python forks.py run FOLDER [-m] SCRIPT ARG ...  runs a script in a process forked from a server in the folder

Each rank has a server of its own. Workers of one server would share the seed of string hashes, which hides results that
depend on the order of a set.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from typing import Any

status = [0]
"""The exit code of a job."""
RANKS = ("RANK", "HOROVOD_RANK")  # set by torchrun, by horovodrun


def end() -> None:
    """End a job's process at once. Python's own exit takes a second to free the imported modules."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status[0])


def serve(path: str, modules: list[str]) -> dict[str, Any]:
    """Fork a process for each connection. Returns its job in each of these processes, and never in the server."""
    import atexit
    import gc
    import importlib

    atexit.register(end)  # first registered, last run
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen(64)
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # keep forked workers from visiting and copying the imported modules
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps the processes that run `keep`
    while True:
        ready, _, _ = select.select([server, sys.stdin], [], [])
        if sys.stdin in ready:
            os._exit(0)
        connection, _ = server.accept()
        if os.fork() == 0:
            server.close()
            return keep(connection)
        connection.close()


def keep(connection: socket.socket) -> dict[str, Any]:
    """Fork the process of a connection's job, and wait for its end or the client's. Returns in the job's process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, files, *_ = socket.recv_fds(connection, 1, 3)
    job: dict[str, Any] = json.loads(connection.makefile("rb").readline())
    worker = os.fork()
    if worker == 0:
        connection.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        return job
    for file in files:  # close them, so that readers of a pipe see its end
        os.close(file)
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    connection.sendall(b"%d\n" % worker)
    ended = os.pidfd_open(worker)
    ready, _, _ = select.select([connection, ended], [], [])
    if ended not in ready:
        os.kill(worker, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    if ended in ready:
        connection.sendall(b"%d\n" % code)
    os._exit(0)


def request(folder: str, argv: list[str]) -> int:
    """Have a server run a script with this process's files, environment and folder. Returns its exit code."""
    rank = next((os.environ[name] for name in RANKS if name in os.environ), "launcher")
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.path.join(folder, rank))
    socket.send_fds(connection, [b"\0"], [0, 1, 2])
    connection.sendall(json.dumps({"argv": argv, "environment": dict(os.environ), "cwd": os.getcwd()}).encode() + b"\n")
    answers = connection.makefile("rb")
    worker = int(answers.readline())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(worker, number))
    return int(answers.readline())


def become(job: dict[str, Any]) -> None:
    """Run a job's script as Python would."""
    import runpy

    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["cwd"])
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
    option, *rest = job["argv"]
    try:
        if option == "-m":
            sys.argv, sys.path[0] = rest, os.getcwd()
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = job["argv"], os.path.dirname(os.path.abspath(option))
            runpy.run_path(option, run_name="__main__")
    except BaseException as error:
        wanted = error.code if isinstance(error, SystemExit) else 1
        status[0] = wanted if isinstance(wanted, int) else int(wanted is not None)
        raise


if __name__ == "__main__":
    what, where, *others = sys.argv[1:]
    if what == "run":
        code = request(where, others)
        if code < 0:  # ended by a signal: return the code that launchers report
            if -code != signal.SIGKILL:
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        sys.exit(code)
    become(serve(where, others))
