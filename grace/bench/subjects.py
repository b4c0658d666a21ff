"""GRACE's methods as measured objects: refill, encode, commit, decode; one small function each."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from grace.backends import Backend, get_backend
from grace.bench.plan import DEVICES, SCALE, SEVERAL, WORKERS, Case, Config, method_of, shapes
from grace.core import Array, Combine, Context, Payload, State, as_program
from grace.core.dtypes import ITEMSIZE
from grace.core.method import Method
from grace.engine.meter import Meter
from grace.engine.options import Options
from grace.engine.scheduler import RoundScheduler
from grace.engine.session import Grace
from grace.engine.trace import Trace
from grace.factory import grace_from_params
from grace.transports.local import LocalTransport, World

KERNELS = os.environ.get("GRACE_KERNELS", "on")
"""The variable at process start."""
NATIVE = "triton" if KERNELS == "triton" else "on"


class Subject(Protocol):
    """A measured object. Its methods run outside the clock unless they are marked as timed."""

    label: str
    bytes: int
    """Payload bytes of one worker, including the model's dense tensors."""
    workers: int
    """Number of payloads to decode."""
    state_bytes: int
    note: str

    def several(self, repeated: bool) -> None:
        """Make all workers' payloads; ``repeated``: reuse one payload, since encoding is slow."""

    def refill(self) -> None:
        """Put the next gradient where the method expects it."""

    def encode(self) -> None:
        """Timed: memory compensate, compress, memory update, for all tensors."""

    def look(self) -> None:
        """Get the arrays of the new state."""

    def commit(self) -> None:
        """Timed: store the new state."""

    def decode(self) -> None:
        """Timed: decode several workers' payloads to their mean, for all tensors."""

    def step(self) -> None:
        """Timed: replace gradients by means in place, on one worker."""

    def release(self) -> None:
        """Release a call's results."""


