"""The cost of a strategy: the chain of operations after a gradient, on a cluster with a compressor.

Espresso, section 4.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

from grace.communicators.planned.runner import carries, summable
from grace.communicators.planned.strategy import (
    DENSE_FLAT,
    DENSE_HIERARCHICAL,
    Action,
    Device,
    Option,
    Place,
    options,
    parse,
    states,
)
from grace.core.registry import triple
from grace.planner.codecs import Codec, Curve, Speed, codec
from grace.planner.links import COEFFICIENTS, Cluster, Link, Rate, cluster, fitted
from grace.planner.timeline import CPU, DEVICE, INTER, INTRA, Chain

__all__ = [
    "COEFFICIENTS",
    "Cluster",
    "Codec",
    "Costs",
    "Curve",
    "Link",
    "Rate",
    "Speed",
    "Term",
    "cluster",
    "codec",
    "fitted",
    "terms",
]

MIN_NUMEL = 1024
"""Smaller tensors travel uncompressed in other tensors' messages, as by default in `grace.engine.options.Options`."""
KEPT = 12
"""Maximum number of strategies per tensor size in a search."""


class Term(NamedTuple):
    """One operation of a strategy, for any tensor size.

    If a collective's term is on the device, it is the work of the computing thread, which submits the collective and
    takes its result.
    """

    resource: int
    action: Action
    share: float
    """Share of the tensor that a worker holds."""
    pieces: int
    """Number of payloads that a worker holds."""
    sharing: int
    """Number of workers that share a machine's link."""
    workers: int = 0
    """Number of workers of a collective along one axis of a grid; 0: all those of its level."""

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
        """Seconds of the operation for tensors of these sizes, whose payloads travel as one message.

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
            held = sum(cluster.element * self.share * size for size in sizes)
        if self.resource == DEVICE:
            return cluster.handling(held, joined)
        return cluster.seconds(action, held, self.sharing, joined, self.workers)


def terms(cluster: Cluster, option: Option, dims: Sequence[int] = ()) -> Iterator[Term]:
    """The operations of a strategy on a cluster, in order.

    ``dims``: if given, the strategy's all-to-all of payloads goes along the axes of a grid of these sizes, and the
    payloads of the means come back along them, as `grace.communicators.twostage` does it.
    """
    share, pieces, shared = 1.0, 1, 1
    for action, place, workers in _along(option, dims):
        if not action.collective:
            yield Term(DEVICE if action.device == "gpu" else CPU, action, share, pieces, 1)
            pieces = 1
            continue
        count = workers or cluster.size(action.level)
        within = not cluster.between(action.level)
        sharing = shared if action.level == "inter" else 1
        if action.level == "flat" and action.kind == "alltoall" and not within:
            # a ring crosses a machine's link once, an all-to-all once for each worker of the machine
            sharing = cluster.per_node
        if any(cluster.message):
            yield Term(DEVICE, action, share, pieces, 1, workers)
        yield Term(INTRA if within else INTER, action, share, pieces, sharing, workers)
        if action.level == "intra":
            shared = cluster.per_node if action.kind in ("reduce_scatter", "alltoall") else 1
        if action.kind in ("reduce_scatter", "alltoall"):
            share /= count
        elif place == "shard":
            share *= count
        if action.compressed and place == "own" and action.kind != "allreduce":
            pieces *= count


def _along(option: Option, dims: Sequence[int]) -> Iterator[tuple[Action, Place, int]]:
    # Yields each action with the progress of its level's sum before it, and `Term.workers`.
    for number, (action, held) in enumerate(zip(option.actions, states(option), strict=False)):
        place = held.at(action.level)
        if not dims or not action.compressed:
            yield action, place, 0
        elif action.kind == "alltoall":
            yield action, place, dims[0]
            for size in dims[1:]:
                yield from ((again, place, 0) for again in option.actions[number + 1 : number + 3])
                yield action, place, size
        else:
            yield from ((action, place, size) for size in reversed(dims))


class Costs:
    """Strategies for tensors of any size, as chains of operations on one cluster with one compressor.

    ``devices``: allowed devices for compressions; default: those with known costs. ``max_compressions``: maximum number
    per tensor. ``min_numel``: smaller tensors have no choice of strategy: they join other tensors' dense messages.
    ``rooted``: whether collectives may have a root; some transports do not support that (`grace.core.Transport`).
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
        """The plain strategies: an allreduce among all workers and, on clusters with two levels, one of two levels."""
        return tuple(map(parse, (DENSE_FLAT, DENSE_HIERARCHICAL)[: 1 + self.cluster.levels]))

    @cached_property
    def _tree(self) -> list[Option]:
        # Returns the strategies with which communicator "planned" supports this method, with all compressions on the
        # first device.
        method, _ = triple(self.codec.params)
        summed = summable(method.compressor)
        every = options(not self.cluster.levels, self.devices[:1], self.max_compressions, summed)
        return [option for option in every if (self.rooted or not option.rooted) and carries(option, method)]

    def chain(self, option: Option, size: float) -> Chain:
        """The operations of a strategy for a tensor of this size; `labels` returns their names."""
        return tuple((resource, self._of(number, size)) for resource, number in self._numbered(option))

    def last(self, sizes: Sequence[int]) -> dict[int, Chain]:
        """Chains of the small tensors, by index: all share the last one's message. {} if the last tensor is large."""
        small = [number for number, size in enumerate(sizes) if size < self.min_numel]
        if not small or small[-1] < len(sizes) - 1:
            return {}
        total = sum(sizes[number] for number in small)
        message = ((t.resource, t.seconds(self.cluster, None, (total,))) for t in terms(self.cluster, self.dense[0]))
        return {**dict.fromkeys(small, ()), small[-1]: tuple(message)}

    def labels(self, option: Option) -> list[str]:
        """The label of each operation in a strategy's chain."""
        return [term.label for term in terms(self.cluster, option)]

    def _numbered(self, option: Option) -> tuple[tuple[int, int], ...]:
        # Returns the resource and term number of each operation. Equal operations of different strategies are one term.
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
        actions. Of the others, the `KEPT` with the smallest total time stay. ``offload``: include compressions on the
        CPU pool; False: use the first device only.
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
