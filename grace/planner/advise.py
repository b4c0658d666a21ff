"""Does compression pay here, and which method? Every method against dense gradients that overlap as well as they can.

Each method is played in all `grace.planner.ways`, and with a plan of its own. Dense gradients travel the same way
without compression; that is the rival, not a step without overlap.

Agarwal et al., "On the Utility of Gradient Compression in Distributed Training Systems", MLSys 2022: compression pays
when what it costs is less than the part of the communication that the backward pass does not hide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from grace.core import Combine
from grace.core.registry import triple
from grace.planner import plan as planner
from grace.planner import ways
from grace.planner.costs import MIN_NUMEL, Cluster, Codec, Costs
from grace.planner.profile import Profile
from grace.planner.search import GAIN
from grace.planner.ways import BUCKET_MB, Way, buckets

__all__ = [
    "BUCKET_MB",
    "METHODS",
    "MIN_NUMEL",
    "TERMS",
    "Advice",
    "Candidate",
    "Verdict",
    "advise",
    "against_bandwidth",
    "against_nodes",
    "buckets",
    "candidate",
    "step",
]

HIDDEN = 0.05
"""Communication counts as hidden when it prolongs the backward pass by no more than this share of it."""
DECADES = 4
"""A break-even bandwidth is looked for within so many powers of ten of the given one, in both directions."""
TERMS = ("bytes", "latency", "compression", "computation")
METHODS = (
    "fp16",
    "topk:compress_ratio=0.01",
    "topk:compress_ratio=0.001",
    "randomk:compress_ratio=0.01",
    "efsignsgd:block_size=512",
    "blockint:bits=8",
    "qsgd",
    "powersgd:compress_rank=4",
)
"""What is compared where nothing is named."""


@dataclass(frozen=True)
class Candidate:
    """A method that is compared: its costs, and how its payloads travel by default."""

    label: str
    codec: Codec
    summed: bool
    """Its payloads are summed on the wire (allreduce); else everybody gets everybody's (allgather)."""
    rounds: int = 1
    """Messages for each bucket, one after the other; the bytes are divided among them."""


@dataclass(frozen=True)
class Verdict:
    """What is predicted of one method, in the way that is fastest for it."""

    label: str
    seconds: float
    """Of a step."""
    speedup: float
    """Dense seconds over these. Below 1 the method loses."""
    ratio: float
    """Dense bytes over this method's, as one worker sends them."""
    codec_seconds: float
    """Compressing and decoding in a step, hidden or not."""
    break_even: float | None
    """Bandwidth, in bytes per second, up to which it is faster than dense; infinity: beyond all that was looked at;
    None: it loses everywhere there."""
    limit: str
    """What would help most if it cost nothing: one of `TERMS`."""
    way: str = ""
    """The fastest one, a name of `ways.NAMES`, of which all else is said."""
    ways: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a step by the name of each way, fastest first."""
    exchange: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `grace.grace_from_params` that do it; a plan is written by `grace plan -o plan.json`."""

    @property
    def pays(self) -> bool:
        """Faster than dense, by more than rounding."""
        return self.speedup > 1 + GAIN


@dataclass(frozen=True)
class Advice:
    """The comparison of all methods with dense gradients."""

    dense: float
    """Seconds of a step without compression."""
    backward: float
    dense_limit: str
    needed: float | None
    """The least factor by which bytes must shrink, at no cost, for communication to be hidden; 1: it is already; None:
    latency alone prevents it."""
    verdicts: tuple[Verdict, ...]
    """Fastest first."""
    profile: str
    """Where the backward times come from."""
    simulated: bool
    """The cluster was given or scaled, not measured."""
    dense_ways: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a step without compression by the name of each way, fastest first; "plan": strategies by tensor."""

    @property
    def fastest_dense(self) -> str:
        """Of `dense_ways`; a plain allreduce where no other one is faster by more than rounding."""
        name = min(self.dense_ways, key=self.dense_ways.__getitem__, default=ways.DENSE.name)
        return name if self.dense_ways.get(name, self.dense) < self.dense * (1 - GAIN) else ways.DENSE.name

    @property
    def best(self) -> str:
        """The label of what to use; "dense" if nothing is faster than the fastest way without compression."""
        if not self.verdicts or not self.verdicts[0].pays:
            return "dense"
        first = self.verdicts[0]
        least = self.dense_ways.get(self.fastest_dense, self.dense)
        return first.label if first.seconds < least * (1 - GAIN) else "dense"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; an infinite break-even bandwidth is "any"."""
        data = asdict(self)
        for verdict in data["verdicts"]:
            if verdict["break_even"] == math.inf:
                verdict["break_even"] = "any"
        return {"best": self.best, **data}


