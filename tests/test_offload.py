"""Compression on a thread pool: the same bits, ordered messages, errors in the right thread."""

import json
import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest
from launch import launch
from methods import backend, workers
from support.commands import run
from support.costs import codec

from grace import grace_from_params, simulate
from grace.backends import get_backend
from grace.bench import costs as measure
from grace.compressors.measured.topk import TopK
from grace.core.collectives import Gather
from grace.engine.scheduler import RoundScheduler, WorkerPool
from grace.engine.trace import Trace
from grace.transports.local import LocalTransport

CPU = "compress(cpu) allgather*(flat) decompress(cpu)"
GPU = "compress(gpu) allgather*(flat) decompress(gpu)"


class Told(LocalTransport):
    """A transport that lists the messages it sent."""

    def __init__(self):
        super().__init__()
        self.xp, self.names = get_backend("numpy"), []

    def start(self, collectives, name):
        self.names.append(name)
        return super().start(collectives, name)


def sending(before=lambda: None, rounds=1):
    """A program that calls ``before`` and then gathers, in each round."""
    found = []
    for number in range(rounds):
        before()
        found += yield Gather((np.full(3, number, np.float32),))
    return found


def test_messages_leave_in_the_order_of_their_flights():
    transport, go = Told(), threading.Event()
    pool = WorkerPool(1, {"slow"}, transport.xp)
    first = RoundScheduler("first", {"slow": sending(go.wait), "fast": sending()}, transport, Trace(), pool)
    second = RoundScheduler("second", {"fast": sending()}, transport, Trace(), None, first)
    third = RoundScheduler("third", {"slow": sending()}, transport, Trace(), pool, second)
    assert not third.depart()
    assert transport.names == []
    go.set()
    assert third.depart(wait=True)
    assert transport.names == ["first.0", "second.0", "third.0"]
    for _ in range(2):  # one call for the round, and one to finish
        done = [each.advance() for each in (first, second, third)]
    assert all(done)
    assert list(first.results) == ["slow", "fast"]
    assert [unit for unit, *_ in first.asked] == ["slow", "fast"]


def test_buckets_leave_in_order_though_the_first_takes_longest():
    transport = Told()
    plan = {"tensors": {"a": {"option": GPU}, "b": {"option": CPU}}}  # "b" is in the first bucket
    grace = grace_from_params({"compressor": Where(compress_ratio=0.1), "plan": plan, "bucket_mb": 1e-6}, transport)
    given = {name: np.ones(900, np.float32) for name in "ab"}
    grace.build(given)
    transport.names.clear()
    for name in "ba":
        grace.start(name, given[name])
    grace.flush()
    assert transport.names == ["bucket0.0", "bucket1.0"]


def test_what_is_done_leaves_without_a_wait():
    transport, go = Told(), threading.Event()
    pool = WorkerPool(1, {"slow"}, transport.xp)
    flight = RoundScheduler("only", {"slow": sending(go.wait)}, transport, Trace(), pool)
    assert not flight.depart()
    go.set()
    end = time.monotonic() + 10
    while not flight.depart() and time.monotonic() < end:
        time.sleep(0.001)
    assert transport.names == ["only.0"]


def test_what_fails_on_the_pool_is_raised_and_nothing_follows():
    def fail():
        go.wait()
        raise ArithmeticError("on the pool")

    transport, go = Told(), threading.Event()
    pool = WorkerPool(1, {"bad"}, transport.xp)
    first = RoundScheduler("first", {"bad": sending(fail)}, transport, Trace(), pool)
    second = RoundScheduler("second", {"good": sending()}, transport, Trace(), pool, first)
    go.set()
    for flight in (first, second, second):
        with pytest.raises(ArithmeticError, match="on the pool"):
            flight.depart(wait=True)
    second.settle()
    assert transport.names == []


def test_what_fails_here_waits_for_the_pool():
    def fail():
        raise ArithmeticError("here")

    transport, done = Told(), []
    pool = WorkerPool(1, {"slow"}, transport.xp)
    slow = sending(lambda: done.append(time.sleep(0.2)))
    with pytest.raises(ArithmeticError, match="here"):
        RoundScheduler("only", {"bad": sending(fail), "slow": slow}, transport, Trace(), pool)
    assert done == [None]


@dataclass(frozen=True)
class Where(TopK):
    """A slow top-k that records the thread which compresses."""

    def compress(self, x, state, ctx):
        THREADS.append((ctx.name, threading.current_thread().name))
        time.sleep(0.002 * (ctx.rank + 1))
        return super().compress(x, state, ctx)


THREADS: list[tuple[str, str]] = []


