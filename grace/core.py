"""The vocabulary: Compressor, Memory, Transport, Context, Combine.

A method is the pair (compressor, memory): pure functions with explicit state, written over a backend ``xp``
and never over a toolkit. Standard library only; importing this imports no toolkit.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
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


class Calls:
    """Kernels' work that is put off, so that of many tensors it is done in one go, in the order in which it was added.

    Python that runs between two kernels finds the caches full of gradients, and takes several times as long.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[[], None], tuple[Any, ...]]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, call: Callable[[], None], *used: Any) -> None:
        """Have a call made later. What is ``used`` there stays until then: a kernel knows no more than addresses."""
        self._waiting.append((call, used))

    def make(self) -> None:
        """Make all calls that wait."""
        waiting, self._waiting = self._waiting, []
        for call, _ in waiting:
            call()


T = TypeVar("T")
Program = Generator[Collective | tuple[Collective, ...] | Calls, Any, T]
"""A computation that yields collectives and is resumed with their results; or `Calls`, once these have been made."""
Steps = Union[T, Program[T]]  # noqa: UP007 - a TypeVar alone has no | at run time in 3.10
"""A value, or a program that returns one."""


def run(steps: Steps[T]) -> Program[T]:
    """Use a value and a program alike: ``result = yield from run(steps)``."""
    if isinstance(steps, Generator):
        return (yield from steps)
    return steps


def at_once(steps: Steps[T], whose: Any) -> T:
    """What steps come to that ask for no collective. ValueError if they do, naming the method."""
    program = run(steps)
    try:
        next(program)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise ValueError(f"{name_of(whose)!r} asks for collectives inside compress, so its payload cannot be cut")


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
    """What the exchange computes in."""
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
    calls: Calls | None = field(default=None, repr=False, compare=False)
    """A kernel may leave its work here: `Compressor.fused` and `fused_mean` return arrays that are filled then, and so
    must not look at them. None: it is done at once."""
    drawn: dict[Any, Array] = field(default_factory=dict, repr=False, compare=False)
    """What a method has drawn in this step and draws again when it decodes, by all that it depends on."""

    tail: list[Array] | None = field(default=None, repr=False, compare=False)
    """Where `accumulated` may leave ``xp.excess`` of its result and 0, for a method that begins with that. None: nobody
    asks."""

    wire: str = "float32"
    """What a gradient that is sent as it is travels in: its own dtype."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def kernels(self) -> Any:
        """The backend's kernels, which know of ``undo`` and ``calls``; None or empty where there are none."""
        kernels = self.xp.kernels
        if kernels and (self.undo is not None or self.calls is not None):
            return kernels.within(self.undo, self.calls)
        return kernels

    def accumulated(self, x: Array, last: Array, beta: float = 1.0, gamma: float = 1.0) -> Array:
        """float32[n] beta * last + gamma * x, in the memory of one of them.

        It is that of ``last``, an array of the state, where `undo` can tell where that went. x is spent.
        """
        xp = self.xp
        if xp.kernels and self.undo is not None and (kernel := self.kernels.accumulate):
            return kernel(x, last, beta, gamma, self.tail)
        if beta == gamma == 1.0:
            return xp.add_to(x, last)
        if not 0 < xp.piece < self.size:
            return xp.add_to(x * gamma, last * beta)
        for start in range(0, self.size, xp.piece):
            part = slice(start, min(start + xp.piece, self.size))
            xp.write(x[part], last[part] * beta + x[part] * gamma)
        return x

    def without_undo(self) -> Context:
        """The same, where the last residual must stay as it is."""
        return self._with(undo=None)

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

    def with_tail(self) -> Context:
        """The same, with a place for what a method begins with."""
        return self._with(tail=[])

    def with_calls(self, calls: Calls | None) -> Context:
        """The same, with or without a place for calls."""
        return self._with(calls=calls)

    def _with(self, **changes: Any) -> Context:
        # As dataclasses.replace, at a fifth of its time: a step makes thousands.
        context = object.__new__(type(self))
        context.__dict__.update(self.__dict__, **changes)
        return context


def apart(arrays: Payload, others: Payload, xp: Any) -> Payload:
    """The arrays in memory of their own, copied where they share some of the others'."""
    return tuple(xp.copy(x) if any(xp.overlap(x, other) for other in others) else x for x in arrays)


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
    lossless: ClassVar[bool] = False
    """The payload is x itself, in ``ctx.wire``: float64 stays float64."""
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

    tail: ClassVar[bool] = False
    """`compress` begins with ``xp.excess`` of x and 0, which may lie in ``ctx.tail``."""

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
        (total,) = apart((self.decompress(payloads[0], ctx),), payloads[0], ctx.xp)
        for payload in payloads[1:]:
            total = self.add_decoded(total, payload, ctx)
        return total

    def fused(self, x: Array, residual: Array | None, ctx: Context) -> tuple[Payload, Array] | None:
        """``compress(x + residual)`` and what its payload does not carry, by ``ctx.kernels``; None: no kernel.

        The result is that of the plain functions. ``x`` is spent; without a residual what is left is not asked for.
        """
        return None

    def fused_mean(self, payloads: Sequence[Payload], out: Array | None, ctx: Context) -> Array | None:
        """`aggregate` by ``ctx.kernels``, written to ``out`` if there is one; None: no kernel."""
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

    lockstep: bool = False
    """The workers share a process and run round by round, so that they cannot be at different steps."""

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
