"""Gossip: each worker mixes its parameters with its neighbours' instead of averaging gradients over all workers.

There is no collective over all workers. After its own optimizer step, a worker moves its parameters towards its
neighbours', so that all workers' parameters stay close while training moves their mean. A `Mixing` defines the messages
between neighbours; `Gossip` exchanges them. Integrations: `grace.torch.gossip` and `grace.keras.GossipCallback`.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from grace.backends import Backend, backend_of, get_backend
from grace.core import Array, Combine, Compressor, Context, Payload, Program, State, Transport, join, name_of, scope
from grace.core.collectives import AllToAll
from grace.core.program import as_program, run_local
from grace.core.registry import compressors, take, unknown_key
from grace.engine.buckets import Tensor
from grace.engine.meter import Meter
from grace.engine.report import Report, TensorReport
from grace.engine.scheduler import RoundScheduler
from grace.engine.trace import Trace
from grace.ops import blocks
from grace.transports import get_transport, known_transport
from grace.transports.packer import Packer

__all__ = ["Choco", "Edge", "Full", "Gossip", "Mixing", "PowerGossip", "edges", "neighbours"]

Topology = str | Iterable[tuple[int, int]]
TOPOLOGIES = ("ring", "torus", "complete")


# -- topologies --------------------------------------------------------------------------------------------------------
def edges(topology: Topology, workers: int) -> list[tuple[int, int]]:
    """The pairs (i, j), i < j, of neighbouring workers, sorted.

    ``topology``: "ring"; "torus", a grid as square as the number of workers allows, closed in both directions;
    "complete"; or the pairs themselves. Raises ValueError for invalid pairs, and for a disconnected graph.
    """
    if not isinstance(topology, str):
        found = {(min(pair), max(pair)) for pair in topology}
    elif topology == "ring":
        found = {_ordered(i, (i + 1) % workers) for i in range(workers)}
    elif topology == "torus":
        rows = max(d for d in range(1, math.isqrt(workers) + 1) if workers % d == 0)
        columns = workers // rows
        places = [(i, *divmod(i, columns)) for i in range(workers)]
        found = {_ordered(i, row * columns + (column + 1) % columns) for i, row, column in places}
        found |= {_ordered(i, (row + 1) % rows * columns + column) for i, row, column in places}
    elif topology == "complete":
        found = {(i, j) for j in range(workers) for i in range(j)}
    else:
        raise ValueError(f"unknown topology {topology!r}: name one of {', '.join(TOPOLOGIES)}, or list pairs")
    if isinstance(topology, str):
        found = {(i, j) for i, j in found if i != j}  # a ring of one, a torus of one row
    if wrong := sorted((i, j) for i, j in found if i == j or i < 0 or j >= workers):
        raise ValueError(f"topology: {wrong[0]} is no pair of different workers among 0 .. {workers - 1}")
    reached, fresh = {0}, {0}
    while fresh:
        fresh = {b for pair in found for a, b in (pair, pair[::-1]) if a in fresh} - reached
        reached |= fresh
    if len(reached) < workers:
        lost = min(set(range(workers)) - reached)
        raise ValueError(f"topology: no path joins workers 0 and {lost}, so they would never agree. Add pairs")
    return sorted(found)


@dataclass(frozen=True)
class Edge:
    """The link from a worker to a neighbour, whose rank is ``peer``."""

    peer: int
    weight: float
    """The Metropolis weight 1 / (1 + d), where d is the larger number of neighbours of the two workers. Equal at both
    ends; a worker's weights add up to less than 1."""


def neighbours(topology: Topology, workers: int, rank: int) -> tuple[Edge, ...]:
    """The neighbours of a worker, in rank order."""
    pairs = edges(topology, workers)
    degrees = [sum(i in pair for pair in pairs) for i in range(workers)]
    mine = [sum(pair) - rank for pair in pairs if rank in pair]
    return tuple(Edge(peer, 1 / (1 + max(degrees[rank], degrees[peer]))) for peer in sorted(mine))


def _ordered(i: int, j: int) -> tuple[int, int]:
    return min(i, j), max(i, j)


