"""Communicator `planned`, which executes a strategy for each tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from grace.communicators.planned.strategy import DENSE_FLAT, Action, Level, Option, parse
from grace.core import (
    Array,
    Combine,
    Compressor,
    Context,
    Memory,
    Payload,
    Program,
    State,
    Transport,
    join,
    name_of,
    scope,
)
from grace.core.collectives import AllToAll, Broadcast, Gather, Group, Reduce
from grace.core.communicator import Communicator, machine_size, refuse_agreed
from grace.core.method import Method, materialize
from grace.core.registry import compressors, memories, register
from grace.core.sharding import shards, template

if TYPE_CHECKING:
    from grace.communicators.planned.table import PlanTable

GROUPS: dict[Level, Group] = {"flat": "world", "intra": "node", "inter": "cross"}
GATHERED = "compress(gpu) allgather*(flat) decompress(gpu)"


@register("planned")
@dataclass(frozen=True)
class Planned(Communicator):
    """Carry each tensor by a strategy from Espresso's tree: where to compress, and which collectives to use.

    Each compression has its own memory; a mean is compressed with the method's memory for a second compression. Data
    that is later divided among workers is compressed shard by shard. Each collective returns a mean, and its root is
    the first worker of its group. A reduce, a gather and a reduce-scatter are each run as an AllToAll to the workers
    that need the data, so the number of bytes is that of the strategy.
    ``option``: the strategy of all tensors, as text (`grace.communicators.planned.strategy`).
    ``ways``: instead of ``option``, a strategy and an optional method for each tensor; the key ``plan`` sets it.
    ``node_size``: workers per machine, with consecutive ranks; 0: as launched. It must divide the number of workers.
    Wang et al., "Hi-Speed DNN Training with Espresso", EuroSys 2023, section 4.1.
    """

    option: str = GATHERED
    ways: PlanTable | None = None
    node_size: int = 0

    def resolve(self, method: Method, transport: Transport) -> Communicator:
        if self.ways is not None:
            return replace(self, ways=self.ways.resolve(method))  # a plan may give the workers per machine
        if parse(self.option).flat:
            return self
        return replace(self, node_size=machine_size("planned", self.node_size, transport))

    def check(self, method: Method, world_size: int) -> None:
        if self.ways is None:
            check(parse(self.option), method)

    def adopt_local_plan(self, transport: Transport) -> None:
        if self.ways is not None:
            self.ways.adopt_local_plan(transport, self.node_size)

    def create_groups(self, transport: Transport) -> None:
        if self.ways is not None:
            self.ways.agree(transport, self.node_size)
        options = self.ways.options if self.ways else [parse(self.option)]
        rooted = next((str(option) for option in options if option.rooted), "")
        if rooted and not transport.rooted:
            raise ValueError(
                f"TensorFlow over Horovod cannot carry {rooted!r}: if some workers only send, a graph may hang. Use "
                "strategies without reduce and gather*, such as " + repr(GATHERED)
            )
        if not all(option.flat for option in options):
            transport.split(self._nodes)

    def method(self, method: Method, name: str) -> Method:
        if not self._route(name).compressions:
            return Method(compressors["none"](), memories["none"]())
        way = None if self.ways is None else self.ways[name]
        return method if way is None or way.method is None else way.method

    def strategy(self, name: str) -> str:
        return str(self._route(name))

    def threads(self, name: str) -> int:
        if "cpu" not in self._route(name).devices:
            return 0
        return 1 if self.ways is None else self.ways.threads

    @property
    def origin(self) -> str:
        return "" if self.ways is None else self.ways.origin

    def applies(self, method: Method, ctx: Context) -> bool:
        route, method = self._route(ctx.name), self.method(method, ctx.name)
        if self._dense(ctx.name):
            return False
        check(route, method)
        # Check every worker's shards, since all workers must decide alike.
        everybody = (replace(ctx, rank=rank) for rank in range(ctx.world_size))
        return all(
            method.compressor.applies(leaf)
            for worker in everybody
            for leg in expand_plan(route, method.compressor, worker, self._nodes)
            if leg.action.kind == "compress"
            for leaf in leg.leaves
        )

    def reason(self, method: Method, ctx: Context) -> str:
        if self._dense(ctx.name):
            return f"its strategy is {DENSE_FLAT}"
        return super().reason(self.method(method, ctx.name), ctx)

    def compression_points(self, method: Method, ctx: Context) -> dict[str, tuple[Method, Context]]:
        method = self.method(method, ctx.name)
        found: dict[str, tuple[Method, Context]] = {}
        for leg in expand_plan(self._route(ctx.name), method.compressor, ctx, self._nodes):
            if leg.action.kind == "compress" and leg.here:
                found |= {key: (leg.method(method), leaf) for key, leaf in leg.kept()}
        return found

    def reduce(self, x: Array, method: Method, state: State, ctx: Context) -> Program[tuple[Any, State]]:
        method = method.like(self.method(method, ctx.name))
        worker = _Worker(x, method, state, ctx)
        for leg in expand_plan(self._route(ctx.name), method.compressor, ctx, self._nodes):
            yield from worker.go(leg)
        return worker.dense, worker.state

    @property
    def _nodes(self) -> int:
        return self.node_size if self.ways is None else self.ways.node_size

    def _dense(self, name: str) -> bool:
        # Returns whether the tensor is averaged uncompressed, at every level of a policy.
        return self.option == DENSE_FLAT if self.ways is None else self.ways.dense(name)

    def _route(self, name: str) -> Option:
        return parse(self.option) if self.ways is None else parse(self.ways[name].option)


def check(option: Option, method: Method) -> None:
    """Raise ValueError, naming the remedy, for a method that a strategy does not support."""
    if not option.compressions:
        return
    compressor, name = method.compressor, name_of(method.compressor)
    refuse_agreed("planned", method)
    if type(method.memory).after_mean is not Memory.after_mean:
        raise ValueError(
            f"communicator 'planned' cannot carry memory {name_of(method.memory)!r}, which tracks the mean of what the "
            "workers sent: strategies compress it again. Use communicator 'allgather', or memory 'residual'"
        )
    odd = [a for a in option.actions if a.kind in ("alltoall", "gather") and a.compressed]
    if compressor.traits.variable_length and odd:
        raise ValueError(
            f"{odd[0]} cannot carry payloads of {name!r}, whose lengths depend on the values: use strategies whose "
            f"payloads travel by allgather* and broadcast*, such as {GATHERED!r}"
        )
    if any(a.kind == "allreduce" and a.compressed for a in option.actions) and not summable(compressor):
        raise ValueError(
            f"allreduce* cannot carry payloads of {name!r}, which are not averaged as float numbers: use strategies "
            f"with allgather*, such as {GATHERED!r}"
        )


def carries(option: Option, method: Method) -> bool:
    """Return whether a strategy supports a method: `check` passes."""
    try:
        check(option, method)
    except ValueError:
        return False
    return True


def summable(compressor: Compressor) -> bool:
    """Return whether ``allreduce*`` supports a compressor: the mean of its payloads decodes to the tensors' mean."""
    floats = compressor.traits.wire_sum is None and type(compressor).reduced is Compressor.reduced
    return compressor.traits.combine is Combine.MEAN and floats


