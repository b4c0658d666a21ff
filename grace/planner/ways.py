"""Ways: exchanges of a whole model, with one communicator for all tensors that a method compresses.

A step is simulated as GRACE runs it: tensors in buckets, each bucket compressed once its gradients are ready, its
message overlapping the backward pass, and decoded at the end. Dense gradients travel in the same way, without
compression. `grace.planner.advise` compares all ways, and no plan of `grace.planner.plan` is slower than one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

from grace.communicators.auto import LEVELS, MANY, LinkTimes, choose
from grace.communicators.planned.strategy import DENSE_FLAT, DENSE_HIERARCHICAL, Option, parse
from grace.core import Combine, name_of
from grace.core.grid import factors
from grace.core.method import Method
from grace.core.registry import communicators, triple
from grace.engine.buckets import grouped
from grace.planner.costs import MIN_NUMEL, Cluster, Codec, Term, terms
from grace.planner.profile import Profile, TensorProfile
from grace.planner.timeline import Chain, Span, Timeline

BUCKET_MB = 25.0
PLAN = "plan"
"""Used instead of a way's name if each tensor has its own strategy."""
_PAYLOADS = {
    "allreduce": "compress(gpu) allreduce*({0}) decompress(gpu)",
    "allgather": "compress(gpu) allgather*({0}) decompress(gpu)",
    "twostage": "compress(gpu) alltoall*({0}) decompress(gpu) compress(gpu) allgather*({0}) decompress(gpu)",
}
"""By communicator: the text of its strategy for a tensor, with {0} for the level of its collectives."""


@dataclass(frozen=True)
class Way:
    """A communicator, and its equivalent strategy for each tensor that the method compresses."""

    name: str
    option: Option
    params: Mapping[str, Any]
    """The communicator and its parameters, as for `grace.grace_from_params`."""
    levels: int = 1
    """Levels of communicator "twostage"."""

    def dims(self, cluster: Cluster) -> tuple[int, ...]:
        """The grid of workers, or of machines, in which it exchanges; empty if it has a single level."""
        return factors(cluster.workers if self.option.flat else cluster.nodes, self.levels) if self.levels > 1 else ()


def _hierarchical(outer: str, option: str) -> Way:
    return Way(f"hierarchical, outer {outer}", parse(option), {"communicator": "hierarchical", "outer": outer})


FLAT = {name: Way(name, parse(text.format("flat")), {"communicator": name}) for name, text in _PAYLOADS.items()}
HIERARCHICAL = {
    name: _hierarchical(name, f"reduce_scatter(intra) {text.format('inter')} allgather(intra)")
    for name, text in _PAYLOADS.items()
}
GRIDS = {
    way.name: way
    for levels in LEVELS
    for base, key in ((FLAT["twostage"], "levels"), (HIERARCHICAL["twostage"], "outer_levels"))
    for way in [Way(f"{base.name}, levels {levels}", base.option, {**base.params, key: levels}, levels)]
}
DENSE = Way("dense", parse(DENSE_FLAT), {})
DENSE_LEVELS = Way("dense, hierarchical", parse(DENSE_HIERARCHICAL), {"communicator": "hierarchical"})
WAYS = {way.name: way for way in (DENSE, DENSE_LEVELS, *FLAT.values(), *HIERARCHICAL.values())} | GRIDS
NAMES = (PLAN, *WAYS)


def usual(method: Method, cluster: Cluster) -> Way:
    """A method's default way on a cluster."""
    rate = cluster.link("inter" if cluster.levels else "flat").rate("alltoall")
    link = LinkTimes(0.0, *rate)
    chosen: Any = choose(method, cluster.workers, cluster.per_node if cluster.levels else 1, link)[0]
    name = name_of(chosen)
    if name == "hierarchical":
        chosen = chosen.outer
        name = HIERARCHICAL[name_of(chosen)].name
    levels = getattr(chosen, "levels", 1)
    return WAYS[name if levels == 1 else f"{name}, levels {levels}"]


def dense(cluster: Cluster) -> list[Way]:
    """Ways without compression, a plain allreduce first."""
    return [DENSE, DENSE_LEVELS][: 1 + cluster.levels]


