"""Runs methods with NumPy's kernels for another toolkit on the same host."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import cache
from typing import Any

from grace.backends.base import HOSTED
from grace.core import Array, Compressor, Context, Memory, Payload, State, run_local
from grace.core.sharding import template
from grace.engine.reshard import CARRIED


def encode_hosted(method: Any, x: Array, state: State, ctx: Context) -> tuple[Payload, State] | None:
    """`Method.encode` by NumPy's kernels, for a toolkit on this host that lacks some kernels.

    Returns None if NumPy is no faster, or if the method requests collectives.
    """
    host = host_backend(ctx, method.compressor, method.memory)
    if host is None or inspect.isgeneratorfunction(method.memory.compensate):
        return None
    payload = _payload(method.compressor, host, ctx.shape)
    if payload is None:
        return None
    xp, lr = ctx.xp, ctx.lr
    mine = {key: array for key, array in state.items() if key != CARRIED}  # the carried residual was already added to x
    keys, kept = list(mine), [(xp.dtype(array), xp.shape(array)) for array in mine.values()]

    def work(step: Any, rate: Any, x: Any, *arrays: Any) -> list[Array]:
        # x is donated, but the toolkit owns its memory: copy.
        here = on_host(replace(ctx, lr=lr and (lambda: rate)), host, step)
        held = dict(zip(keys, arrays, strict=True))
        with host.quiet():
            sent, after = run_local(method.encode(host.copy(x), held, here), method.compressor)
        return [*sent, *(after[key] for key in keys)]

    step, rate = xp.asarray(ctx.step, "int64"), xp.asarray(lr() if lr else 0.0, "float32")
    found = xp.hosted(work, [step, rate, x, *mine.values()], [*payload, *kept])
    return tuple(found[: len(payload)]), dict(zip(keys, found[len(payload) :], strict=True))


@cache
def _payload(compressor: Compressor, xp: Any, shape: tuple[int, ...]) -> tuple[tuple[str, tuple[Any, ...]], ...] | None:
    # Returns `template`'s result, with None for lengths that depend on values; None if the method requests collectives.
    try:
        found = template(compressor, xp, shape)
    except ValueError:
        return None
    return tuple((dtype, (None, *sizes[1:])) for dtype, sizes in found) if compressor.traits.variable_length else found


def host_backend(ctx: Context, compressor: Compressor, *memory: Memory) -> Any:
    """The host backend that runs a method instead of the toolkit; None if the toolkit runs it.

    Third-party methods always run on the toolkit, because they may support no other.
    """
    if ctx.size < HOSTED or (host := ctx.xp.host) is None or compressor.traits.lossless:
        return None
    if ctx.xp.kernels.whole(compressor):
        return None
    return host if all(type(part).__module__.startswith("grace.") for part in (compressor, *memory)) else None


def on_host(ctx: Context, host: Any, step: Any) -> Context:
    """The context for the host's backend, without cached draws, because a graph's context outlives a step."""
    return replace(ctx, xp=host, step=int(step), _draws=None)