# -- the steps of a strategy -------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class PlanStep:
    """One action of a strategy, and the data that one worker holds before it."""

    action: Action
    here: bool
    """Whether this worker takes part; for a compression: whether it has data to compress."""
    region: Context
    """The part of the tensor that the action works on."""
    cuts: tuple[int, ...]
    """How the region is cut into leaves: into ``cuts[0]`` shards, each of these into ``cuts[1]`` shards, and so on."""
    pieces: int
    """Number of payloads per leaf, each from a different worker."""
    place: int
    """This worker's rank in the collective's group."""
    size: int
    """The number of workers in the collective's group."""
    parent: Context
    """For the second collective of a pair (`strategy.SECOND`): the region that the first one divided."""
    stage: int
    """Number of earlier compressions."""
    compressor: Compressor

    @property
    def leaves(self) -> list[Context]:
        """The region's smallest shards, each with its own payloads. For a compression: the shards that it encodes."""
        return _leaves(self.compressor, self.region, self.cuts)

    def kept(self) -> Iterator[tuple[str, Context]]:
        """For a compression: the leaves, each with the key of its state."""
        return ((f"compress{self.stage}.{number}", leaf) for number, leaf in enumerate(self.leaves))

    def method(self, method: Method) -> Method:
        """The method of this compression: ``method`` for the first one, its second stage for later ones (of means)."""
        return method.for_second_stage if self.stage else method


