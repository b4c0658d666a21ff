"""The threads that wait for the network's events, and when they may interrupt those that compute."""

from __future__ import annotations

import os
import time
from pathlib import Path

TASKS = Path("/proc/self/task")
EPOLL = ("ep_poll", "do_epoll_wait")
"""Where in the kernel of the system a thread waits for events; which of the two depends on how that was compiled."""
LOOKS = 3
"""How often to look, a millisecond apart: a thread that has an event to see to is not waiting just then."""


def settle() -> int:
    """Make batch threads of this process's threads that wait for events. Returns how many became some.

    On a core that it shares, such a thread interrupts whoever computes when an event comes. If that one is just about
    to send, it holds the connection, and gloo's thread asks for it again and again until its time is up. A batch
    thread (SCHED_BATCH) has the same share of the cores and interrupts nobody; on a core of its own nothing changes.
    Linux only; GRACE_EVENTS=interrupt leaves all as it is.
    """
    if not hasattr(os, "SCHED_BATCH") or os.environ.get("GRACE_EVENTS", "").lower() == "interrupt":
        return 0
    found: set[int] = set()
    for look in range(LOOKS):
        if look:
            time.sleep(0.001)
        found.update(_waiting())
    return sum(map(_batched, found))


def _waiting() -> list[int]:
    try:
        threads = [int(entry.name) for entry in TASKS.iterdir()]
    except OSError:
        return []
    return [thread for thread in threads if _waits(thread)]


def _waits(thread: int) -> bool:
    try:
        return (TASKS / str(thread) / "wchan").read_text() in EPOLL
    except OSError:  # it has ended, or the system does not tell
        return False


def _batched(thread: int) -> bool:
    try:
        if os.sched_getscheduler(thread) != os.SCHED_OTHER:
            return False
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
    except OSError:
        return False
    return True
