"""Fresh processes of JAX: it may not be forked once it has started."""

import pickle
import subprocess
import sys

from launch import TESTS, end, environ, free_port


def processes(size, script, out, *args, timeout=300):
    """Run tests/workers/<script> OUT RANK SIZE PORT ARGS in ``size`` processes; returns what each saved."""
    out.mkdir(exist_ok=True)
    port, started = free_port(), []
    try:
        for rank in range(size):
            command = [sys.executable, TESTS / "workers" / script, out, rank, size, port, *args]
            with (out / f"{rank}.txt").open("w") as log:
                each = subprocess.Popen(
                    [str(part) for part in command],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environ(JAX_PLATFORMS="cpu", XLA_FLAGS=""),
                    start_new_session=True,
                )
            started.append(each)
        for each in started:
            each.wait(timeout)
    finally:
        for each in started:
            end(each)
    logs = [(out / f"{rank}.txt").read_text() for rank in range(size)]
    assert [each.returncode for each in started] == [0] * size, "\n".join(log[-3000:] for log in logs)
    return [pickle.loads((out / f"{rank}.pickle").read_bytes()) for rank in range(size)]
