"""Grace: holds the triple, the transport and every tensor's state, and drives a gradient's way to the mean."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

from grace.backends import Backend, backend_of
from grace.backends.base import ITEMSIZE
from grace.collectives import Reduce
from grace.core import Array, Communicator, Context, Memory, Method, Program, Transport, name_of
from grace.execution import Mean, apart, as_array
from grace.flight import Flight
from grace.layout import Bucket, Tensor, Unit, layout
from grace.meter import Meter
from grace.report import Report, TensorReport
from grace.trace import Trace

FORMAT = 1  # of state_dict
FLOATS = ("float16", "bfloat16", "float32", "float64")
MOMENTUM_TWICE = "memory {!r} has momentum of its own: set the optimizer's momentum to 0"
SPARSE = "its sparse gradients are made dense first"
PRESENT = "(present)"  # the program that counts who has a gradient
DENSE = "(dense)"  # the program of all tensors of a bucket that go dense


@dataclass(frozen=True)
class Options:
    """What is common to all methods."""

    min_numel: int = 1024
    """Tensors of fewer elements go dense, in their bucket's one dense message; 0: compress everything."""
    fuse: str = "tensor"
    """What a method sees as one tensor: "tensor", "bucket" (all of a bucket, flat) or "model"."""
    bucket_mb: float = 25.0
    """Gradients that travel together: a bucket is closed once it holds so many MiB, the first one once it holds 1."""
    nonfinite: str = "poison"
    """When a mean is not finite, the tensor's state stays as it was, and the mean is handed on ("poison": every
    worker's loss scaler sees it), replaced by zeros ("zero"), or FloatingPointError is raised on all workers ("raise").
    """
    seed: int = 0
    """Of all random numbers. The same on every worker."""

    def __post_init__(self) -> None:
        for key, choices in (("fuse", ("tensor", "bucket", "model")), ("nonfinite", ("poison", "zero", "raise"))):
            if getattr(self, key) not in choices:
                raise ValueError(f"{key}={getattr(self, key)!r}: choose one of {', '.join(map(repr, choices))}")
        if self.min_numel < 0:
            raise ValueError(f"min_numel={self.min_numel!r} must be 0 or more")
        if not self.bucket_mb > 0:
            raise ValueError(f"bucket_mb={self.bucket_mb!r} must be positive")


class Job(NamedTuple):
    """A gradient on its way; `Grace.finish` gives its mean."""

    name: str