# -- mixings -----------------------------------------------------------------------------------------------------------
class Mixing(ABC):
    """Defines how neighbours' tensors approach each other. A frozen dataclass, pure like a compressor.

    A law: the changes at both ends of an edge cancel out, so that the workers' sum is preserved.
    Arguments: ``x``, a tensor as float32[n]; ``near``, this worker's neighbours.
    """

    @property
    def title(self) -> str:
        """The name for reports."""
        return type(self).__name__.lower()

    def init(self, ctx: Context, near: Sequence[Edge]) -> State:
        """Return a tensor's initial state."""
        return {}

    @abstractmethod
    def mix(self, x: Array, state: State, ctx: Context, near: Sequence[Edge]) -> Program[tuple[Array, State]]:
        """Return this worker's tensor after one round, and its next state. ``ctx.step``: the round's number, an int."""


def swap(parts: Mapping[int, Payload], ctx: Context) -> Program[list[Payload]]:
    """Send ``parts``, payloads by neighbour's rank; return the neighbours' payloads, of equal shapes, in this order."""
    received = yield AllToAll(tuple(parts.get(worker, ()) for worker in range(ctx.world_size)), mutual=True)
    return [received[peer] for peer in parts]


def swap_ragged(payload: Payload, near: Sequence[Edge], ctx: Context) -> Program[list[Payload]]:
    """Send all neighbours the same payload; return theirs, whose arrays may have other lengths.

    Two messages: the size, then the payload, padded to the larger of both ends' sizes.
    """
    xp, packer = ctx.xp, Packer(ctx.xp, ctx.rank, ctx.world_size)
    mine, layout = packer.pack_ragged(payload)
    length = xp.lengths([mine])
    answers = yield from swap({edge.peer: (length,) for edge in near}, ctx)
    sizes = {edge.peer: int(xp.integers(size)[0]) for edge, (size,) in zip(near, answers, strict=True)}
    own = int(xp.integers(length)[0])
    received = yield from swap({peer: (xp.pad(mine, max(own, size)),) for peer, size in sizes.items()}, ctx)
    return [
        packer.unpack_ragged(buffer[:size], layout, peer)
        for (peer, size), (buffer,) in zip(sizes.items(), received, strict=True)
    ]


@dataclass(frozen=True)
class Full(Mixing):
    """Neighbours exchange whole tensors: X_i becomes sum_j w_ij X_j."""

    def mix(self, x: Array, state: State, ctx: Context, near: Sequence[Edge]) -> Program[tuple[Array, State]]:
        received = yield from swap({edge.peer: (x,) for edge in near}, ctx)
        change = ctx.xp.zeros(ctx.size)
        for edge, (other,) in zip(near, received, strict=True):
            change = change + edge.weight * (other - x)
        return x + change, state


