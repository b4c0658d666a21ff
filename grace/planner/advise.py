"""Compares methods with dense gradients at the best overlap: which method pays off on a cluster, if any?

Each method is simulated in all `grace.planner.ways`, and with its own plan. The baseline is a plain allreduce of dense
gradients in buckets, with overlap.

Agarwal et al., "On the Utility of Gradient Compression in Distributed Training Systems", MLSys 2022: compression pays
off if it costs less than the part of the communication that the backward pass does not hide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from grace.core import Combine
from grace.core.registry import triple
from grace.planner import measured, ways
from grace.planner import plan as planner
from grace.planner.costs import MIN_NUMEL, Cluster, Codec, Costs
from grace.planner.profile import Profile
from grace.planner.search import GAIN
from grace.planner.ways import BUCKET_MB, Way, buckets

__all__ = [
    "BUCKET_MB",
    "MIN_NUMEL",
    "TERMS",
    "Advice",
    "Candidate",
    "Verdict",
    "advise",
    "against_bandwidth",
    "against_nodes",
    "break_even",
    "buckets",
    "candidate",
    "step",
]

HIDDEN = 0.05
"""Communication counts as hidden if it prolongs the backward pass by at most this share."""
DECADES = 4
"""Search range of the break-even bandwidth: this many powers of ten around the given one, in both directions."""
TERMS = ("bytes", "latency", "compression", "computation")
"""The parts of a step's cost, one of which limits it most."""


@dataclass(frozen=True)
class Candidate:
    """A method to compare: its costs, and its default exchange."""

    label: str
    codec: Codec
    summed: bool
    """Whether payloads are summed on the wire (allreduce) instead of gathered (allgather)."""
    rounds: int = 1
    """Number of successive messages per bucket, which share the bytes."""


@dataclass(frozen=True)
class Verdict:
    """The prediction for one method, in its fastest way."""

    label: str
    seconds: float
    """Seconds per step."""
    speedup: float
    """Dense seconds over ``seconds``. Below 1 the method is slower."""
    ratio: float
    """Dense bytes over this method's bytes, as sent by one worker."""
    codec_seconds: float
    """Seconds of encoding and decoding per step, hidden or not."""
    break_even: float | None
    """Bandwidth, in bytes per second, up to which the method beats dense gradients; infinity if it does for all
    bandwidths of the search range, None if for none.
    """
    limit: str
    """The term whose removal would help most: one of `TERMS`."""
    way: str = ""
    """The fastest way, a name of `ways.NAMES`, to which all other fields refer."""
    ways: Mapping[str, float] = field(default_factory=dict)
    """Seconds per step by way, fastest first."""
    exchange: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `grace.grace_from_params` for this way; `grace plan -o plan.json` writes a plan."""
    quality: measured.Quality | None = None
    """The method's results in stored trainings; None if none is stored."""

    @property
    def kept(self) -> bool:
        """Whether the method kept the quality of dense gradients in the trainings of all tasks."""
        return self.quality is not None and self.quality.everywhere

    @property
    def pays(self) -> bool:
        """Whether the method is faster than dense gradients, by more than rounding."""
        return self.speedup > 1 + GAIN


