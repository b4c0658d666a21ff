"""Bad input for everything that reads external data: payloads, messages, checkpoints, plans, settings.

    python -m benchmarks.fuzz [--inputs 100000] [--seconds S] [--only TEXT] [--json FILE]

An input is a mutated valid one: truncated, extended, changed bytes, another dtype, indices out of range. The reader
must raise ValueError or return a harmless result: a gradient of the right shape, without a write outside its memory, or
a valid state. Failures are counted by kind: accepted although invalid (silent), another exception (odd), a process that
dies (crash) or does not return (hang). Targets run in separate processes that report their progress: a crash costs one
input, and the others continue.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import math
import multiprocessing
import os
import random
import sys
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))  # for the table of methods

HANG = 30.0
"""Seconds without a finished input after which a process counts as hanging."""
CANARY = 123.25
MARGIN = 64
"""Number of guard elements on each side of a result."""
INT32 = (-(2**31), -(2**31) + 1, -1, 2**31 - 1, 2**30, 65536)

Change = Callable[[random.Random], tuple[str, bool]]


class Silent(Exception):
    """Invalid input was accepted."""


@dataclass
class Count:
    """The outcomes of a target's inputs."""

    target: str
    inputs: int = 0
    refused: int = 0
    harmless: int = 0
    silent: int = 0
    odd: int = 0
    crash: int = 0
    hang: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    """The first failures, each with the data to reproduce it."""

    @property
    def failures(self) -> int:
        return self.silent + self.odd + self.crash + self.hang

    def add(self, other: Count) -> None:
        """Add another count's numbers and notes."""
        for name in ("inputs", "refused", "harmless", "silent", "odd", "crash", "hang", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.notes += other.notes[: max(0, 5 - len(self.notes))]


@dataclass(frozen=True)
class Target:
    """A reader under test. ``make`` builds it once per process: a function that makes and reads one input."""

    name: str
    make: Callable[[], Callable[[random.Random], None]]
    weight: float = 1.0
    """Its share of the inputs, relative to others."""


# -- arrays ------------------------------------------------------------------------------------------------------------
def shorter(array: Any, rng: random.Random) -> Any:
    return array[: rng.randrange(len(array))]


def longer(array: Any, rng: random.Random) -> Any:
    more = np.frombuffer(rng.randbytes(rng.randint(1, 5) * array[:1].nbytes), array.dtype)
    return np.concatenate([array, more.reshape(-1, *array.shape[1:])])


def flipped(array: Any, rng: random.Random) -> Any:
    data = bytearray(array.tobytes())
    for _ in range(rng.choice((1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return np.frombuffer(bytes(data), array.dtype).reshape(array.shape)


def overwritten(array: Any, rng: random.Random) -> Any:
    data = bytearray(array.tobytes())
    start = rng.randrange(len(data))
    count = rng.randint(1, len(data) - start)
    data[start : start + count] = rng.choice((rng.randbytes(count), b"\xff" * count, b"\0" * count))
    return np.frombuffer(bytes(data), array.dtype).reshape(array.shape)


def other_dtype(array: Any, rng: random.Random) -> Any:
    names = ("uint8", "int8", "int32", "int64", "float16", "float32", "float64")
    return np.zeros(array.shape, rng.choice([name for name in names if name != array.dtype.name]))


CHANGES = {"shorter": shorter, "longer": longer, "flipped": flipped, "overwritten": overwritten, "dtype": other_dtype}


class Payloads:
    """Payloads of one method, one of them mutated, decoded to a mean."""

    def __init__(self, row: Any, backend: str, n: int, by_message: bool = False):
        from grace import grace_from_params
        from grace.backends import get_backend
        from grace.compressors.sparse import Scattered
        from grace.core import Combine
        from grace.engine.codecs import TensorCodec
        from grace.testing import cases
        from grace.transports.local import LocalTransport

        self.xp = get_backend(backend)
        self.by_message = by_message
        params = {**row.params, "communicator": row.communicators[0]}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = grace_from_params(params, LocalTransport()).method
            self.method = TensorCodec(made.compressor, made.memory)
        compressor = self.compressor = self.method.compressor
        shape = cases.shape_of(compressor, n)
        self.ctx = cases.context(self.xp, shape, world_size=3)
        self.agreed = compressor.traits.combine is Combine.AGREED
        self.good = []
        for rank in range(1 if self.agreed else 3):
            ctx = replace(self.ctx, rank=rank)
            payload, _ = cases.send(compressor, self.xp, cases.spread(*shape, seed=rank), ctx)
            self.good.append([np.array(self.xp.to_numpy(array)) for array in payload])
        # An agreed payload may end with arrays that only the worker itself reads.
        self.seen = (1 if row.name == "gradiveq" else 2) if self.agreed else len(self.good[0])
        self.limit = -(-self.ctx.size // getattr(compressor, "row_size", 1))
        name = row.name
        self.limit *= 8 if name == "variance" else 1  # three bits below a position
        # Indices of the arrays that stay valid when they are cut short.
        self.loose = {"adaq": (1,), "wangni": (2,), "variance": (0,)}.get(name, ())
        self.signed = {"adaq": (1,), "wangni": (2,), "variance": (0,)}.get(name, ())
        self.positions = [
            place
            for place, array in enumerate(self.good[0][: self.seen])
            if isinstance(compressor, Scattered) and array.dtype == np.int32
        ]
        self.decode(self.good)

    def __call__(self, rng: random.Random) -> None:
        payloads = list(self.good)
        victim = rng.randrange(len(payloads))
        if self.by_message:
            payloads[victim], wrong = self.message(payloads[victim], rng)
        else:
            payloads[victim], wrong = self.spoilt(payloads[victim], rng)
        try:
            self.decode(payloads)
        except ValueError as error:
            text = str(error)
            if not self.agreed and f"worker {victim} " not in text and "unpack the message" not in text:
                raise Silent(f"the error names another worker than {victim}: {text}") from error
            raise
        if wrong:
            raise Silent(f"{wrong} of payload {[array.shape for array in self.good[victim]]} was taken")

    def spoilt(self, payload: list[Any], rng: random.Random) -> tuple[list[Any], str]:
        """A payload with one changed array, and the change if it is invalid."""
        payload = list(payload)
        places = [place for place in range(self.seen) if payload[place].size]
        if not places:
            return [longer(np.zeros(1, array.dtype), rng) for array in payload], "lengthening"
        if self.positions and rng.random() < 0.4:
            place = rng.choice(self.positions)
            if len(payload[place]):
                payload[place], how = self.misplaced(payload[place], place in self.signed, rng)
                return payload, how
        place = rng.choice(places)
        how = rng.choice(list(CHANGES))
        before = payload[place]
        payload[place] = CHANGES[how](before, rng)
        if how == "shorter":
            return payload, "" if place in self.loose else f"{how} {place}"
        if how == "dtype":
            return payload, f"{how} {place} ({payload[place].dtype})"
        if how == "longer" and place in self.loose:
            return payload, ""
        return payload, f"{how} {place}" if how == "longer" else ""

    def misplaced(self, positions: Any, signed: bool, rng: random.Random) -> tuple[Any, str]:
        """Positions, one of them out of range or order, and the change."""
        positions = positions.copy()
        at = rng.randrange(len(positions))
        if len(positions) > 1 and rng.random() < 0.4:
            other = rng.choice([each for each in range(len(positions)) if each != at])
            if rng.random() < 0.5:
                positions[at] = positions[other]
                return positions, "a repeated position"
            positions[at], positions[other] = positions[other], positions[at]
            return positions, "exchanged positions"
        bad = [value for value in (*INT32, self.limit, self.limit + 1) if not 0 <= value < self.limit]
        if signed:  # a negative number is -1 - position
            bad = [value for value in bad if value >= self.limit or -1 - value >= self.limit]
        positions[at] = rng.choice(bad)
        return positions, f"position {positions[at]}"

    def message(self, payload: list[Any], rng: random.Random) -> tuple[list[Any], str]:
        """The payload that a worker unpacks from a mutated message, and the change if it is invalid."""
        from grace.transports.packer import Packer

        xp, ragged = self.xp, self.compressor.traits.variable_length
        arrays = tuple(xp.asarray(array.copy(), array.dtype.name) for array in payload[: self.seen])
        own = tuple(xp.asarray(array.copy(), array.dtype.name) for array in self.good[0][: self.seen])
        packer = Packer(xp, 0, 1)
        pack = packer.pack_ragged if ragged else packer.pack
        data = bytearray(np.array(xp.to_numpy(pack(arrays)[0])).tobytes())
        layout, wrong = pack(own)[1], ""
        how = rng.choice(("shorter", "longer", "flipped", *["lengths"] * (2 * ragged)))
        if how == "shorter" and data:
            data, wrong = data[: rng.randrange(len(data))], how
        elif how == "flipped" and data:
            for _ in range(rng.choice((1, 2, 8))):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif how == "lengths":
            heads = np.frombuffer(bytes(data[: 8 * len(layout)]), np.int64).copy()
            at, before = rng.randrange(len(heads)), heads.copy()
            heads[at] = rng.choice((0, -1, heads[at] - 1, heads[at] + 1, 2**62, 2**61, -(2**63), 2**63 - 1, 10**9))
            if len(heads) > 1 and rng.random() < 0.5:  # with equal item sizes the sum stays the same
                other = rng.choice([each for each in range(len(heads)) if each != at])
                with np.errstate(over="ignore"):
                    heads[other] += before[at] - heads[at]
            else:
                wrong = "" if heads[at] == before[at] else "another length"
            data[: 8 * len(layout)] = heads.tobytes()
        else:
            data, wrong = data + rng.randbytes(rng.randint(1, 40)), "longer"
        buffer = xp.asarray(np.frombuffer(bytes(data), np.uint8).copy(), "uint8")
        unpack = packer.unpack_ragged if ragged else packer.unpack
        found = [np.array(xp.to_numpy(array)) for array in unpack(buffer, layout, 1)]
        return [*found, *payload[self.seen :]], wrong

    def decode(self, payloads: list[Any]) -> None:
        """Decode to the mean, between guard elements. Raises Silent for a wrong form, or if a guard was overwritten."""
        xp, n = self.xp, self.ctx.size
        arrays = [tuple(xp.asarray(array.copy(), array.dtype.name) for array in payload) for payload in payloads]
        mean = self.method.mean(arrays, self.ctx, agreed=self.agreed)
        with xp.quiet():
            if xp.mutable:
                whole = xp.full(n + 2 * MARGIN, CANARY)
                out = mean.array(whole[MARGIN : MARGIN + n])
                edges = np.concatenate([xp.to_numpy(whole)[:MARGIN], xp.to_numpy(whole)[MARGIN + n :]])
                if not (edges == CANARY).all():
                    raise Silent("something was written outside the result")
            else:
                out = mean.array()
        if xp.dtype(out) != "float32" or xp.shape(out) != (n,):
            raise Silent(f"the mean is {xp.dtype(out)}{list(xp.shape(out))}")


# -- texts and files ---------------------------------------------------------------------------------------------------
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**200, -(2**63), 0.5, -0.5, 1e308, float("nan"), float("inf")),
    *(
        "",
        "x",
        "../../etc/passwd",
        "topk",
        "\0",
        "a" * 1000,
        [],
        [1],
        {},
        {"$array": 0},
        {"$array": -1},
        [[]],
        {"a": []},
    ),
)


def places_of(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all parts of plain data."""
    yield path
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from places_of(value, (*path, key))


def upset(data: Any, rng: random.Random) -> Any:
    """Plain data with one part replaced, removed, renamed or moved."""
    data = copy.deepcopy(data)
    paths = [path for path in places_of(data) if path]
    if not paths:
        return rng.choice(ODD)
    *before, key = rng.choice(paths)
    part = data
    for step in before:
        part = part[step]
    how = rng.random()
    if how < 0.65:
        part[key] = copy.deepcopy(rng.choice(ODD))
    elif how < 0.8:
        del part[key]
    elif isinstance(part, dict):
        part[rng.choice(("x", "", str(key) + "x"))] = part.pop(key) if how < 0.9 else part[key]
    else:
        part.insert(key, copy.deepcopy(part[key]))
    return data


def spoilt_text(text: str, rng: random.Random) -> str:
    """A text with some characters changed, cut or repeated."""
    how, at = rng.random(), rng.randrange(len(text))
    if how < 0.3:
        return text[:at]
    if how < 0.8:
        return text[:at] + rng.choice('{}[]",:0-9eE.\\x\0 é') + text[at + rng.randint(0, 2) :]
    return text[:at] + text[rng.randrange(len(text)) :]


class Checkpoints:
    """State files, with mutated bytes or content, loaded into a Grace."""

    PARAMS = (
        {"compressor": "topk", "memory": "dgc"},
        {"compressor": "powersgd", "min_rate": 0.5, "policy": "accordion", "k_low": 4, "compress_rank": 2},
        {"compressor": "efsignsgd", "communicator": "twostage", "block_size": 64},
    )

    def __init__(self, kind: str):
        from grace import checkpoint
        from grace.testing.cases import lockstep

        self.kind, self.checkpoint = kind, checkpoint
        self.cases = []
        for params in self.PARAMS:
            graces = self.made(params, 2)
            lockstep(graces, [{"a": np.ones((8, 30), np.float32), "b": np.ones(50, np.float32)} for _ in graces])
            states = [grace.state_dict() for grace in graces]
            self.cases.append((params, [checkpoint.to_bytes(state) for state in states], self.made(params, 2)[0]))

    def made(self, params: dict[str, Any], size: int) -> list[Any]:
        from grace import grace_from_params
        from grace.transports.local import LocalTransport, World

        world = World(size)
        graces = [grace_from_params({"min_numel": 0, **params}, LocalTransport(world, rank)) for rank in range(size)]
        for grace in graces:
            grace.build({"a": np.zeros((8, 30), np.float32), "b": np.zeros(50, np.float32)})
        return graces

    def __call__(self, rng: random.Random) -> None:
        params, (data, other), grace = rng.choice(self.cases)
        wrong = ""
        if self.kind == "bytes":
            changed, wrong = self.bytes(data, rng)
            state = self.checkpoint.from_bytes(changed)
            if wrong:
                raise Silent(f"a checkpoint was taken that was {wrong}")
            grace.check_state(state)
            return
        state = self.checkpoint.from_bytes(self.inside(data, rng))
        if self.kind == "resized" and "twostage" not in params.values():
            (grace,) = self.made(params, 1)
            states = [state, self.checkpoint.from_bytes(other)]
        else:
            states = [state]
        before = _held(grace)
        try:
            grace.load_state_dict(*states)
        except ValueError:
            if before != _held(grace):
                raise Silent("a state that was refused has changed something") from None
            raise
        now = grace.state_dict()
        for unit, cells in now["tensors"].items():
            for key, array in cells.items():
                if np.asarray(array).dtype.kind not in "fiub":
                    raise Silent(f"{key} of {unit} became {np.asarray(array).dtype}")

    def bytes(self, data: bytes, rng: random.Random) -> tuple[bytes, str]:
        """A file's bytes, truncated, changed or random, and the change if it is invalid."""
        how, at = rng.random(), rng.randrange(len(data))
        if how < 0.25:
            return data[:at], f"cut after {at} bytes"
        if how < 0.35:
            return rng.randbytes(rng.randint(0, 400)), "other bytes"
        if how < 0.7:
            return data[:at] + rng.randbytes(1) + data[at + 1 :], ""
        count = rng.randint(1, 200)
        return data[:at] + rng.randbytes(rng.randint(0, 200)) + data[at + count :], ""

    def inside(self, data: bytes, rng: random.Random) -> bytes:
        """A file with correct checksums and wrong content."""
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        text = members["state.json"].decode()
        names = [name for name in members if name.endswith(".npy")]
        how = rng.random()
        if how < 0.5:
            text = json.dumps(upset(json.loads(text), rng))
        elif how < 0.6:
            text = spoilt_text(text, rng)
        elif how < 0.7:
            members.pop(rng.choice(names))
        else:
            name = rng.choice(names)
            content = np.frombuffer(members[name], np.uint8)
            if how < 0.85:  # the header
                content = np.concatenate([flipped(content[:128], rng), content[128:]])
            else:
                content = rng.choice((shorter, longer, overwritten))(content, rng)
            members[name] = content.tobytes()
        members["state.json"] = text.encode("utf-8", "surrogatepass")
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED if rng.random() < 0.95 else zipfile.ZIP_DEFLATED) as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        return file.getvalue()


def _held(grace: Any) -> Any:
    # All state of a worker, for comparison.
    state = grace.state_dict()
    arrays = {
        (unit, key): np.asarray(array).tobytes()
        for unit, cells in state["tensors"].items()
        for key, array in cells.items()
    }
    policy = state["policy"] and {key: value for key, value in state["policy"].items() if key != "sums"}
    return state["step"], arrays, repr(policy)


class Plans:
    """Mutated plans: read as a file, or as workers agree on them."""

    def __init__(self, kind: str):
        from grace.communicators.planned.strategy import parse
        from grace.planner.costs import Cluster, Codec, Curve, Link, Speed
        from grace.planner.plan import Basis, Plan, Prediction
        from grace.planner.profile import Profile, TensorProfile

        self.kind = kind
        options = {
            "w": parse("compress(gpu) allgather*(flat) decompress(gpu)"),
            "v": parse("allreduce(flat)"),
            "u": parse("compress(gpu) alltoall*(flat) decompress(gpu) compress(gpu) allgather*(flat) decompress(gpu)"),
        }
        params = {"compressor": "efsignsgd", "block_size": 64, "memory": "residual"}
        rate = Curve((1e3, 1e6), (1e-6, 1e-3))
        costs = Codec(params, rate, {"gpu": Speed(rate, rate, rate)})
        profile = Profile(tuple(TensorProfile(name, (9000,), 1e-3) for name in options), "measured")
        basis = Basis(profile, Cluster(2, 2, Link(1e-5, 1e8)), (costs,), ("gpu",))
        about = {"source": "x"}, {"cluster": basis.cluster.to_dict(), "compressor": "given"}
        plan = Plan(options, params, 4, 2, Prediction(1.0, 2.0, 0.5, 0.25, 0.125), *about, basis=basis)
        self.good = plan.to_dict()

    def __call__(self, rng: random.Random) -> None:
        from grace.communicators.planned.table import PlanTable
        from grace.planner import plan
        from grace.transports.local import LocalTransport

        changed = upset(self.good, rng) if rng.random() < 0.8 else None
        text = spoilt_text(json.dumps(self.good), rng) if changed is None else json.dumps(changed)
        if self.kind == "file":
            data = json.loads(text)
            found = plan.from_dict(data)
            # Only the hashed part must agree.
            for key in ("tensors", "params", "workers", "workers_per_node"):
                if found.to_dict()[key] != self.good[key]:
                    raise Silent(f"a plan with other {key} was taken")
        else:
            ways = PlanTable(text, load=plan.from_dict)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # for another number of workers
                ways.agree(LocalTransport(), 0)
            if not all(isinstance(option.compressions, int) for option in ways.options):
                raise Silent(f"a plan has ways {ways}")


class Settings:
    """Settings for `grace_from_params`, and a step with the accepted ones."""

    def __init__(self) -> None:
        from table import ROWS

        self.rows = [row.params for row in ROWS]
        extras = {"min_numel": 0, "fuse": "tensor", "bucket_mb": 25.0, "nonfinite": "poison", "seed": 0, "timeout": 9.0}
        self.extras = list(extras.items())

    def __call__(self, rng: random.Random) -> None:
        from grace import grace_from_params
        from grace.transports.local import LocalTransport

        params = dict(rng.choice(self.rows))
        params.update(rng.sample(self.extras, rng.randint(0, 3)))
        known = {"compressor", "memory", "communicator", *params}
        changed = upset(params, rng)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if not isinstance(changed, dict):
                changed = {"compressor": changed}
            grace = grace_from_params(changed, LocalTransport())
            if odd := changed.keys() - known:
                raise Silent(f"an unknown key {odd} was taken")
            x = np.linspace(-1, 1, 300, dtype=np.float32).reshape(15, 20)
            grace.build({"w": x})
            found = grace.step({"w": x})["w"]
        if found is None or found.shape != x.shape:
            raise Silent(f"{changed} gives a mean of shape {getattr(found, 'shape', None)}")


# -- running ---------------------------------------------------------------------------------------------------------
def targets(backends: tuple[str, ...] = ("numpy", "torch", "tensorflow")) -> list[Target]:
    """All targets: every method of tests/table.py on each backend; and the readers of files and settings."""
    from table import ROWS

    found = []
    for backend in backends:
        for index, row in enumerate(ROWS):
            weight = {"numpy": 1.0, "torch": 0.5, "tensorflow": 0.25}[backend]
            n = (300, 3000)[index % 2]

            def make(row: Any = row, backend: str = backend, n: int = n, by: bool = False) -> Any:
                return Payloads(row, backend, n, by)

            found.append(Target(f"payload {backend} {row}", make, weight))
            if not any(t.name == f"message {backend} {row.name}" for t in found):
                through = lambda make=make: make(by=True)  # noqa: E731
                found.append(Target(f"message {backend} {row.name}", through, weight))
    for kind in ("bytes", "inside", "resized"):
        found.append(Target(f"checkpoint {kind}", lambda kind=kind: Checkpoints(kind), 6.0))
    for kind in ("file", "ways"):
        found.append(Target(f"plan {kind}", lambda kind=kind: Plans(kind), 6.0))
    found.append(Target("settings", Settings, 6.0))
    return found


def go(
    target: Target, first: int, count: int, seed: int = 0, tell: Callable[[int, Count], None] | None = None
) -> Count:
    """Give a target its inputs ``first .. first + count``, in this process."""
    made, done, begin = target.make(), Count(target.name), time.perf_counter()
    for number in range(first, first + count):
        if tell is not None:
            tell(number, done)
        rng = random.Random(f"{seed} {target.name} {number}")
        done.inputs += 1
        try:
            made(rng)
        except ValueError:
            done.refused += 1
        except Silent as error:
            done.silent += 1
            done.notes.append(f"input {number}: {error}")
        except Exception as error:  # any other exception is a failure
            done.odd += 1
            last = traceback.extract_tb(error.__traceback__)[-1]
            done.notes.append(f"input {number}: {error!r} at {Path(last.filename).name}:{last.lineno}"[:400])
        else:
            done.harmless += 1
        done.notes = done.notes[:5]
    done.seconds = time.perf_counter() - begin
    return done


def _work(jobs: list[tuple[Target, int]], first: int, seed: int, pipe: Any) -> None:
    warnings.simplefilter("ignore")
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - stays open until this process ends
    last = 0.0

    def tell(number: int, done: Count) -> None:
        # Report every input: it may be the last.
        nonlocal last
        pipe.send((number, None))
        if time.monotonic() - last > 1:
            last = time.monotonic()
            pipe.send((number, done))

    for target, count in jobs:
        pipe.send((-1, go(target, first, count - first, seed, tell)))
        first = 0


def apart(jobs: list[tuple[Target, int]], seed: int = 0, hang: float = HANG) -> list[Count]:
    """Run `go` in a process that may crash, or is killed if it stalls for ``hang`` seconds. Either costs one input."""
    done: list[Count] = []
    total, first = Count(jobs[0][0].name), 0
    while len(done) < len(jobs):
        mine, theirs = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(
            target=_work, args=(jobs[len(done) :], first, seed, theirs), daemon=True
        )
        process.start()
        theirs.close()
        number, known, late = first, Count(total.target), False
        while len(done) < len(jobs):
            try:
                if not mine.poll(hang if number > first else 4 * hang):
                    late = True
                    break
                number, counted = mine.recv()
            except EOFError:
                break
            if counted is not None:
                known = counted
            if number == -1:  # the target is done
                total.add(known)
                done.append(total)
                if len(done) < len(jobs):
                    total, first, number = Count(jobs[len(done)][0].name), 0, 0
                    known = Count(total.target)
        if late:
            process.kill()
        process.join()
        if len(done) < len(jobs):
            # The process survived the inputs since its last report; nothing else is known about them.
            known.harmless += number - first - known.inputs
            known.inputs = number - first + 1
            known.crash, known.hang = int(not late), int(late)
            known.notes.append(f"input {number}: {'a hang' if late else f'exit code {process.exitcode}'}")
            total.add(known)
            first = number + 1
            if first >= jobs[len(done)][1] or total.crash + total.hang > 20:
                done.append(total)
                total, first = Count(jobs[len(done)][0].name if len(done) < len(jobs) else ""), 0
    return done


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--inputs", type=int, default=100_000, help="in all (default: 100000)")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no further kind of target after so many"
    )
    parser.add_argument("--only", default="", help="targets whose names contain this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backends", default="numpy,torch,tensorflow")
    parser.add_argument("--json", type=Path, help="write the counts to this file")
    parser.add_argument("--all", action="store_true", help="print every target, not only sums and failures")
    args = parser.parse_args(arguments)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    chosen = [each for each in targets(tuple(args.backends.split(","))) if args.only in each.name]
    if not chosen:
        parser.error(f"no target's name contains {args.only!r}")
    weights, begin = sum(each.weight for each in chosen), time.perf_counter()
    counts: list[Count] = []
    # One process per kind of target, which loads its toolkit once. This process loads none, so forks are safe.
    batches: dict[str, list[tuple[Target, int]]] = {}
    for target in chosen:
        count = math.ceil(args.inputs * target.weight / weights)
        batches.setdefault(" ".join(target.name.split(" ")[:2]), []).append((target, count))
    for batch in batches.values():
        if time.perf_counter() - begin > args.seconds:
            break
        for found in apart(batch, args.seed):
            counts.append(found)
            if args.all or found.failures:
                print(line(found), *found.notes, sep="\n    ", flush=True)
    groups: dict[str, Count] = {}
    for count in counts:
        kind, where = [*count.target.split(" "), ""][:2]
        group = f"{kind} {where}".strip()
        groups.setdefault(group, Count(group)).add(count)
    total = Count("all")
    for group in groups.values():
        print(line(group))
        total.add(group)
    print(line(total))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(
            json.dumps([asdict(count) for count in (total, *groups.values(), *counts)], indent=1) + "\n"
        )
    if len(counts) < len(chosen):
        print(f"{len(chosen) - len(counts)} of {len(chosen)} targets were left out: the time was over")
    return 1 if total.failures else 0


def line(count: Count) -> str:
    """One line of the table."""
    names = ("inputs", "refused", "harmless", "silent", "odd", "crash", "hang")
    numbers = ", ".join(f"{getattr(count, name)} {name}" for name in names)
    return f"{count.target:<44} {numbers}, {count.seconds:.1f} s"


if __name__ == "__main__":
    sys.exit(main())
