"""Does compression pay here, and which method? Every method against dense gradients that overlap as well as they can.

A step is played as GRACE carries it out: tensors in buckets, each bucket compressed when its gradients are there, its
message under way while the backward pass goes on, and decoded at the end. Dense gradients travel the same way without
compression; that is the rival, not a step without overlap.

Agarwal et al., "On the Utility of Gradient Compression in Distributed Training Systems", MLSys 2022: compression pays
when what it costs is less than the part of the communication that the backward pass does not hide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from grace.communicators.planned.strategy import Action, Kind
from grace.core import Combine
from grace.core.registry import triple
from grace.engine.buckets import grouped
from grace.planner.costs import MIN_NUMEL, Cluster, Codec
from grace.planner.profile import Profile, TensorProfile
from grace.planner.timeline import DEVICE, INTER, INTRA, Chain, Timeline

BUCKET_MB = 25.0
HIDDEN = 0.05
"""Communication counts as hidden when it prolongs the backward pass by no more than this share of it."""
DECADES = 4
"""A break-even bandwidth is looked for within so many powers of ten of the given one, in both directions."""
TREE: tuple[Kind, Kind] = ("reduce", "broadcast")
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
    """A method that is compared: its costs, and how its payloads travel."""

    label: str
    codec: Codec
    summed: bool
    """Its payloads are summed on the wire (allreduce); else everybody gets everybody's (allgather)."""
    rounds: int = 1
    """Messages for each bucket, one after the other; the bytes are divided among them."""


@dataclass(frozen=True)
class Verdict:
    """What is predicted of one method."""

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

    @property
    def pays(self) -> bool:
        """Faster than dense, by more than rounding."""
        return self.speedup > 1 + 1e-9


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

    @property
    def best(self) -> str:
        """The label of what to use; "dense" if nothing is faster."""
        return self.verdicts[0].label if self.verdicts and self.verdicts[0].pays else "dense"

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
    # A method that agrees on its payload asks for its factors one after the other.
    rounds = 2 if compressor.traits.combine is Combine.AGREED else 1
    return Candidate(label, codec, compressor.traits.combine is not Combine.GATHER, rounds)


# -- steps -----------------------------------------------------------------------------------------------------------
Bucket = list[TensorProfile]


def buckets(profile: Profile, bucket_mb: float = BUCKET_MB) -> list[Bucket]:
    """The tensors as GRACE lays them into buckets."""
    return grouped(profile.tensors, bucket_mb, MIN_NUMEL)


def step(
    profile: Profile,
    cluster: Cluster,
    method: Candidate | None = None,
    bucket_mb: float = BUCKET_MB,
    shrink: float = 1.0,
) -> float:
    """Seconds of a step with a method, None: dense. ``shrink``: dense bytes are divided by it, for nothing."""
    laid = buckets(profile, bucket_mb)
    ends = dict(zip(profile.tensors, accumulate(tensor.backward for tensor in profile.tensors), strict=True))
    ready = [max(ends[tensor] for tensor in bucket) for bucket in laid]  # of a backward pass, when it is complete
    backward = [end - begin for begin, end in pairwise([0.0, *ready])]
    chains = [_chain(bucket, cluster, method, shrink) for bucket in laid]
    return profile.forward + Timeline(backward, chains, deferred=True).seconds


def _chain(bucket: Bucket, cluster: Cluster, method: Candidate | None, shrink: float) -> Chain:
    resource = INTER if cluster.between("flat") else INTRA

    def send(kind: Kind, held: float) -> Chain:
        seconds = cluster.seconds(Action(kind), held)
        if kind == "allreduce":  # libraries go up and down a tree where a ring would take longer
            seconds = min(seconds, sum(cluster.seconds(Action(half), held) for half in TREE))
        handled = cluster.handling(held)
        return ((DEVICE, handled), (resource, seconds)) if handled else ((resource, seconds),)

    large = [tensor for tensor in bucket if tensor.size >= MIN_NUMEL] if method else []
    dense = 4.0 * sum(tensor.size for tensor in bucket if method is None or tensor.size < MIN_NUMEL) / shrink
    if method is None or not large:
        return send("allreduce", dense)
    codec, count = method.codec, 1 if method.summed else cluster.workers
    wire = sum(codec.wire(tensor.size) for tensor in large)
    encode = sum(codec.encode(tensor.size) for tensor in large)
    decode = sum(codec.decode(tensor.size, count) for tensor in large)
    kind: Kind = "allreduce" if method.summed else "allgather"
    beside = send("allreduce", dense) if dense else ()
    return ((DEVICE, encode), *beside, *send(kind, wire / method.rounds) * method.rounds, (DEVICE, decode))


