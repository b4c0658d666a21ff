"""Chooses the native kernels that encode and average a method's payloads, and their arguments for a tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from grace.compressors.measured.blockint import BlockInt
from grace.compressors.measured.eden import Eden
from grace.compressors.measured.efsignsgd import EFSignSGD
from grace.compressors.measured.natural import Natural
from grace.compressors.measured.onebit import OneBit
from grace.compressors.measured.qsgd import QSGD
from grace.compressors.measured.signsgd import SignSGD
from grace.compressors.measured.terngrad import TernGrad
from grace.compressors.measured.topk import TopK
from grace.compressors.sparse import kept
from grace.compressors.studies.signum import Signum
from grace.core import Compressor, Context
from grace.engine.codecs.quantisers import NATURAL
from grace.kernels import Codes
from grace.kernels.schema import CODECS, blocks
from grace.ops import index_coding
from grace.ops.hadamard import STREAMS, width_of
from grace.ops.packing import packed_size

PLANES = 4
"""Number of arrays ("planes") for the lower bits of encoded positions; some of them may be empty."""


@dataclass(frozen=True)
class Recipe:
    """The kernels for one tensor."""

    encode: str
    mean: str
    arrays: tuple[tuple[str, str, int], ...]
    """For each array of the payload: the name of the kernels' argument, the dtype and the length."""
    how: Mapping[str, int]
    """Arguments of both kernels."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments, numbers or float32 arrays, for the kernels that take them."""
    draws: str = ""
    """The label of the random stream, which is equal on all workers if ``shared``; empty if nothing is random."""
    shared: bool = False
    noise: bool = False
    """Whether the kernel takes noise (`grace.core.rng.Rng.noise`) instead of random words alone."""
    counted: bool = False
    """Whether the mean kernel takes the number of elements that each worker sent."""
    codec: Codes | None = None
    """The structure that both kernels take, with the keys of a random stream."""
    coded: Mapping[str, int] | None = None
    """Arguments of the kernels that encode positions, to `PLANES` planes and "upper"; None: positions as they are."""


def recipe(compressor: Compressor, ctx: Context) -> Recipe | None:
    """Return the recipe for a tensor or shard with this context; None if there is none."""
    find = RECIPES.get(type(compressor))
    return None if find is None else find(compressor, ctx)


def _coded(name: str, n: int, how: Mapping[str, int], **more: Any) -> Recipe:
    codec = CODECS[name]
    arrays = tuple((array, *form) for array, form in zip(codec.arrays, codec.sizes(n, *how.values()), strict=True))
    return Recipe(codec.encode, codec.mean, arrays, how, **more)  # type: ignore[arg-type]


def _signs(compressor: EFSignSGD, ctx: Context) -> Recipe:
    return _coded("efsignsgd", ctx.size, {"block": compressor.block_size})


def _halves(compressor: OneBit, ctx: Context) -> Recipe:
    return _coded("onebit", ctx.size, {"block": compressor.block_size})


def _integers(compressor: BlockInt, ctx: Context) -> Recipe:
    how, random = {"block": compressor.block_size, "bits": compressor.bits}, compressor.traits.unbiased
    return _coded("blockint", ctx.size, how, draws="round" if random else "", noise=random)


def _levels(compressor: QSGD, ctx: Context) -> Recipe:
    how = {"block": compressor.bucket_size, "bits": compressor.bits, "levels": compressor.quantum_num}
    return _coded("qsgd", ctx.size, how, draws="round", noise=True)


def _votes(compressor: SignSGD, ctx: Context) -> Recipe | None:
    return _coded("signsgd", ctx.size, {}) if compressor.packed else None


def _powers(compressor: Natural, ctx: Context) -> Recipe:
    n, block, draws = ctx.size, compressor.block_size, "round" if compressor.stochastic else ""
    arrays = (("codes", "uint8", n), ("scales", "int32", blocks(n, block)))
    return Recipe("codes_encode", "codes_mean", arrays, {"block": block}, draws=draws, codec=NATURAL[compressor.window])


def _ternary(compressor: TernGrad, ctx: Context) -> Recipe | None:
    how = {"block": compressor.block_size, "bits": 2, "levels": 0}
    return None if compressor.clip else _coded("qsgd", ctx.size, how, draws="round")


def _rotated(compressor: Eden, ctx: Context) -> Recipe:
    width = width_of(ctx, compressor.block_size)
    divisor = compressor.divisor(width) if compressor.biased else 0.0
    more = {**_tables(compressor.bits), "divisor": divisor, "stream": ctx.rank % STREAMS}
    how = {"width": width, "bits": compressor.bits}
    return _coded("eden", ctx.size, how, more=more, draws="rotation", shared=True)


@cache
def _tables(bits: int) -> dict[str, Any]:
    compressor = Eden(bits=bits)
    found = {"levels": compressor.levels(), "middles": compressor.middles()}
    return {name: np.array(values, np.float32) for name, values in found.items()}


def _largest(compressor: TopK, ctx: Context) -> Recipe | None:
    if compressor.selector != "exact":
        return None
    k, coding = kept(compressor.compress_ratio, ctx.size), compressor.elements.coding(ctx.size)
    values = ("values", "float32", k)
    if coding == "int32":
        arrays = (values, ("positions", "int32", k))
        return Recipe("topk_encode", "sparse_mean", arrays, {}, {"k": k}, counted=True)
    if coding != "elias_fano":
        return None
    widths, marks = index_coding.widths(ctx.size, k)
    sizes = [packed_size(bits, k) for bits in widths] + [0] * (PLANES - len(widths))
    planes = tuple((f"plane{number}", "uint8", size) for number, size in enumerate(sizes))
    sent = (values, *planes, ("upper", "uint8", packed_size(1, marks)))
    coded = {"k": k, "lower": sum(widths), "marks": marks}
    return Recipe("topk_encode", "sparse_mean", sent, {}, {"k": k}, counted=True, coded=coded)


RECIPES: dict[type, Callable[[Any, Context], Recipe | None]] = {
    EFSignSGD: _signs,
    OneBit: _halves,
    BlockInt: _integers,
    QSGD: _levels,
    TernGrad: _ternary,
    SignSGD: _votes,
    Signum: _votes,
    Natural: _powers,
    Eden: _rotated,
    TopK: _largest,
}
