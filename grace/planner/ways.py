"""Ways of a whole model to its means: one communicator for all tensors that a method compresses.

A step is played as GRACE carries it out: tensors in buckets, each bucket compressed when its gradients are there, its
message under way while the backward pass goes on, and decoded at the end. Dense gradients travel the same way without
compression. `grace.planner.advise` compares all ways, and no plan of `grace.planner.plan` is slower than one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

from grace.communicators.auto import choose
from grace.communicators.planned.strategy import DENSE_FLAT, DENSE_HIERARCHICAL, Option, parse
from grace.core import Combine, name_of
from grace.core.method import Method
from grace.core.registry import communicators, triple
from grace.engine.buckets import grouped
from grace.planner.costs import MIN_NUMEL, Cluster, Codec, Term, terms
from grace.planner.profile import Profile, TensorProfile
from grace.planner.timeline import Chain, Span, Timeline

BUCKET_MB = 25.0
PLAN = "plan"
"""The name of no way: each tensor has a strategy of its own."""
_PAYLOADS = {
    "allreduce": "compress(gpu) allreduce*({0}) decompress(gpu)",
    "allgather": "compress(gpu) allgather*({0}) decompress(gpu)",
    "twostage": "compress(gpu) alltoall*({0}) decompress(gpu) compress(gpu) allgather*({0}) decompress(gpu)",
}


@dataclass(frozen=True)
class Way:
    """A communicator, and the strategy that it is for each tensor that the method compresses."""

    name: str
    option: Option
    params: Mapping[str, str]
    """As for `grace.grace_from_params`."""


def _hierarchical(outer: str, option: str) -> Way:
    return Way(f"hierarchical, outer {outer}", parse(option), {"communicator": "hierarchical", "outer": outer})


FLAT = {name: Way(name, parse(text.format("flat")), {"communicator": name}) for name, text in _PAYLOADS.items()}
HIERARCHICAL = {
    name: _hierarchical(name, f"reduce_scatter(intra) {text.format('inter')} allgather(intra)")
    for name, text in _PAYLOADS.items()
}
DENSE = Way("dense", parse(DENSE_FLAT), {})
DENSE_LEVELS = Way("dense, hierarchical", parse(DENSE_HIERARCHICAL), {"communicator": "hierarchical"})
WAYS = {way.name: way for way in (DENSE, DENSE_LEVELS, *FLAT.values(), *HIERARCHICAL.values())}
NAMES = (PLAN, *WAYS)


def usual(method: Method, cluster: Cluster) -> Way:
    """What a method does on a cluster with nothing but its name."""
    chosen, _ = choose(method, cluster.workers, cluster.per_node if cluster.levels else 1)
    if name_of(chosen) == "hierarchical":
        return HIERARCHICAL[name_of(choose(method, cluster.nodes, 1)[0])]
    return FLAT[name_of(chosen)]


def dense(cluster: Cluster) -> list[Way]:
    """Ways without compression; a plain allreduce first."""
    return [DENSE, DENSE_LEVELS][: 1 + cluster.levels]


def every(params: Mapping[str, Any], cluster: Cluster) -> list[Way]:
    """The ways that carry a method; of these the one that ``params`` may name.

    ``params``: as for `grace.grace_from_params`: a compressor, perhaps a memory and a communicator. ValueError where
    none of them carries it.
    """
    method, named = triple(params)
    found = [way for name, way in FLAT.items() if _carries(name, method, cluster.workers)]
    if cluster.levels:
        found += [way for name, way in HIERARCHICAL.items() if _carries(name, method, cluster.nodes)]
    if "communicator" in params:
        given = {**params, "communicator": name_of(named)}
        found = [way for way in found if all(given.get(key, value) == value for key, value in way.params.items())]
    if not found:
        named.check(method, cluster.workers)
        raise ValueError(
            f"steps over communicator {name_of(named)!r} are not predicted here: leave it out, or name one of "
            f"{', '.join(FLAT)}, hierarchical"
        )
    return found


def exchange(name: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of `grace.grace_from_params` for a method that goes the way of this name."""
    way = WAYS[name]
    return {**(params if way.option.compressions else {"compressor": "none"}), **way.params}


