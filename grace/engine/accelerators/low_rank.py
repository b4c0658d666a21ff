"""In-place versions of low-rank approximations: a first pass that adds the residual, and in-place products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from grace.compressors.acpsgd import ACPSGD
from grace.compressors.atomo import Atomo
from grace.compressors.gradzip import GradZip
from grace.compressors.powersgd import PowerSGD
from grace.core import Array, Context, Payload, Program, State
from grace.engine.accelerators.base import Accelerator

A = TypeVar("A", PowerSGD, GradZip, ACPSGD)


class Factors(Accelerator[A]):
    """Accelerator of powersgd and gradzip."""

    def compensated(
        self, compressor: A, x: Array, residual: Array, state: State, ctx: Context
    ) -> tuple[Array, Program[tuple[Payload, State]]]:
        return x, compressor.agree(x, state, ctx, residual)

    def split_residual(self, compressor: A, x: Array, payload: Payload, residual: Array, ctx: Context) -> None:
        ctx.xp.linalg.part_product(x, *compressor.factors(payload, ctx), residual)

    def decode_into(self, compressor: A, out: Array, payload: Payload, ctx: Context) -> Array:
        return ctx.xp.linalg.product_into(out, *compressor.factors(payload, ctx))


class OwnFactors(Factors[ACPSGD]):
    """Accelerator of acpsgd: the residual comes from this worker's own factors."""

    def split_residual(self, compressor: ACPSGD, x: Array, payload: Payload, residual: Array, ctx: Context) -> None:
        ctx.xp.linalg.part_product(x, *compressor.factors(payload, ctx), residual, (payload[2], payload[3]))


class RandomSingularValues(Accelerator[Atomo]):
    """Accelerator of atomo."""

    def aggregate_into(self, compressor: Atomo, out: Array, payloads: Sequence[Payload], ctx: Context) -> Array:
        return ctx.xp.linalg.product_into(out, *compressor.side_by_side(payloads, ctx))


ACCELERATORS: dict[type, Accelerator[Any]] = {
    PowerSGD: Factors[PowerSGD](),
    GradZip: Factors[GradZip](),
    ACPSGD: OwnFactors(),
    Atomo: RandomSingularValues(),
}
