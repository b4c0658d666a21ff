"""The vocabulary: Compressor, Memory, Communicator, Transport, Context, Combine.

A method is the pair (compressor, memory): pure functions with explicit state, written over a backend ``xp``
and never over a toolkit. Standard library only; importing this imports no toolkit.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, ClassVar, TypeVar, Union

from grace.collectives import Collective
from grace.rng import Rng

Array = Any
Payload = tuple[Array, ...]
"""What one worker puts on the wire: arrays in wire dtypes, bits already packed."""
State = dict[str, Array]
"""What is kept of a tensor between steps. Keys, shapes and dtypes are fixed by ``init``."""


def name_of(part: Any) -> str:
    """The registered name of a compressor, memory or communicator; the class's own name if it has none."""
    return vars(type(part)).get("registered_name", type(part).__name__)


T = TypeVar("T")
Program = Generator[Collective | tuple[Collective, ...], Any, T]
"""A computation that yields collectives and is resumed with their results."""
Steps = Union[T, Program[T]]  # noqa: UP007 - a TypeVar alone has no | at run time in 3.10
"""A value, or a program that returns one."""


def run(steps: Steps[T]) -> Program[T]:
    """Use a value and a program alike: ``result = yield from run(steps)``."""
    if isinstance(steps, Generator):
        return (yield from steps)
    return steps


class Combine(Enum):
    """How the payloads of all workers become one gradient."""

    GATHER = "gather"
    """All payloads are needed: each is decoded, then averaged (or voted on)."""
    MEAN = "mean"
    """Payloads are linear in the gradient: they may be averaged on the wire."""
    AGREED = "agreed"
    """The workers agreed on one payload inside ``compress``: nothing is left to exchange."""


class Resize(Enum):
    """What becomes of an array of the state when the number of workers changes."""

    SAME = "same"
    """It is the same on all workers, and stays so."""
    SUM = "sum"
    """The sum over the workers is kept, and every worker has an equal part of it: nothing is lost."""
    MEAN = "mean"
    """Every worker gets the mean."""
    OWN = "own"
    """A worker's own affair: each takes one of the old workers' over, as they come."""
    TRACKED = "tracked"
    """All workers keep the mean of it as "mean", beside it: every worker goes on from that. So the two stay true to
    each other, also where what a worker had is lost."""


@dataclass(frozen=True)
class Context:
    """All that is known about a tensor without looking at its values."""

    xp: Any = field(repr=False)
    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    rank: int = 0
    world_size: int = 1
    step: Any = 0
    """How many exchanges this tensor has had: an int, or an int64 scalar inside a graph."""
    seed: int = 0
    lr: Callable[[], Any] | None = field(default=None, repr=False)
    """Gives the learning rate that the mean will be applied with, a float or a scalar; None where nobody has said."""
    offset: int = 0
    """Where a piece begins in the flattened tensor; 0 for a whole one."""
    compile: bool = False
    """Pieces may be carried out by compiled forms (`grace.backends.base.Backend.forms`)."""
    undo: list[tuple[Array, Array]] | None = field(default=None, repr=False, compare=False)
    """A kernel may write the next residual over the last one if it notes here the residual's array, and the array that
    has the last one now: the spent x, of as many elements. None: the last residual must stay as it is."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def rng(self, label: str) -> Rng:
        """This worker's own numbers for this tensor and step."""
        return Rng(self.xp, self.seed, label, self.name, self.step, self.rank + 1, self.offset)

    def shared_rng(self, label: str) -> Rng:
        """Numbers that are the same on every worker."""
        return Rng(self.xp, self.seed, label, self.name, self.step, 0, self.offset)

    def piece(self, start: int, size: int) -> Context:
        """The context of elements ``start .. start + size`` of the flattened tensor."""
        return self._with(shape=(size,), offset=self.offset + start)

    def stage(self, name: str) -> Context:
        """The same elements at another point of the exchange: other random numbers, other state."""
        return self._with(name=f"{self.name}/{name}")

    def _with(self, **changes: Any) -> Context:
        # As dataclasses.replace, at a fifth of its time: a step makes thousands.
        context = object.__new__(type(self))
        context.__dict__.update(self.__dict__, **changes)
        return context


