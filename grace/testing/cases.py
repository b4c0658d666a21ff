"""Helpers of the laws: contexts, workers in lockstep, and difficult gradients."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import numpy as np

from grace.core import Compressor, Context, Memory, as_program
from grace.core.collectives import Collective, arrays_of
from grace.core.communicator import Communicator
from grace.core.method import Method
from grace.core.registry import communicators, compressors, memories, usual_communicator
from grace.engine.options import Options
from grace.engine.scheduler import RoundScheduler
from grace.engine.session import Grace
from grace.engine.trace import Trace
from grace.transports.local import LocalTransport, World

SIZES = (0, 1, 7, 8, 9, 1000, 5000)
MATRICES = ((3, 5), (8, 8), (40, 25), (4, 3, 3, 8))
SHAPE: ContextVar[tuple[int, ...] | None] = ContextVar("shape", default=None)
"""The shape that a law is checking, for its error message."""
EXTREMES = (1e-45, 1e-40, 1e-38, 1e-30, 1e-8, 1.0, 6e4, 1e15, 1e30)
"""Magnitudes from float32's least subnormal number to one whose square is no float32."""
WIRE = {"uint8", "int8", "int32", "int64", "float16", "float32", "float64"}
"""The dtypes that arrays of a payload may have."""


class Laws(dict[str, Callable[..., None]]):
    """Laws by name: functions that raise AssertionError if the law is violated."""

    def add(self, check: Callable[..., None]) -> Callable[..., None]:
        """Decorator: add a function to the laws."""
        self[check.__name__] = check
        return check


def fully(xp: Any) -> bool:
    """Return whether the laws run in full: on NumPy. Other toolkits, which are slower, get fewer cases."""
    return bool(xp.name == "numpy")


def context(xp: Any, shape: Any, **fields: Any) -> Context:
    """The context of a tensor "w" on worker 0 of 4."""
    shape = (shape,) if isinstance(shape, int) else shape
    SHAPE.set(shape)
    return Context(**{"xp": xp, "name": "w", "shape": shape, "world_size": 4, **fields})


def shapes(compressor: Compressor, xp: Any) -> list[tuple[int, ...]]:
    """Shapes to test a compressor with: edges of bytes and of its blocks, or matrices if it needs the shape.

    Toolkits other than NumPy get one in three; `toolkits_agree_with_numpy` compares all of them.
    """
    fit: list[tuple[int, ...]]
    if compressor.traits.needs_shape:
        fit = [shape for shape in MATRICES if compressor.applies(Context(None, "w", shape))] or [(64, 48)]
    else:
        block = compressor.traits.block_size
        edges = {block + i for i in (-1, 0, 1)} if block and block <= 5000 else set()
        fit = [(n,) for n in sorted({*SIZES, *edges})]
    return fit if fully(xp) else fit[::3]


def shape_of(compressor: Compressor, n: int = 603) -> tuple[int, ...]:
    """A shape of about n elements that the compressor compresses."""
    found = (n,) if not compressor.traits.needs_shape else _matrix(compressor, n)
    SHAPE.set(found)
    return found


def _matrix(compressor: Compressor, n: int) -> tuple[int, ...]:
    for side in (8, 20, 32, 64, 128, 256):
        if side * side >= n // 2 and compressor.applies(Context(None, "w", (side, side + 10))):
            return (side, side + 10)
    return (512, 512)


