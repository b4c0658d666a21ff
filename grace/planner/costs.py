"""The cost of each action of a strategy: links, compressors, and the chain of operations after a gradient.

A collective among w workers that each hold V bytes takes A(w) a + B(w) V b, with the latency a in seconds and the
seconds per byte b of its level, and A and B from `COEFFICIENTS` (Thakur et al., 2005). a and b come from the link's
bandwidth and latency, or are fitted to measurements of each collective. The workers of a machine share its link to
other machines.

Espresso, section 4.2.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from operator import itemgetter
from typing import Any, NamedTuple

from grace.communicators.planned.runner import carries, summable
from grace.communicators.planned.strategy import (
    DENSE_FLAT,
    DENSE_HIERARCHICAL,
    DEVICES,
    Action,
    Device,
    Kind,
    Level,
    Option,
    options,
    parse,
    states,
)
from grace.core.registry import triple
from grace.planner.profile import but
from grace.planner.profile import seconds as checked
from grace.planner.timeline import CPU, DEVICE, INTER, INTRA, Chain

FORMAT = 1
MIN_NUMEL = 1024
"""Smaller tensors go dense with other tensors' messages, as by default in `grace.engine.session.Options`."""
KEPT = 12
"""Maximum number of strategies per tensor size in a search."""


def _tree(w: int) -> float:
    return math.ceil(math.log2(w)) if w > 1 else 0.0


COEFFICIENTS: dict[Kind, Callable[[int], tuple[float, float]]] = {
    "allreduce": lambda w: (2.0 * (w - 1), 2.0 * (w - 1) / w),
    "reduce_scatter": lambda w: (w - 1.0, (w - 1) / w),
    "alltoall": lambda w: (w - 1.0, (w - 1) / w),
    "allgather": lambda w: (w - 1.0, w - 1.0),
    "gather": lambda w: (w - 1.0, w - 1.0),
    "reduce": lambda w: (_tree(w), float(w > 1)),
    "broadcast": lambda w: (_tree(w), float(w > 1)),
}
"""By collective, for w workers: the number of latencies, and the multiple of a worker's bytes."""
TREE: tuple[Kind, Kind] = ("reduce", "broadcast")
LIKE: dict[Kind, Kind] = {
    "reduce_scatter": "alltoall",
    "gather": "allgather",
    "reduce": "broadcast",
}
"""Substitutes for collectives that were not measured."""


class Rate(NamedTuple):
    """Seconds of latency, and seconds per byte."""

    latency: float
    per_byte: float


NOTHING = Rate(0.0, 0.0)