def candidate(label: str, codec: Codec) -> Candidate:
    """A method as it travels by default: summed where payloads are linear or agreed on, else gathered."""
    compressor = triple(codec.params)[0].compressor
    return Candidate(label, codec, compressor.traits.combine is not Combine.GATHER, ways.rounds_of(codec))


def step(
    profile: Profile,
    cluster: Cluster,
    method: Candidate | None = None,
    bucket_mb: float = BUCKET_MB,
    shrink: float = 1.0,
) -> float:
    """Seconds of a step with a method as it comes; None: dense.

    ``shrink``: dense bytes are divided by it, for nothing.
    """
    way = ways.DENSE if method is None else ways.usual(triple(method.codec.params)[0], cluster)
    codec = None if method is None else method.codec
    return profile.forward + ways.play(profile, cluster, codec, way, bucket_mb, shrink=shrink).seconds


# -- the comparison --------------------------------------------------------------------------------------------------
Step = Callable[[Profile, Cluster, Codec | None], float]
"""Seconds of a step with a method at these costs, in a way that is settled."""


def advise(profile: Profile, cluster: Cluster, methods: Iterable[Candidate], bucket_mb: float = BUCKET_MB) -> Advice:
    """Compare methods with dense gradients on a cluster, each in every way that carries it, and with a plan.

    ``bucket_mb``: size of GRACE's buckets. Nothing is run: the costs of links and compressors are what was given or
    measured, and the result is as good as they are.
    """
    plain = _uniform(ways.DENSE, bucket_mb)
    dense = plain(profile, cluster, None)
    dense_ways = {way.name: _uniform(way, bucket_mb)(profile, cluster, None) for way in ways.dense(cluster)}
    verdicts = []
    for method in methods:
        made = _planned(profile, cluster, method.codec, bucket_mb)
        if made is not None and not made.plan.compressed:  # none of the method's: what tensors gain without it
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
    # None for a method that no strategy carries, or whose communicator is settled.
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
    sent = sum(codec.wire(t.size) if t.name in compressed else 4.0 * t.size for t in profile.tensors)
    limit = _limit(found[name], profile, cluster, codec)
    break_even = _break_even(found[name], profile, cluster, codec, bucket_mb)
    ratio = 4.0 * profile.size / sent
    return Verdict(
        method.label, seconds, dense / seconds, ratio, play.codec_seconds, break_even, limit, name, each, exchange
    )


def faster(cluster: Cluster, factor: float) -> Cluster:
    """The same cluster with so many times the bandwidth between machines (of one machine: within it)."""
    flat = cluster.flat and cluster.flat.scaled(bandwidth=factor)
    if cluster.nodes == 1:
        return replace(cluster, intra=cluster.intra.scaled(bandwidth=factor), flat=flat)
    return replace(cluster, inter=cluster.inter.scaled(bandwidth=factor), flat=flat)


def _break_even(step_: Step, profile: Profile, cluster: Cluster, codec: Codec, bucket_mb: float) -> float | None:
    # The least bandwidth above which dense is never slower. Gains shrink as bandwidth grows, so a bisection finds it.
    def gain(exponent: float) -> bool:
        there = faster(cluster, 10**exponent)
        dense = step(profile, there, None, bucket_mb)
        return step_(profile, there, codec) < dense * (1 - GAIN)

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
    # Each term is taken to cost nothing, in turn; that which then saves most limits the step.
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
    """Speed-ups of each method as it comes, by `step`, where links are so many times as fast."""
    return _curves(profile, [faster(cluster, factor) for factor in factors], methods, bucket_mb)


def against_nodes(
    profile: Profile, cluster: Cluster, methods: Sequence[Candidate], nodes: Sequence[int], bucket_mb: float = BUCKET_MB
) -> Mapping[str, list[float]]:
    """Speed-ups of each method as it comes, by `step`, on so many machines of this kind."""
    return _curves(profile, [replace(cluster, nodes=count, flat=None) for count in nodes], methods, bucket_mb)


def _curves(
    profile: Profile, clusters: Sequence[Cluster], methods: Sequence[Candidate], bucket_mb: float
) -> Mapping[str, list[float]]:
    dense = [step(profile, there, None, bucket_mb) for there in clusters]
    return {
        method.label: [d / step(profile, c, method, bucket_mb) for d, c in zip(dense, clusters, strict=True)]
        for method in methods
    }