class Compressor(ABC):
    """Turns a gradient into a payload and a payload back into a gradient.

    Subclasses are frozen dataclasses of hyper-parameters. ``x`` is always float32[n] with n = ``ctx.size``.
    Only ``compress`` and ``decompress`` must be written.
    """

    family: ClassVar[str] = ""
    """What kind of method it is: "quantisation", "sparsification", "hybrid" or "low rank"."""
    combine: ClassVar[Combine] = Combine.GATHER
    ragged: ClassVar[bool] = False
    """The payload's length depends on the values."""
    unbiased: ClassVar[bool] = False
    """The expectation of ``decompress(compress(x))`` is x."""
    largest: ClassVar[float] = 1e30
    """Magnitudes up to this give finite results; larger ones may become infinite."""
    shaped: ClassVar[bool] = False
    """It sees the tensor's shape, not only its size."""
    mask: ClassVar[bool] = False
    """Every element is sent as it is or kept as it is: `residual` is x with zeros where it was sent."""
    vote: ClassVar[bool] = False
    """The result is a vote, not a mean: error feedback has nothing to subtract from."""
    feedback: ClassVar[bool] = False
    """It keeps what it did not send in a state of its own."""
    memory: ClassVar[str] = "residual"
    """The memory that a user should have with this method."""
    resize: ClassVar[Mapping[str, Resize]] = {}
    """How arrays of its state follow the number of workers, by their keys; those that are not named: `Resize.SAME`."""
    marked: ClassVar[bool] = False
    """NaN and infinity in x show as such in the payload's float32 arrays: nothing need be decoded to see them."""

    @property
    def summed(self) -> tuple[str, int] | None:
        """dtype and largest magnitude of an integer payload that is summed on the wire; None if payloads are floats."""
        return None

    @property
    def block(self) -> int | None:
        """Statistics are per block of so many elements, so that blocks may be compressed apart; None: per tensor.

        A promise: cut at whole blocks (and whole bytes), the payload arrays of the pieces concatenate to those
        of the whole.
        """
        return None

    def applies(self, ctx: Context) -> bool:
        """False: this tensor goes dense, and the report says so."""
        return True

    def contraction(self, n: int) -> float | None:
        """d with E|x - x̂|² <= (1 - d)|x|² for every x of n elements, if there is one."""
        return None

    def variance(self, n: int) -> float | None:
        """w with E|x - x̂|² <= w|x|² for every x of n elements, if the method is unbiased."""
        return None

    def init(self, ctx: Context) -> State:
        """The state before the first step."""
        return {}

    @abstractmethod
    def compress(self, x: Array, state: State, ctx: Context) -> Steps[tuple[Payload, State]]:
        """float32[n] -> payload and next state. A generator may ask for collectives."""

    def compensated(
        self, x: Array, residual: Array, state: State, ctx: Context
    ) -> Program[tuple[Payload, State]] | None:
        """`compress` of x + residual, where its first pass over x also adds up: x becomes the sum. None: it does not.

        Asked for only where arrays can be written to (``ctx.xp.mutable``). `compress` is not called then: a subclass
        overrides both or neither.
        """
        return None

    @abstractmethod
    def decompress(self, payload: Payload, ctx: Context) -> Array:
        """Payload -> float32[n]. Sees only what every worker sees: any worker gets the same bits."""

    def decompress_into(self, out: Array, payload: Payload, ctx: Context) -> Array:
        """`decompress`, written to float32[n] ``out``; for toolkits whose arrays can be written to."""
        ctx.xp.write(out, self.decompress(payload, ctx))
        return out

    def residual(self, x: Array, payload: Payload, ctx: Context) -> Array:
        """float32[n]: what of ``x`` the payload does not carry. x is spent: its memory may be reused."""
        return ctx.xp.subtract_from(x, self.decompress(payload, ctx))

    def part(self, x: Array, payload: Payload, rest: Array, ctx: Context) -> None:
        """x becomes what the payload carries, and float32[n] ``rest`` its `residual`.

        For toolkits whose arrays can be written to.
        """
        xp = ctx.xp
        xp.write(rest, x)
        left = self.residual(rest, payload, ctx)
        if not xp.same_memory(left, rest):
            xp.write(rest, left)
        self.decompress_into(x, payload, ctx)

    def aggregate(self, payloads: Sequence[Payload], ctx: Context) -> Array:
        """All workers' payloads, in rank order -> float32[n], the mean. One dense buffer, whatever their number."""
        total = self._total(payloads, ctx)
        return ctx.xp.divide_in(total, len(payloads)) if len(payloads) > 1 else total

    def aggregate_into(self, out: Array, payloads: Sequence[Payload], ctx: Context) -> Array:
        """`aggregate`, written to float32[n] ``out``; for toolkits whose arrays can be written to."""
        if type(self).aggregate is Compressor.aggregate and len(payloads) > 1:
            return ctx.xp.divided(self._total(payloads, ctx), len(payloads), out)
        ctx.xp.write(out, self.aggregate(payloads, ctx))
        return out

    def add_decoded(self, total: Array, payload: Payload, ctx: Context) -> Array:
        """float32[n] ``total`` + `decompress`, the same to the bit. total is spent: its memory may be reused."""
        return ctx.xp.add_to(total, self.decompress(payload, ctx))

    def _total(self, payloads: Sequence[Payload], ctx: Context) -> Array:
        (total,) = execution.apart((self.decompress(payloads[0], ctx),), payloads[0], ctx.xp)
        for payload in payloads[1:]:
            total = self.add_decoded(total, payload, ctx)
        return total

    def fused(self, x: Array, residual: Array | None, ctx: Context) -> tuple[Payload, Array] | None:
        """``compress(x + residual)`` and what its payload does not carry, by ``ctx.xp.kernels``; None: no kernel.

        The result is that of the plain functions. ``x`` is spent; without a residual what is left is not asked for.
        """
        return None

    def fused_mean(self, payloads: Sequence[Payload], out: Array | None, ctx: Context) -> Array | None:
        """`aggregate` by ``ctx.xp.kernels``, written to ``out`` if there is one; None: no kernel."""
        return None

    def reduced(self, payload: Payload, ctx: Context) -> Array:
        """A payload reduced on the wire -> float32[n]. Floats come averaged, integers summed (combine MEAN)."""
        return self.decompress(payload, ctx)


