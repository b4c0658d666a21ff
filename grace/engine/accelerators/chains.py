"""Accelerators of chains of a sparsifier and a quantizer, built from the accelerators of both."""

from __future__ import annotations

from typing import Any, TypeVar

from grace.compressors.chain import Chain
from grace.compressors.qsparse import Qsparse
from grace.compressors.sparse import Sparsifier
from grace.compressors.stc import STC
from grace.core import Array, Context, Payload, Program, State, as_program, run_local
from grace.engine.accelerators.base import Accelerator
from grace.engine.accelerators.sparsifiers import DecodedSums, Selection
from grace.engine.accelerators.table import accelerator_of, decode, encode
from grace.engine.workspace import deferring

H = TypeVar("H", bound=Chain)


class Chains(DecodedSums[H]):
    """Accelerator of chain, stc and qsparse."""

    def compress(self, compressor: H, x: Array, state: State, ctx: Context) -> Program[tuple[Payload, State]]:
        first, second = compressor.sparsifier, compressor.quantizer
        sent, _ = yield from as_program(accelerator_of(first).compress(first, x, {}, ctx))
        values, _ = yield from as_program(accelerator_of(second).compress(second, sent[0], {}, compressor.second(ctx)))
        return (*values, *sent[1:]), state

    def encode(self, compressor: H, x: Array, residual: Array | None, ctx: Context) -> tuple[Payload, Array] | None:
        ctx = deferring(ctx, None)  # the quantizer reads the values immediately
        first, second = compressor.sparsifier, compressor.quantizer
        selection = accelerator_of(first)
        if not isinstance(selection, Selection) or (done := selection.chosen(first, x, residual, ctx)) is None:
            return None
        (values, positions), left = done
        where = compressor.second(ctx)
        coded = encode(second, ctx.xp.buffers.copy(values), None, where)
        found, _ = coded or run_local(second.compress(values, {}, where), second)
        payload = (*found, *selection.write(first, positions, ctx))
        if residual is None:
            return payload, left
        return payload, ctx.xp.inplace.scatter(left, positions, values - self._decoded(compressor, found, ctx))

    def parts(self, compressor: H, payload: Payload, ctx: Context) -> tuple[Array, Array]:
        first = compressor.sparsifier
        assert isinstance(first, Sparsifier)
        count, accelerator = len(payload) - first.elements.arrays(ctx.size), accelerator_of(first)
        sent = (self._decoded(compressor, payload[:count], ctx), *payload[count:])
        if isinstance(accelerator, Selection):
            return accelerator.parts(first, sent, ctx)
        return first.elements.parts(sent, ctx)

    def _decoded(self, compressor: H, found: Payload, ctx: Context) -> Array:
        return decode(compressor.quantizer, found, compressor.second(ctx)) * compressor.scale(
            compressor.count(ctx.size)
        )


ACCELERATORS: dict[type, Accelerator[Any]] = {Chain: Chains[Chain](), STC: Chains[STC](), Qsparse: Chains[Qsparse]()}
