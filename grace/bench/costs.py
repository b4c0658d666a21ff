"""Measured costs of compressors and links on this machine: the inputs of `grace.planner.costs`."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from grace.communicators.planned.strategy import Device, Kind, Level
from grace.core import Array, Transport
from grace.core.collectives import AllToAll, Broadcast, Collective, Gather, Group, Reduce
from grace.planner.costs import COEFFICIENTS, Cluster, Codec, Curve, Link, Rate, Speed, fitted

SIZES = (2**12, 2**15, 2**18, 2**21)
"""Default sizes, in elements, for measuring a compressor."""
BYTES = tuple(int(2 ** (10 + 16 * i / 11)) // 64 * 64 for i in range(12))
"""12 sizes of messages from 1 KiB to 64 MiB."""
EVICTED = 2**26
"""Bytes written between two exchanges to evict the caches."""
WARM_UP = 3
GROUPS: dict[Level, Group] = {"flat": "world", "intra": "node", "inter": "cross"}


def compressor(
    params: Mapping[str, Any], sizes: Sequence[int] = SIZES, backend: str = "numpy", budget: float = 0.2
) -> Codec:
    """Measure a compressor's bytes, and its seconds on one thread: the fastest of a few calls at each size.

    ``params``: as for `grace.grace_from_params`. ``sizes``: elements; a method that needs a matrix gets a nearly
    square one. ``backend``: the toolkit, on this machine's CPU: times differ between toolkits, and TensorFlow
    uses its own number of threads. ``budget``: seconds of measuring at each size, at least three calls. Encoding
    includes the method's memory.
    """
    from grace.backends import get_backend
    from grace.bench.kernels import machine
    from grace.bench.plan import Case, Config
    from grace.bench.subjects import Bench, Ours

    wire, encode, decode, piece = [], [], [], []
    xp = get_backend(backend)
    with _one_thread(backend):
        for size in sizes:
            bench = Bench(xp, Config(backend, 1, "asis", size))
            subject = Ours(Case(str(params["compressor"]), dict(params)), bench, "eager")
            wire.append(float(subject.bytes))
            encode.append(_fastest(lambda s=subject: _encoded(s), budget, subject.refill))  # type: ignore[misc]
            one = _fastest(subject.decode, budget / 2)
            subject.several(repeated=True)
            more = subject.workers - 1
            all_ = _fastest(subject.decode, budget / 2) if more else one
            decode.append(one)
            piece.append(max(all_ - one, 0.0) / more if more else 0.0)
    curves = (Curve(tuple(map(float, sizes)), tuple(values)) for values in (encode, decode, piece))
    speeds: dict[Device, Speed] = {"gpu": Speed(*curves)}
    threads = "" if backend == "tensorflow" else ", one thread"  # TensorFlow's thread pools cannot be resized later
    source = f"measured with {backend} on a CPU ({machine()['cpu']}){threads}"
    return Codec(dict(params), Curve(tuple(map(float, sizes)), tuple(wire)), speeds, source)


@contextmanager
def _one_thread(backend: str) -> Iterator[None]:
    if backend != "torch":
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def product(side: int = 256) -> Callable[[], None]:
    """Return a function that computes a matrix product in NumPy, as a stand-in for a backward pass."""
    import numpy as np

    matrix, out = np.ones((side, side), np.float32), np.empty((side, side), np.float32)
    return lambda: np.matmul(matrix, matrix, out)  # type: ignore[return-value]


def contention(work: Callable[[], None], params: Mapping[str, Any], size: int = 2**18, budget: float = 0.5) -> float:
    """Measure the factor by which a compressor in another thread is slower while this thread runs ``work``; at least 1.

    The result is the pool's factor for `grace.planner.costs.Codec.offloaded` if device and pool are the same CPU.
    """
    alone = compressor(params, (size,), budget=budget).encode(size)
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(compressor, params, (size,), "numpy", budget)
        while not beside.done():
            work()
    return max(beside.result().encode(size) / alone, 1.0)


def at_work(
    transport: Transport, codecs: Iterable[Codec], sizes: Sequence[int] = SIZES, steps: int = 15
) -> tuple[Rate, list[Codec]]:
    """Measure the time that messages and compressors take from the computing thread while all workers exchange.

    Costs measured on one idle machine are too low for a training: there, caches hold other data, workers share the
    memory bandwidth, and each message is submitted. All workers make this call together, and get the same result.
    ``transport``: bound to a backend. ``sizes``: elements of one tensor, ascending. ``steps``: exchanges of each size,
    whose median is averaged over all workers. Returns `grace.planner.costs.Cluster.message`, and the codecs with
    these times.
    """
    xp: Any = transport.xp  # type: ignore[attr-defined]
    itself = {"compressor": "none"}
    asked = [itself, *(codec.params for codec in codecs)]
    mine = [[_handled(transport, params, size, steps) for size in sizes] for params in asked]
    everybody = [json.loads(text) for text in transport.exchange(json.dumps(mine))]
    means = [[_mean(each) for each in zip(*rows, strict=True)] for rows in zip(*everybody, strict=True)]
    dense, *rest = means
    least, most = (sum(pair) for pair in (dense[0], dense[-1]))
    spread = 4.0 * (sizes[-1] - sizes[0])
    message = Rate(least, max(most - least, 0.0) / spread if spread else 0.0)
    source = f"measured in exchanges of {transport.size} workers with {xp.name}"
    return message, [
        _scaled(codec, sizes, found, message, transport.size, source) for codec, found in zip(codecs, rest, strict=True)
    ]


def _mean(pairs: Iterable[Sequence[float]]) -> tuple[float, float]:
    first, second = zip(*pairs, strict=True)
    return statistics.fmean(first), statistics.fmean(second)


def _handled(transport: Transport, params: Mapping[str, Any], size: int, steps: int) -> tuple[float, float]:
    # Returns median seconds of this worker's thread: until a tensor's first message has been sent, and from then on,
    # without waiting.
    import numpy as np

    from grace.bench.plan import SCALE
    from grace.factory import grace_from_params

    xp: Any = transport.xp  # type: ignore[attr-defined]
    rows = 2 ** (size.bit_length() // 2)
    draw = np.random.default_rng(size)
    given = [xp.asarray(draw.laplace(0, SCALE, (rows, size // rows)), "float32") for _ in range(2)]
    others = xp.asarray(np.zeros(EVICTED // 4), "float32")
    exchange = grace_from_params({**params, "fuse": "tensor", "timeout": 60}, transport)
    exchange.build({"tensor": given[0]})
    found = []
    for step in range(WARM_UP + steps):
        others = others + 1  # evict the caches, as a step's other work does
        gradient = xp.buffers.copy(given[step % 2])
        transport.exchange("")  # all workers start together
        waited, began = exchange.setup.trace.totals["wait"], time.perf_counter()
        job = exchange.start("tensor", gradient, spent=True)
        left = time.perf_counter()
        exchange.finish(job)
        ended = time.perf_counter()
        found.append((left - began, ended - left - (exchange.setup.trace.totals["wait"] - waited)))
    before, after = zip(*found[WARM_UP:], strict=True)
    return statistics.median(before), statistics.median(after)


def _scaled(
    codec: Codec, sizes: Sequence[int], found: Sequence[tuple[float, float]], message: Rate, workers: int, source: str
) -> Codec:
    # Returns the codec with measured seconds. The ratio of times to decode one payload or several is unchanged.
    count = 1 if _summed(codec) else workers
    encode, decode, piece = [], [], []
    for size, (before, after) in zip(sizes, found, strict=True):
        encode.append(max(before - message.latency - message.per_byte * codec.wire(size), 0.0))
        share = after / max(codec.decode(size, count), 1e-12)
        decode.append(share * codec.decode(size))
        piece.append(share * (codec.decode(size, 2) - codec.decode(size)))
    curves = (Curve(tuple(map(float, sizes)), tuple(values)) for values in (encode, decode, piece))
    return replace(codec, speeds={**codec.speeds, "gpu": Speed(*curves)}, source=source)


def _summed(codec: Codec) -> bool:
    from grace.planner.advise import candidate

    return candidate("", codec).summed


def _encoded(subject: Any) -> None:
    subject.encode()
    subject.look()
    subject.commit()


def _fastest(call: Callable[[], None], budget: float, before: Callable[[], None] = lambda: None) -> float:
    before()
    call()
    found: list[float] = []
    while len(found) < 3 or (sum(found) < budget and len(found) < 100):
        before()
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return min(found)  # other programs can only add time


def links(transport: Transport, node_size: int = 0, sizes: Iterable[int] = BYTES, repeats: int = 20) -> Cluster:
    """Measure the cluster that a transport spans: time its collectives and fit them. All workers call it together.

    ``transport``: bound to a backend. ``node_size``: workers per machine, 0: as launched. ``sizes``: bytes; each is
    timed ``repeats`` times. The time of a collective is that of the slowest worker (a late worker finds its data
    ready), and the median over repeats. Collectives are implemented as in communicator "planned".
    """
    xp: Any = transport.xp  # type: ignore[attr-defined]
    per_node = node_size or transport.node_size
    if transport.size < 2:
        raise ValueError("links are between at least 2 workers: launch several")
    if transport.size % per_node:
        raise ValueError(f"node_size={per_node} does not divide {transport.size} workers")
    nodes = transport.size // per_node
    counts: dict[Level, int] = {"flat": transport.size}
    if min(nodes, per_node) > 1:
        transport.split(per_node)
        counts = {"flat": transport.size, "intra": per_node, "inter": nodes}
    measured: dict[Level, Link] = {}
    for level, count in counts.items():
        times: dict[Kind, list[tuple[float, list[float]]]] = {kind: [] for kind in COEFFICIENTS}
        for size in sizes:
            x = xp.zeros(max(size // 4 // count, 1) * count)
            for kind, pairs in times.items():
                pairs.append((4.0 * xp.shape(x)[0], _timed(transport, level, kind, x, count, repeats)))
        everybody = [json.loads(text) for text in transport.exchange(json.dumps(times))]
        fits: dict[Kind, Rate] = {}
        for kind in times:
            by_size = zip(*(worker[kind] for worker in everybody), strict=True)
            slowest = [(each[0][0], [*map(max, zip(*(found for _, found in each), strict=True))]) for each in by_size]
            rate = fitted(kind, count, [(held, statistics.median(found)) for held, found in slowest])
            # All workers of a machine took part, and shared its link.
            shared = per_node if level == "inter" or (level == "flat" and kind == "alltoall" and nodes > 1) else 1
            fits[kind] = Rate(rate.latency, rate.per_byte / shared)
        measured[level] = Link(fits["allreduce"].latency, 1 / max(fits["allreduce"].per_byte, 1e-15), fits)
    flat = measured["flat"]
    return Cluster(nodes, per_node, measured.get("inter", flat), measured.get("intra", flat), "measured", flat)


def _timed(transport: Transport, level: Level, kind: Kind, x: Array, count: int, repeats: int) -> list[float]:
    found = []
    for _ in range(repeats):
        asked = _collective(transport, level, kind, x, count)
        transport.exchange("")  # all workers start together
        began = time.perf_counter()
        transport.start([asked], f"measure.{kind}")()
        found.append(time.perf_counter() - began)
    return found


def _collective(transport: Transport, level: Level, kind: Kind, x: Array, count: int) -> Collective:
    group = GROUPS[level]
    (length,) = transport.xp.shape(x)  # type: ignore[attr-defined]
    shard = length // count
    if kind == "allreduce":
        return Reduce((x,), "mean", group)
    if kind == "allgather":
        return Gather((x,), group=group)
    if kind == "broadcast":
        return Broadcast((x,), 0, group=group)
    if kind in ("reduce", "gather"):
        return AllToAll(((x,), *[(x[:0],)] * (count - 1)), group)
    return AllToAll(tuple((x[i * shard : (i + 1) * shard],) for i in range(count)), group)
