"""Keeps threads that wait for network events from preempting compute threads and from outliving the interpreter."""

from __future__ import annotations

import atexit
import functools
import os
import time
from pathlib import Path

TASKS = Path("/proc/self/task")
EPOLL = ("ep_poll", "do_epoll_wait")
"""Kernel functions in which a thread waits for events; the name depends on how the kernel was compiled."""
CLOCK = ("hrtimer_nanosleep",)
"""Kernel function in which a thread sleeps for a time."""
LOOKS = 3
"""Number of checks, a millisecond apart: a thread that handles an event at one check may be waiting at the next."""
POLLS = 8
"""Number of checks to find polling threads, which fall asleep at least half as many times during the checks."""


def settle(polling: bool = False) -> int:
    """Turn those threads of this process that wait for network events into batch threads. Returns the number changed.

    On a shared core, such a thread preempts a compute thread when an event arrives. If the compute thread is about to
    send, it holds the connection's lock, and gloo's thread polls for it until its time slice ends. A batch thread
    (SCHED_BATCH) has the same share of the cores but preempts no other; on a core of its own nothing changes.
    ``polling``: include threads that wake up every millisecond to check for work, such as Horovod's.
    Linux only; GRACE_EVENTS=interrupt turns it off.
    """
    if not hasattr(os, "SCHED_BATCH") or os.environ.get("GRACE_EVENTS", "").lower() == "interrupt":
        return 0
    before = {thread: _sleeps(thread) for thread in _threads()} if polling else {}
    found: set[int] = set()
    sleeping: set[int] = set()
    for look in range(POLLS if polling else LOOKS):
        if look:
            time.sleep(0.001)
        for thread in _threads():
            place = _told(thread, "wchan")
            if place in EPOLL:
                found.add(thread)
            elif place in CLOCK:
                sleeping.add(thread)
    found |= {thread for thread in sleeping & before.keys() if _sleeps(thread) - before[thread] >= POLLS // 2}
    return sum(map(_batched, found))


@functools.cache
def release_at_exit() -> None:
    """Let gloo's threads release the tensors of finished collectives before Python exits; once per process.

    They do so shortly after a wait has returned, and need the GIL for it. During finalization Python refuses the GIL,
    which aborts the process (exit code -6).
    """
    atexit.register(time.sleep, 0.05)


def _threads() -> list[int]:
    try:
        return [int(entry.name) for entry in TASKS.iterdir()]
    except OSError:
        return []


def _sleeps(thread: int) -> int:
    # Number of voluntary context switches.
    lines = _told(thread, "status").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches")), 0)


def _told(thread: int, file: str) -> str:
    try:
        return (TASKS / str(thread) / file).read_text()
    except OSError:  # the thread has ended, or the system hides the file
        return ""


def _batched(thread: int) -> bool:
    try:
        if os.sched_getscheduler(thread) != os.SCHED_OTHER:
            return False
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
    except OSError:
        return False
    return True