class Memory(ABC):
    """What is added to a gradient before it is compressed, and what is kept afterwards."""

    feedback: ClassVar[bool] = False
    """It feeds back what the payload did not carry."""
    server: ClassVar[Memory | None] = None
    """The memory of a second compression, where a communicator has one; None: this one."""
    momentum_inside: ClassVar[bool] = False
    """Its results carry momentum: the optimizer should have none of its own."""
    resize: ClassVar[Mapping[str, Resize]] = {}
    """As of a `Compressor`."""
    plain: ClassVar[bool] = False
    """It compresses x plus its state "residual", if it has that, and keeps what was not sent: no more and no less."""

    def check(self, compressor: Compressor) -> None:  # noqa: B027 - most fit every compressor
        """Raise ValueError, naming the remedy, for a compressor that this memory cannot work with."""

    def init(self, ctx: Context) -> State:
        """The state before the first step."""
        return {}

    @abstractmethod
    def compensate(self, x: Array, state: State, ctx: Context) -> Steps[tuple[Array, State]]:
        """float32[n] -> what to compress instead, and next state. x is spent: its memory may be reused."""

    @abstractmethod
    def update(self, x: Array, payload: Payload, compressor: Compressor, state: State, ctx: Context) -> State:
        """Next state, from what was compressed (``x``, spent) and the payload that leaves this worker."""

    def finish(self, mean: Array, compressor: Compressor, state: State, ctx: Context) -> tuple[Array, State]:
        """float32[n], the mean of what all workers sent -> the result, and next state. By default the mean."""
        return mean, state

    def init_dense(self, ctx: Context) -> State:
        """The state before the first step of a tensor that goes dense; numbers are in ``ctx.dtype``."""
        return {}

    def finish_dense(self, mean: Array, state: State, ctx: Context) -> tuple[Array, State]:
        """As `finish`, for the exact mean of a tensor that goes dense."""
        return mean, state


