"""Threads that wait for events do not preempt others."""

import os
import select
import subprocess
import sys
import threading
import time

import pytest

from grace.backends import get_backend
from grace.transports import events, get_transport

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="batch threads are Linux's")


@pytest.fixture
def waiting():
    """A thread that polls for an event, and one that sleeps."""
    end, (read, write) = threading.Event(), os.pipe()
    poll = select.epoll()
    poll.register(read, select.EPOLLIN)
    threads = threading.Thread(target=poll.poll), threading.Thread(target=end.wait)
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    yield threads
    os.write(write, b"x")
    end.set()
    for thread in threads:
        thread.join()
    poll.close()
    os.close(read)
    os.close(write)


def test_only_threads_that_wait_for_events_become_batch_threads(waiting):
    one, other = waiting
    assert events.settle() >= 1
    assert os.sched_getscheduler(one.native_id) == os.SCHED_BATCH
    assert os.sched_getscheduler(other.native_id) == os.SCHED_OTHER
    assert os.sched_getscheduler(threading.get_native_id()) == os.SCHED_OTHER


def test_threads_that_poll_become_batch_threads_if_that_is_wanted():
    end = threading.Event()

    def poll():
        while not end.is_set():
            time.sleep(0.001)

    polls, sleeps = threading.Thread(target=poll), threading.Thread(target=time.sleep, args=(1,))
    polls.start(), sleeps.start()
    time.sleep(0.02)
    try:
        events.settle()
        assert os.sched_getscheduler(polls.native_id) == os.SCHED_OTHER
        # On a busy machine the thread may not wake up in time for the first check.
        assert any(events.settle(polling=True) for _ in range(20))
        assert os.sched_getscheduler(polls.native_id) == os.SCHED_BATCH
        assert os.sched_getscheduler(sleeps.native_id) == os.SCHED_OTHER
    finally:
        end.set()
        polls.join(), sleeps.join()


def test_the_thread_of_gloo_is_one_of_them(tmp_path):
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        transport = get_transport("torch").bind(get_backend("torch"))
        one = loops()
        transport.among([0])  # a new group has a thread of its own
        two = loops()
        assert 0 < len(one) < len(two)
        assert {os.sched_getscheduler(thread) for thread in two} == {os.SCHED_BATCH}
    finally:
        dist.destroy_process_group()


def test_gloos_threads_get_the_gil_before_python_refuses_it(monkeypatch):
    dist = pytest.importorskip("torch.distributed")
    at_exit = []
    monkeypatch.setattr("atexit.register", lambda *call: at_exit.append(call))
    events.release_at_exit.cache_clear()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        get_transport("torch"), get_transport("torch")
    finally:
        events.release_at_exit.cache_clear()  # the test replaced it, and this process needs the real one
        dist.destroy_process_group()
    ((function, *arguments),) = at_exit  # registered once per process
    released = []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100)  # another thread gets the GIL only if this one blocks
    try:
        thread = threading.Thread(target=lambda: (time.sleep(0.001), released.append(True)))
        thread.start()
        function(*arguments)
        assert released
    finally:
        sys.setswitchinterval(interval)
    thread.join()


def test_the_thread_of_horovod_is_one_of_them():
    pytest.importorskip("horovod.torch")
    script = (
        "import os, time, horovod.torch as hvd; hvd.init()\n"
        "from grace.backends import get_backend\n"
        "from grace.transports import events, get_transport\n"
        "get_transport('horovod').bind(get_backend('torch'))\n"
        "threads = [int(task.name) for task in events.TASKS.iterdir()]\n"
        "batch = [t for t in threads if os.sched_getscheduler(t) == os.SCHED_BATCH]\n"
        "found, end = set(), time.monotonic() + 10\n"  # the thread may be running during a check
        "while 'hrtimer_nanosleep' not in found and time.monotonic() < end:\n"
        "    found |= {(events.TASKS / str(t) / 'wchan').read_text() for t in batch}\n"
        "print(sorted(found))\n"
    )
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=True)
    assert "hrtimer_nanosleep" in found.stdout, found.stdout


def loops():
    """gloo's threads of this process."""
    names = {int(task.name): (task / "comm").read_text().strip() for task in events.TASKS.iterdir()}
    return [thread for thread, name in names.items() if name == "gloo_tcp_loop"]


def test_the_environment_leaves_them_alone(waiting, monkeypatch):
    monkeypatch.setenv("GRACE_EVENTS", "interrupt")
    assert events.settle() == 0
    assert os.sched_getscheduler(waiting[0].native_id) == os.SCHED_OTHER


def test_a_system_that_does_not_tell_is_no_error(waiting, monkeypatch, tmp_path):
    monkeypatch.setattr(events, "TASKS", tmp_path / "nothing")
    assert events.settle() == 0
    (tmp_path / str(waiting[0].native_id)).mkdir()
    monkeypatch.setattr(events, "TASKS", tmp_path)  # a thread without a file that names its wait channel
    assert events.settle() == 0
