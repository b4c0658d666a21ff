"""A table of the kernels that replace a method's plain functions, by the method's exact type.

Groups (`grace.engine.groups`) do not use this table. It serves tensors that are exchanged one by one, such as those of
methods and communicators without groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from grace.core import Array, Compressor, Context, MaybeProgram, Payload, State
from grace.core.errors import Unavailable

FAMILIES: dict[str, tuple[str, ...]] = {
    "quantisers": (
        *("measured.efsignsgd", "measured.onebit", "measured.blockint", "measured.qsgd"),
        *("measured.terngrad", "measured.signsgd", "studies.signum", "studies.threelc"),
        *("studies.inceptionn", "studies.sketch", "measured.bf16", "measured.fp16", "studies.fp8"),
        *("measured.natural", "studies.natural_dithering", "studies.dettmers8", "studies.shared_int"),
    ),
    "transforms": ("measured.eden", "studies.thc", "studies.demo"),
    "sparsifiers": (
        *("measured.topk", "studies.dgc", "studies.threshold", "studies.sidco"),
        *("studies.randomk", "studies.chunktopk", "studies.adaq", "studies.cltk"),
        *("studies.chain", "studies.stc", "studies.qsparse"),
    ),
    "low_rank": ("measured.powersgd", "studies.gradzip", "studies.acpsgd", "studies.atomo"),
}
"""By module of this package: the modules of `grace.compressors` with the methods in its table CALLS."""
_PLACES = {f"grace.compressors.{module}": family for family, modules in FAMILIES.items() for module in modules}

Encode = Callable[[Any, Array, Array | None, Context], tuple[Payload, Array] | None]
Compress = Callable[[Any, Array, State, Context], MaybeProgram[tuple[Payload, State]] | None]
Residual = Callable[[Any, Array, Payload, Context], Array | None]
Mean = Callable[[Any, Sequence[Payload], Array | None, Context], Array | None]


class Calls(NamedTuple):
    """Functions that replace methods of a compressor. Each returns None where the backend lacks its kernel."""

    encode: Encode | None = None
    """(compressor, x, residual, ctx): returns the payload of x + residual, and the new residual in x's memory.

    If ``residual`` is None, the payload is that of x, and the second result is unused.
    """
    compress: Compress | None = None
    """`Compressor.compress`, for a method without ``encode``, or with a memory other than standard error feedback."""
    residual: Residual | None = None
    """`Compressor.residual`. x is donated."""
    mean: Mean | None = None
    """(compressor, payloads, out, ctx): `Compressor.aggregate`, written to float32[n] ``out`` unless that is None."""


_NONE = Calls()


@cache
def calls_of(kind: type[Compressor]) -> Calls:
    """The calls of a compressor's exact type. A subclass has none, because it may override any method."""
    family = _PLACES.get(kind.__module__)
    return _NONE if family is None else table(family).get(kind, _NONE)


def table(family: str) -> dict[type, Calls]:
    """The calls of a family, by type. Importing it imports its methods."""
    found: dict[type, Calls] = import_module(f"grace.engine.codecs.{family}").CALLS
    return found


def kernel(ctx: Context, family: str, name: str) -> Any:
    """A kernel of the backend; None if it has no such kernel."""
    found = ctx.xp.kernels
    return getattr(getattr(found, family), name) if found else None


def with_kernel(family: str, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator for a function of `Calls`: passes the kernel as first argument, or returns None if there is none."""

    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(compressor: Any, *args: Any) -> Any:
            found = kernel(args[-1], family, name)
            return None if found is None else function(found, compressor, *args)

        return called

    return decorated


def encode(compressor: Compressor, x: Array, residual: Array | None, ctx: Context) -> tuple[Payload, Array] | None:
    """`Calls.encode`; None without a kernel. x is donated."""
    call = calls_of(type(compressor)).encode
    try:
        return None if call is None else call(compressor, x, residual, ctx)
    except Unavailable:
        return None


def compress(compressor: Compressor, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
    """`Compressor.compress`, by a kernel if there is one."""
    call = calls_of(type(compressor)).compress
    found = None if call is None else call(compressor, x, state, ctx)
    return compressor.compress(x, state, ctx) if found is None else found


def residual(compressor: Compressor, x: Array, payload: Payload, ctx: Context) -> Array:
    """`Compressor.residual`, by a kernel if there is one. x is donated."""
    call = calls_of(type(compressor)).residual
    found = None if call is None else call(compressor, x, payload, ctx)
    return compressor.residual(x, payload, ctx) if found is None else found


def mean(compressor: Compressor, payloads: Sequence[Payload], out: Array | None, ctx: Context) -> Array | None:
    """`Calls.mean`; None without a kernel."""
    call = calls_of(type(compressor)).mean
    try:
        return None if call is None else call(compressor, payloads, out, ctx)
    except Unavailable:
        return None


def decode(compressor: Compressor, payload: Payload, ctx: Context) -> Array:
    """`Compressor.decompress`, by a kernel if there is one."""
    found = mean(compressor, [payload], None, ctx) if ctx.size else None
    return compressor.decompress(payload, ctx) if found is None else found
