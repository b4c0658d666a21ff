"""Means of low-rank approximations, written to the memory of the result without an intermediate array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grace.compressors.measured.powersgd import PowerSGD
from grace.compressors.studies.acpsgd import ACPSGD
from grace.compressors.studies.atomo import Atomo
from grace.compressors.studies.gradzip import GradZip
from grace.core import Array, Context, Payload
from grace.engine.codecs.table import Calls


def _agreed(compressor: Any, payloads: Sequence[Payload], out: Array | None, ctx: Context) -> Array | None:
    return None if out is None else ctx.xp.linalg.product_into(out, *compressor.factors(payloads[0], ctx))


def _gathered(compressor: Atomo, payloads: Sequence[Payload], out: Array | None, ctx: Context) -> Array | None:
    return None if out is None else ctx.xp.linalg.product_into(out, *compressor.side_by_side(payloads, ctx))


CALLS: dict[type, Calls] = {
    PowerSGD: Calls(mean=_agreed),
    GradZip: Calls(mean=_agreed),
    ACPSGD: Calls(mean=_agreed),
    Atomo: Calls(mean=_gathered),
}
