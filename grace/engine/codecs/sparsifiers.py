"""Kernel calls for methods that send some elements with their positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from grace.compressors.measured.topk import TopK
from grace.compressors.selectors import FACTORS, MISS, Sampled, SelectingSparsifier
from grace.compressors.sparse import Sparsifier, kept
from grace.compressors.studies.adaq import AdaQ
from grace.compressors.studies.chain import Chain
from grace.compressors.studies.chunktopk import ChunkTopK
from grace.compressors.studies.cltk import CLTopK
from grace.compressors.studies.dgc import DGC
from grace.compressors.studies.qsparse import Qsparse
from grace.compressors.studies.randomk import RandomK
from grace.compressors.studies.sidco import SIDCo
from grace.compressors.studies.stc import STC
from grace.compressors.studies.threshold import Threshold
from grace.core import Array, Context, Payload, State, run_local
from grace.core.gathered import GatheredPayloads
from grace.engine.codecs.table import Calls, decode, encode, kernel, with_kernel
from grace.ops import index_coding
from grace.ops.validate import placed

Parts = Callable[[Any, Payload, Context], tuple[Array, Array]]
"""(compressor, payload, ctx) -> values float32[K] and positions int32[K]. Callers check that positions ascend."""


def sums(parts: Parts) -> Calls:
    """`Calls` whose ``mean`` averages payloads that ``parts`` decodes."""

    def mean(compressor: Any, payloads: Sequence[Payload], out: Array | None, ctx: Context) -> Array | None:
        xp, call = ctx.xp, kernel(ctx, "sparsifiers", "sparse_mean")
        if call is not None:
            if (k := _uncoded(compressor, payloads, ctx)) is not None:
                return call(payloads, out, ctx.size, k)
            return call([parts(compressor, payload, ctx) for payload in payloads], out, ctx.size)
        if out is None:
            return None
        xp.buffers.write(out, 0.0)
        total = out
        for payload in payloads:
            values, positions = parts(compressor, payload, ctx)
            total = xp.scatter_add(total, placed(xp, positions, ctx.size), values)
        total = xp.inplace.divide(total, len(payloads)) if len(payloads) > 1 else total
        if not xp.buffers.same_memory(total, out):
            xp.buffers.write(out, total)
        return out

    return Calls(mean=mean)


def _uncoded(compressor: Any, payloads: Sequence[Payload], ctx: Context) -> int | None:
    # Returns the number of elements of a payload if a kernel can read gathered payloads without decoding, else None.
    if not isinstance(payloads, GatheredPayloads) or not isinstance(compressor, Sparsifier):
        return None
    return compressor.elements.count(ctx.size) if compressor.elements.coding(ctx.size) == "int32" else None


def _sent(compressor: Sparsifier, payload: Payload, ctx: Context) -> tuple[Array, Array]:
    return compressor.elements.parts(payload, ctx)


# -- topk and dgc: the selectors "exact" and "sampled", and the index coding "elias_fano" -----------------------------
def _coded(compressor: Sparsifier, name: str, ctx: Context) -> Any:
    # Returns the kernel that writes or reads positions in coding "elias_fano"; None without it, or for other codings.
    if not isinstance(compressor, SelectingSparsifier) or compressor.elements.coding(ctx.size) != "elias_fano":
        return None
    return kernel(ctx, "sparsifiers", name)


def _write(compressor: Sparsifier, positions: Array, ctx: Context) -> tuple[Array, ...]:
    # Does what `Elements.write` does, by a kernel if there is one.
    call = _coded(compressor, "positions_write", ctx)
    if call is None:
        return compressor.elements.write(positions, ctx)
    widths = index_coding.widths(ctx.size, ctx.xp.shape(positions)[0])
    return tuple(call(positions, *widths))


def _read(compressor: Sparsifier, sent: tuple[Array, ...], ctx: Context) -> Array:
    # Does what `Elements.read` does, by a kernel if there is one.
    call, found = _coded(compressor, "positions_read", ctx), None
    if call is not None:
        k = compressor.elements.count(ctx.size)
        assert k is not None
        found = call(sent, *index_coding.widths(ctx.size, k), k)  # None: the plain function raises the error
    return compressor.elements.read(sent, ctx) if found is None else found


def _selected(compressor: Sparsifier, payload: Payload, ctx: Context) -> tuple[Array, Array]:
    return compressor.elements.matched(payload[0], _read(compressor, payload[1:], ctx), ctx)


def _choose(compressor: Sparsifier, x: Array, residual: Array | None, ctx: Context) -> Any:
    # Returns ((values float32[K], positions int32[K]), residual); None without a kernel for the selection.
    if isinstance(compressor, Threshold):
        call = kernel(ctx, "sparsifiers", "threshold_encode")
        return None if call is None else call(x, residual, compressor.threshold)
    if not isinstance(compressor, SelectingSparsifier) or compressor.selector != "exact":
        return None
    call = kernel(ctx, "sparsifiers", "topk_encode")
    return None if call is None else call(x, residual, kept(compressor.compress_ratio, ctx.size))


def _encode(compressor: Sparsifier, x: Array, residual: Array | None, ctx: Context) -> Any:
    if (done := _choose(compressor, x, residual, ctx)) is None:
        return None
    (values, positions), left = done
    return (values, *_write(compressor, positions, ctx)), left


@with_kernel("sparsifiers", "sampled")
def _compress(call: Any, compressor: SelectingSparsifier, x: Array, state: State, ctx: Context) -> Any:
    selector = compressor.elements.selector
    if isinstance(selector, Sampled) and (sample := selector.sample(ctx.size)) < ctx.size:
        positions = _sampled(call, selector, x, sample, ctx)
    else:
        positions, state = selector.choose(x, state, ctx)
    return (ctx.xp.take(x, positions), *_write(compressor, positions, ctx)), state


def _sampled(call: Any, selector: Sampled, x: Array, sample: int, ctx: Context) -> Array:
    # Does what `Sampled.select` does, with a sample of ``sample`` elements; returns int32[K].
    xp, k = ctx.xp, kept(selector.compress_ratio, ctx.size)
    rank, most = math.ceil(selector.compress_ratio * sample), math.ceil(1.3 * k)
    factors, miss = xp.asarray(FACTORS, "float32"), xp.asarray(MISS, "float32")
    return call(x, ctx.rng("sample"), sample, rank, factors, miss, selector.likely, k, most)


def _residual(compressor: SelectingSparsifier, x: Array, payload: Payload, ctx: Context) -> Array | None:
    if _coded(compressor, "positions_read", ctx) is None:
        return None
    return ctx.xp.inplace.scatter(x, _read(compressor, payload[1:], ctx), 0.0)


# -- randomk ----------------------------------------------------------------------------------------------------------
def _shared_mean(compressor: RandomK, payloads: Sequence[Payload], out: Array | None, ctx: Context) -> Array | None:
    if out is None:
        return None
    ctx.xp.buffers.write(out, 0.0)
    positions = compressor.positions(ctx)
    return ctx.xp.inplace.scatter(out, positions, compressor.values(payloads, positions, ctx))


# -- chunktopk and adaq -----------------------------------------------------------------------------------------------
@with_kernel("sparsifiers", "chunktopk_encode")
def _chunks_encode(call: Any, compressor: ChunkTopK, x: Array, residual: Array | None, ctx: Context) -> Any:
    return call(x, residual, compressor.chunk_size, compressor.chunk_k)


def _chunks_parts(compressor: ChunkTopK, payload: Payload, ctx: Context) -> tuple[Array, Array]:
    call = kernel(ctx, "sparsifiers", "chunktopk_values")
    found = None if call is None else call(payload, ctx.size, compressor.chunk_size, compressor.chunk_k)
    return compressor.parts(payload, ctx) if found is None else found  # the plain function raises the error


@with_kernel("sparsifiers", "adaq_encode")
def _signs_encode(call: Any, compressor: AdaQ, x: Array, residual: Array | None, ctx: Context) -> Any:
    return call(x, residual, compressor.compress_ratio)


@with_kernel("sparsifiers", "adaq_mean")
def _signs_mean(call: Any, compressor: AdaQ, payloads: Sequence[Payload], out: Array | None, ctx: Context) -> Any:
    return call(payloads, out, ctx.size)


# -- chains of a sparsifier and a quantiser ---------------------------------------------------------------------------
def _chain_encode(compressor: Chain, x: Array, residual: Array | None, ctx: Context) -> Any:
    first, second = compressor.sparsifier, compressor.quantizer
    assert isinstance(first, Sparsifier)
    if (done := _choose(first, x, residual, ctx)) is None:
        return None
    (values, positions), left = done
    coded = encode(second, ctx.xp.buffers.copy(values), None, compressor.second(ctx))
    found, _ = coded or run_local(second.compress(values, {}, compressor.second(ctx)), second)
    payload = (*found, *_write(first, positions, ctx))
    if residual is None:
        return payload, left
    return payload, ctx.xp.inplace.scatter(left, positions, values - _chain_values(compressor, found, ctx))


def _chain_values(compressor: Chain, found: Payload, ctx: Context) -> Array:
    values = decode(compressor.quantizer, found, compressor.second(ctx))
    return values * compressor.scale(compressor.count(ctx.size))


def _chain_parts(compressor: Chain, payload: Payload, ctx: Context) -> tuple[Array, Array]:
    first = compressor.sparsifier
    assert isinstance(first, Sparsifier)
    count = len(payload) - first.elements.arrays(ctx.size)
    values = _chain_values(compressor, payload[:count], ctx)
    return first.elements.matched(values, _read(first, payload[count:], ctx), ctx)


_SELECTED = sums(_selected)._replace(encode=_encode, compress=_compress, residual=_residual)
_CHAIN = sums(_chain_parts)._replace(encode=_chain_encode)
CALLS: dict[type, Calls] = {
    TopK: _SELECTED,
    DGC: _SELECTED,
    Threshold: sums(_sent)._replace(encode=_encode),
    SIDCo: sums(_sent),
    CLTopK: sums(_sent),
    RandomK: Calls(mean=_shared_mean),
    ChunkTopK: sums(_chunks_parts)._replace(encode=_chunks_encode),
    AdaQ: Calls(_signs_encode, mean=_signs_mean),
    Chain: _CHAIN,
    STC: _CHAIN,
    Qsparse: _CHAIN,
}