def _carries(name: str, method: Method, workers: int) -> bool:
    try:
        communicators[name]().check(method, workers)
    except ValueError:
        return False
    return True


# -- steps -----------------------------------------------------------------------------------------------------------
Bucket = list[TensorProfile]


class Play(NamedTuple):
    """A step as it is predicted."""

    timeline: Timeline
    names: tuple[str, ...]
    """Of its tensors, or buckets."""
    labels: tuple[list[str], ...]
    """What each operation of each of them is."""

    @property
    def seconds(self) -> float:
        """From the beginning of the backward pass to the last mean."""
        return self.timeline.seconds

    @property
    def codec_seconds(self) -> float:
        """Compressing and decoding, hidden or not."""
        chains = zip(self.timeline.chains, self.labels, strict=True)
        pairs = (
            (label, seconds) for chain, labels in chains for label, (_, seconds) in zip(labels, chain, strict=True)
        )
        return sum(seconds for label, seconds in pairs if label.startswith(("compress", "decompress")))

    def spans(self) -> list[Span]:
        """Everything that happens, in the order in which it is taken up."""
        return self.timeline.spans()


def buckets(profile: Profile, bucket_mb: float = BUCKET_MB, min_numel: int = MIN_NUMEL) -> list[Bucket]:
    """The tensors as GRACE lays them into buckets."""
    return grouped(profile.tensors, bucket_mb, min_numel)


def play(
    profile: Profile,
    cluster: Cluster,
    codec: Codec | None,
    way: Way,
    bucket_mb: float = BUCKET_MB,
    min_numel: int = MIN_NUMEL,
    shrink: float = 1.0,
    deferred: bool = True,
) -> Play:
    """A step with a method that goes a way. ``codec``: its costs; None: where the way is a dense one.

    ``min_numel``: smaller tensors go dense. ``shrink``: dense bytes are divided by it, for nothing. ``deferred``: as of
    `Timeline`.
    """
    laid = buckets(profile, bucket_mb, min_numel)
    ends = dict(zip(profile.tensors, accumulate(tensor.backward for tensor in profile.tensors), strict=True))
    ready = [max(ends[tensor] for tensor in bucket) for bucket in laid]  # of a backward pass, when it is complete
    backward = [end - begin for begin, end in pairwise([0.0, *ready])]
    alone = 0 if way is DENSE else min_numel  # larger tensors go this way, the others by a plain allreduce
    chains: list[Chain] = []
    labels = []
    for bucket in laid:
        large = [tensor.size / shrink for tensor in bucket if tensor.size >= alone]
        small = [tensor.size / shrink for tensor in bucket if tensor.size < alone]
        done = _operations(cluster, codec, way, large, small)
        chains.append(tuple((term.resource, seconds) for term, seconds in done))
        labels.append([term.label for term, _ in done])
    names = tuple(f"bucket {number}" for number in range(len(laid)))
    return Play(Timeline(backward, chains, deferred=deferred), names, tuple(labels))


def _operations(
    cluster: Cluster, codec: Codec | None, way: Way, large: Sequence[float], small: Sequence[float]
) -> list[tuple[Term, float]]:
    # Of a bucket with tensors of so many elements. Small ones have a dense message before the others' first one.
    found: list[tuple[Term, float]] = []
    # The thread's part of a message goes with the message.
    for action, group in groupby(terms(cluster, way.option) if large else (), key=lambda term: term.action):
        times = rounds_of(codec) if codec is not None and action.compressed else 1
        found += [(term, term.seconds(cluster, codec, large, messages=times)) for term in group] * times
    first = next((number for number, (term, _) in enumerate(found) if term.action.collective), 0)
    dense = [(term, term.seconds(cluster, None, small)) for term in terms(cluster, DENSE.option) if small]
    return [*found[:first], *dense, *found[first:]]


def rounds_of(codec: Codec) -> int:
    """Messages of each bucket, one after the other: methods that agree on a payload ask for its factors in turn."""
    return 2 if triple(codec.params)[0].compressor.traits.combine is Combine.AGREED else 1
