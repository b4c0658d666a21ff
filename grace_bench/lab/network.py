"""Emulated hosts, links and a switch, built from network namespaces, veth pairs and token bucket filters."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from grace.bench.plan import UNSHAPED
from grace_bench.lab import delays

PREFIX = "grace-lab"
NETNS = Path("/etc/netns")  # `ip netns exec NAME` replaces files in /etc by those in NETNS/NAME
PACKAGES = {"ip": "iproute2", "tc": "iproute2"}
SSH_PACKAGES = {"sshd": "openssh-server", "ssh": "openssh-client", "ssh-keygen": "openssh-client"}
LATENCY = "100ms"  # capacity of a queue, as time at the link's rate
UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}

_counter = itertools.count()


class LabError(RuntimeError):
    """The lab cannot be built or used; the message says what to do."""


def bits_per_second(rate: str) -> float:
    """``"100mbit"`` -> 1e8; infinite for ``"unshaped"``."""
    if rate == UNSHAPED:
        return float("inf")
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?bit)", rate)
    if not found or not float(found[1]):
        raise LabError(f"rate {rate!r}: write it as tc does, such as 100mbit or 1gbit, or {UNSHAPED!r}")
    return float(found[1]) * UNITS[found[2]]


def burst_bytes(rate: str) -> int:
    """Bytes that an idle link may send at once: 4.2 ms at its rate (525 kB at 1 Gbit/s), and at least 16 KiB.

    A larger burst would carry most of a compressed message for free on a slow link; a smaller one misses the rate.
    """
    return max(int(bits_per_second(rate) / 8 * 0.0042), 16 * 1024)


def missing(ssh: bool = False) -> list[str]:
    """Missing requirements of a lab on this machine, each with its remedy; empty if none.

    ``ssh``: include the requirements of horovodrun, which reaches other hosts by SSH.
    """
    lacks = []
    if sys.platform != "linux":
        return ["network namespaces (Linux only)"]
    if os.geteuid():
        lacks.append("root: run it with sudo, or in a container with --privileged")
    needed = PACKAGES | SSH_PACKAGES if ssh else PACKAGES
    if packages := sorted({package for tool, package in needed.items() if not find(tool)}):
        tools = ", ".join(tool for tool in needed if not find(tool))
        lacks.append(f"{tools}: apt-get install {' '.join(packages)}")
    return lacks


def find(tool: str) -> str | None:
    """A system tool's path; sshd and tc may not be on PATH."""
    return shutil.which(tool, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))


