"""The tree of strategies for one tensor: where it is compressed, on which device, and by which collectives it is sent.

A strategy (`Option`) is a sequence of actions that turns the workers' dense gradients into their sum on every worker.
`options` returns all strategies, `check` verifies one, and `states` returns the kind of a worker's data before each
action.

Wang et al., "Hi-Speed DNN Training with Espresso", EuroSys 2023, section 4.1. Its four dimensions (compress or not,
device, collectives, position of the compression) are written here as a grammar, which yields the paper's 4341
strategies. Payloads that the wire may sum can also be sent by ``allreduce*``, in places where the paper has
``allgather*``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, cast, get_args

Kind = Literal[
    "reduce_scatter", "reduce", "allreduce", "allgather", "alltoall", "gather", "broadcast", "compress", "decompress"
]
Level = Literal["flat", "intra", "inter"]
"""The group of a collective: all workers, those of one machine, or those with the same local rank on every machine."""
Device = Literal["gpu", "cpu"]
"""Where to compress: "gpu", the stream that computes gradients (even if that is a CPU's), or "cpu", a separate pool of
CPU threads."""
Place = Literal["own", "shard", "root", "full"]
"""Progress of one level's sum: not begun; a shard on each worker; complete on the root; complete on all workers."""

KINDS: tuple[Kind, ...] = get_args(Kind)
LEVELS: tuple[Level, ...] = get_args(Level)
DEVICES: tuple[Device, ...] = get_args(Device)
SECOND: dict[Kind, Kind] = {
    "reduce_scatter": "allgather",
    "reduce": "broadcast",
    "alltoall": "allgather",
    "gather": "broadcast",
}
"""A divided collective is a pair: the first collective divides or collects the data, the second one distributes the
result. Maps the first to the second."""
CODEC: tuple[Kind, ...] = ("compress", "decompress")
"""The actions that are not collectives."""


@dataclass(frozen=True)
class Action:
    """One step: a collective at a level, on compressed or dense data; or a (de)compression on a device."""

    kind: Kind
    level: Level = "flat"
    """The level of a collective; always "flat" for a (de)compression, where it has no meaning."""
    compressed: bool = False
    """Whether a collective sends payloads."""
    device: Device | None = None
    """The device of a (de)compression; None for a collective."""

    @property
    def collective(self) -> bool:
        """Whether the action is a collective."""
        return self.kind not in CODEC

    def __str__(self) -> str:
        return f"{self.kind}{'*' * self.compressed}({self.level if self.collective else self.device})"


@dataclass(frozen=True)
class Option:
    """A strategy for one tensor. ``str`` gives its text; `parse` is the inverse.

    The text names the actions in order, with a star where a collective sends payloads:
    ``compress(gpu) alltoall*(flat) decompress(gpu) allgather(flat)``.
    """

    actions: tuple[Action, ...]

    @property
    def compressions(self) -> int:
        """Number of compressions."""
        return sum(action.kind == "compress" for action in self.actions)

    @property
    def flat(self) -> bool:
        """Whether every collective is among all workers, regardless of machines."""
        return all(action.level == "flat" for action in self.actions)

    @property
    def rooted(self) -> bool:
        """Whether some data goes to a single root."""
        return any(action.kind in ("reduce", "gather") for action in self.actions)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of its compressions and decompressions, in order."""
        return tuple(action.device for action in self.actions if action.device is not None)

    def on(self, devices: Sequence[Device]) -> Option:
        """The same strategy with its compressions and decompressions on these devices, in order."""
        rest = iter(devices)
        return Option(tuple(a if a.device is None else replace(a, device=next(rest)) for a in self.actions))

    def __str__(self) -> str:
        return " ".join(map(str, self.actions))


@dataclass(frozen=True)
class Held:
    """The kind of a worker's data between two actions: payloads or dense, and how far it is summed at each level."""

    compressed: bool
    flat: Place
    intra: Place
    inter: Place

    def at(self, level: Level) -> Place:
        """Progress of the sum at a level."""
        return cast(Place, getattr(self, level))


DENSE_FLAT = "allreduce(flat)"
"""The baseline: one plain allreduce."""
DENSE_HIERARCHICAL = "reduce_scatter(intra) allreduce(inter) allgather(intra)"
_BEGIN = Held(False, "own", "own", "own")
_ENDS = (Held(False, "full", "own", "own"), Held(False, "own", "full", "full"))
_ACTION = re.compile(r"(\w+)(\*?)\((\w+)\)")


def parse(text: str) -> Option:
    """Parse a strategy. ValueError if the text is not in the tree."""
    if not isinstance(text, str):
        raise ValueError(f"a strategy is a text such as {DENSE_FLAT!r}, not {text!r}")
    actions = []
    for word in text.split():
        match = _ACTION.fullmatch(word)
        kind, star, place = match.groups() if match else ("", "", "")
        if kind not in KINDS or place not in (DEVICES if kind in CODEC else LEVELS) or (kind in CODEC and star):
            raise ValueError(
                f"{word!r} is no action of a strategy: write a collective with its level, such as allreduce(flat), "
                "allgather*(inter) with a star for payloads, or compress(gpu), decompress(cpu)"
            )
        known = cast(Kind, kind)
        if known in CODEC:
            actions.append(Action(known, device=cast(Device, place)))
        else:
            actions.append(Action(known, cast(Level, place), bool(star)))
    option = Option(tuple(actions))
    check(option)
    return option


def check(option: Option) -> None:
    """Raise ValueError, naming the action, unless the strategy leaves the whole dense sum on every worker."""
    states(option)


@cache
def states(option: Option) -> tuple[Held, ...]:
    """The kind of a worker's data before each action, and at the end. ValueError as in `check`."""
    held = [_BEGIN]
    for number, action in enumerate(option.actions):
        before = option.actions[number - 1].kind
        if action.kind == "decompress" and before == "compress":
            raise ValueError(f"{str(option)!r} decompresses what it has just compressed")
        if action.kind == "allreduce" and action.compressed and before != "compress":
            raise ValueError(f"{action} in {str(option)!r} needs compress just before: it sums one payload per worker")
        held.append(_after(held[-1], action, option))
    if held[-1] not in _ENDS:
        raise ValueError(f"{str(option)!r} does not end with the dense sum on every worker, but with {held[-1]}")
    return tuple(held)


def _after(held: Held, action: Action, option: Option) -> Held:
    kind, level = action.kind, action.level

    def need(truth: bool, what: str) -> None:
        if not truth:
            raise ValueError(f"{action} in {str(option)!r} needs {what}, but finds {held}")

    if kind in CODEC:
        need(action.device is not None and not action.compressed, "a device and no star")
        need(held.compressed == (kind == "decompress"), f"{'payloads' if kind == 'decompress' else 'dense data'}")
        return replace(held, compressed=not held.compressed)
    need(action.device is None, "no device")
    need(held.compressed == action.compressed, "payloads" if action.compressed else "dense data")
    place = held.at(level)
    if level == "flat":
        need(held.intra == held.inter == "own", "that nothing was summed at other levels")
    else:
        need(held.flat == "own", "that nothing was summed among all workers")
    if level == "inter":
        need(held.intra in ("shard", "root"), "a first step at level intra")
    if kind in ("reduce_scatter", "reduce", "allreduce"):
        dense = kind == "allreduce" or not held.compressed
        need(place == "own" and dense, "dense data that was not summed yet")
        to: Place = {"reduce_scatter": "shard", "reduce": "root", "allreduce": "full"}[kind]  # type: ignore[assignment]
    elif kind in ("alltoall", "gather"):
        need(place == "own" and held.compressed, "payloads that were not collected yet")
        to = "shard" if kind == "alltoall" else "root"
    elif kind == "allgather":
        need(place == "shard" or (place == "own" and held.compressed), "shards, or payloads that were not collected")
        to = "full"
    else:
        need(place == "root", "a root that has the sum")
        to = "full"
    places = {each: to if each == level else held.at(each) for each in LEVELS}
    return Held(held.compressed, **places)


# -- the grammar -------------------------------------------------------------------------------------------------------
# One method of `_Tree` for each rule. ``first``: the first collective of a pair at level intra (or flat), whose second
# collective must still follow; ``pair``: the same at level inter. A rule yields the remaining actions, as tuples.
Path = tuple[Action, ...]
_SUMS: tuple[Action, ...] = (Action("reduce_scatter"), Action("reduce"))
_COLLECTS: tuple[Action, ...] = (Action("alltoall", compressed=True), Action("gather", compressed=True))
_AR = Action("allreduce")
_AG = Action("allgather", compressed=True)
_AR_SUM = Action("allreduce", compressed=True)


@cache
def options(
    flat_only: bool = False,
    devices: tuple[Device, ...] = DEVICES,
    max_compressions: int | None = None,
    summable: bool = False,
) -> tuple[Option, ...]:
    """All strategies: flat ones first, beginning with the plain allreduce.

    ``flat_only``: omit strategies with levels intra and inter, for a single machine, or one worker on each machine.
    ``devices``: the devices on which to compress. ``max_compressions``: the most compressions in a strategy, to bound
    the loss; None: any number. ``summable``: the wire may sum payloads, so include strategies with ``allreduce*``.
    """
    tree = _Tree(devices, summable)
    paths = [*tree.flat(), *(() if flat_only else tree.hierarchical())]
    found = [Option(path) for path in paths]
    return tuple(o for o in found if max_compressions is None or o.compressions <= max_compressions)


class _Tree:
    def __init__(self, devices: Iterable[Device], summable: bool):
        devices = tuple(devices)
        self.summable = summable
        if not devices or any(device not in DEVICES for device in devices):
            raise ValueError(f"devices={devices!r}: choose from {', '.join(DEVICES)}")
        self.encode = [Action("compress", device=device) for device in devices]
        self.decode = [Action("decompress", device=device) for device in devices]

    def flat(self) -> Iterator[Path]:
        yield (_AR,)
        for first in _SUMS:
            yield from _then([first], self.last_dense(first))
        for whole in (_AG, _AR_SUM)[: 1 + self.summable]:
            yield from _then(self.encode, [(whole,)], [(d,) for d in self.decode])
        for first in _COLLECTS:
            yield from _then(self.encode, [(first,)], list(self.last_payload(first)))

    def hierarchical(self) -> Iterator[Path]:
        for first in _SUMS:
            first = replace(first, level="intra")
            yield from _then([first], self.inter_dense(first))
            yield from _then([first], self.inter_compressed(first))
        for first in _COLLECTS:
            first = replace(first, level="intra")
            begin = list(_then(self.encode, [(first,)]))
            yield from _then(begin, self.inter_payload(first))
            middle = list(_then(begin, [(d,) for d in self.decode]))
            yield from _then(middle, self.inter_dense(first))
            yield from _then(middle, self.inter_compressed(first))

    def last_dense(self, first: Action) -> Iterator[Path]:
        yield (_second(first, False),)
        yield from _then(self.encode, [(_second(first, True),)], [(d,) for d in self.decode])

    def last_payload(self, first: Action) -> Iterator[Path]:
        yield from _then([_second(first, True)], [(d,) for d in self.decode])
        yield from _then(self.decode, self.last_dense(first))

    def inter_second(self, pair: Action, first: Action) -> Iterator[Path]:
        yield from _then([_second(pair, False)], self.last_dense(first))
        yield from _then(self.encode, [(_second(pair, True),)], list(self.last_payload(first)))

    def inter_dense(self, first: Action) -> Iterator[Path]:
        yield from _then([replace(_AR, level="inter")], self.last_dense(first))
        for pair in _SUMS:
            pair = replace(pair, level="inter")
            yield from _then([pair], self.inter_second(pair, first))

    def inter_compressed(self, first: Action) -> Iterator[Path]:
        yield from _then(self.encode, list(self.inter_payload(first)))
        if self.summable:
            yield from _then(self.encode, [(replace(_AR_SUM, level="inter"),)], list(self.last_payload(first)))

    def inter_payload(self, first: Action) -> Iterator[Path]:
        yield from _then([replace(_AG, level="inter")], self.last_payload(first))
        for pair in _COLLECTS:
            pair = replace(pair, level="inter")
            yield from _then([pair], _then([_second(pair, True)], self.last_payload(first)))
            yield from _then([pair], [(d,) for d in self.decode], list(self.inter_second(pair, first)))


def _second(first: Action, compressed: bool) -> Action:
    return Action(SECOND[first.kind], first.level, compressed)


def _then(begin: Iterable[Action | Path], *rest: Iterable[Path]) -> Iterator[Path]:
    # Yields every path that joins a path of ``begin`` and one path of each item of ``rest``.
    if not rest:
        yield from (path if isinstance(path, tuple) else (path,) for path in begin)
        return
    head, *tail = rest
    continuations = list(_then(head, *tail))
    for path in _then(begin):
        for continuation in continuations:
            yield path + continuation