def expand_plan(option: Option, compressor: Compressor, ctx: Context, node_size: int) -> list[PlanStep]:
    """The steps of a strategy for one worker. ``ctx``: the context of the whole tensor."""
    nodes = node_size or 1
    places: dict[Level, tuple[int, int]] = {
        "flat": (ctx.rank, ctx.world_size),
        "intra": (ctx.rank % nodes, nodes),
        "inter": (ctx.rank // nodes, ctx.world_size // nodes),
    }
    found: list[PlanStep] = []
    holds: dict[Level, bool] = dict.fromkeys(places, True)
    parents: dict[Level, Context] = {}
    cuts: tuple[int, ...] = ()
    region, pieces, stage, met = ctx, 1, 0, False  # met: whether all machines have the same data
    for number, action in enumerate(option.actions):
        level, kind = action.level, action.kind
        place, size = places[level]
        if kind == "compress":
            cuts, pieces = _divisions(option.actions[number + 1 :], places), 1
            if stage:  # the first compression keeps the tensor's name, as if it were the only one
                # Machines that hold the same mean must compress it alike, so that their results are equal.
                rank = ctx.rank % nodes if met else ctx.rank
                region = replace(region, name=f"{ctx.name}/compress{stage}", rank=rank)
        others = [hold for each, hold in holds.items() if action.device is not None or each != level]
        parent = parents.get(level, region)
        found.append(PlanStep(action, all(others), region, cuts, pieces, place, size, parent, stage, compressor))
        stage += kind == "compress"
        met = met or (level == "inter" and kind in ("allreduce", "broadcast", "allgather"))
        if kind in ("reduce_scatter", "alltoall"):
            parents[level] = region
            region = shards(compressor, region, size)[place]
            cuts = cuts[1:]
        elif kind == "allgather" and level in parents:
            region = replace(parents.pop(level), name=region.name)
            cuts = (size, *cuts) if action.compressed else ()
        elif kind in ("reduce", "gather", "broadcast"):
            holds[level] = kind == "broadcast" or place == 0
        if kind in ("alltoall", "gather") or (kind == "allgather" and parent is region and action.compressed):
            pieces *= size
        if kind == "decompress":
            cuts, pieces = (), 1
    return found


def _divisions(rest: Sequence[Action], places: Mapping[Level, tuple[int, int]]) -> tuple[int, ...]:
    # Returns `PlanStep.cuts` of a compression: the group size of each AllToAll before decompression. ``rest``: the
    # actions after the compression.
    found: list[int] = []
    for action in rest:
        if action.kind == "decompress":
            break
        if action.kind == "alltoall":
            found.append(places[action.level][1])
    return tuple(found)


def _leaves(compressor: Compressor, region: Context, cuts: tuple[int, ...]) -> list[Context]:
    if not cuts:
        return [region]
    return [leaf for shard in shards(compressor, region, cuts[0]) for leaf in _leaves(compressor, shard, cuts[1:])]


# -- carrying out the steps --------------------------------------------------------------------------------------------
class _Worker:
    """One worker's data between two actions: dense data (perhaps a mean not yet decoded), payloads, or nothing."""

    def __init__(self, x: Array, method: Method, state: State, ctx: Context):
        self.dense: Any = x
        self.state = dict(state)
        self._payloads: list[list[Payload]] | None = None  # indexed [leaf][sender]; each leaf is decoded separately
        self._method, self._xp, self._dtype = method, ctx.xp, ctx.dtype
        self._wire = ctx.wire if method.compressor.traits.lossless else ctx.dtype

    def go(self, leg: PlanStep) -> Program[None]:
        """Execute an action."""
        if leg.here:
            yield from getattr(self, f"_{leg.action.kind}{'_payloads' * leg.action.compressed}")(leg)
        elif leg.action.collective:
            yield ()  # take part in this round without data: the group's other workers exchange theirs

    def _compress(self, leg: PlanStep) -> Program[None]:
        x, found = materialize(self.dense), []
        bounds = list(accumulate((leaf.size for leaf in leg.leaves), initial=0))
        # A leaf's state may overwrite the memory of its data, so each leaf gets a copy.
        parts = [x] if len(bounds) == 2 else [self._xp.buffers.copy(x[start:stop]) for start, stop in pairwise(bounds)]
        for (key, leaf), part in zip(leg.kept(), parts, strict=True):
            payload, kept = yield from leg.method(self._method).encode(part, scope(self.state, key), leaf)
            self.state |= join(**{key: kept})
            found.append([payload])
        self.dense, self._payloads = None, found

    def _decompress(self, leg: PlanStep) -> Program[None]:
        yield from ()
        assert self._payloads is not None
        agreed = leg.pieces == 1
        means = [self._method.mean(p, leaf, agreed) for p, leaf in zip(self._payloads, leg.leaves, strict=True)]
        self.dense = means[0] if len(means) == 1 else self._xp.concat([materialize(mean) for mean in means])
        self._payloads = None

    # -- dense data ----------------------------------------------------------------------------------------------------
    def _sent(self, dense: Any) -> Array:
        # Uncompressed data is sent in its own dtype.
        return self._xp.cast(materialize(dense), self._wire)

    def _allreduce(self, leg: PlanStep) -> Program[None]:
        (mean,) = yield Reduce((self._sent(self.dense),), "mean", GROUPS[leg.action.level])
        self.dense = self._xp.cast(mean, self._dtype)

    def _reduce_scatter(self, leg: PlanStep) -> Program[None]:
        x = self._sent(self.dense)
        sizes = [shard.size for shard in shards(leg.compressor, leg.region, leg.size)]
        yield from self._averaged(tuple((x[a:b],) for a, b in pairwise(accumulate(sizes, initial=0))), leg)

    def _reduce(self, leg: PlanStep) -> Program[None]:
        yield from self._averaged(((self._sent(self.dense),), *[()] * (leg.size - 1)), leg)

    def _averaged(self, parts: tuple[tuple[Array, ...], ...], leg: PlanStep) -> Program[None]:
        # Averages the parts that this worker receives, in rank order. Without any, the worker's data becomes None.
        received = yield AllToAll(parts, GROUPS[leg.action.level])
        totals = [self._xp.cast(array, self._dtype) for part in received for array in part]
        self.dense = None if not totals else sum(totals[1:], totals[0]) / leg.size

    def _allgather(self, leg: PlanStep) -> Program[None]:
        sizes = [shard.size for shard in shards(leg.compressor, leg.parent, leg.size)]
        mine = self._xp.pad(self._sent(self.dense), sizes[0])  # the last shards are shorter than the first
        gathered = yield Gather((mine,), group=GROUPS[leg.action.level])
        whole = self._xp.concat([shard[:size] for (shard,), size in zip(gathered, sizes, strict=True)])
        self.dense = self._xp.cast(whole, self._dtype)

    def _broadcast(self, leg: PlanStep) -> Program[None]:
        x = self._sent(self.dense) if leg.place == 0 else self._xp.zeros(leg.region.size, self._wire)
        (received,) = yield Broadcast((x,), 0, group=GROUPS[leg.action.level])
        self.dense = self._xp.cast(
            self._xp.buffers.copy(received), self._dtype
        )  # a copy: workers of one process would share the received array, and the next action may overwrite it

    # -- payloads ------------------------------------------------------------------------------------------------------
    def _allreduce_payloads(self, leg: PlanStep) -> Program[None]:
        assert self._payloads is not None
        mean = yield Reduce(_flat(self._payloads), "mean", GROUPS[leg.action.level])
        self._payloads = _dealt(mean, len(leg.leaves), leg.pieces)

    def _alltoall_payloads(self, leg: PlanStep) -> Program[None]:
        assert self._payloads is not None
        count = len(self._payloads) // leg.size
        groups = [self._payloads[first : first + count] for first in range(0, len(self._payloads), count)]
        received = yield AllToAll(tuple(map(_flat, groups)), GROUPS[leg.action.level])
        self._merge(received, leg.leaves[:count], leg)

    def _gather_payloads(self, leg: PlanStep) -> Program[None]:
        assert self._payloads is not None
        received = yield AllToAll((_flat(self._payloads), *[()] * (leg.size - 1)), GROUPS[leg.action.level])
        if leg.place == 0:
            self._merge(received, leg.leaves, leg)
        else:
            self._payloads = None

    def _allgather_payloads(self, leg: PlanStep) -> Program[None]:
        assert self._payloads is not None
        ragged, group = leg.compressor.traits.variable_length, GROUPS[leg.action.level]
        if leg.parent is leg.region:  # all workers have payloads of the same region
            received = yield Gather(_flat(self._payloads), ragged, group)
            self._merge(received, leg.leaves, leg)
            return
        whole = replace(leg.parent, name=leg.region.name)
        leaves = [_leaves(leg.compressor, shard, leg.cuts) for shard in shards(leg.compressor, whole, leg.size)]
        layouts = [self._layout(each, leg) for each in leaves]
        arrays = _flat(self._payloads)
        if not ragged:  # the last shards are shorter than the first: pad for the exchange, then trim
            sizes = [[math.prod(shape) for _, shape in layout] for layout in layouts]
            room = [max(lengths) for lengths in zip(*sizes, strict=True)]
            arrays = tuple(self._xp.pad(self._xp.reshape(a, (-1,)), n) for a, n in zip(arrays, room, strict=True))
        received = yield Gather(arrays, ragged, group)
        self._payloads = []
        for part, layout, each in zip(received, layouts, leaves, strict=True):
            if not ragged:
                part = [self._xp.reshape(a[: math.prod(s)], s) for a, (_, s) in zip(part, layout, strict=True)]
            self._payloads += _dealt(part, len(each), leg.pieces)

    def _broadcast_payloads(self, leg: PlanStep) -> Program[None]:
        if self._payloads is not None:
            mine = _flat(self._payloads)
        else:
            layout = self._layout(leg.leaves, leg)
            mine = tuple(self._xp.zeros(tuple(n or 0 for n in shape), dtype) for dtype, shape in layout)
        received = yield Broadcast(mine, 0, leg.compressor.traits.variable_length, GROUPS[leg.action.level])
        self._payloads = _dealt(received, len(leg.leaves), leg.pieces)

    def _merge(self, received: Sequence[Sequence[Array]], leaves: Sequence[Context], leg: PlanStep) -> None:
        # Collects the payloads of all workers, by leaf.
        dealt = [_dealt(arrays, len(leaves), leg.pieces) for arrays in received]
        self._payloads = [[payload for each in dealt for payload in each[leaf]] for leaf in range(len(leaves))]

    def _layout(self, leaves: Sequence[Context], leg: PlanStep) -> list[tuple[str, tuple[Any, ...]]]:
        # Returns dtypes and shapes of the arrays that `_flat` returns for these leaves.
        each = (template(leg.compressor, self._xp, leaf.shape, leaf.wire) for leaf in leaves)
        return [array for arrays in each for array in arrays * leg.pieces]


def _flat(payloads: Sequence[Sequence[Payload]]) -> tuple[Array, ...]:
    return tuple(array for leaf in payloads for payload in leaf for array in payload)


def _dealt(arrays: Sequence[Array], leaves: int, pieces: int) -> list[list[Payload]]:
    # The inverse of `_flat`: returns the payloads by leaf and sender.
    count = len(arrays) // (leaves * pieces)
    payloads = [tuple(arrays[first : first + count]) for first in range(0, len(arrays), count)]
    return [payloads[first : first + pieces] for first in range(0, len(payloads), pieces)]