def run(*command: Any, check: bool = True) -> str:
    """Run a system tool and return its output."""
    words = [str(word) for word in command]
    done = subprocess.run([find(words[0]) or words[0], *words[1:]], capture_output=True, text=True)
    if check and done.returncode:
        raise LabError(f"`{' '.join(words)}` failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout


class Host:
    """One emulated host."""

    def __init__(self, lab: str, index: int):
        self.index = index
        self.name = f"{lab}-h{index}"
        self.address = f"10.77.0.{index + 1}"
        self.sshd: subprocess.Popen[bytes] | None = None
        self.started: list[subprocess.Popen[bytes]] = []

    def command(self, *words: Any) -> list[str]:
        """The command line that runs a command on this host."""
        return [find("ip") or "ip", "netns", "exec", self.name, *map(str, words)]

    def popen(self, *words: Any, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[bytes]:
        """Start a command on this host."""
        process = subprocess.Popen(
            self.command(*words),
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            **options,
        )
        self.started = [earlier for earlier in self.started if earlier.poll() is None] + [process]
        return process

    def processes(self) -> set[int]:
        """All processes on this host, except its sshd."""
        listed = run("ip", "netns", "pids", self.name, check=False)
        return {int(pid) for pid in listed.split()} - ({self.sshd.pid} if self.sshd else set())


class Lab:
    """``hosts`` emulated hosts on one switch, each link shaped to ``rate`` in both directions.

    A context manager. Every host has an interface eth0, a hosts file with its own address and, for horovodrun, an sshd
    with keys of this lab alone; the machine's own network and ssh are not changed. ``rate``: in tc's form, or
    "unshaped". ``burst``: bytes that an idle link may send at once; None: `burst_bytes`. ``delay``: milliseconds by
    which each link delays packets in both directions, so that they take four times as long from a host to another and
    back (`grace_bench.lab.delays`).
    """

    def __init__(
        self,
        hosts: int = 4,
        rate: str = "100mbit",
        workers_per_host: int = 1,
        burst: int | None = None,
        delay: float = 0.0,
    ) -> None:
        if not 1 <= hosts <= 250 or workers_per_host < 1:
            raise LabError(f"{hosts} hosts with {workers_per_host} workers each: 1 to 250 hosts, at least 1 worker")
        bits_per_second(rate)
        self.interface, self.port = "eth0", 29500  # the port is free: nothing else runs on these hosts
        if not 0 <= delay <= 10_000:
            raise LabError(f"a delay of {delay:g} ms: write 0 to 10000")
        self.rate, self.burst, self.workers_per_host, self.delay = rate, burst, workers_per_host, delay
        self.name = f"{PREFIX}-{os.getpid()}-{next(_counter)}"
        self.switch = f"{self.name}-sw"
        self.hosts = [Host(self.name, index) for index in range(hosts)]
        self.folder = Path()
        self._key: Path | None = None
        self._delays: subprocess.Popen[bytes] | None = None

    @property
    def size(self) -> int:
        """Total number of workers."""
        return len(self.hosts) * self.workers_per_host

    @property
    def topology(self) -> str:
        """``"4"`` for 4 hosts with a worker each, ``"2x2"`` for 2 with 2 each."""
        return topology(len(self.hosts), self.workers_per_host)

    @property
    def key(self) -> Path:
        """The private key that every host accepts; starts an sshd on each. Raises LabError if OpenSSH is missing."""
        if self._key is None:
            if lacks := missing(ssh=True):
                raise LabError("horovodrun in the network lab needs " + "; and ".join(lacks))
            self._start_sshd()
            self._key = self.folder / "id"
        return self._key

    def __enter__(self) -> Lab:
        lacks = missing()
        if lacks:
            raise LabError("the network lab needs " + "; and ".join(lacks))
        clean()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop all processes on the hosts, and remove the hosts."""
        started = [process for host in self.hosts for process in host.started]
        started += [self._delays] if self._delays else []
        for process in started:  # a process may not have entered its host yet
            process.kill()
        _remove(self.name)
        for process in started:
            process.wait()
        if self._delays:
            self._delays.communicate()  # closes its pipes

    def stop(self) -> None:
        """Kill all processes on the hosts, except their sshd."""
        for _ in range(50):
            left = set().union(*(host.processes() for host in self.hosts))
            if not left:
                return
            _kill(left)
            time.sleep(0.1)
        raise LabError(f"processes {sorted(left)} in the lab cannot be killed")

    def shape(self, rate: str, burst: int | None = None) -> None:
        """Set another rate on all links."""
        bits_per_second(rate)
        self.rate, self.burst = rate, burst
        for host in self.hosts:
            for namespace, device in ((host.name, "eth0"), (self.switch, f"p{host.index}")):
                tc = ("ip", "netns", "exec", namespace, find("tc"), "qdisc")
                run(*tc, "del", "dev", device, "root", check=False)
                if rate != UNSHAPED:
                    limits = ("rate", rate, "burst", burst or burst_bytes(rate), "latency", LATENCY)
                    run(*tc, "add", "dev", device, "root", "tbf", *limits)

    def _build(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"{self.name}-"))
        run("ip", "netns", "add", self.switch)
        in_switch = ("ip", "-n", self.switch)
        run(*in_switch, "link", "add", "br0", "type", "bridge")
        run(*in_switch, "link", "set", "br0", "up")
        if self.delay:
            self._start_delays()
        for host in self.hosts:
            port, here = f"p{host.index}", ("ip", "-n", host.name)
            run("ip", "netns", "add", host.name)
            if self.delay:
                run(*in_switch, "link", "set", f"e{host.index}", "netns", host.name, "name", "eth0")
            else:
                run("ip", "link", "add", port, "netns", self.switch, "type", "veth", "peer", "eth0", "netns", host.name)
            run(*in_switch, "link", "set", port, "master", "br0", "up")
            run(*here, "link", "set", "lo", "up")
            run(*here, "link", "set", "eth0", "up")
            run(*here, "address", "add", f"{host.address}/24", "dev", "eth0")
            self._etc(host)
        self.shape(self.rate, self.burst)

    def _start_delays(self) -> None:
        script = (sys.executable, delays.__file__, str(self.delay / 1e3), str(len(self.hosts)))
        command = [find("ip") or "ip", "netns", "exec", self.switch, *script]
        self._delays = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert self._delays.stdout is not None
        if self._delays.stdout.readline() != b"ready\n":
            reason = "".join(self._delays.communicate()[1].decode().splitlines()[-1:])
            raise LabError(f"links with a delay: {reason}. They need TAP devices: `modprobe tun`, in a container "
                           "`--device /dev/net/tun`, and the right to set priorities")  # fmt: skip

    def _etc(self, host: Host) -> None:
        # Horovod's gloo resolves its own host name, which is often 127.0.0.1 in the machine's file.
        etc = NETNS / host.name
        (etc / "ssh").mkdir(parents=True)
        names = f"127.0.0.1 localhost\n::1 localhost\n{host.address} {socket.gethostname()}\n"
        (etc / "hosts").write_text(names + "".join(f"{h.address} host{h.index}\n" for h in self.hosts))
        # Keep the keys of these hosts out of the user's known_hosts.
        (etc / "ssh" / "ssh_config").write_text("Host *\n UserKnownHostsFile /dev/null\n LogLevel ERROR\n")

    def _start_sshd(self) -> None:
        for name in ("id", "host"):
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name)
        settings = {
            "HostKey": self.folder / "host",
            "AuthorizedKeysFile": self.folder / "id.pub",
            "PermitRootLogin": "prohibit-password",
            "PasswordAuthentication": "no",
            "StrictModes": "no",
            "UsePAM": "no",
            "PidFile": "none",
            "MaxStartups": "100",
            "PrintMotd": "no",
        }
        config = self.folder / "sshd_config"
        config.write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd needs this empty folder
        Path("/etc/ssh").mkdir(exist_ok=True)  # the mount point must exist
        for host in self.hosts:
            with (self.folder / f"sshd{host.index}.log").open("wb") as log:
                sshd = find("sshd")
                host.sshd = host.popen(sshd, "-D", "-e", "-f", config, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 20
        for host in self.hosts:
            while "listening on" not in (said := (self.folder / f"sshd{host.index}.log").read_text()):
                if time.monotonic() > deadline or (host.sshd and host.sshd.poll() is not None):
                    raise LabError(f"sshd did not start: {said}")
                time.sleep(0.02)


class Loopback:
    """This machine unchanged, as a lab of one host with all workers: no links, no rate. Needs no root."""

    def __init__(self, workers: int):
        self.interface, self.address, self.index = "lo", "localhost", 0
        self.size = self.workers_per_host = workers
        self.hosts = [self]
        self.key = None
        self._mark = f"GRACE_LOOPBACK={uuid.uuid4().hex}"
        self.folder = Path()

    @property
    def port(self) -> int:
        """A free port."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return free.getsockname()[1]

    def __enter__(self) -> Loopback:
        self.folder = Path(tempfile.mkdtemp(prefix="grace-loopback-"))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def popen(self, *words: Any, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[bytes]:
        """Start a command."""
        name, _, value = self._mark.partition("=")
        return subprocess.Popen(
            [*map(str, words)],
            env={**os.environ, **(env or {}), name: value},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            **options,
        )

    def processes(self) -> set[int]:
        """All running processes that were started here, in any process group: launchers create groups for workers."""
        found = set()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if self._mark.encode() in path.read_bytes().split(b"\0"):
                    found.add(int(path.parent.name))
        return found

    def stop(self) -> None:
        """Kill all processes that were started here."""
        for _ in range(50):
            left = self.processes()
            if not left:
                return
            _kill(left)
            time.sleep(0.1)
        raise LabError(f"processes {sorted(left)} cannot be killed")


def topology(hosts: int, workers_per_host: int) -> str:
    """A topology as text: (4, 1) -> ``"4"``; (2, 2) -> ``"2x2"``."""
    return f"{hosts}x{workers_per_host}" if workers_per_host > 1 else str(hosts)


def parse_topology(text: str) -> tuple[int, int]:
    """``"4"`` -> (4, 1); ``"2x2"`` -> (2, 2)."""
    found = re.fullmatch(r"(\d+)(?:x(\d+))?", text.strip())
    if not found:
        raise LabError(f"hosts {text!r}: write 4, or 2x2 for 2 hosts with 2 workers each")
    return int(found[1]), int(found[2] or 1)


def leftovers(everything: bool = False) -> list[str]:
    """Labs whose process has ended without removing them. ``everything``: include labs in use."""
    listed = [line.split()[0] for line in run("ip", "netns", "list", check=False).splitlines() if line.strip()]
    for folder in (NETNS, Path(tempfile.gettempdir())):
        listed += [path.name for path in folder.glob(f"{PREFIX}-*")]
    found = {match[0]: int(match[1]) for name in listed if (match := re.match(rf"{PREFIX}-(\d+)-\d+", name))}
    return sorted(lab for lab, pid in found.items() if everything or not _alive(pid))


def clean(everything: bool = False) -> list[str]:
    """Remove `leftovers`; returns their names."""
    found = leftovers(everything)
    for lab in found:
        _remove(lab)
    return found


def _remove(lab: str) -> None:
    listed = run("ip", "netns", "list", check=False).splitlines()
    names = [name for line in listed for name in line.split()[:1] if name.startswith(f"{lab}-")]
    for name in names:
        for _ in range(50):
            pids = {int(pid) for pid in run("ip", "netns", "pids", name, check=False).split()}
            if not pids - {os.getpid()}:
                break
            _kill(pids)
            time.sleep(0.05)
        run("ip", "netns", "delete", name, check=False)
    for folder in (NETNS, Path(tempfile.gettempdir())):
        for path in folder.glob(f"{lab}-*"):
            shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        NETNS.rmdir()  # only if empty


def _kill(pids: Iterable[int]) -> None:
    for pid in set(pids) - {os.getpid()}:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
