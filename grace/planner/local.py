"""Predicts local training (an exchange of pseudo-gradients every H steps), compared with synchronous training.

A step computes for C seconds. The exchange of a fragment keeps the device busy for B seconds (encoding, decoding,
handing messages over) and makes it wait W seconds for messages, in R rounds. A delay of tau steps hides

    hidden = min(tau C, W min(1, tau / R))

of W. Each round is sent after the wait for the previous one, so tau steps hide at most tau of the R rounds. All P
fragments are exchanged once in H steps; over these, a step takes on average

    C + (sum of B + W - hidden over the fragments) / H

In contrast to synchronous training, no backward pass hides an exchange. The model neglects arithmetic on parameters and
assumes that messages in flight do not slow the computation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from grace.core.local_training import Settings
from grace.planner import ways
from grace.planner.advise import break_even
from grace.planner.costs import MIN_NUMEL, Cluster, Codec
from grace.planner.profile import Profile
from grace.planner.search import GAIN
from grace.planner.timeline import DEVICE
from grace.planner.ways import BUCKET_MB, Way

DENSE = "dense"
"""The label of pseudo-gradients without compression."""


class Cost(NamedTuple):
    """The cost of exchanging one fragment, in seconds."""

    busy: float
    """Time in which the device encodes, decodes and hands messages over."""
    wait: float
    """Time in which the device waits for messages."""
    rounds: int
    """Number of successive messages."""

    def hidden(self, computation: float, delay: int) -> float:
        """Seconds of ``wait`` that ``delay`` steps of ``computation`` seconds each hide."""
        return min(delay * computation, self.wait * min(1.0, delay / self.rounds))


@dataclass(frozen=True)
class Verdict:
    """The prediction for local training with one method."""

    label: str
    synchronous: float
    """Seconds of a step that exchanges gradients with the method, in its fastest way."""
    seconds: float
    """Seconds per step with an exchange every H steps, without delay."""
    delayed: float
    """Seconds per step with the delay."""
    hiding_delay: int | None
    """The smallest delay, in steps, that hides all messages; None: no delay within a slot does."""
    nbytes: float
    """Payload bytes that a worker sends per step: those of an exchange / H."""
    break_even: float | None
    """Bandwidth, in bytes per second, up to which local training with the delay is faster than synchronous training,
    both dense and with the method; as `advise.Verdict.break_even`."""
    speedup: float
    """Seconds of the faster synchronous training over ``delayed``."""
    way: str
    """The fastest way of the exchange with the delay, a name of `ways.NAMES`."""
    exchange: Mapping[str, Any]
    """Keys of `grace.grace_from_params` for this way."""

    @property
    def pays(self) -> bool:
        """Whether local training is faster than synchronous training, by more than rounding."""
        return self.speedup > 1 + GAIN


@dataclass(frozen=True)
class Comparison:
    """Local training with each method, and synchronous training."""

    settings: Settings
    computation: float
    """Seconds of a step without any exchange."""
    verdicts: tuple[Verdict, ...]
    """Fastest first, dense pseudo-gradients among them."""

    @property
    def synchronous(self) -> tuple[str, float]:
        """Label and seconds of the fastest synchronous training."""
        best = min(self.verdicts, key=lambda verdict: verdict.synchronous)
        return best.label, best.synchronous

    @property
    def best(self) -> Verdict | None:
        """The fastest method of local training; None if synchronous training is as fast."""
        first = self.verdicts[0]
        return first if first.delayed < self.synchronous[1] * (1 - GAIN) else None

    def params(self, verdict: Verdict) -> dict[str, Any]:
        """The parameters for `grace.local.from_params`."""
        settings = self.settings
        local: dict[str, Any] = {"sync_every": settings.sync_every}
        if settings.parts > 1:
            local["fragments"] = settings.parts
        if verdict.delayed < verdict.seconds * (1 - GAIN):
            local["fragment_sync_delay"] = settings.fragment_sync_delay
        return {"local": local, **verdict.exchange}

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; an infinite break-even bandwidth is "any"."""
        methods = {verdict.label: asdict(verdict) for verdict in self.verdicts}
        for method in methods.values():
            del method["label"]
            if method["break_even"] == math.inf:
                method["break_even"] = "any"
        schedule = {key: getattr(self.settings, key) for key in ("sync_every", "fragments", "fragment_sync_delay")}
        best = "synchronous" if self.best is None else self.best.label
        return {"best": best, **schedule, "computation": self.computation, "methods": methods}