def scope(state: State, prefix: str) -> State:
    """The part of a state under ``prefix/``."""
    start = prefix + "/"
    return {key[len(start) :]: value for key, value in state.items() if key.startswith(start)}


def join(**parts: State) -> State:
    """Several states as one: ``join(memory=..., compressor=...)``; undone by `scope`."""
    return {f"{prefix}/{key}": value for prefix, state in parts.items() for key, value in state.items()}


@dataclass(frozen=True)
class Method:
    """A compressor with its memory: all that happens to a gradient at one point of compression."""

    compressor: Compressor
    memory: Memory

    def check(self) -> None:
        """Raise ValueError for a pair that cannot work, and warn of one that loses gradients."""
        compressor, large = self.compressor, 2**20
        name = name_of(compressor)
        if self.memory.feedback and compressor.vote:
            raise ValueError(
                f"memory {name_of(self.memory)!r} cannot feed back what a vote lost: use memory 'none' with {name!r}, "
                "or compressor 'efsignsgd', which sends a scale with its signs"
            )
        if self.memory.feedback and compressor.feedback:
            raise ValueError(
                f"memory {name_of(self.memory)!r} would feed back twice: {name!r} keeps by itself what it did not "
                "send. Use memory 'none'"
            )
        if self.memory.feedback and (compressor.variance(large) or 0) >= 1:
            raise ValueError(
                f"memory {name_of(self.memory)!r} diverges with {name!r} as it is set: its error can exceed the "
                "gradient. It is unbiased, so use memory 'none'"
            )
        self.memory.check(compressor)
        lossy = not compressor.unbiased and not compressor.vote and compressor.memory != "none"
        if lossy and not self.memory.feedback and compressor.memory != name_of(self.memory):
            warnings.warn(
                f"{name!r} without error feedback loses what it does not send; use memory {compressor.memory!r}",
                stacklevel=4,
            )

    def init(self, ctx: Context) -> State:
        return join(memory=self.memory.init(ctx), compressor=self.compressor.init(ctx))

    def encode(self, x: Array, state: State, ctx: Context, late: bool = False) -> Program[tuple[Payload, State]]:
        """compensate -> compress -> update. x is spent: its memory may be reused, also for the next state.

        ``late``: a residual may come as a `grace.execution.Rest`, to be worked out where it is kept.
        """
        done = execution.encode(self, x, state, ctx)
        if done is not None:
            return done
        memory, kept, program = scope(state, "memory"), scope(state, "compressor"), None
        if self.memory.plain and "residual" in memory and ctx.xp.mutable:
            program = self.compressor.compensated(x, memory["residual"], kept, ctx)
        if program is None:
            x, memory = yield from run(self.memory.compensate(x, memory, ctx))
            program = run(self.compressor.compress(x, kept, ctx))
        payload, kept = yield from program
        payload = execution.apart(payload, (x,), ctx.xp)
        if late and self.memory.plain and "residual" in memory and ctx.xp.piece:
            memory = {"residual": execution.Rest(self.compressor, x, payload, ctx)}
        else:
            memory = self.memory.update(x, payload, self.compressor, memory, ctx)
        return payload, join(memory=memory, compressor=kept)

    @property
    def again(self) -> Method:
        """What compresses a mean: this method, with the memory that is for a second compression."""
        return self if self.memory.server is None else replace(self, memory=self.memory.server)

    def mean(self, payloads: Sequence[Payload], ctx: Context, agreed: bool = False) -> execution.Mean:
        """The mean of all workers' payloads, in rank order, or of the one payload that they ``agreed`` on.

        It is not decoded yet: ``.array()`` gives float32[n], ``.into(out)`` writes it there.
        """
        return execution.Mean(self.compressor, payloads, ctx, agreed)

    def finish(self, mean: Array | execution.Mean, state: State, ctx: Context) -> tuple[Any, State]:
        """What the memory makes of the mean of all workers' payloads."""
        if type(self.memory).finish is Memory.finish:
            return mean, state
        mean = execution.as_array(mean)
        mean, memory = self.memory.finish(mean, self.compressor, scope(state, "memory"), ctx)
        return mean, join(memory=memory, compressor=scope(state, "compressor"))