class Bench:
    """Shared data of a process's measured objects: read-only gradients, and buffers."""

    def __init__(self, xp: Backend, config: Config):
        self.xp, self.config = xp, config
        self.n = sum(math.prod(shape) for shape in shapes(config, False).values())
        hosts = [gradient(self.n, seed) for seed in range(SEVERAL)]
        self.gradients = [own(xp, host) for host in hosts]
        self.staging = own(xp, hosts[0])
        """The vector to encode. Refilled before each call: methods may overwrite it."""
        self.out = own(xp, hosts[0])
        copy: Any = (xp.buffers.write, self.out, self.staging) if xp.mutable else (np.copyto, hosts[0].copy(), hosts[1])
        self.memcpy = partial(*copy)
        """Copies as many bytes as the gradient has, between existing arrays. For TensorFlow, NumPy copies."""

    def refill(self, turn: int) -> None:
        """Make one of the gradients `staging`: copy it into this buffer, unless arrays are immutable."""
        if self.xp.mutable:
            self.xp.buffers.write(self.staging, self.gradients[turn % SEVERAL])
        else:
            self.staging = self.gradients[turn % SEVERAL]

    def wait(self) -> None:
        """Wait until the device has finished."""
        if cuda := cuda_of(self.xp):
            cuda.synchronize()

    @property
    def events(self) -> Callable[[Callable[[], None]], float] | None:
        """A function that times a call by the device's events, in seconds; None on the host."""
        cuda = cuda_of(self.xp)
        if not cuda:
            return None

        def seconds(operation: Callable[[], None]) -> float:
            began, ended = (cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            operation()
            ended.record()
            ended.synchronize()
            return float(began.elapsed_time(ended)) / 1e3

        return seconds

    @property
    def device(self) -> str:
        """The CUDA device's name; empty on the host."""
        cuda = cuda_of(self.xp)
        return str(cuda.get_device_name()) if cuda else ""

    def free_bytes(self) -> float:
        """Free memory for gradients in bytes; infinite if the system does not report it."""
        if cuda := cuda_of(self.xp):
            return float(cuda.mem_get_info()[0])
        try:
            text = Path("/proc/meminfo").read_text()
        except OSError:
            return float("inf")
        return 1024 * int(re.search(r"MemAvailable: +(\d+)", text)[1])  # type: ignore[index]


def cuda_of(xp: Any) -> Any:
    """torch.cuda for a backend on its current device; None for others."""
    device = getattr(xp, "device", None)
    if device is None or device.type != "cuda":
        return None
    import torch

    return torch.cuda


def backend(config: Config) -> Any:
    """The backend, with its number of threads. RuntimeError if PyTorch lacks the device."""
    if config.toolkit == "torch":
        import torch

        torch.set_num_threads(config.threads)
        device = DEVICES.get(config.backend, "cpu")
        if device == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("PyTorch finds no CUDA device here: torch.cuda.is_available() is False")
        return get_backend("torch", device)
    if config.backend == "tensorflow":
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(config.threads)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    return get_backend(config.backend)


def gradient(n: int, seed: int) -> Any:
    """float32[n] from a Laplace distribution, on the host."""
    rng = np.random.default_rng(seed)
    size = rng.standard_exponential(n, dtype=np.float32)
    signs = np.unpackbits(rng.integers(0, 256, -(-n // 8), np.uint8), count=n).astype(np.float32)
    signs *= 2 * SCALE
    signs -= SCALE
    size *= signs
    return size


def own(xp: Backend, host: Any) -> Array:
    """A backend copy of a NumPy array."""
    return xp.asarray(host.copy(), "float32")


class Part:
    """One tensor of a model: its slice of the flat vector, its state, and all workers' payloads."""

    def __init__(self, name: str, shape: tuple[int, ...], start: int):
        self.name, self.shape, self.start, self.size = name, shape, start, math.prod(shape)
        self.answers: list[list[Any]] = []
        """Results of the collectives inside the first worker's encode, in an even and an odd step."""
        self.cells: dict[str, Any] = {}
        self.payloads: list[Payload] = []

    def of(self, x: Array) -> Array:
        """This tensor's slice of the flat vector; the vector itself if it is the only tensor."""
        return x if self.size == x.shape[0] else x[self.start : self.start + self.size]


class Ours:
    """A compressor and memory of GRACE, eagerly or in a graph."""

    def __init__(self, case: Case, bench: Bench, mode: str):
        self.label, self.bench, self.mode = case.label, bench, mode
        self.method = method_of(case.params)
        self.agreed = self.method.compressor.traits.combine is Combine.AGREED
        self.workers = 1 if self.agreed else WORKERS
        self._traced_xp = get_backend("jax", "traced") if bench.config.toolkit == "jax" else bench.xp
        self.note = ""
        self.turn = 0
        self._how = case.how
        self._settle()
        self._params = case.params
        self._step: Any = None
        self.parts: list[Part] = []
        dense, start = 0, 0
        for name, shape in shapes(bench.config, self.method.compressor.traits.needs_shape).items():
            part = Part(name, shape, start)
            start += part.size
            if part.size and self.method.compressor.applies(self._context(part)) and self._large(part):
                self.parts.append(part)
            else:
                dense += part.size
        if not self.parts:
            raise ValueError(f"does not apply to {list(shape)}: these tensors go dense")
        self._refuse()
        self.bytes = 4 * dense
        self._ok = bench.xp.all(bench.xp.asarray([True], "bool"))
        with bench.xp.quiet():  # as in a step: JAX needs it for 64-bit types
            for part in self.parts:
                self._begin(part)
        self.state_bytes = sum(nbytes(bench.xp, cell.read()) for part in self.parts for cell in part.cells.values())
        self._traced_encode: Any = None
        self._traced_decode: Any = None
        self._trace()
        self._inputs: list[tuple[State, Context, list[Any]]] = []
        self._results: list[tuple[Payload, State]] = []
        self._moves: list[tuple[Any, Array, Array, bool]] = []

    def _settle(self) -> None:
        # Set GRACE_KERNELS, which is read at each call: cases of a process may use kernels differently.
        os.environ["GRACE_KERNELS"] = {"": KERNELS, "native": NATIVE}.get(self._how, "off")

    def _refuse(self) -> None:
        xp, config = self.bench.xp, self.bench.config
        if config.toolkit == "jax" and config.tensors != "flat":
            raise ValueError("a step of several tensors is not measured on JAX, where the program compiles it whole")
        if self._how == "native" and not xp.kernels:
            raise ValueError("native kernels are not built for this machine")

    def _large(self, part: Part) -> bool:
        return self.bench.config.tensors == "flat" or part.size >= Options().min_numel

    def _context(self, part: Part, rank: int = 0, world_size: int = WORKERS) -> Context:
        how = "float32", rank, world_size, self._at(self._number)
        return Context(self.bench.xp, part.name, part.shape, *how, lr=lambda: 0.1, _draws={})

    def _at(self, step: int) -> Any:
        return self.bench.xp.asarray(step, "int64") if self.bench.xp.traced else step

    @property
    def _number(self) -> int:
        # Steps 2 and 1 in turns: the first step may ask for more than later ones, and some methods alternate.
        return 2 - self.turn % 2

    def _heard(self, part: Part) -> list[Any]:
        # Returns copies of the results of this step's collectives.
        return list(copied(self.bench.xp, part.answers[self.turn % 2]))

    def _begin(self, part: Part) -> None:
        # Run all workers once, in lockstep if they exchange; the timed calls replay the first worker's results.
        xp = self.bench.xp
        part.answers = [[], []]
        if exchanges(self._program(part, 0, 2)):
            first, state, asked = self._exchanged(part, 2)
            self._exchanged(part, 1)
            meter = Meter(xp)
            meter.extend(["w"])
            meter.add(meter.count(["w"], asked, lambda group: 0, {}))
            self.bytes += meter.read()["w"][0]
        else:
            first, state = drive(self._program(part, 0, 2), [])
        part.payloads = [copied(xp, tuple(first))]
        part.cells = {key: xp.cell(copied(xp, value)) for key, value in state.items()}
        if not self.agreed:
            self.bytes += sum(nbytes(xp, array) for array in part.payloads[0])

    def _program(self, part: Part, rank: int, step: int) -> Any:
        ctx = replace(self._context(part, rank), step=self._at(step))
        x = copied(self.bench.xp, part.of(self.bench.gradients[rank]))
        return as_program(self.method.encode(x, self.method.init(ctx), ctx))

    def _exchanged(self, part: Part, step: int) -> tuple[Payload, State, list[Any]]:
        # Run a step on all workers; returns the first worker's payload, state and requests.
        xp, world = self.bench.xp, World(WORKERS)
        programs = [self._program(part, rank, step) for rank in range(WORKERS)]
        programs[0] = listening(programs[0], part.answers[step % 2], xp)
        flights = [
            RoundScheduler("bench", {"w": each}, LocalTransport(world, rank).bind(xp), Trace())
            for rank, each in enumerate(programs)
        ]
        while [flight for flight in flights if not flight.advance()]:
            pass
        return *flights[0].results["w"], flights[0].asked

    def several(self, repeated: bool) -> None:
        xp = self.bench.xp
        for part in self.parts:
            for rank in range(1, self.workers):
                if repeated:
                    part.payloads.append(copied(xp, part.payloads[0]))
                    continue
                with xp.quiet():
                    payload, _ = drive(self._program(part, rank, self._number), self._heard(part))
                part.payloads.append(copied(xp, tuple(payload)))
        if repeated and self.workers > 1:
            self.note = "one payload stands for those of all workers"

    # -- timed operations -------------------------------------------------------------------------------------------
    def refill(self) -> None:
        self._settle()
        self.turn += 1
        self.bench.refill(self.turn)
        self._results = []
        self._inputs = [
            ({key: cell.read() for key, cell in part.cells.items()}, self._context(part), self._heard(part))
            for part in self.parts
        ]

    def encode(self) -> None:
        states, contexts, answers = zip(*self._inputs, strict=True)
        x = self.bench.staging
        if self._traced_encode is not None:
            self._results = self._traced_encode(x, list(states), contexts[0].step)
        else:
            self._results = self._encode(x, states, contexts, answers)

    def _encode(self, x: Array, states: Any, contexts: Any, answers: Any) -> list[tuple[Payload, State]]:
        return [
            drive(as_program(self.method.encode(part.of(x), state, ctx)), heard)
            for part, state, ctx, heard in zip(self.parts, states, contexts, answers, strict=True)
        ]

    def look(self) -> None:
        x = self.bench.staging
        self._moves = [
            (cell, cell.read(), state[key], self.bench.xp.buffers.same_memory(state[key], part.of(x)))
            for part, (_, state) in zip(self.parts, self._results, strict=True)
            for key, cell in part.cells.items()
        ]

    def commit(self) -> None:
        with self.bench.xp.buffers.streaming_writes(self.bench.n):  # as in `Grace.land`
            for cell, old, new, spent in self._moves:
                commit(self.bench.xp, cell, old, new, spent, self._ok)

    def decode(self) -> None:
        payloads = [part.payloads for part in self.parts]
        if self._traced_decode is not None:
            self._traced_decode(payloads)
        else:
            with self.bench.xp.buffers.streaming_writes(self.bench.n):
                self._decode(payloads, map(self._context, self.parts))

    def _decode(self, payloads: list[list[Payload]], contexts: Iterable[Context]) -> list[Array]:
        outs = [part.of(self.bench.out) for part in self.parts]
        return [mean(self.method, *each) for each in zip(payloads, contexts, outs, strict=True)]

    def step(self) -> None:
        xp, x = self.bench.xp, self.bench.staging
        tensors = shapes(self.bench.config, self.method.compressor.traits.needs_shape)
        gradients, start = {}, 0
        for name, shape in tensors.items():
            gradients[name] = xp.reshape(x[start : start + math.prod(shape)], shape)
            start += math.prod(shape)
        if self._step is None:
            grace = grace_from_params(self._params, "local")
            grace.build(gradients)
            self._step = stepper(grace, self.mode)
        self._step(gradients)

    def release(self) -> None:
        self._results, self._inputs, self._moves = [], [], []

    def _trace(self) -> None:
        # Trace all tensors into one graph, as the integrations do; the results of collectives are constants in this
        # graph.
        if self.mode != "graph":
            return
        fixed = [replace(self._context(part), xp=self._traced_xp) for part in self.parts]
        answers = [part.answers[0] for part in self.parts]
        compiled = jitted if self.bench.config.toolkit == "jax" else graph
        self._traced_encode = compiled(
            lambda x, states, step: self._encode(x, states, [replace(ctx, step=step) for ctx in fixed], answers)
        )
        self._traced_decode = compiled(lambda payloads: self._decode(payloads, fixed))


def mean(method: Method, payloads: Sequence[Payload], ctx: Context, out: Array | None) -> Array:
    """All workers' payloads, or the agreed payload -> float32[n], their mean; written to ``out`` if given."""
    found: Array = method.mean(payloads, ctx, agreed=method.compressor.traits.combine is Combine.AGREED).array(out)
    return found


def stepper(grace: Grace, mode: str) -> Callable[[dict[str, Array]], Any]:
    """Return a function that runs a step as an integration does: means replace gradients if arrays are mutable."""
    if mode == "graph":
        return graph(grace.step)

    def step(gradients: dict[str, Array]) -> None:
        grace.launch(gradients, spent=True)
        grace.land()
        for name, gradient in gradients.items():
            mean = grace.mean(name)
            if grace.xp.mutable and not grace.xp.buffers.same_memory(mean, gradient):
                grace.xp.buffers.write(gradient, mean)

    return step


def commit(xp: Backend, cell: Any, old: Array, new: Array, spent: bool, ok: Array) -> None:
    """Store new state as `Grace` does: copy arrays that are in the donated gradient's memory."""
    if new is old:
        return
    if spent:
        xp.buffers.write(old, xp.choose(ok, new, old))
    else:
        cell.assign(xp.choose(ok, new, old))


def drive(program: Generator[Any, Any, Any], answers: Iterable[Any]) -> Any:
    """Run a program with the results of its collectives; returns its result."""
    answer = None
    try:
        program.send(None)
        for answer in answers:
            program.send(answer)
    except StopIteration as stop:
        return stop.value
    raise RuntimeError("the program asks for more collectives than it did the first time")


def exchanges(program: Generator[Any, Any, Any]) -> bool:
    """Whether a program requests a collective before it returns."""
    try:
        program.send(None)
    except StopIteration:
        return False
    program.close()
    return True


def listening(program: Generator[Any, Any, Any], answers: list[Any], xp: Backend) -> Generator[Any, Any, Any]:
    """Wrap a program; the results that it receives are copied to ``answers``."""
    answer = None
    while True:
        try:
            asked = program.send(answer)
        except StopIteration as stop:
            return stop.value
        answer = yield asked
        answers.append(copied(xp, answer))


def copied(xp: Backend, arrays: Any) -> Any:
    """Arrays, and sequences of arrays, copied."""
    if isinstance(arrays, Sequence):
        return (tuple if isinstance(arrays, tuple) else list)(copied(xp, each) for each in arrays)
    return xp.buffers.copy(arrays)


def nbytes(xp: Backend, array: Array) -> int:
    """Bytes of one array."""
    return int(math.prod(int(length) for length in xp.shape(array))) * ITEMSIZE[xp.dtype(array)]


def graph(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function as a TensorFlow graph."""
    import tensorflow as tf

    return tf.function(function, autograph=False)


def jitted(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function compiled by JAX, which returns when its results are there."""
    import jax

    from grace.backends.jax import wide

    @jax.jit
    def inside(*arguments: Any) -> Any:
        with wide():
            return function(*arguments)

    return lambda *arguments: jax.block_until_ready(inside(*arguments))