def compare(
    profile: Profile,
    cluster: Cluster,
    codecs: Mapping[str, Codec],
    settings: Settings,
    bucket_mb: float = BUCKET_MB,
) -> Comparison:
    """Compare local training with synchronous training, dense and with each method, in all ways except plans.

    ``settings``: only the schedule matters. ``bucket_mb``: size of GRACE's buckets. Raises ValueError for a method
    that no way supports, and for more fragments than tensors.
    """
    computation = profile.forward + profile.backward
    parts = _fragments(profile, settings)

    def local(there: Cluster, codec: Codec | None, way: Way, delay: int) -> float:
        costs = [cost(part, there, codec, way, bucket_mb) for part in parts]
        exposed = sum(each.busy + each.wait - each.hidden(computation, delay) for each in costs)
        return computation + exposed / settings.sync_every

    def fastest(there: Cluster, codec: Codec | None, delay: int) -> tuple[float, Way]:
        found = [(local(there, codec, way, delay), way) for way in _every(codec, there)]
        return min(found, key=itemgetter(0))

    def synchronous(there: Cluster, codec: Codec | None) -> float:
        plays = (ways.play(profile, there, codec, way, bucket_mb) for way in _every(codec, there))
        return profile.forward + min(play.seconds for play in plays)

    def verdict(label: str, codec: Codec | None) -> Verdict:
        def speedup(there: Cluster) -> float:
            least = min(synchronous(there, each) for each in (None, codec))
            return least / fastest(there, codec, settings.fragment_sync_delay)[0]

        delayed, way = fastest(cluster, codec, settings.fragment_sync_delay)
        costs = [cost(part, cluster, codec, way, bucket_mb) for part in parts]
        hiding = (n for n in range(settings.slot) if all(each.wait <= each.hidden(computation, n) for each in costs))
        exchange = ways.exchange(way.name, {} if codec is None else codec.params)
        return Verdict(
            label=label,
            synchronous=synchronous(cluster, codec),
            seconds=fastest(cluster, codec, 0)[0],
            delayed=delayed,
            hiding_delay=next(hiding, None),
            nbytes=payload(profile, codec) / settings.sync_every,
            break_even=break_even(cluster, lambda there: speedup(there) > 1 + GAIN),
            speedup=speedup(cluster),
            way=way.name,
            exchange=exchange | ({} if bucket_mb == BUCKET_MB else {"bucket_mb": bucket_mb}),
        )

    named: dict[str, Codec | None] = {DENSE: None, **codecs}
    verdicts = [verdict(label, codec) for label, codec in named.items()]
    return Comparison(settings, computation, tuple(sorted(verdicts, key=attrgetter("delayed"))))


def cost(fragment: Profile, cluster: Cluster, codec: Codec | None, way: Way, bucket_mb: float = BUCKET_MB) -> Cost:
    """The cost of exchanging a fragment, whose pseudo-gradients are known all at once. ``codec``: None if dense."""
    idle = replace(fragment, tensors=tuple(replace(tensor, backward=0.0) for tensor in fragment.tensors))
    play = ways.play(idle, cluster, codec, way, bucket_mb)
    busy = sum(seconds for chain in play.timeline.chains for resource, seconds in chain if resource == DEVICE)
    within = 1 if codec is None else ways.rounds_of(codec)
    rounds = sum(within if action.compressed else 1 for action in way.option.actions if action.collective)
    rounds += 2 * max(0, len(way.dims(cluster)) - 1)  # each further level: one round there, one back
    return Cost(busy, play.seconds - busy, rounds)


def payload(profile: Profile, codec: Codec | None) -> float:
    """Bytes of a worker's payloads in one exchange; a communicator may send more or fewer."""
    if codec is None:
        return 4.0 * profile.size
    return sum(codec.wire(t.size) if t.size >= MIN_NUMEL else 4.0 * t.size for t in profile.tensors)


def _every(codec: Codec | None, cluster: Cluster) -> list[Way]:
    return ways.dense(cluster) if codec is None else ways.every(codec.params, cluster)


def _fragments(profile: Profile, settings: Settings) -> list[Profile]:
    # A profile has the order of the backward pass, `Settings.split` needs that of the model.
    named = {tensor.name: tensor for tensor in reversed(profile.tensors)}
    parts = settings.split({name: tensor.nbytes for name, tensor in named.items()})
    return [replace(profile, tensors=tuple(named[name] for name in reversed(part))) for part in parts]
