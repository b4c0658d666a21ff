"""What the tests need to run the methods of the table (tests/table)."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from table import ROWS

from grace import grace_from_params
from grace.backends import get_backend
from grace.collectives import AllToAll, Gather, Reduce, arrays_of
from grace.core import Context, run
from grace.transports.local import LocalTransport, World

BACKENDS = ("numpy", "torch", "tensorflow")
SIZES = (1, 7, 8, 9, 1000, 5000)
VOTES = ("signsgd", "signum")
EXCHANGES = [(row, communicator) for row in ROWS for communicator in row.communicators]


def rows(chosen: Callable[[Any], Any] = lambda row: True) -> Any:
    """Decorator: run a test for each row for which ``chosen`` is true."""
    return pytest.mark.parametrize("row", [row for row in ROWS if chosen(row)], ids=str)


def exchanges(chosen: Callable[[Any, str], Any] = lambda row, communicator: True) -> Any:
    """Decorator: run a test, which uses the fixture ``xp``, for each row with each communicator that fits it.

    NumPy sees them all. On the other toolkits a broadcast is left to the transports' tests, and a width of codes to
    test_packing.py.
    """
    some = [
        (row, communicator, name)
        for name in BACKENDS
        for row, communicator in EXCHANGES
        if chosen(row, communicator) and (name == "numpy" or (row.everywhere and communicator != "broadcast"))
    ]
    ids = [f"{name}-{row}-{communicator}" for row, communicator, name in some]
    return pytest.mark.parametrize("row, communicator, xp", some, ids=ids, indirect=["xp"])


def backend(name: str) -> Any:
    """A backend; skips the test where its toolkit is not installed."""
    if name != "numpy":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a toolkit says about itself while it is imported
            pytest.importorskip(name)
    return get_backend(name)


def context(xp: Any, shape: Any, **fields: Any) -> Context:
    """The context of a tensor "w" on worker 0 of 4."""
    shape = (shape,) if isinstance(shape, int) else shape
    return Context(**{"xp": xp, "name": "w", "shape": shape, "world_size": 4, **fields})


def parts(row: Any) -> Any:
    """The `grace.Method` of a row: its compressor and memory."""
    return grace_from_params({**row.params, "communicator": row.communicators[0]}, LocalTransport()).method


def workers(params: dict[str, Any], size: int) -> list[Any]:
    """One Grace for each worker of a world in this process; small tensors are compressed too."""
    world = World(size)
    return [grace_from_params({"min_numel": 0, **params}, LocalTransport(world, rank)) for rank in range(size)]


def lockstep(graces: list[Any], gradients: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One exchange of all workers of a world; the means that each worker finds."""
    for grace, mine in zip(graces, gradients, strict=True):
        grace.launch(mine)
    while [grace for grace in graces if not grace.advance()]:
        pass
    for grace in graces:
        grace.land()
    return [{name: grace.mean(name) for name in mine} for grace, mine in zip(graces, gradients, strict=True)]


def together(programs: list[Any]) -> tuple[list[Any], list[Any]]:
    """Programs of several workers in lockstep: their results, and what worker 0 asked for."""
    programs = [run(program) for program in programs]
    answers: list[Any] = [None] * len(programs)
    results, asked = [], []
    while not results:
        requests = []
        for program, answer in zip(programs, answers, strict=True):
            try:
                requests.append(program.send(answer))
            except StopIteration as stop:
                results.append(stop.value)
        assert not (results and requests), "one worker has finished, another asks for a collective"
        if requests:
            asked.append(requests[0])
            answers = _answers(requests)
    return results, asked


def _answers(requests: list[Any]) -> list[Any]:
    # What each worker gets back when the workers ask for this.
    first, everybody = requests[0], range(len(requests))
    if isinstance(first, tuple):
        rounds = [_answers(list(each)) for each in zip(*requests, strict=True)]
        return [tuple(answers[rank] for answers in rounds) for rank in everybody]
    if isinstance(first, Reduce):
        columns = [list(column) for column in zip(*(request.arrays for request in requests), strict=True)]
        totals = []
        for total, *rest in columns:
            for other in rest:
                total = total + other
            totals.append(total / len(requests) if first.op == "mean" else total)
        assert first.op in ("mean", "sum")
        return [tuple(totals) for _ in everybody]
    if isinstance(first, Gather):
        return [[request.arrays for request in requests] for _ in everybody]
    if isinstance(first, AllToAll):
        return [[request.parts[rank] for request in requests] for rank in everybody]
    return [requests[first.root].arrays for _ in everybody]


def alone(make: Callable[[Context], Any], ctx: Context) -> Any:
    """What ``make(ctx)`` gives worker ctx.rank when the other workers do the same with their contexts."""
    steps = make(ctx)
    try:
        next(run(steps))
    except StopIteration as stop:
        return stop.value
    everybody = [make(replace(ctx, rank=rank)) for rank in range(ctx.world_size)]
    return together(everybody)[0][ctx.rank]


def handed_over(make: Callable[[Context], Any], ctx: Context) -> list[Any]:
    """The arrays that worker 0 hands over inside ``make(ctx)``."""
    _, asked = together([make(replace(ctx, rank=rank)) for rank in range(ctx.world_size)])
    rounds = [each if isinstance(each, tuple) else (each,) for each in asked]
    return [array for each in rounds for collective in each for array in arrays_of(collective)]


def host(xp: Any, payload: Any) -> list[Any]:
    """Arrays of a payload, copied to NumPy."""
    return [np.array(xp.to_numpy(array)) for array in payload]


def same(one: Any, two: Any) -> bool:
    """Equal shapes, dtypes and bits, array by array."""
    return [(a.shape, a.dtype, a.tobytes()) for a in one] == [(b.shape, b.dtype, b.tobytes()) for b in two]


def normal(*shape: int, seed: int = 0) -> Any:
    """float32 numbers of the normal distribution."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def spread(*shape: int, seed: int = 0) -> Any:
    """Numbers of very different sizes, both signs."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp(rng.standard_normal(shape))).astype(np.float32)


def send(method: Any, xp: Any, x: Any, ctx: Context, state: Any = None) -> Any:
    """Payload and next state of the compressor, without memory."""
    compressor = method.compressor
    state = compressor.init(ctx) if state is None else state
    return alone(lambda ctx: compressor.compress(xp.asarray(x.reshape(-1).copy(), "float32"), state, ctx), ctx)


def receive(method: Any, xp: Any, payload: Any, ctx: Context) -> Any:
    """What a payload decodes to, in NumPy."""
    found = method.compressor.decompress(payload, ctx)
    assert xp.dtype(found) == "float32"
    assert xp.shape(found) == (ctx.size,)
    return np.array(xp.to_numpy(found))


def method_of(**params: Any) -> Any:
    """The `grace.Method` of a dictionary of parameters."""
    return grace_from_params(params, LocalTransport()).method


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