class Communicator(ABC):
    """A gradient's way to the mean over all workers.

    It owns the order, so it may compress after an exact step, twice, or not at all.
    """

    scattered: ClassVar[bool] = False
    """A tensor's first dimension is the workers: the result is the mean of this worker's row, and no other's."""

    def check(self, method: Method, world_size: int) -> None:  # noqa: B027 - most have nothing to refuse
        """Raise ValueError, naming the remedy, when this method cannot travel this way."""

    def fitted(self, method: Method, transport: Transport) -> Communicator:
        """This communicator with everything settled that follows from the method and the workers."""
        return self

    def lay(self, transport: Transport) -> None:  # noqa: B027 - most need nothing
        """Where nothing may be said to others yet, before tensors are laid out: settle alone what `prepare` checks."""

    def prepare(self, transport: Transport) -> None:  # noqa: B027 - most need nothing
        """Once, before the first exchange, on every worker: ask the transport for the groups that it needs."""

    def applies(self, method: Method, ctx: Context) -> bool:
        """False: this tensor goes dense, and the report says so."""
        return method.compressor.applies(ctx)

    def points(self, method: Method, ctx: Context) -> dict[str, tuple[Method, Context]]:
        """Where it compresses: by a name each, the method and the elements. One point needs no name: ""."""
        return {"": (method, ctx)}

    def reason(self, method: Method, ctx: Context) -> str:
        """Why a tensor goes dense that it does not apply to, for the report."""
        return f"{name_of(method.compressor)!r} does not apply to shape {list(ctx.shape)}"

    def method(self, method: Method, name: str) -> Method:
        """The method of one tensor, where it is not that of all."""
        return method

    def strategy(self, name: str) -> str:
        """How a tensor travels, as text, where tensors do not all travel alike."""
        return ""

    def threads(self, name: str) -> int:
        """How many threads of the CPU may work on a tensor and on others beside the one that computes gradients."""
        return 0

    @property
    def origin(self) -> str:
        """What strategies were made for and from, for the report, where they were planned."""
        return ""

    def init(self, method: Method, ctx: Context) -> State:
        """One method state for each point where it compresses, under its name."""
        states = {name: here.init(part) for name, (here, part) in self.points(method, ctx).items()}
        return states[""] if "" in states else join(**states)

    @abstractmethod
    def reduce(self, x: Array, method: Method, state: State, ctx: Context) -> Program[tuple[Any, State]]:
        """float32[n] -> float32[n], the mean over all workers, bit-equal on all of them; and next state.

        Of a ``scattered`` communicator, float32[n / world_size]. x is spent. The mean may be a `grace.execution.Mean`,
        to be decoded where it belongs.
        """


class Transport(ABC):
    """Carries collectives out. Calls must come in the same order on every worker."""

    rank: int = 0
    size: int = 1
    rooted: bool = True
    """Messages may go to one worker alone, to which the others give without getting."""
    timeout: float = 600.0
    """Seconds after which a wait for other workers raises TimeoutError, where the library lets us look."""
    elastic: bool = False
    """Workers may join others that train already: nothing is said to them before `grace.Grace.settle`."""

    @property
    def node_size(self) -> int:
        """How many workers share this machine, as they were launched."""
        return self.size

    def split(self, node_size: int) -> None:
        """Make the groups "node" and "cross", machines being ``node_size`` consecutive workers each."""
        raise NotImplementedError(f"{type(self).__name__} has no groups of workers")

    def group_rank(self, group: str) -> int:
        """This worker's rank within a group."""
        return self.rank

    def bind(self, xp: Any) -> Transport:
        """The transport for arrays of this backend; raises if it cannot carry them."""
        return self

    @abstractmethod
    def start(self, collectives: Sequence[Collective], name: str) -> Callable[[], list[Any]]:
        """Begin one round of collectives as few messages; the returned function waits for the results."""

    def exchange(self, text: str) -> list[str]:
        """Every worker's text, in rank order (for start-up checks, not for the hot path)."""
        return [text]


from grace import execution  # noqa: E402 - it is written with the vocabulary above
