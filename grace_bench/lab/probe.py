"""TCP throughput between two hosts of a lab. Each end runs this file as a script: standard library only."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grace_bench.lab.network import Lab

PORT = 5999
SKIPPED = 0.4  # first seconds, not counted: connection set-up, and the burst of an idle link


def receive(address: str) -> None:
    """Accept one connection, and print the bits per second received after `SKIPPED` seconds."""
    with socket.create_server((address, PORT)) as server:
        print("ready", flush=True)
        server.settimeout(30)
        connection, _ = server.accept()
    room = bytearray(1 << 20)
    began = time.perf_counter()
    first = last = began
    counted = 0
    with connection:
        connection.settimeout(30)
        while got := connection.recv_into(room):
            now = time.perf_counter()
            if now - began < SKIPPED:
                first = now
            else:
                counted, last = counted + got, now
    print(8 * counted / (last - first) if last > first else 0.0, flush=True)


def send(address: str, seconds: float) -> None:
    """Send as fast as the link allows."""
    data = bytes(1 << 18)
    with socket.create_connection((address, PORT), timeout=30) as connection:
        end = time.perf_counter() + SKIPPED + seconds
        while time.perf_counter() < end:
            connection.sendall(data)


def probe(lab: Lab, source: int = 1, target: int = 0, seconds: float = 2.0) -> float:
    """Bits per second of one TCP connection from one host to another (payload, without headers)."""
    to, of = lab.hosts[target], lab.hosts[source]
    receiver = to.popen(sys.executable, __file__, "receive", to.address, stdout=subprocess.PIPE)
    sender = None
    try:
        assert receiver.stdout is not None
        if receiver.stdout.readline().strip() == b"ready":
            sender = of.popen(sys.executable, __file__, "send", to.address, str(seconds))
        answer = receiver.communicate(timeout=60 + seconds)[0]
        if receiver.returncode:
            raise RuntimeError("the throughput probe failed: its output is above")
        return float(answer)
    finally:
        for end in (receiver, sender):
            if end is not None:
                end.kill()
                end.wait()


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(sys.argv[2])
    else:
        send(sys.argv[2], float(sys.argv[3]))