class Grace:
    """A method, a communicator and a transport at work on named gradients.

    Made by `grace.grace_from_params`. The toolkits' doors (`grace.torch`, `grace.tensorflow`) drive it; so may you, by
    `build` once and `step` (or `start` and `finish`) for every exchange. Every worker must make the same calls.
    """

    def __init__(self, method: Method, communicator: Communicator, transport: Transport, options: Options):
        method.check()
        communicator = communicator.fitted(method, transport)
        communicator.check(method, transport.size)
        if communicator.scattered and options.fuse != "tensor":
            raise ValueError(
                f"communicator {name_of(communicator)!r} needs the rows of each tensor apart: use fuse='tensor', not "
                f"{options.fuse!r}"
            )
        self.method, self.communicator, self.options = method, communicator, options
        self.transport = transport
        self.track_missing = False
        """Some gradient may be absent on some workers (None): costs 4 bytes per tensor and step."""
        self.learning_rate: Callable[[str], Any] | None = None
        """Gives a tensor's learning rate by its name, for memories that need it. The toolkits' doors set it."""
        self._xp: Backend | None = None
        self._tensors: dict[str, Tensor] = {}
        self._buckets: list[Bucket] = []
        self._unit_of: dict[str, Unit] = {}
        self._cells: dict[str, dict[str, Any]] = {}
        self._notes: dict[str, str] = {}
        self._step: Any = None
        self._meter: Any = None
        self.trace = Trace()
        """Where the time goes; the toolkits' doors note what they know."""
        self._skipped = 0
        self._waiting: Mapping[str, Any] | None = None  # a checkpoint that came before the tensors
        self._clear()

    def _clear(self) -> None:
        self._gradients: dict[str, Array | None] = {}
        self._spent: set[str] = set()
        self._flights: list[tuple[Flight, dict[Unit, Array]]] = []
        self._launched = 0
        self._means: dict[str, Array | None] = {}

    @property
    def xp(self) -> Backend:
        """The backend; known once `build` has seen a tensor."""
        if self._xp is None:
            raise RuntimeError("call build(named_tensors) first: nothing is known about the gradients yet")
        return self._xp

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def world_size(self) -> int:
        return self.transport.size

    @property
    def started(self) -> set[str]:
        """Tensors whose gradient of this step was handed in."""
        return set(self._gradients)

    @property
    def names(self) -> list[str]:
        """Names of all tensors, in the order in which they were built."""
        return list(self._tensors)

    # -- set-up -----------------------------------------------------------------------------------------------------
    def build(self, named_tensors: Mapping[str, Array] | Iterable[tuple[str, Array]]) -> None:
        """Lay out tensors and make all their state. ``named_tensors``: parameters or gradients; only shapes count.

        Called again, it adds what is new. Raises on every worker, naming the difference, when the workers' tensors or
        settings differ.
        """
        named = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
        new: dict[str, Tensor] = {}
        for name, array in named:
            xp = backend_of(array)
            if self._xp is None:
                self._xp = xp
                self.transport = self.transport.bind(xp)
                self.communicator.prepare(self.transport)
            elif xp is not self._xp:
                raise ValueError(
                    f"{name!r} lies on another toolkit or device than the tensors before it: use a second Grace"
                )
            tensor = Tensor(name, xp.shape(array), xp.dtype(array))
            if tensor.dtype not in FLOATS:
                raise TypeError(
                    f"{name!r} has dtype {tensor.dtype}: only {', '.join(FLOATS)} gradients can be averaged"
                )
            if self.communicator.scattered and tensor.shape[:1] != (self.world_size,):
                raise ValueError(
                    f"communicator {name_of(self.communicator)!r} hands each of {self.world_size} workers its own row "
                    f"of a tensor, but {name!r} has shape {list(tensor.shape)}. It is for grace.torch.fsdp: take "
                    "another one for whole gradients"
                )
            if name in new or self._tensors.get(name, tensor) != tensor:
                raise ValueError(f"two tensors are named {name!r}: names must be unique, and shapes must not change")
            if name not in self._tensors:
                new[name] = tensor
        if not new:
            return
        xp = self.xp
        self._agree(new.values())
        self._tensors.update(new)
        applies = partial(self.communicator.applies, self.method)
        buckets = layout(new.values(), name_of(self.method.compressor), applies, self.options, xp, len(self._buckets))
        self._buckets += buckets
        if self._step is None:
            self._step = xp.cell(xp.asarray(0, "int64")) if xp.traced else Counter()
            self._meter = Meter(xp)
            self._meter.extend([PRESENT])
        for unit in (unit for bucket in buckets for unit in bucket.units):
            self._unit_of.update({tensor.name: unit for tensor in unit.tensors})
            ctx = self._context(unit, 0)
            state = self.method.memory.init_dense(ctx) if unit.dense else self.communicator.init(self.method, ctx)
            self._cells[unit.name] = {}
            for number, (key, value) in enumerate(state.items()):  # each in memory of its own: it is written to
                (own,) = apart((value,), tuple(state.values())[:number], xp)
                self._cells[unit.name][key] = xp.cell(own)
        self._meter.extend([unit.name for bucket in buckets for unit in bucket.units])
        if self._waiting is not None:
            self.load_state_dict(self._waiting)

    def _agree(self, tensors: Iterable[Tensor]) -> None:
        from grace import __version__

        if self.world_size == 1:
            return
        settings = {
            "grace's version": __version__,
            "compressor": repr(self.method.compressor),
            "memory": repr(self.method.memory),
            "communicator": repr(self.communicator),
            # Both decode the same numbers, but a graph may round a constant division otherwise than a kernel.
            "the use of native kernels": "on" if self.xp.kernels else "off",
            **asdict(self.options),
        }
        mine = json.dumps([settings, [asdict(tensor) for tensor in tensors]])
        texts = self.transport.exchange(mine)
        # Every worker compares the same texts with worker 0's, so all of them raise together.
        for rank, text in enumerate(texts):
            if text != texts[0]:
                raise ValueError(
                    f"worker 0 and worker {rank} differ: {_difference(json.loads(texts[0]), json.loads(text))}"
                )

    def _context(self, unit: Unit, step: Any) -> Context:
        return Context(
            xp=self.xp,
            name=unit.name,
            shape=unit.shape,
            dtype=unit.dtype,
            rank=self.rank,
            world_size=self.world_size,
            step=step,
            seed=self.options.seed,
            lr=None if self.learning_rate is None else partial(self.learning_rate, unit.tensors[0].name),
        )

    # -- exchange ---------------------------------------------------------------------------------------------------
    def start(self, name: str, gradient: Array | None, spent: bool = False) -> Job:
        """Hand in a gradient. Its bucket leaves as soon as it is complete and the buckets before it have left.

        Buckets leave in one order on all workers, whatever the order of these calls. ``spent``: its memory may be used
        for the exchange and for the mean, where the toolkit can; read it no more. Raises KeyError for a name that was
        not built and RuntimeError for a second gradient before `finish`.
        """
        self._hand_in(name, gradient, spent)
        while self._launched < len(self._buckets):
            bucket = self._buckets[self._launched]
            if not bucket.names <= self._gradients.keys():
                break
            self._launched += 1
            self._launch(bucket.name, bucket.units)
        return Job(name)

    def finish(self, job: Job) -> Array | None:
        """The mean of a gradient, in its shape and dtype. The first call ends the step.

        A gradient that was not handed in counts as absent on this worker: with ``track_missing`` its mean is None if it
        is absent everywhere, and zero is averaged for it otherwise.
        """
        if job.name not in self._means:
            self.flush()
        return self._means.pop(job.name)

    def flush(self) -> None:
        """End the step: launch what is left, wait for everything, and keep the new state."""
        for bucket in self._buckets[self._launched :]:
            self._launch(bucket.name, bucket.units)
        self._launched = len(self._buckets)
        self.land()

    def step(self, gradients: Mapping[str, Array | None]) -> dict[str, Array | None]:
        """The means of these gradients, in one exchange. Tensors that are not named take no part."""
        if not gradients:
            return {}
        self.launch(gradients)
        self.land()
        return {name: self._means.pop(name) for name in gradients}

    def launch(self, gradients: Mapping[str, Array | None], together: str = "", spent: bool = False) -> None:
        """Hand in gradients and let them leave now, one message for each bucket. `land` ends the step.

        ``together``: a name under which they all leave as one message instead. ``spent``: as in `start`.
        """
        for name, gradient in gradients.items():
            self._hand_in(name, gradient, spent)
        names = dict.fromkeys(self._unit_of[name].name for name in gradients)
        groups = [(bucket.name, [unit for unit in bucket.units if unit.name in names]) for bucket in self._buckets]
        if together:
            groups = [(together, [unit for _, units in groups for unit in units])]
        for label, units in groups:
            if units:
                self._launch(label, tuple(units))

    def land(self, last: bool = True) -> None:
        """Wait for all that was launched, bucket by bucket and round by round, and keep the new state.

        ``last``: the step ends here; otherwise more of its tensors are to come.
        """
        try:
            while not self.advance():
                pass
            means: dict[str, Array | None] = {}
            with self.xp.quiet():
                for flight, flat in self._flights:
                    with self.trace.span("decompress", flight.name):
                        means.update(self._commit(flight, flat))
        finally:
            self._clear()
        self._means = means
        if last:
            self._step.assign(self._step.read() + 1)

    def abandon(self) -> None:
        """Drop a step that was begun: wait for what is under way, and keep neither means nor state."""
        for flight, _ in self._flights:
            flight.settle()
        self._clear()

    def advance(self) -> bool:
        """One round of every bucket, in order. True when nothing is left to exchange."""
        with self.xp.quiet():
            done = [flight.advance() for flight, _ in self._flights]  # every one of them, so no generator
        return all(done)

    def note(self, name: str, text: str) -> None:
        """Have the report say this of a tensor."""
        self._notes[name] = text

    def mean(self, name: str) -> Array | None:
        """The mean of a gradient after `land`; asked for once."""
        return self._means.pop(name)

    def _hand_in(self, name: str, gradient: Array | None, spent: bool) -> None:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise KeyError(
                f"{name!r} was not built; build(named_tensors) must name every tensor before its first gradient"
            )
        if name in self._gradients:
            raise RuntimeError(f"{name!r} has a gradient in this step already: finish the step before the next one")
        if gradient is not None and self.xp.shape(gradient) != tensor.shape:
            raise ValueError(f"gradient of {name!r} has shape {self.xp.shape(gradient)}, but {tensor.shape} was built")
        self._gradients[name] = gradient
        if spent:
            self._spent.add(name)

    def _launch(self, name: str, units: tuple[Unit, ...]) -> None:
        programs: dict[str, Program[Any]] = {}
        step = self._step.read()
        flat = {unit: self._flatten(unit) for unit in units}
        for unit, x in flat.items():
            if not unit.dense:
                state = {key: cell.read() for key, cell in self._cells[unit.name].items()}
                programs[unit.name] = self.communicator.reduce(x, self.method, state, self._context(unit, step))
        if dense := tuple(x for unit, x in flat.items() if unit.dense):
            programs[DENSE] = _averaged(dense)
        if self.track_missing:
            programs[PRESENT] = self._presence(units)
        with self.xp.quiet():
            self._flights.append((Flight(name, programs, self.transport, self.trace), flat))

    def _flatten(self, unit: Unit) -> Array:
        # What the exchange may write to, if the toolkit's arrays can be written to: the gradient itself if it is spent.
        xp = self.xp
        parts, owned = [], False
        for tensor in unit.tensors:
            gradient = self._gradients.get(tensor.name)
            if gradient is None:
                parts.append(xp.zeros(tensor.size, unit.dtype))
                owned = True
            else:
                flat = xp.contiguous(xp.cast(xp.reshape(gradient, (-1,)), unit.dtype))
                owned = tensor.name in self._spent or (xp.mutable and not xp.same_memory(flat, gradient))
                parts.append(flat)
        owned = owned or len(parts) > 1 or unit.dense != ""
        return xp.concat(parts) if owned else xp.copy(parts[0])

    def _presence(self, units: tuple[Unit, ...]) -> Program[Array]:
        here = [float(self._gradients.get(t.name) is not None) for unit in units for t in unit.tensors]
        (count,) = yield Reduce((self.xp.asarray(here, "float32"),), "sum")
        return count

    def _commit(self, flight: Flight, flat: Mapping[Unit, Array]) -> dict[str, Array | None]:
        # The one place where state is kept: not at all where the mean is not finite (the same decision on all workers,
        # since the mean is) or where no worker had a gradient.
        xp, policy = self.xp, self.options.nonfinite
        counts = self._counts(flight, flat)
        means: dict[str, Array | None] = {}
        dense = iter(flight.results.pop(DENSE, ()))
        for unit, x in flat.items():
            cells = self._cells[unit.name]
            mean, state = (next(dense), {}) if unit.dense else flight.results.pop(unit.name)
            if unit.dense and (cells or type(self.method.memory).finish_dense is not Memory.finish_dense):
                state = {key: cell.read() for key, cell in cells.items()}
                mean, state = self.method.memory.finish_dense(mean, state, self._context(unit, self._step.read()))
            absent = all(counts.get(tensor.name) == 0 for tensor in unit.tensors)
            ok = None
            if (cells or policy != "poison") and not absent:
                # What was kept may make a mean larger than float16 holds. A row of it only its own worker could judge.
                narrow = unit.narrow and not self.communicator.scattered
                ok = mean.finite() if isinstance(mean, Mean) and not narrow else None
                if ok is None:
                    mean = as_array(mean)
                    ok = xp.finite(xp.cast(mean, "float16") if narrow else mean)
                if not xp.traced and self._on_host(ok) and not ok:
                    self._skipped += 1
                if policy == "raise":
                    xp.require(ok, f"the mean gradient of {unit.name!r} is not finite on any worker")
                for key, cell in cells.items():
                    self._keep(cell, ok, state[key], x)
            # Only now, since what was not sent may be where the mean belongs.
            if isinstance(mean, Mean):
                mean = mean.into(x) if xp.mutable else mean.array()
            if policy == "zero" and ok is not None:
                mean = xp.choose(ok, mean, xp.zeros(xp.shape(mean), unit.dtype))
            start = 0
            for tensor in unit.tensors:
                size, shape = tensor.size, tensor.shape
                if self.communicator.scattered:
                    size, shape = size // self.world_size, shape[1:]
                    start = self.rank * size if unit.dense else 0
                part = xp.reshape(mean[start : start + size], shape)
                means[tensor.name] = None if counts.get(tensor.name) == 0 else xp.cast(part, tensor.dtype)
                start += size
        sizes = {unit.name: sum(t.size for t in unit.tensors) * ITEMSIZE[unit.dtype] for unit in flat if unit.dense}
        asked = [(name, *rest) for name, *rest in flight.asked if name != DENSE]
        self._meter.add([*(unit.name for unit in flat), *flight.results], asked, self.transport.group_rank, sizes)
        return means

    def _keep(self, cell: Any, ok: Array, new: Array, x: Array) -> None:
        old = cell.read()
        if new is old:
            return
        if self.xp.mutable and self.xp.overlap(new, x):
            self.xp.write(old, self.xp.choose(ok, new, old))  # x is wanted for the mean
        else:
            cell.assign(self.xp.choose(ok, new, old))

    def _counts(self, flight: Flight, units: Iterable[Unit]) -> dict[str, float]:
        # How many workers had a gradient; looked at (a device waits) only for what this worker lacks.
        names = [tensor.name for unit in units for tensor in unit.tensors]
        missing = [name for name in names if self._gradients.get(name) is None]
        if not missing or PRESENT not in flight.results:
            return {}
        found = dict(zip(names, self.xp.to_numpy(flight.results[PRESENT]).tolist(), strict=True))
        return {name: found[name] for name in missing}

    def _on_host(self, value: Array) -> bool:
        return str(getattr(value, "device", "cpu")) == "cpu"

    # -- state ------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """All state of this worker: the step, and every tensor's arrays (PyTorch: tensors on the CPU; else NumPy).

        Each worker saves and loads its own: residuals differ between workers.
        """
        return {
            "format": FORMAT,
            "rank": self.rank,
            "world_size": self.world_size,
            "step": int(self._step.read()) if self._step is not None else 0,
            "method": repr(self.method),
            "tensors": {
                unit: {key: self._export(cell.read()) for key, cell in cells.items()}
                for unit, cells in self._cells.items()
                if cells
            },
        }

    def _export(self, array: Array) -> Any:
        if self.xp.name == "torch":
            return array.detach().cpu().clone()
        return self.xp.to_numpy(array).copy()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`. Before `build` it is kept until the tensors are known.

        Raises ValueError, and changes nothing, when it is another worker's, of another format or method, or when names
        or shapes differ from the model's.
        """
        if state.get("format") != FORMAT:
            raise ValueError(f"this state has format {state.get('format')!r}, but this version of grace reads {FORMAT}")
        whose = (state["rank"], state["world_size"])
        if whose != (self.rank, self.world_size):
            raise ValueError(
                f"this is the state of worker {whose[0]} of {whose[1]}, but this is worker {self.rank} of "
                f"{self.world_size}: save one file for each worker, and load each worker's own"
            )
        if state["method"] != repr(self.method):
            raise ValueError(
                f"this state belongs to {state['method']}, but this is {self.method!r}: use the same settings"
            )
        if self._xp is None:
            self._waiting = state
            return
        mine = {unit: cells for unit, cells in self._cells.items() if cells}
        theirs = state["tensors"]
        absent, extra = sorted(set(mine) - set(theirs)), sorted(set(theirs) - set(mine))
        if absent or extra:
            raise ValueError(
                f"the state and the model name different tensors: the model's {absent or 'none'} are not in the state, "
                f"the state's {extra or 'none'} are not in the model. If a parameter was renamed, rename its key in "
                "state['tensors'] to the model's name before you load"
            )
        new: list[tuple[Any, Array]] = []
        for unit, cells in mine.items():
            if set(cells) != set(theirs[unit]):
                raise ValueError(f"state of {unit!r} has {sorted(theirs[unit])}, but this method keeps {sorted(cells)}")
            for key, cell in cells.items():
                old = cell.read()
                array = self.xp.copy(self.xp.asarray(theirs[unit][key], self.xp.dtype(old)))
                if self.xp.shape(array) != self.xp.shape(old):
                    shapes = f"{self.xp.shape(array)}, but the model needs {self.xp.shape(old)}"
                    raise ValueError(f"state {key!r} of {unit!r} has shape {shapes}")
                new.append((cell, array))
        for cell, array in new:
            cell.assign(array)
        step = int(state["step"])
        self._step.assign(self.xp.asarray(step, "int64") if self.xp.traced else step)
        self._waiting = None

    # -- report -----------------------------------------------------------------------------------------------------
    def report(self, trace: str | os.PathLike[str] | None = None) -> Report:
        """What was sent since this object was made (or loaded), in total and for every tensor.

        ``trace``: a file for the last steps in Chrome's trace format: backward pass, compression, messages under way,
        waiting, decompression. ValueError for TensorFlow, whose graphs run by themselves: use its own profiler.
        """
        if trace is not None:
            if self._xp is not None and self._xp.traced:
                raise ValueError("a graph runs by itself and cannot be traced from here: use tf.profiler.experimental")
            self.trace.save(trace, self.rank)
        name = name_of(self.method.compressor)
        method = f"{name} + {name_of(self.method.memory)} + {name_of(self.communicator)}"
        if self._xp is None:
            return Report(0, self.rank, self.world_size, method, 0, 0, 0)
        traffic = self._meter.read()
        units = [unit for bucket in self._buckets[::-1] for unit in bucket.units[::-1]]
        tensors = [
            TensorReport(
                name=unit.name,
                shape=unit.shape,
                method="dense" if unit.dense else name,
                reason="; ".join(filter(None, [unit.dense, *(self._notes.get(t.name) for t in unit.tensors)])),
                bytes_sent=traffic[unit.name][0],
                bytes_dense=traffic[unit.name][2] * sum(tensor.nbytes for tensor in unit.tensors),
                residual_norm=self._residual_norm(unit),
            )
            for unit in units
        ]
        return Report(
            steps=int(self._step.read()),
            rank=self.rank,
            world_size=self.world_size,
            method=method,
            bytes_sent=sum(counts[0] for counts in traffic.values()),
            bytes_received=sum(counts[1] for counts in traffic.values()),
            bytes_dense=sum(tensor.bytes_dense for tensor in tensors),
            tensors=tensors,
            times={} if self.xp.traced else dict(self.trace.totals),
            skipped=self._skipped,
        )

    def _residual_norm(self, unit: Unit) -> float | None:
        arrays = [cell.read() for key, cell in self._cells[unit.name].items() if key.endswith("memory/residual")]
        if not arrays:
            return None
        return sum(float(self.xp.to_numpy(self.xp.sum(array * array))) for array in arrays) ** 0.5


