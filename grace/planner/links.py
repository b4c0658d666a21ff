"""The cost of collectives: links, and clusters of them.

A collective among w workers that each hold V bytes takes A(w) a + B(w) V b, with the latency a in seconds and the
seconds per byte b of its level, and A and B from `COEFFICIENTS` (Thakur et al., 2005). a and b come from the link's
bandwidth and latency, or are fitted to measurements of each collective. The workers of a machine share its link to
other machines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, NamedTuple

from grace.communicators.planned.strategy import (
    Action,
    Kind,
    Level,
)
from grace.planner.profile import but
from grace.planner.profile import seconds as checked


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
"""By collective: another collective, whose measured rate is used if this one was not measured."""


class Rate(NamedTuple):
    """Seconds of latency, and seconds per byte."""

    latency: float
    per_byte: float


NOTHING = Rate(0.0, 0.0)


@dataclass(frozen=True)
class Link:
    """The connection between the workers of a level: "flat", "intra" or "inter"."""

    latency: float
    """Seconds."""
    bandwidth: float
    """Bytes per second; infinity: no cost."""
    fits: Mapping[Kind, Rate] = field(default_factory=dict)
    """Measured rates of single collectives, which take precedence over latency and bandwidth."""

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
    """The link between one machine and the others; all workers of the machine share it."""
    intra: Link = INTRA_LINK
    """The link between the workers of one machine. Default: 5 us and 100 GB/s, roughly NVLink."""
    source: str = "given"
    flat: Link | None = None
    """The link for collectives among all workers; None: ``inter`` if there are several machines, else ``intra``."""
    message: Rate = NOTHING
    """Time of a collective on the computing thread, which submits it and takes its result."""
    element: float = 4.0
    """Bytes of an element of dense messages: 4, or 2 if gradients have 16 bits."""

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

        ``per_node``: workers per machine; 0: unchanged if it divides ``workers``, else each worker counts as a separate
        machine (but if there is one machine, all workers stay on it). ValueError for machines of unequal size.
        """
        size = per_node or (self.per_node if workers % self.per_node == 0 else workers if self.nodes == 1 else 1)
        if workers % size:
            raise ValueError(f"node_size={size} does not divide {workers} workers")
        if (workers // size, size) == (self.nodes, self.per_node):
            return self
        source = f"{self.source} among {self.workers} workers, scaled to {workers}"
        # ``flat`` was measured over another kind of link
        flat = self.flat if (workers > size) == (self.nodes > 1) else None
        return replace(self, nodes=workers // size, per_node=size, flat=flat, source=source)

    def seconds(self, action: Action, held: float, sharing: int = 1, joined: bool = False, workers: int = 0) -> float:
        """Seconds of a collective. ``held``: bytes per worker; ``sharing``: workers that share a machine's link.

        ``joined``: the collective travels with another message, and adds no latency of its own. ``workers``: those that
        take part; 0: all of the level. An allreduce without a measurement takes the time of a ring or a tree, whichever
        is faster.
        """
        link = self.link(action.level)
        if action.kind == "allreduce" and "allreduce" not in link.fits:
            tree = sum(self._seconds(half, action.level, held, sharing, joined) for half in TREE)
            return min(self._seconds("allreduce", action.level, held, sharing, joined), tree)
        return self._seconds(action.kind, action.level, held, sharing, joined, workers)

    def _seconds(self, kind: Kind, level: Level, held: float, sharing: int, joined: bool, workers: int = 0) -> float:
        latencies, bytes_ = COEFFICIENTS[kind](workers or self.size(level))
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
        if self.element != 4:
            parts["element"] = self.element
        return {"nodes": self.nodes, "workers_per_node": self.per_node, **parts, "source": self.source}


def cluster(data: Any) -> Cluster:
    """A `Cluster` from JSON data: {"nodes", "workers_per_node", "inter": link, "intra": link}; else ValueError."""
    if not isinstance(data, Mapping) or "inter" not in data:
        raise ValueError(
            'a cluster is {"nodes": 4, "workers_per_node": 8, "inter": {"gbit_per_s": 10}, "intra": ...}' + but(data)
        )
    if unknown := set(data) - {"nodes", "workers_per_node", "inter", "intra", "flat", "message", "element", "source"}:
        raise ValueError(f"a cluster has no {sorted(unknown)[0]!r}")
    counts = [data.get(key, 1) for key in ("nodes", "workers_per_node")]
    if not all(type(count) is int and count >= 1 for count in counts):
        raise ValueError(f"nodes and workers_per_node are whole numbers of at least 1, not {counts}")
    nodes, per_node = counts
    intra = link(data["intra"], "intra") if "intra" in data else INTRA_LINK
    flat = link(data["flat"], "flat") if "flat" in data else None
    message = _rate(data.get("message", (0.0, 0.0)), "message")
    element = data.get("element", 4)
    if element not in (2, 4):
        raise ValueError(f"element, the bytes of an element of dense messages, is 2 or 4, not {element!r}")
    source = str(data.get("source", "given"))
    return Cluster(nodes, per_node, link(data["inter"], "inter"), intra, source, flat, message, float(element))


def fitted(kind: Kind, workers: int, measured: Iterable[tuple[float, float]]) -> Rate:
    """Latency and seconds per byte, both non-negative, from measured pairs (bytes held, seconds).

    Chooses the line with the smallest sum of relative errors, among the lines through two pairs and lines of the same
    slopes. Errors are relative, since sizes span decades; they are summed without squares, so that an outlier (a burst
    that a link passes at once, a disturbance) does not bend the line.
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