@pytest.mark.parametrize("name", ["numpy", "torch", "tensorflow"])
def test_the_pool_compresses_and_changes_nothing(name):
    backend(name)
    rng = np.random.default_rng(0)
    given = [[{n: rng.standard_normal(900).astype(np.float32) for n in "ab"} for _ in range(3)] for _ in range(4)]
    found = []
    for option in (GPU, CPU):
        THREADS.clear()
        plan = {"tensors": {"a": {"option": option}, "b": {"option": GPU}}}
        params = {"compressor": Where(compress_ratio=0.1), "plan": plan, "bucket_mb": 1e-6}
        found.append(simulate(params, given, backend=name))
        elsewhere = {tensor for tensor, thread in THREADS if thread.startswith("pool")}
        assert elsewhere == ({"a"} if option is CPU and name != "tensorflow" else set())
    for one, two in zip(found[0].history, found[1].history, strict=True):
        for rank in range(3):
            assert all(np.array_equal(one[rank][n], two[rank][n]) for n in "ab")
    assert found[0].report.bytes_sent == found[1].report.bytes_sent


def test_the_trace_has_a_track_for_each_thread(tmp_path):
    (grace,) = workers({"plan": {"params": {"compressor": "topk"}, "tensors": {"a": {"option": CPU}}}, "trace": 1}, 1)
    grace.build({"a": np.zeros(5000, np.float32)})
    grace.step({"a": np.ones(5000, np.float32)})
    grace.report(trace=tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    mine = [event for event in events if event["ph"] == "X" and "compress a" in event["name"]]
    assert {tracks[event["tid"]] for event in mine} == {"pool_0"}


def test_a_step_that_fails_on_the_pool_can_be_dropped():
    done = []

    class Fails(Where):
        def compress(self, x, state, ctx):
            if ctx.step == 1 and ctx.name == "b":
                raise ArithmeticError("on the pool")
            time.sleep(0.1)
            done.append(ctx.step)
            return super().compress(x, state, ctx)

    plan = {"tensors": {n: {"option": CPU} for n in "ab"}}
    grace = grace_from_params({"compressor": Fails(compress_ratio=0.1), "plan": plan}, LocalTransport())
    given = {n: np.ones(900, np.float32) for n in "ab"}
    grace.build(given)
    grace.step(given)
    for end in (grace.abandon, grace.land):
        grace.launch(given)
        if end == grace.abandon:
            grace.abandon()
        else:
            with pytest.raises(ArithmeticError, match="on the pool"):
                grace.land()
        assert done[-1] == 1, "what is under way is waited for: it works in the gradient's memory"
        done.append(None)
        assert not grace.started
    assert grace.state_dict()["step"] == 1


# -- the planner -------------------------------------------------------------------------------------------------------
def test_a_pool_needs_cores_of_its_own(tmp_path, monkeypatch):
    costs, out = tmp_path / "costs.json", tmp_path / "plan.json"
    costs.write_text(json.dumps([codec({"compressor": "topk"}, 0.02).to_dict()]))
    words = ("plan", "lstm", "--costs", costs, "-o", out, "--offload")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(measure, "contention", lambda work, params: work() is None or 3.0)
    done = run(*words, 2)
    assert done.exit_code == 2
    assert "2 cores leave 1 free for the pool of each of 1 worker" in " ".join(done.output.replace("│", " ").split())
    assert run(*words, 1, "--per-node", 2).exit_code == 2
    assert run(*words, 2, "--compress-speed", 0.2).exit_code == 0, "another device trains"
    done = run(*words, 1)
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())["basis"]
    ((_, gpu), *_), ((_, cpu), *_) = (found["codecs"][0]["speeds"][device]["encode"] for device in ("gpu", "cpu"))
    assert cpu == pytest.approx(3 * gpu)
    assert "3.00 times as long on the pool" in found["codecs"][0]["source"]


# -- real workers ------------------------------------------------------------------------------------------------------
@pytest.mark.processes
@pytest.mark.parametrize("launcher, transport", [("torchrun", "torch"), ("horovodrun", "horovod")])
def test_real_workers_with_a_pool(launcher, transport, tmp_path):
    found = launch(launcher, 2, "offload.py", tmp_path, transport)
    for worker in found:
        assert np.array_equal(worker["cpu"], worker["gpu"])
        assert np.array_equal(worker["cpu"], found[0]["gpu"])
        assert worker["threads"]
    if transport == "torch":
        assert found[1]["error"] == ("ArithmeticError", "worker 1 failed on the pool")
        assert found[0]["error"][0] in ("TimeoutError", "ConnectionError")