def _averaged(arrays: tuple[Array, ...]) -> Program[tuple[Array, ...]]:
    means = yield Reduce(arrays, "mean")
    return means


class Counter:
    """A step count on the host."""

    def __init__(self) -> None:
        self._value = 0

    def read(self) -> int:
        return self._value

    def assign(self, value: int) -> None:
        self._value = value


def _difference(first: Any, other: Any) -> str:
    (settings, tensors), (other_settings, other_tensors) = first, other
    for key, value in settings.items():
        if other_settings[key] != value:
            return (
                f"{key} is {value} on the one and {other_settings[key]} on the other. Use the same settings everywhere"
            )
    names, other_names = [t["name"] for t in tensors], [t["name"] for t in other_tensors]
    if only := [name for name in names if name not in other_names]:
        return f"only worker 0 has {only[:3]}. Make the same model on every worker"
    if only := [name for name in other_names if name not in names]:
        return f"worker 0 lacks {only[:3]}. Make the same model on every worker"
    for one, two in zip(tensors, other_tensors, strict=True):
        if one != two:
            return (
                f"{one['name']!r} is {one['dtype']}{one['shape']} on the one where the other has {two['name']!r}, "
                f"{two['dtype']}{two['shape']}. Make the same model, in the same order, on every worker"
            )
    return "their settings"