# -- the comparison --------------------------------------------------------------------------------------------------
def advise(profile: Profile, cluster: Cluster, methods: Iterable[Candidate], bucket_mb: float = BUCKET_MB) -> Advice:
    """Compare methods with dense gradients on a cluster.

    ``bucket_mb``: size of GRACE's buckets. Nothing is run: the costs of links and compressors are what was given or
    measured, and the result is as good as they are.
    """
    dense = step(profile, cluster, None, bucket_mb)
    verdicts = [_verdict(profile, cluster, method, bucket_mb, dense) for method in methods]
    verdicts.sort(key=lambda verdict: verdict.seconds)
    limit = _limit(lambda p, c, m: step(p, c, m, bucket_mb), profile, cluster, None)
    needed = _needed(profile, cluster, bucket_mb)
    simulated = cluster.source != "measured"
    return Advice(dense, profile.backward, limit, needed, tuple(verdicts), profile.source, simulated)


def _verdict(profile: Profile, cluster: Cluster, method: Candidate, bucket_mb: float, dense: float) -> Verdict:
    seconds = step(profile, cluster, method, bucket_mb)
    large = [tensor for tensor in profile.tensors if tensor.size >= MIN_NUMEL]
    count = 1 if method.summed else cluster.workers
    codec = method.codec
    small = 4.0 * (profile.size - sum(tensor.size for tensor in large))
    sent = small + sum(codec.wire(tensor.size) for tensor in large)
    spent = sum(codec.encode(tensor.size) + codec.decode(tensor.size, count) for tensor in large)
    limit = _limit(lambda p, c, m: step(p, c, m, bucket_mb), profile, cluster, method)
    break_even = _break_even(profile, cluster, method, bucket_mb)
    return Verdict(method.label, seconds, dense / seconds, 4.0 * profile.size / sent, spent, break_even, limit)


def faster(cluster: Cluster, factor: float) -> Cluster:
    """The same cluster with so many times the bandwidth between machines (of one machine: within it)."""
    flat = cluster.flat and cluster.flat.scaled(bandwidth=factor)
    if cluster.nodes == 1:
        return replace(cluster, intra=cluster.intra.scaled(bandwidth=factor), flat=flat)
    return replace(cluster, inter=cluster.inter.scaled(bandwidth=factor), flat=flat)


def _break_even(profile: Profile, cluster: Cluster, method: Candidate, bucket_mb: float) -> float | None:
    # The least bandwidth above which dense is never slower. Gains shrink as bandwidth grows, so a bisection finds it.
    def gain(exponent: float) -> bool:
        there = faster(cluster, 10**exponent)
        dense = step(profile, there, None, bucket_mb)
        return step(profile, there, method, bucket_mb) < dense * (1 - 1e-9)

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


Step = Callable[[Profile, Cluster, Candidate | None], float]


def _limit(step_: Step, profile: Profile, cluster: Cluster, method: Candidate | None) -> str:
    # Each term is taken to cost nothing, in turn; that which then saves most limits the step.
    now = step_(profile, cluster, method)
    no_latency = replace(
        cluster,
        inter=cluster.inter.scaled(latency=0.0),
        intra=cluster.intra.scaled(latency=0.0),
        flat=cluster.flat and cluster.flat.scaled(latency=0.0),
        message=cluster.message._replace(latency=0.0),
    )
    idle = replace(profile, tensors=tuple(replace(t, backward=0.0) for t in profile.tensors), forward=0.0)
    without = {
        "bytes": step_(profile, faster(cluster, math.inf), method),
        "latency": step_(profile, no_latency, method),
        "compression": now
        if method is None
        else step_(profile, cluster, replace(method, codec=method.codec.slowed(0.0))),
        "computation": step_(idle, cluster, method),
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
    """Speed-ups of each method where links are so many times as fast."""
    return _curves(profile, [faster(cluster, factor) for factor in factors], methods, bucket_mb)


def against_nodes(
    profile: Profile, cluster: Cluster, methods: Sequence[Candidate], nodes: Sequence[int], bucket_mb: float = BUCKET_MB
) -> Mapping[str, list[float]]:
    """Speed-ups of each method on so many machines of this kind."""
    return _curves(profile, [replace(cluster, nodes=count, flat=None) for count in nodes], methods, bucket_mb)


def _curves(
    profile: Profile, clusters: Sequence[Cluster], methods: Sequence[Candidate], bucket_mb: float
) -> Mapping[str, list[float]]:
    dense = [step(profile, there, None, bucket_mb) for there in clusters]
    return {
        method.label: [d / step(profile, c, method, bucket_mb) for d, c in zip(dense, clusters, strict=True)]
        for method in methods
    }