@dataclass(frozen=True)
class Advice:
    """The comparison of all methods with dense gradients."""

    dense: float
    """Seconds per step without compression."""
    backward: float
    """Seconds of the backward pass."""
    dense_limit: str
    """The term whose removal would help most without compression: one of `TERMS`."""
    needed: float | None
    """The smallest factor by which compression without cost must divide the bytes to hide the communication; 1 if it is
    hidden anyway; None if latency alone prevents that."""
    verdicts: tuple[Verdict, ...]
    """Fastest first."""
    profile: str
    """Source of the backward times."""
    simulated: bool
    """Whether the cluster was given or scaled, not measured."""
    dense_ways: Mapping[str, float] = field(default_factory=dict)
    """Seconds per step without compression by way, fastest first; "plan": strategies by tensor."""

    @property
    def fastest_dense(self) -> str:
        """The fastest of `dense_ways`; a plain allreduce unless another is faster by more than rounding."""
        name = min(self.dense_ways, key=self.dense_ways.__getitem__, default=ways.DENSE.name)
        return name if self.dense_ways.get(name, self.dense) < self.dense * (1 - GAIN) else ways.DENSE.name

    @property
    def chosen(self) -> Verdict | None:
        """The fastest method that kept the quality of dense gradients in all tasks; None if it does not beat the
        fastest way without compression.
        """
        return self._paying(verdict for verdict in self.verdicts if verdict.kept)

    @property
    def best(self) -> str:
        """The label of the `chosen` method, or "dense"."""
        return "dense" if self.chosen is None else self.chosen.label

    @property
    def fastest(self) -> str:
        """The label of the fastest method, whatever its quality; "dense" if none beats the fastest way without
        compression.
        """
        first = self._paying(iter(self.verdicts))
        return "dense" if first is None else first.label

    def _paying(self, verdicts: Iterator[Verdict]) -> Verdict | None:
        first = next(verdicts, None)
        least = self.dense_ways.get(self.fastest_dense, self.dense)
        return first if first and first.pays and first.seconds < least * (1 - GAIN) else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; an infinite break-even bandwidth is "any"."""
        data = asdict(self)
        for verdict in data["verdicts"]:
            if verdict["break_even"] == math.inf:
                verdict["break_even"] = "any"
        return {"best": self.best, "fastest": self.fastest, **data}


def candidate(label: str, codec: Codec) -> Candidate:
    """A method with its default exchange: payloads are summed if they are linear or agreed on, else gathered."""
    compressor = triple(codec.params)[0].compressor
    return Candidate(label, codec, compressor.traits.combine is not Combine.GATHER, ways.rounds_of(codec))


def step(
    profile: Profile,
    cluster: Cluster,
    method: Candidate | None = None,
    bucket_mb: float = BUCKET_MB,
    shrink: float = 1.0,
) -> float:
    """Seconds of a step with a method's default exchange; ``method``: None for dense gradients.

    ``shrink``: a number by which the dense bytes are divided, as by free compression.
    """
    way = ways.DENSE if method is None else ways.usual(triple(method.codec.params)[0], cluster)
    codec = None if method is None else method.codec
    return profile.forward + ways.play(profile, cluster, codec, way, bucket_mb, shrink=shrink).seconds


# -- the comparison --------------------------------------------------------------------------------------------------
Step = Callable[[Profile, Cluster, Codec | None], float]
"""A function that returns the seconds of a step, in a fixed way; a codec of None means dense gradients."""


def advise(profile: Profile, cluster: Cluster, methods: Iterable[Candidate], bucket_mb: float = BUCKET_MB) -> Advice:
    """Compare methods with dense gradients on a cluster, each in every way that supports it, and with a plan.

    ``bucket_mb``: size of GRACE's buckets. Nothing is run: the result is only as good as the given or measured costs of
    links and compressors.
    """
    plain = _uniform(ways.DENSE, bucket_mb)
    dense = plain(profile, cluster, None)
    dense_ways = {way.name: _uniform(way, bucket_mb)(profile, cluster, None) for way in ways.dense(cluster)}
    verdicts = []
    for method in methods:
        made = _planned(profile, cluster, method.codec, bucket_mb)
        # a plan without compression shows the gain of its dense strategies
        if made is not None and not made.plan.compressed:
            own = made.seconds[ways.PLAN]
            if made.plan.way == ways.PLAN:
                dense_ways[ways.PLAN] = min(own, dense_ways.get(ways.PLAN, own))
            made = None
        verdicts.append(_verdict(profile, cluster, method, bucket_mb, dense, made))
    verdicts.sort(key=lambda verdict: verdict.seconds)
    limit = _limit(plain, profile, cluster, None)
    needed = _needed(profile, cluster, bucket_mb)
    simulated = cluster.source != "measured"
    dense_ways = dict(sorted(dense_ways.items(), key=lambda pair: pair[1]))
    return Advice(dense, profile.backward, limit, needed, tuple(verdicts), profile.source, simulated, dense_ways)


def _planned(profile: Profile, cluster: Cluster, codec: Codec, bucket_mb: float) -> planner.Planned | None:
    # Returns None if no strategy supports the method, or if its communicator is fixed.
    try:
        planner.refuse(codec.params)
    except ValueError:
        return None
    return planner.make(profile, Costs(cluster, codec, ("gpu",)), bucket_mb=bucket_mb)


def _uniform(way: Way, bucket_mb: float) -> Step:
    return lambda p, c, codec: p.forward + ways.play(p, c, codec, way, bucket_mb).seconds


def _strategies(made: planner.Planned) -> Step:
    def seconds(p: Profile, c: Cluster, codec: Codec | None) -> float:
        assert codec is not None
        return planner.predict(p, Costs(c, codec, ("gpu",)), made.plan.tensors)

    return seconds


def _verdict(
    profile: Profile,
    cluster: Cluster,
    method: Candidate,
    bucket_mb: float,
    dense: float,
    made: planner.Planned | None,
) -> Verdict:
    codec = method.codec
    found = {way.name: _uniform(way, bucket_mb) for way in ways.every(codec.params, cluster)}
    if made is not None and made.plan.way == ways.PLAN:
        found[ways.PLAN] = _strategies(made)
    each = {name: step_(profile, cluster, codec) for name, step_ in found.items()}
    each = dict(sorted(each.items(), key=lambda pair: pair[1]))
    name, seconds = next(iter(each.items()))
    if name == ways.PLAN and made is not None:
        play, compressed, exchange = made.play, set(made.plan.compressed), made.plan.exchange()
    else:
        play = ways.play(profile, cluster, codec, ways.WAYS[name], bucket_mb)
        compressed = {tensor.name for tensor in profile.tensors if tensor.size >= MIN_NUMEL}
        exchange = ways.exchange(name, codec.params)
        exchange |= {} if bucket_mb == BUCKET_MB else {"bucket_mb": bucket_mb}
    sent = sum(codec.wire(t.size) if t.name in compressed else cluster.element * t.size for t in profile.tensors)
    limit = _limit(found[name], profile, cluster, codec)
    ratio = cluster.element * profile.size / sent

    def pays(there: Cluster) -> bool:
        return found[name](profile, there, codec) < step(profile, there, None, bucket_mb) * (1 - GAIN)

    turn = break_even(cluster, pays)
    quality = measured.quality(codec.params)
    return Verdict(
        method.label, seconds, dense / seconds, ratio, play.codec_seconds, turn, limit, name, each, exchange, quality
    )


def faster(cluster: Cluster, factor: float) -> Cluster:
    """The same cluster with the bandwidth between machines (on one machine: within it) multiplied by ``factor``."""
    flat = cluster.flat and cluster.flat.scaled(bandwidth=factor)
    if cluster.nodes == 1:
        return replace(cluster, intra=cluster.intra.scaled(bandwidth=factor), flat=flat)
    return replace(cluster, inter=cluster.inter.scaled(bandwidth=factor), flat=flat)


def break_even(cluster: Cluster, pays: Callable[[Cluster], bool]) -> float | None:
    """The bandwidth, in bytes per second, up to which ``pays`` returns True; infinity if it does for all bandwidths of
    the search range, None if for none. ``pays``: takes a cluster with another bandwidth; gains are assumed to shrink
    with bandwidth.
    """

    def gain(exponent: float) -> bool:
        return pays(faster(cluster, 10**exponent))

    low, high = -float(DECADES), float(DECADES)
    if gain(high):
        return math.inf
    grid = [low + i / 2 for i in range(4 * DECADES)]
    paying = [exponent for exponent in grid if gain(exponent)]
    if not paying:
        return None
    low = paying[-1]
    high = low + 0.5
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if gain(middle) else (low, middle)
    return cluster.link("flat").bandwidth * 10**low


def _needed(profile: Profile, cluster: Cluster, bucket_mb: float) -> float | None:
    limit = profile.forward + profile.backward * (1 + HIDDEN)

    def hidden(exponent: float) -> bool:
        return step(profile, cluster, None, bucket_mb, 10**exponent) <= limit

    if hidden(0.0):
        return 1.0
    low, high = 0.0, 6.0
    if not hidden(high):
        return None
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if hidden(middle) else (middle, high)
    return float(10**high)


def _limit(step_: Step, profile: Profile, cluster: Cluster, codec: Codec | None) -> str:
    # Remove the cost of each term in turn; the term with the largest saving limits the step.
    now = step_(profile, cluster, codec)
    no_latency = replace(
        cluster,
        inter=cluster.inter.scaled(latency=0.0),
        intra=cluster.intra.scaled(latency=0.0),
        flat=cluster.flat and cluster.flat.scaled(latency=0.0),
        message=cluster.message._replace(latency=0.0),
    )
    idle = replace(profile, tensors=tuple(replace(t, backward=0.0) for t in profile.tensors), forward=0.0)
    without = {
        "bytes": step_(profile, faster(cluster, math.inf), codec),
        "latency": step_(profile, no_latency, codec),
        "compression": now if codec is None else step_(profile, cluster, codec.slowed(0.0)),
        "computation": step_(idle, cluster, codec),
    }
    return max(TERMS, key=lambda term: now - without[term])


# -- curves ----------------------------------------------------------------------------------------------------------
def against_bandwidth(
    profile: Profile,
    cluster: Cluster,
    methods: Sequence[Candidate],
    factors: Sequence[float],
    bucket_mb: float = BUCKET_MB,
) -> Mapping[str, list[float]]:
    """Speed-ups of each method's default exchange, by `step`, with links faster by these factors."""
    return _curves(profile, [faster(cluster, factor) for factor in factors], methods, bucket_mb)


def against_nodes(
    profile: Profile, cluster: Cluster, methods: Sequence[Candidate], nodes: Sequence[int], bucket_mb: float = BUCKET_MB
) -> Mapping[str, list[float]]:
    """Speed-ups of each method's default exchange, by `step`, on these numbers of machines."""
    return _curves(profile, [replace(cluster, nodes=count, flat=None) for count in nodes], methods, bucket_mb)


def _curves(
    profile: Profile, clusters: Sequence[Cluster], methods: Sequence[Candidate], bucket_mb: float
) -> Mapping[str, list[float]]:
    dense = [step(profile, there, None, bucket_mb) for there in clusters]
    return {
        method.label: [d / step(profile, c, method, bucket_mb) for d, c in zip(dense, clusters, strict=True)]
        for method in methods
    }