@dataclass(frozen=True)
class PowerGossip(Mixing):
    """Neighbours move along the directions in which they differ most, found by power iteration on X_i - X_j.

    Each edge has factors P and Q. Each iteration orthonormalises one of them, alternately; both ends send their
    matrix's product with it; the difference of the products becomes the other factor, and both ends move by P Q times
    the edge's weight. A message has r a or r b numbers for an a x b matrix. There is no step size to tune. Vectors are
    mixed uncompressed.
    State: for each neighbour P float32[a, r] and Q float32[r, b], equal at both ends.
    ``rank``: r; if it reaches min(a, b), an iteration is exact. ``steps``: iterations per round. ``gamma``: scales each
    move. ``warm_start``: begin with the last iteration's factor instead of a random one. ``sign``: for rank 1,
    replace the factor by its signs, scaled to norm 1, instead of orthonormalising it.
    The authors' code omits the first round, since it mixes before the optimizer's first step; here each mixing follows
    a step.
    Vogels, Karimireddy and Jaggi, "Practical low-rank communication compression in decentralized deep learning",
    NeurIPS 2020, arXiv:2008.01425, algorithm 1.
    """

    rank: int = 1
    steps: int = 1
    gamma: float = 1.0
    warm_start: bool = True
    sign: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1 or self.steps < 1:
            raise ValueError(f"rank={self.rank!r} and steps={self.steps!r} must be at least 1")
        if not self.gamma > 0:
            raise ValueError(f"gamma={self.gamma!r} must be positive")
        if self.sign and self.rank > 1:
            raise ValueError(f"sign=True rounds one vector, but rank={self.rank}: set rank=1")

    def init(self, ctx: Context, near: Sequence[Edge]) -> State:
        if len(ctx.shape) < 2 or not self.warm_start:
            return {}
        a, b, r = self._sizes(ctx)
        state = {}
        for edge in near:
            state[f"{edge.peer}/p"] = ctx.xp.transpose(self._drawn(a, r, edge, ctx))
            state[f"{edge.peer}/q"] = self._drawn(b, r, edge, ctx)
        return state

    def mix(self, x: Array, state: State, ctx: Context, near: Sequence[Edge]) -> Program[tuple[Array, State]]:
        if len(ctx.shape) < 2:
            return (yield from Full().mix(x, state, ctx, near))
        xp, (a, b, r) = ctx.xp, self._sizes(ctx)
        matrix, state = xp.reshape(x, (a, b)), dict(state)
        for step in range(ctx.step * self.steps, (ctx.step + 1) * self.steps):
            # At full rank only the basis of the shorter side spans the whole space.
            left = step % 2 == 0 if r < min(a, b) else a <= b
            bases = [self._basis(left, state, edge, ctx) for edge in near]
            mine = [
                xp.linalg.right_factor(basis, matrix) if left else xp.linalg.left_factor(matrix, basis)
                for basis in bases
            ]
            parts = {edge.peer: (product,) for edge, product in zip(near, mine, strict=True)}
            received = yield from swap(parts, ctx)
            change = xp.zeros((a, b))
            for edge, basis, product, (other,) in zip(near, bases, mine, received, strict=True):
                towards = other - product
                change = change + (self.gamma * edge.weight) * (basis @ towards if left else towards @ basis)
                if self.warm_start:  # flip the sign at one end, so that both store the same factor
                    state[f"{edge.peer}/{'q' if left else 'p'}"] = towards if ctx.rank > edge.peer else -towards
            matrix = matrix + change
        return xp.reshape(matrix, (-1,)), state

    def _sizes(self, ctx: Context) -> tuple[int, int, int]:
        # Returns rows, columns and rank of the matrix. A tensor's shape is split where rows + columns is smallest.
        cuts = [math.prod(ctx.shape[:cut]) for cut in range(1, len(ctx.shape))]
        a = min(cuts, key=lambda a: a + ctx.size // a)
        return a, ctx.size // a, min(self.rank, a, ctx.size // a)

    def _drawn(self, count: int, r: int, edge: Edge, ctx: Context) -> Array:
        # Returns float32[r, count]: random directions, equal at both ends of an edge.
        low, high = _ordered(ctx.rank, edge.peer)
        return ctx.xp.reshape(ctx.stage(f"{low}-{high}").shared_rng("gossip").normal(r * count), (r, count))

    def _basis(self, left: bool, state: State, edge: Edge, ctx: Context) -> Array:
        # Returns orthonormal directions: float32[a, r] on the left, float32[r, b] on the right.
        xp, (a, b, r) = ctx.xp, self._sizes(ctx)
        count = a if left else b
        if self.warm_start:
            rows = xp.transpose(state[f"{edge.peer}/p"]) if left else state[f"{edge.peer}/q"]
            # Unit scale keeps products in range. A zero direction, which would stay zero, is replaced by a random one.
            largest = xp.max(xp.abs(rows), 1)
            rows = rows / blocks.divisor(xp, largest)
            alive = xp.reshape(largest, (-1, 1)) > 0
            rows = xp.mended(alive, rows, lambda: self._drawn(count, r, edge, ctx))
        else:
            rows = self._drawn(count, r, edge, ctx)
        if self.sign:
            columns = xp.transpose((xp.cast(rows >= 0, "float32") * 2.0 - 1.0) / math.sqrt(count))
        else:
            columns = xp.linalg.qr(xp.transpose(rows))
        return columns if left else xp.transpose(columns)


@dataclass(frozen=True)
class Choco(Mixing):
    """Neighbours move towards public copies of each other, which follow by compressed differences.

    Worker j has a public copy c_j of its tensor x_j, 0 at first, which its neighbours store as well. It sends them
    q_j = C(x_j - c_j), and all of them set c_j = c_j + q_j. Then x_i moves by gamma sum_j w_ij (c_j - c_i). What a
    message leaves out stays in x_j - c_j, so there is no memory, and C may be biased.
    Tensors to which the compressor does not apply, as matrix methods to vectors, are mixed uncompressed.
    State: for this worker and each neighbour a copy float32[n], equal on all workers that have it; and the
    compressor's own.
    ``compressor``: a name, a dictionary such as {"compressor": "topk", "compress_ratio": 0.01}, or an instance; any one
    that needs no other workers while it compresses. ``gamma``: the consensus step size, positive; 1 without
    compression. It must be tuned: the coarser the compressor, the smaller.
    Koloskova, Stich and Jaggi, "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
    Communication", ICML 2019, arXiv:1902.00340, algorithms 1 and 2; for non-convex training Koloskova, Lin, Stich and
    Jaggi, "Decentralized Deep Learning with Arbitrary Communication Compression", ICLR 2020, arXiv:1907.09356. The
    authors' code for the latter mixes with the copies of the previous round, before it compresses, and stores their
    weighted sum in place of the neighbours' copies.
    """

    compressor: Any
    gamma: float

    def __post_init__(self) -> None:
        given = self.compressor
        rest: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"compressor": given}
        if "memory" in rest:
            raise ValueError(f"memory {rest['memory']!r}: the public copies already feed errors back: leave memory out")
        compressor: Compressor = take(compressors, rest.pop("compressor", "none"), rest)
        if rest:
            raise ValueError(unknown_key(next(iter(rest)), compressor))
        if reason := _unsuitable(compressor):
            raise ValueError(f"Choco cannot send differences by {name_of(compressor)!r}: {reason}")
        if not self.gamma > 0:
            raise ValueError(f"gamma={self.gamma!r} must be positive")
        object.__setattr__(self, "compressor", compressor)

    @property
    def title(self) -> str:
        return f"choco with {name_of(self.compressor)}"

    def init(self, ctx: Context, near: Sequence[Edge]) -> State:
        if not self.compressor.applies(ctx):
            return {}
        copies = {str(worker): ctx.xp.zeros(ctx.size) for worker in (ctx.rank, *(edge.peer for edge in near))}
        return join(copy=copies, compressor=self.compressor.init(ctx))

    def mix(self, x: Array, state: State, ctx: Context, near: Sequence[Edge]) -> Program[tuple[Array, State]]:
        compressor: Compressor = self.compressor
        if not compressor.applies(ctx):
            return (yield from Full().mix(x, state, ctx, near))
        copies, mine = scope(state, "copy"), str(ctx.rank)
        compressed = compressor.compress(x - copies[mine], scope(state, "compressor"), ctx)
        payload, kept = yield from as_program(compressed)
        if compressor.traits.variable_length:
            received = yield from swap_ragged(payload, near, ctx)
        else:
            received = yield from swap({edge.peer: payload for edge in near}, ctx)
        sent = {mine: payload, **{str(edge.peer): part for edge, part in zip(near, received, strict=True)}}
        copies = {worker: copies[worker] + compressor.decompress(part, ctx) for worker, part in sent.items()}
        for edge in near:
            x = x + self.gamma * edge.weight * (copies[str(edge.peer)] - copies[mine])
        return x, join(copy=copies, compressor=kept)


