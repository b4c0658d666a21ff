"""Cuts tensors and payloads into chunks that fit a cache, and into shards, one per worker."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

from grace.core.compressor import Compressor
from grace.core.context import Context
from grace.core.program import run_local
from grace.core.state import Payload
from grace.core.traits import Combine


def span(xp: Any, unit: int) -> int:
    """Number of elements in a chunk that fits a cache; a multiple of ``unit``."""
    return int(max(1, xp.piece // unit) * unit)


def spans(xp: Any, n: int, unit: int) -> list[tuple[int, int]]:
    """Bounds of the chunks of n elements; each fits a cache and is a multiple of ``unit``, but the last may be shorter.

    A single chunk if the backend sets no chunk size.
    """
    size = span(xp, unit) if xp.piece else n
    return [(start, min(start + size, n)) for start in range(0, n, size)] if n else [(0, 0)]


def unit(compressor: Compressor) -> int:
    """Granularity of chunks: the smallest number of elements that fills whole blocks and whole bytes."""
    return math.lcm(8, compressor.traits.block_size or 1)


def pieces(compressor: Compressor, ctx: Context) -> list[tuple[int, int]]:
    """Bounds of a tensor's chunks; each fits a cache and is a multiple of `unit`, but the last may be shorter."""
    return spans(ctx.xp, ctx.size, unit(compressor))


def cut(payload: Payload, steps: tuple[int, ...], start: int, stop: int, size: int) -> Payload:
    """The slice of a blockwise method's payload that holds elements ``start .. stop`` of ``size``.

    Both bounds are multiples of `unit`, or ``size`` itself. ``steps``: the method's `strides`.
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
    """The number of elements in a `unit`, then the length of each payload array for one unit."""
    units = unit(compressor)  # array lengths of blockwise methods are proportional to it
    return units, *(shape[0] for _, shape in template(compressor, xp, (units,)))


@cache
def cuts(
    compressor: Compressor, xp: Any, size: int, ends: tuple[int, ...], whole: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    """For each payload array, the lengths of its parts if `cut` splits a tensor of ``size`` elements at ``ends``.

    ``whole``: the length of each whole array.
    """
    units, *each = strides(compressor, xp)
    found = []
    for length, end in zip(each, whole, strict=True):
        bounds = [0, *(end if bound >= size else bound // units * length for bound in ends), end]
        found.append(tuple(stop - start for start, stop in pairwise(bounds)))
    return tuple(found)


def shards(compressor: Compressor, ctx: Context, parts: int) -> list[Context]:
    """Cut a tensor into consecutive shards: multiples of `unit`, or whole rows for a method that needs the shape.

    All shards have the same size, except that the last ones may be shorter or empty.
    """
    rows = compressor.traits.needs_shape and len(ctx.shape) > 1
    row = ctx.size // max(1, ctx.shape[0]) if rows else 1
    whole = max(1, row) if compressor.traits.needs_shape else unit(compressor)
    full = -(-ctx.size // (whole * parts)) * whole
    ends = [min(part * full, ctx.size) for part in range(parts + 1)]
    found = [ctx.piece(start, stop - start) for start, stop in pairwise(ends)]
    return [replace(shard, shape=(shard.size // (row or 1), *ctx.shape[1:])) for shard in found] if rows else found


@cache
def template(
    compressor: Compressor, xp: Any, shape: tuple[int, ...], wire: str = "float32"
) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """dtype and shape of a tensor's payload arrays. ValueError for a method that requests collectives."""
    ctx = Context(xp=xp, name="template", shape=shape, wire=wire)
    payload, _ = run_local(compressor.compress(xp.zeros(ctx.size), compressor.init(ctx), ctx), compressor)
    return tuple((xp.dtype(array), tuple(xp.shape(array))) for array in payload)


def in_chunks(compressor: Compressor, ctx: Context) -> bool:
    """Return whether a tensor is compressed chunk by chunk."""
    return 0 < ctx.xp.piece < ctx.size and divisible(compressor)


def cuttable(compressor: Compressor) -> bool:
    """Return whether a tensor's payload can be cut into its shards' payloads."""
    return compressor.traits.block_size is not None and not compressor.traits.variable_length


@cache
def divisible(compressor: Compressor) -> bool:
    """Return whether chunks can be compressed independently: the method is stateless and requests no collectives."""
    return (
        cuttable(compressor)
        and compressor.traits.combine is Combine.GATHER
        and type(compressor).init is Compressor.init
        and not inspect.isgeneratorfunction(type(compressor).compress)
    )
