"""How a method is carried out: by a native kernel, in pieces that stay in a cache, or whole. The result is the same.

A gradient that is handed to a method is *spent*: its memory may take what was not sent, and in the end the mean.
So a step needs no second array of the gradient's size, whose fresh pages cost more than all arithmetic.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

from grace.backends.base import HOSTED, Unavailable
from grace.blocks import span, spans
from grace.core import (
    Array,
    Calls,
    Combine,
    Compressor,
    Context,
    Memory,
    Payload,
    Program,
    State,
    at_once,
    name_of,
)
from grace.received import Received

RESIDUAL = "memory/residual"


def encode(
    compressor: Compressor, memory: Memory, x: Array, state: State, ctx: Context
) -> tuple[Payload, State] | None:
    """`Method.encode` at once: payload and next state. None if there is no way but step by step. x is spent.

    With ``ctx.calls`` it may be left there.
    """
    if not memory.plain or ctx.size == 0:
        return None
    residual = state.get(RESIDUAL)
    done = _fused(compressor, x, residual, ctx)
    if done is None and _in_pieces(compressor, ctx):
        done = _encode_pieces(compressor, x, residual, ctx)
    if done is None:
        return None
    payload, left = done
    return payload, state if residual is None else {**state, RESIDUAL: left}


def _fused(compressor: Compressor, x: Array, residual: Array | None, ctx: Context) -> tuple[Payload, Array] | None:
    try:
        return compressor.fused(x, residual, ctx) if ctx.xp.kernels else None
    except Unavailable:
        return None


def _fused_mean(
    compressor: Compressor, payloads: Sequence[Payload], out: Array | None, ctx: Context, calls: Calls | None
) -> Array | None:
    ctx = ctx if ctx.calls is calls else ctx.with_calls(calls)
    try:
        return compressor.fused_mean(payloads, out, ctx) if ctx.xp.kernels else None
    except Unavailable:
        return None


def decode(compressor: Compressor, payload: Payload, ctx: Context) -> Array:
    """`Compressor.decompress`, by a kernel if there is one."""
    found = _fused_mean(compressor, [payload], None, ctx, None) if ctx.size else None
    return compressor.decompress(payload, ctx) if found is None else found


def encode_hosted(method: Any, x: Array, state: State, ctx: Context) -> tuple[Payload, State] | None:
    """`Method.encode` by NumPy's kernels, for a toolkit on this host without kernels for all of it; None: it can't be.

    Of a method that asks for collectives inside it cannot.
    """
    host = _host(ctx, method.compressor, method.memory)
    if host is None or inspect.isgeneratorfunction(method.memory.compensate):
        return None
    payload = _payload(method.compressor, host, ctx.shape)
    if payload is None:
        return None
    xp, keys, lr = ctx.xp, list(state), ctx.lr
    kept = [(xp.dtype(array), xp.shape(array)) for array in state.values()]

    def work(step: Any, rate: Any, x: Any, *arrays: Any) -> list[Array]:
        # x is spent, but not its memory, which is the toolkit's.
        here = _there(replace(ctx, lr=lr and (lambda: rate)), host, step)
        held = dict(zip(keys, arrays, strict=True))
        with host.quiet():
            sent, after = at_once(method.encode(host.copy(x), held, here), method.compressor)
        return [*sent, *(after[key] for key in keys)]

    step, rate = xp.asarray(ctx.step, "int64"), xp.asarray(lr() if lr else 0.0, "float32")
    found = xp.hosted(work, [step, rate, x, *state.values()], [*payload, *kept])
    return tuple(found[: len(payload)]), dict(zip(keys, found[len(payload) :], strict=True))


@cache
def _payload(compressor: Compressor, xp: Any, shape: tuple[int, ...]) -> tuple[tuple[str, tuple[Any, ...]], ...] | None:
    # `template`, with None for lengths that depend on values; None for a method that asks for collectives.
    try:
        found = template(compressor, xp, shape)
    except ValueError:
        return None
    return tuple((dtype, (None, *sizes[1:])) for dtype, sizes in found) if compressor.ragged else found


def _host(ctx: Context, compressor: Compressor, *memory: Memory) -> Any:
    # The backend that is to carry out a method instead of the toolkit's own. Other people's may know one toolkit only.
    if ctx.size < HOSTED or (host := ctx.xp.host) is None or ctx.xp.kernels.whole(compressor) or compressor.lossless:
        return None
    return host if all(type(part).__module__.startswith("grace.") for part in (compressor, *memory)) else None


def _there(ctx: Context, host: Any, step: Any) -> Context:
    # The context while a host works. That of a graph outlasts its steps, so what a method draws does not stay in it.
    return replace(ctx, xp=host, step=int(step), drawn={})


def _encode_pieces(compressor: Compressor, x: Array, residual: Array | None, ctx: Context) -> tuple[Payload, Array]:
    xp, units, size = ctx.xp, unit(compressor), piece(compressor, ctx.xp)
    each = template(compressor, xp, (units,), ctx.wire)
    # Arrays of the whole payload, a little too long: parts that are put together in the end would be copied once more.
    whole = [xp.empty(-(-ctx.size // units) * shape[0], dtype) for dtype, shape in each]
    ends: list[int] = []
    forms = xp.forms if ctx.compile and not compressor.lossless else None
    for start, stop in pieces(compressor, ctx):
        here, part = ctx.piece(start, stop - start), x[start:stop]
        rest = None if residual is None else residual[start:stop]
        firsts = [start // units * shape[0] for _, shape in each]
        if forms is not None and here.size == size:
            ends = [stop // units * shape[0] for _, shape in each]
            outs = tuple(array[first:end] for array, first, end in zip(whole, firsts, ends, strict=True))
            if forms.encode(compressor, part, rest, outs, here):
                continue
        if rest is not None:
            part = xp.add_to(part, rest)
        found: Any = compressor.compress(part, {}, here)
        payload: Payload = found[0]
        ends = [first + xp.shape(array)[0] for first, array in zip(firsts, payload, strict=True)]
        for place, first, end, array in zip(whole, firsts, ends, payload, strict=True):
            xp.write(place[first:end], array)
        if residual is not None:
            left = compressor.residual(part, payload, here)
            if not xp.same_memory(left, x[start:stop]):
                xp.write(x[start:stop], left)
    return tuple(array[:end] for array, end in zip(whole, ends, strict=True)), x


@contextmanager
def sent_by(worker: int | None, compressor: Compressor, ctx: Context) -> Iterator[None]:
    """Errors inside are about the payload of a worker, or of all of them together (None), and say so."""
    try:
        yield
    except ValueError as error:
        who = "the workers together" if worker is None else f"worker {worker} of {ctx.world_size}"
        raise ValueError(
            f"{who} sent a payload for {ctx.name!r} that {name_of(compressor)!r} cannot have made: {error}. All "
            "workers must run the same version of GRACE; if they do, memory or the network has failed on that machine: "
            "start again from the last checkpoint, without it"
        ) from error


class Mean:
    """The mean of payloads, not decoded yet: it may be written to where it belongs, piece by piece."""

    def __init__(self, compressor: Compressor, payloads: Sequence[Payload], ctx: Context, agreed: bool = False):
        self._compressor, self._payloads, self._ctx, self._agreed = compressor, payloads, ctx, agreed

    @property
    def marked(self) -> bool:
        """Whether `marks` tell if it is finite; otherwise only the decoded mean can."""
        return self._compressor.marked

    def marks(self) -> list[Array]:
        """float32 vectors, all finite if and only if the mean is."""
        xp = self._ctx.xp
        floats = [array for payload in self._payloads for array in payload if xp.dtype(array) == "float32"]
        return [xp.reshape(array, (-1,)) for array in floats]

    @property
    def placed(self) -> bool:
        """Whether `places` are known: the payloads lie in messages."""
        return isinstance(self._payloads, Received)

    def places(self) -> list[tuple[int, int]]:
        """The `marks` in memory: where each begins, and how many numbers it has."""
        payloads: Any = self._payloads
        columns = zip(payloads.layout, payloads.addresses(), strict=True)
        return [
            (address, math.prod(shape)) for (dtype, shape), each in columns if dtype == "float32" for address in each
        ]

    def array(self, calls: Calls | None = None) -> Array:
        """float32[n]. With ``calls`` it may be left there. ValueError names a worker whose payload does not fit."""
        xp, ctx = self._ctx.xp, self._ctx
        if xp.mutable and (xp.kernels or _in_pieces(self._compressor, ctx)):
            return self.into(xp.empty(ctx.size, ctx.dtype), calls)
        with self._named():
            return self._whole()

    def into(self, out: Array, calls: Calls | None = None) -> Array:
        """As `array`, written to float32[n] ``out``."""
        with self._named():
            return self._into(out, calls)

    def made(self) -> Program[Array]:
        """As `array`, for a program: the means of many tensors may be decoded one after the other."""
        calls = self._ctx.calls
        array = self.array(calls)
        if calls:
            yield calls
        return array

    @contextmanager
    def _named(self) -> Iterator[None]:
        # An error says whose payload it is about: that of the first one which cannot be decoded by itself.
        try:
            yield
        except ValueError:
            for worker, payload, ctx in self._sent():
                with sent_by(worker, self._compressor, self._ctx):
                    self._compressor.decompress(payload, ctx)
            raise

    def _sent(self) -> Iterator[tuple[int | None, Payload, Context]]:
        # Each payload, whose it is (None: everybody's), and the elements that it is of.
        for worker, payload in enumerate(self._payloads):
            yield None if self._agreed else worker, payload, self._ctx

    def _whole(self) -> Array:
        ctx = self._ctx
        found = self._hosted()
        if found is None and ctx.size:
            found = _fused_mean(self._compressor, self._payloads, None, ctx, None)
        return self._decode(self._payloads, ctx) if found is None else found

    def _hosted(self) -> Array | None:
        # As of `encode_hosted`.
        ctx, host, payloads = self._ctx, _host(self._ctx, self._compressor), self._payloads
        if host is None:
            return None
        each = len(payloads[0])

        def work(step: Any, *arrays: Any) -> list[Array]:
            parts = [arrays[i : i + each] for i in range(0, len(arrays), each)]
            with host.quiet():
                return [Mean(self._compressor, parts, _there(ctx, host, step), self._agreed).array()]

        arrays = [ctx.xp.asarray(ctx.step, "int64"), *(array for payload in payloads for array in payload)]
        (mean,) = ctx.xp.hosted(work, arrays, [("float32", (ctx.size,))])
        return mean

    def _into(self, out: Array, calls: Calls | None) -> Array:
        xp, ctx, compressor = self._ctx.xp, self._ctx, self._compressor
        if ctx.size == 0:
            return out
        if _fused_mean(compressor, self._payloads, out, ctx, calls) is not None:
            return out
        if not _in_pieces(compressor, ctx):
            return self._decode_into(out, self._payloads, ctx)
        forms: Any = xp.forms if ctx.compile and not compressor.lossless else None
        size, payloads, steps = piece(compressor, xp), list(self._payloads), strides(compressor, xp)
        for start, stop in pieces(compressor, ctx):
            parts = [cut(payload, steps, start, stop, ctx.size) for payload in payloads]
            here = ctx.piece(start, stop - start)
            fits = forms is not None and here.size == size
            if not (fits and forms.mean(compressor, out[start:stop], parts, self._agreed, here)):
                self._decode_into(out[start:stop], parts, here)
        return out

    def _decode_into(self, out: Array, payloads: Sequence[Payload], ctx: Context) -> Array:
        if self._agreed:
            return self._compressor.decompress_into(out, payloads[0], ctx)
        return self._compressor.aggregate_into(out, payloads, ctx)

    def _decode(self, payloads: Sequence[Payload], ctx: Context) -> Array:
        return (
            self._compressor.decompress(payloads[0], ctx) if self._agreed else self._compressor.aggregate(payloads, ctx)
        )


class Shards(Mean):
    """The mean of a tensor of which each worker has sent one of consecutive shards, not decoded yet.

    ``contexts``: of each shard; ``sizes``: how long each array of a payload is, by worker. What is longer is cut off.
    """

    def __init__(
        self,
        compressor: Compressor,
        payloads: Sequence[Payload],
        ctx: Context,
        contexts: Sequence[Context],
        sizes: Sequence[Sequence[int]],
    ):
        super().__init__(compressor, payloads, ctx, agreed=True)
        self._contexts, self._sizes = contexts, sizes

    def _part(self, worker: int) -> Sequence[Payload]:
        lengths, xp = [size[worker] for size in self._sizes], self._ctx.xp
        payloads = self._payloads
        if isinstance(payloads, Received) and [shape[0] for _, shape in payloads.layout] == lengths:
            return payloads.alone(worker)
        cut = [x if xp.shape(x)[0] == n else x[:n] for x, n in zip(payloads[worker], lengths, strict=True)]
        return [tuple(cut)]

    def _sent(self) -> Iterator[tuple[int | None, Payload, Context]]:
        for worker, ctx in enumerate(self._contexts):
            yield worker, self._part(worker)[0], ctx

    def _whole(self) -> Array:
        # One decoding of all: a graph is smaller so.
        xp, parts = self._ctx.xp, [self._part(worker)[0] for worker in range(len(self._contexts))]
        return Mean(self._compressor, [tuple(map(xp.concat, zip(*parts, strict=True)))], self._ctx, True)._whole()

    def _into(self, out: Array, calls: Calls | None) -> Array:
        start = 0
        for worker, ctx in enumerate(self._contexts):
            Mean(self._compressor, self._part(worker), ctx, agreed=True)._into(out[start : start + ctx.size], calls)
            start += ctx.size
        return out


class Rest:
    """What a payload does not carry of x, not worked out yet: x is parted where each of the two belongs.

    Until then x and the payload stay as they are.
    """

    def __init__(self, compressor: Compressor, x: Array, payload: Payload, ctx: Context):
        self.x, self._compressor, self._payload, self._ctx = x, compressor, payload, ctx

    def into(self, out: Array) -> None:
        """It is written to float32[n] ``out``, and x becomes what the payload carries."""
        self._compressor.part(self.x, self._payload, out, self._ctx)


def sound(means: Sequence[Mean], xp: Any) -> bool:
    """Whether the marks of all these are finite: one look at all of them costs less than one at each."""
    kernels = xp.kernels
    if kernels and kernels.finite and all(mean.placed for mean in means):
        places = [place for mean in means for place in mean.places()]
        return bool(kernels.finite([address for address, _ in places], [count for _, count in places]))
    return bool(xp.finite(xp.concat([array for mean in means for array in mean.marks()])))


def as_array(mean: Array | Mean) -> Array:
    """A mean as float32[n], decoded if it is not yet."""
    return mean.array() if isinstance(mean, Mean) else mean


# -- pieces ------------------------------------------------------------------------------------------------------------
def unit(compressor: Compressor) -> int:
    """Elements whose codes fill whole bytes and whole blocks."""
    return math.lcm(8, compressor.block or 1)


def piece(compressor: Compressor, xp: Any) -> int:
    """Elements of a piece that stays in a cache: whole units."""
    return span(xp, unit(compressor))


def pieces(compressor: Compressor, ctx: Context) -> list[tuple[int, int]]:
    """Where pieces that stay in a cache begin and end: whole units, the last one short."""
    return spans(ctx.xp, ctx.size, unit(compressor))


def cut(payload: Payload, steps: tuple[int, ...], start: int, stop: int, size: int) -> Payload:
    """The part of a blockwise method's payload that holds elements ``start .. stop`` of ``size``.

    Both are at whole units or the end. ``steps``: `strides` of the method.
    """
    units, *each = steps
    if start >= size:
        return tuple(array[:0] for array in payload)
    first, last = start // units, None if stop >= size else stop // units
    return tuple(
        array[first * length : None if last is None else last * length]
        for array, length in zip(payload, each, strict=True)
    )


def strides(compressor: Compressor, xp: Any) -> tuple[int, ...]:
    """Elements of a unit, and how long each payload array is for one."""
    units = unit(compressor)  # blockwise methods are linear in it
    return units, *(shape[0] for _, shape in template(compressor, xp, (units,)))


@cache
def cuts(
    compressor: Compressor, xp: Any, size: int, ends: tuple[int, ...], whole: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    """How long the parts of each payload array are where `cut` cuts a tensor of ``size`` elements at ``ends``.

    ``whole``: how long the arrays are themselves.
    """
    units, *each = strides(compressor, xp)
    found = []
    for length, end in zip(each, whole, strict=True):
        bounds = [0, *(end if bound >= size else bound // units * length for bound in ends), end]
        found.append(tuple(stop - start for start, stop in pairwise(bounds)))
    return tuple(found)


def shards(compressor: Compressor, ctx: Context, parts: int) -> list[Context]:
    """A tensor cut into consecutive shards: whole blocks and bytes, or whole rows for a method that sees the shape.

    All are of one size but for the last ones, which are shorter or empty.
    """
    rows = compressor.shaped and len(ctx.shape) > 1
    row = ctx.size // max(1, ctx.shape[0]) if rows else 1
    whole = max(1, row) if compressor.shaped else unit(compressor)
    full = -(-ctx.size // (whole * parts)) * whole
    ends = [min(part * full, ctx.size) for part in range(parts + 1)]
    found = [ctx.piece(start, stop - start) for start, stop in pairwise(ends)]
    return [replace(shard, shape=(shard.size // (row or 1), *ctx.shape[1:])) for shard in found] if rows else found


@cache
def template(
    compressor: Compressor, xp: Any, shape: tuple[int, ...], wire: str = "float32"
) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """dtype and shape of the payload arrays of a tensor. ValueError for a method that asks for collectives."""
    ctx = Context(xp=xp, name="template", shape=shape, wire=wire)
    payload, _ = at_once(compressor.compress(xp.zeros(ctx.size), compressor.init(ctx), ctx), compressor)
    return tuple((xp.dtype(array), tuple(xp.shape(array))) for array in payload)


def _in_pieces(compressor: Compressor, ctx: Context) -> bool:
    return 0 < ctx.xp.piece < ctx.size and _divisible(compressor)


def uncompiled(points: Sequence[tuple[Compressor, Context]], xp: Any) -> str:
    """Why compiled forms would do nothing for any of these compressors and tensors; empty if they would."""
    if xp.forms is None:
        return f"it is for PyTorch's tensors on CPUs, and these are {xp.name}'s" + " on a device" * (xp.name == "torch")
    names = ", ".join(sorted({repr(name_of(compressor)) for compressor, _ in points}))
    blockwise = [(compressor, ctx) for compressor, ctx in points if _divisible(compressor)]
    if not blockwise:
        return (
            f"it is for methods that work on blocks one by one, as block_size=512 makes many do, not {names or 'none'}"
        )
    if not any(_in_pieces(compressor, ctx) for compressor, ctx in blockwise):
        return f"it is for tensors of more than {xp.piece:,} elements; fuse='model' makes one of all"
    if xp.kernels and all(type(compressor).fused is not Compressor.fused for compressor, _ in blockwise):
        return f"native kernels, which are faster, carry out {names}"
    return ""


@cache
def _divisible(compressor: Compressor) -> bool:
    # Blocks may be compressed apart, by plain functions without state.
    return (
        compressor.block is not None
        and not compressor.ragged
        and compressor.combine is Combine.GATHER
        and type(compressor).init is Compressor.init
        and not inspect.isgeneratorfunction(type(compressor).compress)
    )