def _unsuitable(compressor: Compressor) -> str:
    # Returns why `Choco` cannot use a compressor, with the remedy; empty if it can.
    traits, xp = compressor.traits, get_backend("numpy")
    if traits.majority_vote or traits.update_direction:
        return "its result is no estimate of what it compresses. Use 'efsignsgd', which sends a scale with its signs"
    if traits.internal_feedback:
        return "it has a residual of its own, so errors would be fed back twice. Use another one, such as 'topk'"
    if (compressor.variance(2**20) or 0) >= 1:
        return "at these settings its error can exceed the difference. Use compressor 'damped' with it as method"
    ctx = Context(xp=xp, name="probe", shape=(16, 16))
    try:
        if traits.combine is not Combine.AGREED:
            run_local(compressor.compress(xp.zeros(ctx.size), compressor.init(ctx), ctx), compressor)
            return ""
    except ValueError:  # it yields a collective
        pass
    return "it asks all workers while it compresses. Use one that does not, such as 'topk' or 'efsignsgd'"


# -- rounds ------------------------------------------------------------------------------------------------------------
class Gossip:
    """Mixes named parameters between neighbours; one `step` after each optimizer step.

    ``mixing``: default `PowerGossip()`. ``topology``: as for `edges`. ``transport``: "horovod", "torch", "local" or a
    Transport; default: the one that is initialised by the time of `build`. ``seed``: of all random numbers, equal on
    all workers.
    Every worker must make the same calls. Each iteration of the mixing sends the messages of all tensors together.
    """

    def __init__(
        self,
        mixing: Mixing | None = None,
        topology: Topology = "ring",
        transport: str | Transport | None = None,
        seed: int = 0,
    ):
        self.mixing: Mixing = PowerGossip() if mixing is None else mixing
        if not isinstance(topology, str):
            topology = sorted(_ordered(*pair) for pair in topology)
        self.topology: Topology = topology
        self._near: tuple[Edge, ...] | None = None
        self._transport = known_transport(transport)
        if self._transport is not None:
            self.near  # noqa: B018 - raises where the topology does not fit the workers
        self.seed = seed
        self._xp: Backend | None = None
        self._tensors: dict[str, Tensor] = {}
        self._state: dict[str, State] = {}
        self._round = 0
        self._flight: RoundScheduler | None = None
        self._before: dict[str, Array] = {}
        self._meter: Any = None

    @property
    def transport(self) -> Transport:
        """The transport, as in `grace.Grace.transport`."""
        if self._transport is None:
            self._transport = get_transport()
        return self._transport

    @property
    def near(self) -> tuple[Edge, ...]:
        """This worker's neighbours."""
        if self._near is None:
            self._near = neighbours(self.topology, self.transport.size, self.transport.rank)
        return self._near

    @property
    def xp(self) -> Backend:
        """The backend; known once `build` has seen a parameter."""
        if self._xp is None:
            raise RuntimeError("call build(named_parameters) first: nothing is known about the parameters yet")
        return self._xp

    @property
    def built(self) -> bool:
        """Whether `build` has been called."""
        return self._xp is not None

    def build(self, named_parameters: Mapping[str, Array] | Iterable[tuple[str, Array]]) -> None:
        """Create the state of all parameters, once. If workers differ, all raise ValueError, naming the difference."""
        named = dict(named_parameters)
        if self.built:
            raise RuntimeError("built already: make one Gossip for all parameters, and build it once")
        if not named:
            raise ValueError("there are no parameters: pass named_parameters")
        xp = backend_of(next(iter(named.values())))
        self._transport = self.transport.bind(xp)
        self._xp = xp
        self._tensors = {name: Tensor(name, xp.shape(array), xp.dtype(array)) for name, array in named.items()}
        settings = [repr(self.mixing), str(self.topology), self.seed, [asdict(t) for t in self._tensors.values()]]
        texts = self.transport.exchange(json.dumps(settings)) if self.transport.size > 1 else []
        for worker, text in enumerate(texts):
            if text != texts[0]:
                pairs = zip(json.loads(texts[0]), json.loads(text), strict=True)
                one, other = next(pair for pair in pairs if pair[0] != pair[1])
                raise ValueError(
                    f"worker 0 and worker {worker} differ: {one} and {other}. Use the same settings and model"
                )
        self._state = {name: self.mixing.init(self._context(t), self.near) for name, t in self._tensors.items()}
        self._meter = Meter(xp)
        self._meter.extend(list(self._tensors))

    def _context(self, tensor: Tensor) -> Context:
        return Context(
            xp=self.xp,
            name=tensor.name,
            shape=tensor.shape,
            rank=self.transport.rank,
            world_size=self.transport.size,
            step=self._round,
            seed=self.seed,
        )

    def step(self, parameters: Mapping[str, Array]) -> dict[str, Array]:
        """Return all parameters after one round of mixing, with their shapes and dtypes; changes no argument."""
        self.launch(parameters)
        while not self.advance():
            pass
        return self.land()

    def launch(self, parameters: Mapping[str, Array]) -> None:
        """Begin a round with the values of all built parameters, by name."""
        if parameters.keys() != self._tensors.keys():
            odd = sorted(parameters.keys() ^ self._tensors.keys())[0]
            raise KeyError(f"a round must mix exactly the parameters that were built, but {odd!r} differs")
        xp, programs = self.xp, {}
        self._before = dict(parameters)
        for name, tensor in self._tensors.items():
            if xp.shape(parameters[name]) != tensor.shape:
                raise ValueError(f"{name!r} has shape {xp.shape(parameters[name])}, but {tensor.shape} was built")
            x = xp.cast(xp.reshape(parameters[name], (-1,)), "float32")
            if self.near and tensor.size:
                programs[name] = self.mixing.mix(x, self._state[name], self._context(tensor), self.near)
        with xp.quiet():
            self._flight = RoundScheduler("gossip", programs, self.transport, Trace())

    def advance(self) -> bool:
        """Wait for one message and begin the next. True when the exchange is complete."""
        assert self._flight is not None
        with self.xp.quiet():
            return self._flight.advance()

    def land(self) -> dict[str, Array]:
        """End the round: store the new state, and return the new parameters."""
        xp, flight, mixed = self.xp, self._flight, {}
        assert flight is not None
        for name, tensor in self._tensors.items():
            before = mixed[name] = self._before[name]
            if name in flight.results:
                x, self._state[name] = flight.results[name]
                # Add the difference, so that float64 parameters keep the digits that float32 lacks.
                change = x - xp.cast(xp.reshape(before, (-1,)), "float32")
                mixed[name] = before + xp.cast(xp.reshape(change, tensor.shape), tensor.dtype)
        self._meter.add(self._meter.count(list(self._tensors), flight.asked, self.transport.group_rank, {}))
        self._round += 1
        self._flight, self._before = None, {}
        return mixed

    def state_dict(self) -> dict[str, Any]:
        """All state of this worker, as NumPy arrays: each worker saves and loads its own."""
        return {
            "rank": self.transport.rank,
            "world_size": self.transport.size,
            "mixing": repr(self.mixing),
            "round": self._round,
            "tensors": {
                name: {key: self.xp.to_numpy(array).copy() for key, array in state.items()}
                for name, state in self._state.items()
            },
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, after `build`. Raises ValueError, changing nothing, if it does not fit."""
        mine = self.state_dict()
        for key in ("rank", "world_size", "mixing"):
            if saved[key] != mine[key]:
                raise ValueError(f"this state has {key} {saved[key]!r}, but here it is {mine[key]!r}: load its own")
        shapes = [
            {(name, key): array.shape for name, arrays in state["tensors"].items() for key, array in arrays.items()}
            for state in (saved, mine)
        ]
        if shapes[0] != shapes[1]:
            odd = sorted(shapes[0].items() ^ shapes[1].items())[0]
            raise ValueError(f"this state belongs to another model or topology: {odd} is in one of them only")
        self._round = saved["round"]
        self._state = {
            name: {key: self.xp.asarray(array, self.xp.dtype(self._state[name][key])) for key, array in arrays.items()}
            for name, arrays in saved["tensors"].items()
        }

    def report(self) -> Report:
        """Bytes sent since this object was made. ``bytes_dense``: bytes that `Full` gossip would have sent."""
        name = self.mixing.title
        topology = self.topology if isinstance(self.topology, str) else "listed edges"
        head = (self._round, self.transport.rank, self.transport.size, f"{name} on {topology}")
        traffic = self._meter.read() if self._meter else {}
        tensors = [
            TensorReport(
                name=tensor.name,
                shape=tensor.shape,
                method=name,
                reason="",
                bytes_sent=traffic[tensor.name][0],
                bytes_dense=traffic[tensor.name][2] * 4 * tensor.size * len(self.near),
                residual_norm=None,
            )
            for tensor in self._tensors.values()
        ]
        sent, received = (sum(counts[column] for counts in traffic.values()) for column in (0, 1))
        return Report(*head, sent, received, sum(tensor.bytes_dense for tensor in tensors), tensors)