def every(params: Mapping[str, Any], cluster: Cluster) -> list[Way]:
    """The ways that support a method, restricted to the communicator in ``params`` if there is one.

    ``params``: as for `grace.grace_from_params`: a compressor and optionally a memory and a communicator. ValueError if
    no way supports it.
    """
    method, named = triple(params)
    found = [way for name, way in FLAT.items() if _carries(name, method, cluster.workers)]
    if cluster.levels:
        found += [way for name, way in HIERARCHICAL.items() if _carries(name, method, cluster.nodes)]
    parts = cluster.nodes if cluster.levels else cluster.workers
    if parts >= MANY and _carries("twostage", method, parts):
        grids = (way for way in GRIDS.values() if way.option.flat != cluster.levels)
        found += [way for way in grids if len(way.dims(cluster)) == way.levels]
    if "communicator" in params:
        given = {**params, "communicator": name_of(named)}
        levels = params.get("outer_levels" if given["communicator"] == "hierarchical" else "levels")
        found = [way for way in found if levels in (None, way.levels)]
        found = [way for way in found if all(given.get(key, value) == value for key, value in way.params.items())]
    if not found:
        named.check(method, cluster.workers)
        raise ValueError(
            f"steps over communicator {name_of(named)!r} are not predicted here: leave it out, or name one of "
            f"{', '.join(FLAT)}, hierarchical"
        )
    return found


def exchange(name: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of `grace.grace_from_params` for a method in this way."""
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
    """A predicted step."""

    timeline: Timeline
    names: tuple[str, ...]
    """Names of the tensors, or buckets, of the timeline."""
    labels: tuple[list[str], ...]
    """Labels of each tensor's, or bucket's, operations."""

    @property
    def seconds(self) -> float:
        """Seconds from the start of the backward pass to the last mean."""
        return self.timeline.seconds

    @property
    def codec_seconds(self) -> float:
        """Seconds of encoding and decoding, hidden or not."""
        chains = zip(self.timeline.chains, self.labels, strict=True)
        pairs = (
            (label, seconds) for chain, labels in chains for label, (_, seconds) in zip(labels, chain, strict=True)
        )
        return sum(seconds for label, seconds in pairs if label.startswith(("compress", "decompress")))

    def spans(self) -> list[Span]:
        """All operations, in the order of their start."""
        return self.timeline.spans()


def buckets(profile: Profile, bucket_mb: float = BUCKET_MB, min_numel: int = MIN_NUMEL) -> list[Bucket]:
    """Group the tensors into buckets, as GRACE does."""
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
    """Simulate a step with a method in one way. ``codec``: its costs; None for a dense way.

    ``min_numel``: smaller tensors travel uncompressed. ``shrink``: as in `grace.planner.advise.step`. ``deferred``: as
    in `Timeline`.
    """
    laid = buckets(profile, bucket_mb, min_numel)
    ends = dict(zip(profile.tensors, accumulate(tensor.backward for tensor in profile.tensors), strict=True))
    # time in the backward pass at which each bucket is complete
    ready = [max(ends[tensor] for tensor in bucket) for bucket in laid]
    backward = [end - begin for begin, end in pairwise([0.0, *ready])]
    alone = 0 if way is DENSE else min_numel  # tensors of fewer elements use a plain allreduce
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
    # Returns the operations of a bucket. Its small tensors have a dense message, before the first message of the larger
    # ones.
    found: list[tuple[Term, float]] = []
    # Each message of an action is a term of the computing thread (unless that costs nothing) and a term of the link.
    for action, group in groupby(
        terms(cluster, way.option, way.dims(cluster)) if large else (), key=lambda term: term.action
    ):
        times = rounds_of(codec) if codec is not None and action.compressed else 1
        found += [(term, term.seconds(cluster, codec, large, messages=times)) for term in group] * times
    first = next((number for number, (term, _) in enumerate(found) if term.action.collective), 0)
    dense = [(term, term.seconds(cluster, None, small)) for term in terms(cluster, DENSE.option) if small]
    return [*found[:first], *dense, *found[first:]]


def rounds_of(codec: Codec) -> int:
    """The number of successive messages per bucket that a plan assumes: 2 for methods that agree on a payload."""
    return 2 if triple(codec.params)[0].compressor.traits.combine is Combine.AGREED else 1
