"""Kernel calls for quantisers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from grace.compressors.measured.bf16 import BF16
from grace.compressors.measured.blockint import BlockInt
from grace.compressors.measured.efsignsgd import EFSignSGD
from grace.compressors.measured.fp16 import FP16
from grace.compressors.measured.natural import GRACE_TOP, Natural
from grace.compressors.measured.onebit import OneBit
from grace.compressors.measured.qsgd import QSGD
from grace.compressors.measured.signsgd import SignSGD
from grace.compressors.measured.terngrad import TernGrad
from grace.compressors.studies.dettmers8 import Dettmers8, code_bits, code_values, middles
from grace.compressors.studies.fp8 import FORMATS, FP8
from grace.compressors.studies.inceptionn import Inceptionn
from grace.compressors.studies.natural_dithering import NaturalDithering
from grace.compressors.studies.shared_int import SharedInt
from grace.compressors.studies.signum import Signum
from grace.compressors.studies.sketch import Sketch
from grace.compressors.studies.threelc import ThreeLC
from grace.core import Array, Context, Payload, Program, State
from grace.core.collectives import Reduce
from grace.engine.codecs.table import Calls, with_kernel
from grace.kernels import Codes
from grace.ops.validate import fitting

How = Callable[[Any], tuple[Any, ...] | None]
"""A kernel's arguments that depend on the compressor alone; None: no kernel for these settings."""


def blockwise(name: str, how: How, decode: How | None = None, draws: Callable[[Any], bool] | None = None) -> Calls:
    """Calls of the kernels ``name``_encode and ``name``_mean.

    ``decode``: the arguments of the mean kernel, by default those of the encode kernel. ``draws``: for a kernel that
    takes a random stream, whether a compressor uses stochastic rounding.
    """

    @with_kernel("quantisers", f"{name}_encode")
    def encode(call: Any, compressor: Any, x: Array, residual: Array | None, ctx: Context) -> Any:
        given = how(compressor)
        random = () if draws is None else (ctx.rng("round") if draws(compressor) else None,)
        return None if given is None else call(x, residual, *given, *random)

    @with_kernel("quantisers", f"{name}_mean")
    def mean(call: Any, compressor: Any, payloads: Sequence[Payload], out: Array | None, ctx: Context) -> Any:
        given = (decode or how)(compressor)
        return None if given is None else call(payloads, out, ctx.size, *given)

    return Calls(encode, mean=mean)


def whole(name: str, how: Callable[[Any, Context], tuple[Any, ...] | None]) -> Calls:
    """Calls of the kernels ``name``_encode, which computes no residual, and ``name``_mean."""

    @with_kernel("quantisers", f"{name}_encode")
    def compress(call: Any, compressor: Any, x: Array, state: State, ctx: Context) -> Any:
        given = how(compressor, ctx)
        return None if given is None else (call(x, *given), state)

    @with_kernel("quantisers", f"{name}_mean")
    def mean(call: Any, compressor: Any, payloads: Sequence[Payload], out: Array | None, ctx: Context) -> Any:
        given = how(compressor, ctx)
        return None if given is None else call(payloads, out, ctx.size, *given)

    return Calls(compress=compress, mean=mean)


def _always(compressor: Any) -> bool:
    return True


def _unbiased(compressor: Any) -> bool:
    return bool(compressor.traits.unbiased)


# -- low-bit floats and codebooks -------------------------------------------------------------------------------------
NATURAL = {"auto": Codes("natural", 8), "grace": Codes("natural", 8, second=GRACE_TOP)}
"""The codes of natural compression, by window."""
_BFLOAT16 = Codes("bfloat16", 16)
_FP8 = {name: Codes("fp8", 8, *layout, factor=1.0 / layout.largest) for name, layout in FORMATS.items()}


@cache
def _codebook(name: str) -> Codes:
    return Codes("nearest", code_bits(name), table=code_values(name), middles=middles(name))


@cache
def _dithered(s: int, bits: int) -> Codes:
    return Codes("dithered", bits, first=s)


# -- integers with a shared scale, which the wire sums ----------------------------------------------------------------
@with_kernel("quantisers", "shared_int_encode")
def _shared_compress(
    call: Any, compressor: SharedInt, x: Array, state: State, ctx: Context
) -> Program[tuple[Payload, State]]:
    scale = yield from compressor.scale(x, ctx)
    own = call(x, scale, compressor.block_size, compressor.top(ctx), compressor.dtype, ctx.rng("round"))
    (total,) = yield Reduce((own,), "sum")
    return (total, scale, own), state


@with_kernel("quantisers", "shared_int_left")
def _shared_residual(call: Any, compressor: SharedInt, x: Array, payload: Payload, ctx: Context) -> Any:
    own, scale = compressor.checked(payload[2], payload[1], ctx)
    return call(x, own, scale, compressor.block_size, compressor.top(ctx))


@with_kernel("quantisers", "shared_int_mean")
def _shared_mean(call: Any, compressor: SharedInt, payloads: Sequence[Payload], out: Array | None, ctx: Context) -> Any:
    ((total, scale, _),) = payloads
    total, scale = compressor.checked(total, scale, ctx)
    return call(total, scale, out, compressor.block_size, compressor.top(ctx) * ctx.world_size)


def _half_mean(compressor: FP16, payloads: Sequence[Payload], out: Array | None, ctx: Context) -> Array | None:
    # A single pass, where `decompress` would make an array to be copied.
    if out is not None and len(payloads) == 1:
        ctx.xp.buffers.write(out, fitting(ctx.xp, payloads[0][0], "float16", ctx.size, "elements"))
        return out
    return None


CALLS: dict[type, Calls] = {
    EFSignSGD: blockwise("efsignsgd", lambda c: (c.block_size,)),
    OneBit: blockwise("onebit", lambda c: (c.block_size,)),
    BlockInt: blockwise("blockint", lambda c: (c.block_size, c.bits), draws=_unbiased),
    QSGD: blockwise("qsgd", lambda c: (c.bucket_size, c.bits, c.quantum_num), draws=_always),
    TernGrad: blockwise("qsgd", lambda c: None if c.clip else (c.block_size, 2, 0), draws=_always),
    SignSGD: whole("signsgd", lambda c, ctx: () if c.packed else None),
    Signum: whole("signsgd", lambda c, ctx: () if c.packed else None),
    ThreeLC: blockwise(
        "threelc", lambda c: (c.block_size, c.sparsity, c.zero_run), decode=lambda c: (c.block_size, c.zero_run)
    ),
    Inceptionn: whole("inceptionn", lambda c, ctx: c.powers),
    Sketch: whole("sketch", lambda c, ctx: c.sizes(ctx) if ctx.size < 2**31 else None),
    BF16: blockwise("codes", lambda c: (0, _BFLOAT16), draws=_unbiased),
    FP16: Calls(mean=_half_mean),
    FP8: blockwise("codes", lambda c: (c.block_size, _FP8[c.format]), draws=_unbiased),
    Natural: blockwise("codes", lambda c: (c.block_size, NATURAL[c.window]), draws=lambda c: c.stochastic),
    NaturalDithering: blockwise(
        "codes",
        lambda c: (c.block_size, _dithered(c.s, c.bits)) if (c.base, c.norm) == (2, "max") else None,
        lambda c: (c.block_size, _dithered(c.s, c.bits)) if c.base == 2 else None,
        draws=_always,
    ),
    Dettmers8: blockwise("codes", lambda c: (c.block_size, _codebook(c.table)), draws=lambda c: False),
    SharedInt: Calls(compress=_shared_compress, residual=_shared_residual, mean=_shared_mean),
}