def spread(*shape: int, seed: int = 0) -> Any:
    """float32 numbers of widely varying magnitudes, both signs."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp(rng.standard_normal(shape))).astype(np.float32)


def patterns(n: int, magnitudes: Sequence[float]) -> dict[str, Any]:
    """Difficult vectors: zeros, spikes, constants, the ends of float32's range."""
    spike = np.zeros(n, np.float32)
    spike[n // 2] = -3
    signs = np.where(np.arange(n) % 2, np.float32(1), np.float32(-1))
    found = {"zeros": np.zeros(n, np.float32), "spike": spike, "signs": signs, "alternating": signs * spread(n) ** 2}
    for size in magnitudes:
        found |= {f"{size}": np.full(n, size, np.float32), f"-{size}": np.full(n, -size, np.float32)}
        found |= {f"some {size}": (spread(n) / 50 * np.float32(size)).astype(np.float32)}
        found |= {f"spike of {size}": spike / 3 * np.float32(size)}
    return found


def host(xp: Any, arrays: Any) -> list[Any]:
    """Arrays, copied to NumPy."""
    return [np.array(xp.to_numpy(array)) for array in arrays]


def same(one: Any, two: Any) -> bool:
    """Return whether shapes, dtypes and bits are equal, array by array."""
    return [(a.shape, a.dtype, a.tobytes()) for a in one] == [(b.shape, b.dtype, b.tobytes()) for b in two]


# -- several workers in lockstep -----------------------------------------------------------------------------------
def together(xp: Any, programs: list[Any]) -> tuple[list[Any], list[Collective]]:
    """Run several workers' programs in lockstep; returns their results, and worker 0's collectives."""
    world = World(len(programs))
    flights = [
        RoundScheduler("law", {"w": as_program(program)}, LocalTransport(world, rank).bind(xp), Trace())
        for rank, program in enumerate(programs)
    ]
    while [flight for flight in flights if not flight.advance()]:
        pass
    return [flight.results["w"] for flight in flights], [asked for _, asked, _ in flights[0].asked]


def alone(make: Callable[[Context], Any], ctx: Context) -> Any:
    """The result of ``make(ctx)`` for worker ctx.rank, when the other workers run it with their contexts."""
    steps = make(ctx)
    try:
        next(as_program(steps))
    except StopIteration as stop:
        return stop.value
    return together(ctx.xp, [make(replace(ctx, rank=rank)) for rank in range(ctx.world_size)])[0][ctx.rank]


def handed_over(make: Callable[[Context], Any], ctx: Context) -> list[Any]:
    """The arrays that worker 0 sends inside ``make(ctx)``."""
    _, asked = together(ctx.xp, [make(replace(ctx, rank=rank)) for rank in range(ctx.world_size)])
    return [array for collective in asked for array in arrays_of(collective)]


def send(compressor: Compressor, xp: Any, x: Any, ctx: Context, state: Any = None) -> Any:
    """Payload and next state of a compressor, without memory."""
    state = compressor.init(ctx) if state is None else state
    return alone(lambda ctx: compressor.compress(xp.asarray(x.reshape(-1).copy(), "float32"), state, ctx), ctx)


def receive(compressor: Compressor, xp: Any, payload: Any, ctx: Context) -> Any:
    """A decoded payload, in NumPy."""
    found = compressor.decompress(payload, ctx)
    assert xp.dtype(found) == "float32", f"decompress gives {xp.dtype(found)}, not float32"
    assert xp.shape(found) == (ctx.size,), f"decompress gives shape {xp.shape(found)}, not ({ctx.size},)"
    return np.array(xp.to_numpy(found))


def encode(method: Method, xp: Any, x: Any, state: Any, ctx: Context) -> Any:
    """Payload and next state of a compressor with its memory."""
    return alone(lambda ctx: method.encode(xp.asarray(x.reshape(-1).copy(), "float32"), state, ctx), ctx)


# -- exchanges -----------------------------------------------------------------------------------------------------
def memory_of(compressor: Compressor) -> Memory:
    """A compressor's default memory."""
    return memories[compressor.traits.memory]()


def workers(
    compressor: Compressor, memory: Memory | None = None, communicator: Any = None, size: int = 3, **options: Any
) -> list[Grace]:
    """A Grace for each of ``size`` workers in this process; they compress small tensors, too."""
    world, method = World(size), Method(compressor, memory or memory_of(compressor))
    communicator = communicator or communicators[usual_communicator(compressor)]()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*without error feedback")
        return [
            Grace(method, communicator, LocalTransport(world, rank), Options(**{"min_numel": 0, **options}))
            for rank in range(size)
        ]


def lockstep(graces: list[Any], gradients: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One exchange of all workers of a world; returns each worker's means."""
    for grace, mine in zip(graces, gradients, strict=True):
        grace.launch(mine)
    while [grace for grace in graces if not grace.advance()]:
        pass
    for grace in graces:
        grace.land()
    return [{name: grace.mean(name) for name in mine} for grace, mine in zip(graces, gradients, strict=True)]


def states(graces: list[Any]) -> list[dict[tuple[str, str], Any]]:
    """Each worker's state, by tensor and key, in NumPy."""
    return [
        {
            (name, key): np.asarray(array)
            for name, arrays in grace.state_dict()["tensors"].items()
            for key, array in arrays.items()
        }
        for grace in graces
    ]


def unchanged(one: Any, two: Any) -> bool:
    """Return whether states are equal, bit by bit."""
    return [{key: a.tobytes() for key, a in worker.items()} for worker in one] == [
        {key: a.tobytes() for key, a in worker.items()} for worker in two
    ]


def fitting(compressor: Compressor) -> list[Communicator]:
    """The registered communicators that average whole gradients, not shards, and support a compressor."""
    made: list[Communicator] = [cls() for cls in communicators.values()]
    return [each for each in made if not each.reduce_scatters and carries(each, compressor)]


def accepted(communicator: Communicator) -> list[Compressor]:
    """The registered compressors that a communicator supports."""
    return [cls() for cls in compressors.values() if carries(communicator, cls())]


BAD = {
    f"{value} {where}": (value, where)
    for value, where in ((math.nan, 0.0), (math.nan, 0.5), (math.nan, 1.0), (math.inf, 0.5), (-math.inf, 1.0))
}
"""By label: a non-finite value, and its relative position in a gradient, 0 to 1."""


def poisoned(shape: tuple[int, ...], name: str, seed: int) -> Any:
    """float32 numbers with one non-finite element. ``name``: a key of `BAD`."""
    x = spread(*shape, seed=seed)
    value, where = BAD[name]
    x.reshape(-1)[int(where * (x.size - 1))] = value
    return x


def carries(communicator: Communicator, compressor: Compressor) -> bool:
    """Return whether a communicator accepts a compressor with its default memory, between two workers."""
    method = Method(compressor, memories[compressor.traits.memory]())
    try:
        communicator.resolve(method, LocalTransport(World(2))).check(method, 2)
    except ValueError:
        return False
    return True