@dataclass(frozen=True)
class Link:
    """The connection between the workers of a level."""

    latency: float
    """Seconds."""
    bandwidth: float
    """Bytes per second; infinity: no cost."""
    fits: Mapping[Kind, Rate] = field(default_factory=dict)
    """Measured rates of single collectives, which take precedence."""

    def rate(self, kind: Kind) -> Rate:
        """Latency and seconds per byte of a collective."""
        found = self.fits.get(kind) or self.fits.get(LIKE.get(kind, kind))
        return found or Rate(self.latency, 1 / self.bandwidth)

    def scaled(self, latency: float = 1.0, bandwidth: float = 1.0) -> Link:
        """A link with scaled latency and bandwidth."""
        fits = {kind: Rate(rate.latency * latency, rate.per_byte / bandwidth) for kind, rate in self.fits.items()}
        return Link(self.latency * latency, self.bandwidth * bandwidth, fits)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: microseconds and Gbit/s; fits in seconds and seconds per byte."""
        plain: dict[str, Any] = {"latency_us": self.latency * 1e6, "gbit_per_s": self.bandwidth * 8e-9}
        return plain | ({"fits": {kind: list(rate) for kind, rate in self.fits.items()}} if self.fits else {})


def link(data: Any, what: str) -> Link:
    """A `Link` from JSON data: {"latency_us", "gbit_per_s", "fits": {collective: [seconds, seconds per byte]}}."""
    if not isinstance(data, Mapping) or not set(data) <= {"latency_us", "gbit_per_s", "fits"}:
        raise ValueError(f'{what} is {{"gbit_per_s": ..., "latency_us": ...}}, not {data!r}')
    gbit = data.get("gbit_per_s")
    gbit = gbit if gbit == math.inf else checked(gbit, f"gbit_per_s of {what}")
    if gbit == 0:
        raise ValueError(f"gbit_per_s of {what} is 0: write what the link carries")
    fits = {}
    if not isinstance(data.get("fits", {}), Mapping):
        raise ValueError(f"fits of {what} are {{collective: [seconds, seconds per byte]}}, not {data['fits']!r}")
    for kind, pair in data.get("fits", {}).items():
        if kind not in COEFFICIENTS:
            raise ValueError(f"fits of {what} are {{collective: [seconds, seconds per byte]}}, not of {kind!r}")
        fits[kind] = _rate(pair, kind)
    return Link(checked(data.get("latency_us", 50.0), f"latency_us of {what}") * 1e-6, gbit / 8e-9, fits)


def _rate(pair: Any, what: str) -> Rate:
    if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
        raise ValueError(f"{what} is [seconds, seconds per byte], not {pair!r}")
    return Rate(checked(pair[0], f"latency of {what}"), checked(pair[1], f"seconds per byte of {what}"))


INTRA_LINK = Link(5e-6, 100e9)


@dataclass(frozen=True)
class Cluster:
    """Machines with the same number of workers each, and the links within and between them."""

    nodes: int
    per_node: int
    inter: Link
    """Between one machine and the others; all its workers share it."""
    intra: Link = INTRA_LINK
    """Between the workers of one machine. Default: 5 us and 100 GB/s, roughly NVLink."""
    source: str = "given"
    flat: Link | None = None
    """For collectives among all workers; None: use the link between machines, if there are several."""
    message: Rate = NOTHING
    """Time of a collective on the computing thread, which submits it and takes its result."""

    def __post_init__(self) -> None:
        if min(self.nodes, self.per_node) < 1:
            raise ValueError(f"{self.nodes} machines with {self.per_node} workers: write at least 1 of each")

    @property
    def workers(self) -> int:
        return self.nodes * self.per_node

    @property
    def levels(self) -> bool:
        """Whether strategies of several levels make sense."""
        return min(self.nodes, self.per_node) > 1

    def size(self, level: Level) -> int:
        """Number of workers that take part at a level."""
        return {"flat": self.workers, "intra": self.per_node, "inter": self.nodes}[level]

    def link(self, level: Level) -> Link:
        """The link of a level's collectives."""
        if level == "flat" and self.flat is not None:
            return self.flat
        return self.inter if self.between(level) else self.intra

    def between(self, level: Level) -> bool:
        """Whether a level's collectives use the link between machines."""
        return level == "inter" or (level == "flat" and self.nodes > 1)

    def among(self, workers: int, per_node: int = 0) -> Cluster:
        """The same links with another number of workers, by the formulas of collectives instead of measurements.

        ``per_node``: workers per machine; 0: unchanged if that divides them, else each worker counts as a machine of
        its own (on one machine: all stay on it). ValueError for machines of unequal size.
        """
        size = per_node or (self.per_node if workers % self.per_node == 0 else workers if self.nodes == 1 else 1)
        if workers % size:
            raise ValueError(f"node_size={size} does not divide {workers} workers")
        if (workers // size, size) == (self.nodes, self.per_node):
            return self
        source = f"{self.source} among {self.workers} workers, scaled to {workers}"
        flat = self.flat if (workers > size) == (self.nodes > 1) else None  # it was measured over another kind of link
        return replace(self, nodes=workers // size, per_node=size, flat=flat, source=source)

    def seconds(self, action: Action, held: float, sharing: int = 1, joined: bool = False) -> float:
        """Time of a collective. ``held``: bytes per worker; ``sharing``: number of workers that share a machine's link.

        ``joined``: it travels with another message, and adds no latency of its own. An allreduce that was not measured
        uses a ring or a tree, whichever is faster.
        """
        link = self.link(action.level)
        if action.kind == "allreduce" and "allreduce" not in link.fits:
            tree = sum(self._seconds(half, action.level, held, sharing, joined) for half in TREE)
            return min(self._seconds("allreduce", action.level, held, sharing, joined), tree)
        return self._seconds(action.kind, action.level, held, sharing, joined)

    def _seconds(self, kind: Kind, level: Level, held: float, sharing: int, joined: bool) -> float:
        latencies, bytes_ = COEFFICIENTS[kind](self.size(level))
        rate = self.link(level).rate(kind)
        return latencies * rate.latency * (not joined) + bytes_ * held * rate.per_byte * sharing

    def handling(self, held: float, joined: bool = False) -> float:
        """Seconds that the computing thread spends on a collective of this size; ``joined`` as in `seconds`."""
        return self.message.latency * (not joined) + self.message.per_byte * held

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `cluster` is the inverse."""
        parts: dict[str, Any] = {"inter": self.inter.to_dict(), "intra": self.intra.to_dict()}
        if self.flat is not None:
            parts["flat"] = self.flat.to_dict()
        if any(self.message):
            parts["message"] = list(self.message)
        return {"nodes": self.nodes, "workers_per_node": self.per_node, **parts, "source": self.source}


def cluster(data: Any) -> Cluster:
    """A `Cluster` from JSON data: {"nodes", "workers_per_node", "inter": link, "intra": link}; else ValueError."""
    if not isinstance(data, Mapping) or "inter" not in data:
        raise ValueError(
            'a cluster is {"nodes": 4, "workers_per_node": 8, "inter": {"gbit_per_s": 10}, "intra": ...}' + but(data)
        )
    if unknown := set(data) - {"nodes", "workers_per_node", "inter", "intra", "flat", "message", "source"}:
        raise ValueError(f"a cluster has no {sorted(unknown)[0]!r}")
    counts = [data.get(key, 1) for key in ("nodes", "workers_per_node")]
    if not all(type(count) is int and count >= 1 for count in counts):
        raise ValueError(f"nodes and workers_per_node are whole numbers of at least 1, not {counts}")
    nodes, per_node = counts
    intra = link(data["intra"], "intra") if "intra" in data else INTRA_LINK
    flat = link(data["flat"], "flat") if "flat" in data else None
    message = _rate(data.get("message", (0.0, 0.0)), "message")
    return Cluster(
        nodes, per_node, link(data["inter"], "inter"), intra, str(data.get("source", "given")), flat, message
    )


def fitted(kind: Kind, workers: int, measured: Iterable[tuple[float, float]]) -> Rate:
    """Latency and seconds per byte, both non-negative, from measured pairs (bytes held, seconds).

    Chooses, among lines through two of the pairs or with their slope, the one with the smallest sum of errors, as
    ratios: sizes span decades, and an outlier (a burst that a link passes at once, a disturbance) must not bend the
    line.
    """
    latencies, bytes_ = COEFFICIENTS[kind](workers)
    points = [(bytes_ * held, t) for held, t in measured if t > 0]
    if not points or latencies == 0:
        raise ValueError(f"{kind} needs measurements between at least 2 workers to be fitted")
    least = min(t for _, t in points)
    lines = [(t, 0.0) for _, t in points] + [(0.0, t / x) for x, t in points if x > 0]
    for (x, t), (y, u) in combinations(points, 2):
        if x != y and (slope := (u - t) / (y - x)) >= 0:
            lines += [(max(t - slope * x, 0.0), slope), (least, slope)]

    def error(line: tuple[float, float]) -> float:
        start, slope = line
        return sum(abs(math.log(max(start + slope * x, 1e-12) / t)) for x, t in points)

    latency, per_byte = min(lines, key=error)
    latency /= latencies
    return Rate(latency, per_byte)


# -- compressors ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Curve:
    """A quantity as a function of the number of elements, with linear interpolation between known sizes.

    Below the smallest size it is constant. Beyond the largest it follows the last power law, but grows at most linearly
    (with a single known size: linearly).
    """

    sizes: tuple[float, ...]
    values: tuple[float, ...]

    def __call__(self, size: float) -> float:
        sizes, values = self.sizes, self.values
        if size <= sizes[0]:
            return values[0]
        right = bisect_right(sizes, size)
        if right == len(sizes):
            return values[-1] * (size / sizes[-1]) ** self._power
        slope = (values[right] - values[right - 1]) / (sizes[right] - sizes[right - 1])
        return values[right - 1] + slope * (size - sizes[right - 1])

    def scaled(self, factor: float) -> Curve:
        """All values multiplied by ``factor``."""
        return Curve(self.sizes, tuple(value * factor for value in self.values))

    @cached_property
    def _power(self) -> float:
        if len(self.sizes) == 1 or min(self.values[-2:]) <= 0:
            return 1.0
        (a, b), (u, v) = self.sizes[-2:], self.values[-2:]
        return min(max(math.log(v / u) / math.log(b / a), 0.0), 1.0)


@dataclass(frozen=True)
class Speed:
    """Seconds of a compressor on one device, by number of elements."""

    encode: Curve
    decode: Curve
    """From one payload to a dense vector."""
    piece: Curve
    """For each further payload added to it."""

    def slowed(self, factor: float) -> Speed:
        """All seconds multiplied by ``factor``."""
        return Speed(*(c.scaled(factor) for c in (self.encode, self.decode, self.piece)))


@dataclass(frozen=True)
class Codec:
    """The costs of a compressor: bytes on the wire, and seconds on each device."""

    params: Mapping[str, Any]
    """As for `grace.grace_from_params`: the compressor and its parameters."""
    wire: Curve
    """Bytes of a payload, by number of elements."""
    speeds: Mapping[Device, Speed]
    source: str = "given"

    @property
    def devices(self) -> tuple[Device, ...]:
        """Devices with known costs, the one that computes gradients first."""
        return tuple(device for device in DEVICES if device in self.speeds)

    def encode(self, size: float, device: Device = "gpu") -> float:
        """Seconds to compress ``size`` elements."""
        return self.speeds[device].encode(size)

    def decode(self, size: float, pieces: int = 1, device: Device = "gpu") -> float:
        """Seconds to decode ``pieces`` payloads of ``size`` elements into one dense sum."""
        speed = self.speeds[device]
        return speed.decode(size) + (pieces - 1) * speed.piece(size)

    def slowed(self, factor: float) -> Codec:
        """The same bytes with all seconds multiplied by ``factor``, on every device."""
        speeds = {device: speed.slowed(factor) for device, speed in self.speeds.items()}
        return replace(self, speeds=speeds)

    def offloaded(self, device: float = 1.0, pool: float = 1.0) -> Codec:
        """Both devices' costs from a codec measured on a host, with a factor on the seconds of each."""
        host = self.speeds["gpu"]
        return replace(self, speeds={"gpu": host.slowed(device), "cpu": host.slowed(pool)})

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `codec` is the inverse."""

        def pairs(curve: Curve) -> list[list[float]]:
            return [list(pair) for pair in zip(curve.sizes, curve.values, strict=True)]

        speeds = {
            device: {"encode": pairs(speed.encode), "decode": pairs(speed.decode), "piece": pairs(speed.piece)}
            for device, speed in self.speeds.items()
        }
        return {"params": dict(self.params), "wire": pairs(self.wire), "speeds": speeds, "source": self.source}


def codec(data: Any) -> Codec:
    """A `Codec` from JSON data, as `Codec.to_dict` writes it. ValueError explains what is wrong."""
    if not isinstance(data, Mapping) or not {"params", "wire", "speeds"} <= set(data):
        raise ValueError(
            'compression costs are {"params": {...}, "wire": [[elements, bytes], ...], "speeds": {...}}' + but(data)
        )
    if not isinstance(data["params"], Mapping) or "compressor" not in data["params"]:
        raise ValueError('params of compression costs name a "compressor"')
    name = data["params"]["compressor"]

    def curve(pairs: Any, what: str) -> Curve:
        if (
            not isinstance(pairs, Sequence)
            or not pairs
            or not all(isinstance(p, Sequence) and len(p) == 2 for p in pairs)
        ):
            raise ValueError(f"{what} of {name!r} is [[elements, value], ...], not {pairs!r}")
        rows = [(checked(size, f"elements in {what}"), checked(value, what)) for size, value in pairs]
        sizes, values = zip(*rows, strict=True)
        if list(sizes) != sorted(set(sizes)) or sizes[0] <= 0:
            raise ValueError(f"the numbers of elements in {what} of {name!r} must rise from above 0")
        return Curve(sizes, values)

    speeds = {}
    for device, each in data["speeds"].items() if isinstance(data["speeds"], Mapping) else ():
        if device not in DEVICES or not isinstance(each, Mapping) or set(each) != {"encode", "decode", "piece"}:
            raise ValueError(f'speeds of {name!r} are {{"gpu" or "cpu": {{"encode", "decode", "piece"}}}}')
        speeds[device] = Speed(*(curve(each[what], what) for what in ("encode", "decode", "piece")))
    if not speeds:
        raise ValueError(f"speeds of {name!r} are empty: give those of at least one device")
    return Codec(dict(data["params"]), curve(data["wire"], "wire"), speeds, str(data.get("source", "given")))


class Term(NamedTuple):
    """One operation of a strategy, for any tensor size; a collective on the device is the thread's part of it."""

    resource: int
    action: Action
    share: float
    """Share of the tensor that a worker holds."""
    pieces: int
    """Number of payloads."""
    sharing: int
    """Number of workers that share a machine's link."""

    @property
    def label(self) -> str:
        """Label for timelines."""
        return f"hand over {self.action}" if self.action.collective and self.resource == DEVICE else str(self.action)

    def seconds(
        self,
        cluster: Cluster,
        codec: Codec | None,
        sizes: Sequence[float],
        joined: bool = False,
        messages: int = 1,
    ) -> float:
        """Time of it for tensors of these sizes, whose payloads travel as one message.

        ``joined``: as in `Cluster.seconds`. ``codec``: None for strategies without compression. ``messages``: number of
        messages among which the payloads are divided equally.
        """
        action, device = self.action, self.action.device or "gpu"
        if codec is not None and action.kind == "compress":
            return sum(codec.encode(self.share * size, device) for size in sizes)
        if codec is not None and action.kind == "decompress":
            return sum(codec.decode(self.share * size, self.pieces, device) for size in sizes)
        if codec is not None and action.compressed:
            held = sum(self.pieces * codec.wire(self.share * size) for size in sizes) / messages
        else:
            held = sum(4.0 * self.share * size for size in sizes)
        if self.resource == DEVICE:
            return cluster.handling(held, joined)
        return cluster.seconds(action, held, self.sharing, joined)


def terms(cluster: Cluster, option: Option) -> Iterator[Term]:
    """The operations of a strategy on a cluster, in order."""
    share, pieces, shared = 1.0, 1, 1
    for action, held in zip(option.actions, states(option), strict=False):
        if not action.collective:
            yield Term(DEVICE if action.device == "gpu" else CPU, action, share, pieces, 1)
            pieces = 1
            continue
        count = cluster.size(action.level)
        within = not cluster.between(action.level)
        sharing = shared if action.level == "inter" else 1
        if action.level == "flat" and action.kind == "alltoall" and not within:
            sharing = cluster.per_node  # a ring crosses a machine's link once, an all-to-all once per worker
        if any(cluster.message):
            yield Term(DEVICE, action, share, pieces, 1)
        yield Term(INTRA if within else INTER, action, share, pieces, sharing)
        if action.level == "intra":
            shared = cluster.per_node if action.kind in ("reduce_scatter", "alltoall") else 1
        place = held.at(action.level)
        if action.kind in ("reduce_scatter", "alltoall"):
            share /= count
        elif place == "shard":
            share *= count
        if action.compressed and place == "own" and action.kind != "allreduce":
            pieces *= count


class Costs:
    """Strategies for tensors of any size, as chains of operations on one cluster with one compressor.

    ``devices``: allowed devices for compressions; default: those with known costs. ``max_compressions``: per tensor.
    ``min_numel``: smaller tensors have no choice: they join other tensors' dense messages.
    ``rooted``: False if nothing may go to a single root (see `grace.core.Transport`).
    """

    def __init__(
        self,
        cluster: Cluster,
        codec: Codec,
        devices: Iterable[Device] | None = None,
        max_compressions: int | None = None,
        min_numel: int = MIN_NUMEL,
        rooted: bool = True,
    ):
        self.cluster, self.codec, self.max_compressions, self.min_numel = cluster, codec, max_compressions, min_numel
        self.rooted = rooted
        self.devices: tuple[Device, ...] = codec.devices if devices is None else tuple(devices)
        if not self.devices or not set(self.devices) <= set(codec.devices):
            raise ValueError(f"devices={self.devices}: the compressor's costs are known for {', '.join(codec.devices)}")
        self._terms: dict[Term, int] = {}
        self._walked: dict[Option, tuple[tuple[int, int], ...]] = {}
        self._seconds: dict[float, dict[int, float]] = {}
        self._found: dict[tuple[float, bool], list[tuple[Option, Chain]]] = {}

    @cached_property
    def dense(self) -> tuple[Option, ...]:
        """The plain strategies: an allreduce among all workers, and, on several machines, one of two levels."""
        return tuple(map(parse, (DENSE_FLAT, DENSE_HIERARCHICAL)[: 1 + self.cluster.levels]))

    @cached_property
    def _tree(self) -> list[Option]:
        # Strategies with which communicator "planned" can carry this method, all compressions on the first device.
        method, _ = triple(self.codec.params)
        summed = summable(method.compressor)
        every = options(not self.cluster.levels, self.devices[:1], self.max_compressions, summed)
        return [option for option in every if (self.rooted or not option.rooted) and carries(option, method)]

    def chain(self, option: Option, size: float) -> Chain:
        """The operations of a strategy for a tensor of this size; `labels` returns their names."""
        return tuple((resource, self._of(number, size)) for resource, number in self._numbered(option))

    def labels(self, option: Option) -> list[str]:
        """The label of each operation in a strategy's chain."""
        return [term.label for term in terms(self.cluster, option)]

    def _numbered(self, option: Option) -> tuple[tuple[int, int], ...]:
        # Resource and term number of each action: the same action on the same share is one term in all strategies.
        found = self._walked.get(option)
        if found is None:
            known = self._terms
            found = tuple((t.resource, known.setdefault(t, len(known))) for t in terms(self.cluster, option))
            self._walked[option] = found
            self._known = list(known)
        return found

    def _of(self, number: int, size: float) -> float:
        known = self._seconds.setdefault(size, {})
        found = known.get(number)
        if found is None:
            joined = size < self.min_numel
            found = known[number] = self._known[number].seconds(self.cluster, self.codec, (size,), joined)
        return found

    def candidates(self, size: float, offload: bool = True) -> list[tuple[Option, Chain]]:
        """Strategies worth considering for a tensor of this size, plain allreduce first.

        Dominated strategies are dropped: those that take at least as long as another one on every resource, in no fewer
        actions. Of the rest, the `KEPT` with the smallest total time stay. ``offload``: include compressions on the CPU
        pool; False: use the first device only.
        """
        key = (size, offload)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._candidates(size, offload)
        return found

    def _candidates(self, size: float, offload: bool) -> list[tuple[Option, Chain]]:
        if size < self.min_numel:
            return [(self.dense[0], self.chain(self.dense[0], size))]
        kept = self._pruned(self._tree, size)
        if offload and len(self.devices) > 1:
            moved = [o.on(devices) for o in kept for devices in _placements(self.devices, len(o.devices))]
            kept = self._pruned(moved, size)
        return [(option, self.chain(option, size)) for option in kept]

    def _pruned(self, every: Iterable[Option], size: float) -> list[Option]:
        rows = []
        for option in every:
            loads = [0.0] * 4
            for resource, number in self._numbered(option):
                loads[resource] += self._of(number, size)
            rows.append((sum(loads), *loads, len(option.actions), option))
        rows.sort(key=itemgetter(0))
        front: list[tuple[Any, ...]] = []
        for row in rows:
            _, device, cpu, intra, inter, length, _ = row
            for _, device2, cpu2, intra2, inter2, length2, _ in front:
                if device2 <= device and inter2 <= inter and intra2 <= intra and cpu2 <= cpu and length2 <= length:
                    break
            else:
                front.append(row)
        plain = self.dense
        return [*plain, *(row[-1] for row in front if row[-1] not in plain)][: max(KEPT, len(plain))]


def _placements(devices: Sequence[Device], count: int) -> Iterable[tuple[Device, ...]]:
    if count == 0:
        yield ()
        return
    for rest in _placements(devices, count - 1):
        for device in devices:
            yield (*rest, device)
