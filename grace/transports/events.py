"""The threads that wait for the network's events, and when they may interrupt those that compute."""

from __future__ import annotations

import os
import time
from pathlib import Path

TASKS = Path("/proc/self/task")
EPOLL = ("ep_poll", "do_epoll_wait")
"""Where in the kernel of the system a thread waits for events; which of the two depends on how that was compiled."""
CLOCK = ("hrtimer_nanosleep",)
"""Where it sleeps for a time."""
LOOKS = 3
"""How often to look, a millisecond apart: a thread that has an event to see to is not waiting just then."""
POLLS = 8
"""How often to look for a thread that polls; half as often it must have gone to sleep."""


def settle(polling: bool = False) -> int:
    """Make batch threads of this process's threads that wait for events. Returns how many became some.

    On a core that it shares, such a thread interrupts whoever computes when an event comes. If that one is just about
    to send, it holds the connection, and gloo's thread asks for it again and again until its time is up. A batch
    thread (SCHED_BATCH) has the same share of the cores and interrupts nobody; on a core of its own nothing changes.
    ``polling``: also of those that wake up every millisecond to see whether there is something to do, as Horovod's.
    Linux only; GRACE_EVENTS=interrupt leaves all as it is.
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


def _threads() -> list[int]:
    try:
        return [int(entry.name) for entry in TASKS.iterdir()]
    except OSError:
        return []


def _sleeps(thread: int) -> int:
    # How often it has gone to sleep by itself.
    lines = _told(thread, "status").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches")), 0)


def _told(thread: int, file: str) -> str:
    try:
        return (TASKS / str(thread) / file).read_text()
    except OSError:  # it has ended, or the system does not tell
        return ""


def _batched(thread: int) -> bool:
    try:
        if os.sched_getscheduler(thread) != os.SCHED_OTHER:
            return False
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
    except OSError:
        return False
    return True
