"""Chunks of blockwise methods, compiled by `torch.compile` for one core's vector units and checked against the plain
functions.

All chunks have one size, so one compilation serves tensors of every size. Random numbers are inputs: values that
change from step to step must not be compiled in. As between toolkits, a float64 sum that is rounded to float32 is
assumed not to depend on the order of additions.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from grace.backends.base import Backend
from grace.backends.buffers import InPlace
from grace.backends.torch import TorchBackend
from grace.backends.torch_bits import TorchBits, TorchRandom
from grace.backends.torch_buffers import DTYPES, TorchBuffers
from grace.core import Array, Compressor, Context, Payload, name_of
from grace.core.rng import NOISE, Rng

WORKERS = 32
"""Maximum number of payloads in a compiled mean: code size and compile time grow with it."""


TOPS = (127, 7, 1)
"""Largest codes of 8, 4 and 2-bit integers, for samples with values halfway between two codes."""


class Uncompiled(Exception):
    """Raised if a chunk cannot be compiled; the message is the reason."""


class TraceableBits(TorchBits):
    """Packed bits, computed without NumPy."""

    def pack(self, mask: Array) -> Array:
        n = mask.shape[0]
        if n % 8:
            return super().pack(mask)
        # The compiler vectorises this sum for floats, but not for integers.
        weights = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0], dtype=torch.float32, device="cpu")
        return (mask.view(-1, 8).to(torch.float32) * weights).sum(1).to(torch.uint8)

    def unpack(self, packed: Array, n: int) -> Array:
        return self._bits(packed) != 0 if n % 32 == 0 else super().unpack(packed, n)

    def unpack_signs(self, packed: Array, n: int) -> Array:
        return self._bits(packed).to(torch.float32) * 2 - 1 if n % 32 == 0 else super().unpack_signs(packed, n)

    def map_bytes(self, values: Callable[[Array, int], Array], packed: Array, m: int) -> Array:
        return values(packed, m)

    def _bits(self, packed: Array) -> Array:
        # Shift 32-bit words instead of bytes: the compiler does not vectorise operations on bytes.
        words = packed.view(torch.int32).view(-1, 1)
        return ((words >> torch.arange(32, dtype=torch.int32, device="cpu")) & 1).view(-1)


class TraceableBuffers(TorchBuffers):
    """Buffers for traced code, which writes to no array."""

    def overlap(self, x: Array, y: Array) -> bool:
        return False


class TraceableRandom(TorchRandom):
    """Draws no random numbers: they are inputs."""

    def words(self, key0: Any, key1: Any, start: int, n: int) -> Array:
        raise Uncompiled("it draws random numbers of a kind that is not compiled")


class Traceable(TorchBackend):
    """PyTorch functions in forms that a compiler can trace and vectorise. None of them reads values."""

    mutable = False  # the compiler decides which arrays share memory
    buffers = cached_property(TraceableBuffers)
    inplace = cached_property(InPlace)
    bits = cached_property(TraceableBits)
    random = cached_property(TraceableRandom)
    divided = Backend.divided

    def __init__(self) -> None:
        super().__init__("cpu")
        self.on_host = False  # a compiler cannot trace NumPy views or pooled memory
        self.piece = 0

    def bitcast(self, x: Array, dtype: str) -> Array:
        return x.contiguous().view(DTYPES[dtype])

    def sound(self, x: Array, ok: Callable[[], Array], message: str) -> Array:
        raise Uncompiled("it looks at the values of payloads")


# -- random numbers ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Draw:
    """A chunk's request for random numbers."""

    label: str
    shared: bool
    kind: str
    n: int

    def inputs(self, ctx: Context) -> tuple[Array, ...]:
        """The input arrays for these numbers."""
        rng = ctx.shared_rng(self.label) if self.shared else ctx.rng(self.label)
        if self.kind == "noise" and self.n % NOISE == 0 and rng.offset % NOISE == 0:
            return ctx.xp.random.noise_parts(rng.table, rng.keys, rng.offset // NOISE, self.n // NOISE)
        return (getattr(rng, self.kind)(self.n),)


class Stream(Rng):
    """A random stream whose numbers come from ``draw(kind, n)``."""

    def __init__(self, xp: Any, draw: Callable[[str, int], Array]):
        self._xp, self._draw = xp, draw

    def bits(self, n: int) -> Array:
        return self._draw("bits", n)

    def uniform(self, n: int) -> Array:
        return self._draw("uniform", n)

    def noise(self, n: int) -> Array:
        return self._draw("noise", n)

    def normal(self, n: int) -> Array:
        raise Uncompiled("it draws normal numbers")

    def sample(self, n: int, k: int) -> Array:
        raise Uncompiled("it draws positions")


@dataclass(frozen=True)
class Watched(Context):
    """A context whose random numbers come from ``draw(label, shared, kind, n)``."""

    draw: Callable[[str, bool, str, int], Array] | None = field(default=None, repr=False, compare=False)

    def rng(self, label: str) -> Rng:
        assert self.draw
        draw = self.draw
        return Stream(self.xp, lambda kind, n: draw(label, False, kind, n))

    def shared_rng(self, label: str) -> Rng:
        assert self.draw
        draw = self.draw
        return Stream(self.xp, lambda kind, n: draw(label, True, kind, n))


def watched(ctx: Context, xp: Backend, draw: Callable[[str, bool, str, int], Array]) -> Watched:
    """A context without the parts that change between tensors and steps; ``draw`` supplies its random numbers."""
    return Watched(xp, "piece", ctx.shape, world_size=ctx.world_size, draw=draw)


# -- compiled functions ------------------------------------------------------------------------------------------------
class Forms:
    """Compiled chunk functions, each compiled on first use and compared with the plain function."""

    def __init__(self, xp: TorchBackend) -> None:
        self._xp, self._traceable = xp, Traceable()
        self._lock = threading.Lock()
        self._known: dict[Any, Any] = {}
        self._told: set[str] = set()
        self.compilations = 0
        """Number of compiler runs."""

    def encode(self, compressor: Compressor, x: Array, residual: Array | None, payload: Payload, ctx: Context) -> bool:
        """Write the payload of x + residual to ``payload``, and a new residual to x. False: not compiled."""
        key = ("encode", compressor, ctx.shape, residual is None, ctx.world_size)
        form = self._form(key, compressor, lambda: self._encoding(compressor, ctx, residual is not None))
        if form is None:
            return False
        run, draws, like = form
        vectors = (x,) if residual is None else (x, residual)
        if not _fit((*vectors, *payload), like):
            return False
        numbers = [array for draw in draws for array in draw.inputs(ctx)]
        return self._run(key, compressor, run, (*vectors, *payload, *numbers))

    def mean(self, compressor: Compressor, out: Array, payloads: Sequence[Payload], agreed: bool, ctx: Context) -> bool:
        """Write the mean of the payloads, or if ``agreed`` the first one decoded, to ``out``. False: not compiled."""
        count = 1 if agreed else len(payloads)
        key = ("decode", compressor, ctx.shape, count, agreed, ctx.world_size)
        form = self._form(key, compressor, lambda: self._decoding(compressor, ctx, count, agreed))
        if form is None:
            return False
        run, like = form
        arrays = (out, *(_aligned(array) for payload in payloads[:count] for array in payload))
        return _fit(arrays, like) and self._run(key, compressor, run, arrays)

    def _form(self, key: Any, compressor: Compressor, make: Callable[[], Any]) -> Any:
        if key not in self._known:
            with self._lock:
                if key not in self._known:
                    try:
                        with torch.no_grad(), warnings.catch_warnings():
                            warnings.simplefilter("ignore")  # warnings of the compiler itself
                            self._known[key] = make()
                    except Exception as error:  # a compiler can fail in many ways, and training must continue
                        self._refuse(key, compressor, error)
        return self._known[key]

    def _run(self, key: Any, compressor: Compressor, run: Callable[..., None], arrays: tuple[Array, ...]) -> bool:
        try:
            with torch.no_grad():
                run(*arrays)
        except torch._dynamo.exc.TorchDynamoException as error:  # recompilation failed; no output has been written
            self._refuse(key, compressor, error)
            return False
        return True

    def _refuse(self, key: Any, compressor: Compressor, error: Exception) -> None:
        self._known[key] = None
        while isinstance(error.__cause__, Exception):
            error = error.__cause__
        line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        reason = line
        if not isinstance(error, Uncompiled):
            reason = f"{type(error).__name__}: {line} (torch.compile needs a C++ compiler, such as g++)"
        if reason in self._told:  # a missing compiler causes one warning, not one per method
            return
        self._told.add(reason)
        warnings.warn(
            f"compile=True: {name_of(compressor)!r} {key[0]}s uncompiled, with the same results: {reason}", stacklevel=2
        )

    # -- compilation -----------------------------------------------------------------------------------------------
    def _compiled(self, function: Callable[..., None], arrays: Sequence[Array]) -> Callable[..., None]:
        # Trace by execution: the method may use all of Python, and the compiler sees a list of operations.
        graph = make_fx(function, tracing_mode="fake")(*arrays)
        inductor = torch._dynamo.lookup_backend("inductor")

        def count(*arguments: Any, **named: Any) -> Any:
            self.compilations += 1
            return inductor(*arguments, **named)

        before = self.compilations
        run = torch.compile(graph, backend=count, fullgraph=True, dynamic=False)
        run(*(array.clone() for array in arrays))
        if self.compilations == before:
            raise Uncompiled("torch.compile is switched off")
        return run

    def _encoding(self, compressor: Compressor, ctx: Context, feedback: bool) -> Any:
        xp, traceable = self._xp, self._traceable
        ctx = replace(ctx, xp=xp, rank=0, step=0, offset=0, _workspace=None)
        draws: list[Draw] = []

        def note(label: str, shared: bool, kind: str, n: int) -> Array:
            draws.append(Draw(label, shared, kind, n))
            return getattr(ctx.shared_rng(label) if shared else ctx.rng(label), kind)(n)

        x, e = sample(ctx.size, 0), sample(ctx.size, 1)
        vectors = (x, e) if feedback else (x,)
        v = x + e if feedback else x
        plain: Payload = compressor.compress(v.clone(), {}, watched(ctx, xp, note))[0]  # type: ignore[index]
        plain = tuple(array.clone() for array in plain)
        numbers = [draw.inputs(ctx) for draw in draws]
        sizes = [len(vectors), len(plain), *map(len, numbers)]

        def encode(*arrays: Array) -> None:
            (x, *rest), outs, *parts = _split(arrays, sizes)
            drawn = iter(parts)
            here = watched(ctx, traceable, lambda label, shared, kind, n: _joined(next(drawn)))
            v = x + rest[0] if rest else x
            payload: Payload = compressor.compress(v, {}, here)[0]  # type: ignore[index]
            if rest:
                x.copy_(compressor.residual(v, payload, here))
            for out, array in zip(outs, payload, strict=True):
                out.copy_(array)

        arrays = [*vectors, *map(torch.empty_like, plain), *(array for part in numbers for array in part)]
        run = self._compiled(encode, arrays)
        given = [array.clone() for array in arrays]
        run(*given)
        found = tuple(given[len(vectors) : len(vectors) + len(plain)])
        if not all(map(_equal, found, plain)):  # they may differ, for example after sums in another order
            raise Uncompiled("compiled, its payload would not be the same to the bit")
        if feedback and not _equal(given[0], compressor.residual(v.clone(), found, ctx)):
            raise Uncompiled("compiled, its residual would not be the same to the bit")
        return run, draws, [(array.shape, array.dtype) for array in (*vectors, *plain)]

    def _decoding(self, compressor: Compressor, ctx: Context, count: int, agreed: bool) -> Any:
        if count > WORKERS:
            raise Uncompiled(f"a mean of more than {WORKERS} payloads")
        xp, traceable = self._xp, self._traceable
        ctx = replace(ctx, xp=xp, rank=0, step=0, offset=0, _workspace=None)

        def none(label: str, shared: bool, kind: str, n: int) -> Array:
            raise Uncompiled("it draws random numbers to decode")

        def decoded(payloads: Sequence[Payload], here: Context) -> Array:
            return compressor.decompress(payloads[0], here) if agreed else compressor.aggregate(payloads, here)

        payloads = []
        for worker in range(count):
            found: Any = compressor.compress(sample(ctx.size, worker), {}, replace(ctx, rank=worker))
            payloads.append(tuple(array.clone() for array in found[0]))
        sizes = [1, *map(len, payloads)]

        def decode(*arrays: Array) -> None:
            (out,), *payloads = _split(arrays, sizes)
            out.copy_(decoded([tuple(payload) for payload in payloads], watched(ctx, traceable, none)))

        arrays = [
            torch.empty(ctx.size, dtype=torch.float32, device="cpu"),
            *(array for payload in payloads for array in payload),
        ]
        run = self._compiled(decode, arrays)
        run(*arrays)
        if not _equal(arrays[0], decoded(payloads, ctx)):
            raise Uncompiled("compiled, its mean would not be the same to the bit")
        return run, [(array.shape, array.dtype) for array in arrays]


def _joined(parts: Sequence[Array]) -> Array:
    # Combine the arrays of `Draw.inputs`: a single array stays; a table is added to each row's offset, modulo 1.
    if len(parts) == 1:
        return parts[0]
    sums = (parts[0].view(1, -1) + parts[1]).view(-1)
    return sums - torch.floor(sums)


def _split(arrays: Sequence[Array], sizes: Sequence[int]) -> list[list[Array]]:
    rest = iter(arrays)
    return [[next(rest) for _ in range(size)] for size in sizes]


def _fit(arrays: Sequence[Array], like: Sequence[tuple[Any, Any]]) -> bool:
    # Other inputs would cause a recompilation; the plain functions report what is wrong with them.
    return len(arrays) == len(like) and all(
        array.shape == shape and array.dtype == dtype and array.is_contiguous() and not array.requires_grad
        for array, (shape, dtype) in zip(arrays, like, strict=True)
    )


def _aligned(x: Array) -> Array:
    # The compiled code reads bits as words, but arrays in a message may be unaligned.
    return x if x.data_ptr() % 8 == 0 and x.storage_offset() * x.element_size() % 8 == 0 else x.clone()


def _equal(x: Array, y: Array) -> bool:
    return torch.equal(x.view(torch.uint8), y.contiguous().view(torch.uint8))


def sample(n: int, seed: int) -> Array:
    """float32[n] for comparisons: gradients, and hard cases: ties, zeros, both ends of float32's range.

    All seeds have the same ties, so a sum of two samples has ties as well.
    """
    rng, fixed = np.random.default_rng(seed), np.random.default_rng(2)
    x = (rng.laplace(size=n) * 1e-3).astype(np.float32)
    part = n // 16
    for place, values in enumerate(
        (
            np.zeros(part),
            *(np.where(fixed.random(part) < 0.1, top, fixed.integers(-2 * top, 2 * top, part) / 2) / 2 for top in TOPS),
            rng.laplace(size=part) * 1e-41,
            rng.laplace(size=part) * 1e-30,
            rng.laplace(size=part) * 1e28,
            np.where(rng.random(part) < 0.01, rng.laplace(size=part), 0.0),
        )
    ):
        x[(2 * place + 1) * part : (2 * place + 2) * part] = values
    return torch.from_numpy(x)
