"""Quantiser kernels: signs, votes, half means, integers, levels, ternary values, tags and quantiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grace.compressors.blockint import BlockInt
from grace.compressors.efsignsgd import EFSignSGD
from grace.compressors.inceptionn import Inceptionn
from grace.compressors.onebit import OneBit
from grace.compressors.qsgd import QSGD
from grace.compressors.signsgd import SignSGD
from grace.compressors.signum import Signum
from grace.compressors.sketch import Sketch
from grace.compressors.terngrad import TernGrad
from grace.compressors.threelc import ThreeLC
from grace.core import Array, Context, MaybeProgram, Payload, State
from grace.engine.accelerators.base import Accelerator, at_once_encoded
from grace.engine.workspace import kernels
from grace.ops import blocks


class ScaledSigns(Accelerator[EFSignSGD]):
    """Accelerator of efsignsgd."""

    def encode(
        self, compressor: EFSignSGD, x: Array, residual: Array | None, ctx: Context
    ) -> tuple[Payload, Array] | None:
        return kernels(ctx).quantisers.signs_encode(x, residual, compressor.block_size)

    def mean(self, compressor: EFSignSGD, payloads: Sequence[Payload], out: Array | None, ctx: Context) -> Array | None:
        return kernels(ctx).quantisers.signs_mean(payloads, out, ctx.size, compressor.block_size)

    def add_decoded(self, compressor: EFSignSGD, total: Array, payload: Payload, ctx: Context) -> Array:
        # Decode and add in one pass, if the toolkit supports it.
        return blocks.add_scaled(
            ctx.xp, total, compressor.signs(payload, ctx), payload[1], compressor.traits.block_size
        )


class Halves(Accelerator[OneBit]):
    """Accelerator of onebit."""

    def encode(
        self, compressor: OneBit, x: Array, residual: Array | None, ctx: Context
    ) -> tuple[Payload, Array] | None:
        if not kernels(ctx).quantisers.halves_encode:
            return None
        return kernels(ctx).quantisers.halves_encode(x, residual, compressor.block_size)

    def mean(self, compressor: OneBit, payloads: Sequence[Payload], out: Array | None, ctx: Context) -> Array | None:
        if not kernels(ctx).quantisers.halves_encode:
            return None
        return kernels(ctx).quantisers.halves_mean(payloads, out, ctx.size, compressor.block_size)


class Integers(Accelerator[BlockInt]):
    """Accelerator of blockint."""

    def encode(
        self, compressor: BlockInt, x: Array, residual: Array | None, ctx: Context
    ) -> tuple[Payload, Array] | None:
        rng = ctx.rng("round") if compressor.traits.unbiased else None
        return kernels(ctx).quantisers.ints_encode(x, residual, compressor.block_size, compressor.bits, rng)

    def mean(self, compressor: BlockInt, payloads: Sequence[Payload], out: Array | None, ctx: Context) -> Array | None:
        return kernels(ctx).quantisers.ints_mean(payloads, out, ctx.size, compressor.block_size, compressor.bits)


class Levels(Accelerator[QSGD]):
    """Accelerator of qsgd."""

    def encode(self, compressor: QSGD, x: Array, residual: Array | None, ctx: Context) -> tuple[Payload, Array] | None:
        if not kernels(ctx).quantisers.levels_encode:
            return None
        how = compressor.bucket_size, compressor.bits, compressor.quantum_num
        return kernels(ctx).quantisers.levels_encode(x, residual, *how, ctx.rng("round"))

    def mean(self, compressor: QSGD, payloads: Sequence[Payload], out: Array | None, ctx: Context) -> Array | None:
        if not kernels(ctx).quantisers.levels_encode:
            return None
        how = compressor.bucket_size, compressor.bits, compressor.quantum_num
        return kernels(ctx).quantisers.levels_mean(payloads, out, ctx.size, *how)


class RandomTernary(Accelerator[TernGrad]):
    """Accelerator of terngrad, without clipping."""

    def encode(
        self, compressor: TernGrad, x: Array, residual: Array | None, ctx: Context
    ) -> tuple[Payload, Array] | None:
        if compressor.clip or not kernels(ctx).quantisers.levels_encode:
            return None
        return kernels(ctx).quantisers.levels_encode(x, residual, compressor.block_size, 2, 0, ctx.rng("round"))

    def mean(self, compressor: TernGrad, payloads: Sequence[Payload], out: Array | None, ctx: Context) -> Array | None:
        if not kernels(ctx).quantisers.levels_encode:
            return None
        return kernels(ctx).quantisers.levels_mean(payloads, out, ctx.size, compressor.block_size, 2, 0)


class Votes(Accelerator[SignSGD]):
    """Accelerator of signsgd and signum, unless their votes are summed on the wire."""

    def compress(
        self, compressor: SignSGD, x: Array, state: State, ctx: Context
    ) -> MaybeProgram[tuple[Payload, State]]:
        kernels: Any = ctx.xp.kernels
        if compressor.packed and kernels and kernels.quantisers.votes_encode:
            return kernels.quantisers.votes_encode(x), state
        return compressor.compress(x, state, ctx)

    def encode(
        self, compressor: SignSGD, x: Array, residual: Array | None, ctx: Context
    ) -> tuple[Payload, Array] | None:
        if not (compressor.packed and kernels(ctx).quantisers.votes_encode):
            return None
        return kernels(ctx).quantisers.votes_encode(x), x  # no residual: a vote has none

    def mean(self, compressor: SignSGD, payloads: Sequence[Payload], out: Array | None, ctx: Context) -> Array | None:
        if not (compressor.packed and kernels(ctx).quantisers.votes_encode):
            return None
        return kernels(ctx).quantisers.votes_mean(payloads, out, ctx.size)


class ThreeValues(Accelerator[ThreeLC]):
    """Accelerator of 3lc."""

    def encode(
        self, compressor: ThreeLC, x: Array, residual: Array | None, ctx: Context
    ) -> tuple[Payload, Array] | None:
        if not kernels(ctx).quantisers.trits_encode:
            return None
        how = compressor.block_size, compressor.sparsity, compressor.zero_run
        return kernels(ctx).quantisers.trits_encode(x, residual, *how)

    def mean(self, compressor: ThreeLC, payloads: Sequence[Payload], out: Array | None, ctx: Context) -> Array | None:
        if not kernels(ctx).quantisers.trits_encode:
            return None
        return kernels(ctx).quantisers.trits_mean(payloads, out, ctx.size, compressor.block_size, compressor.zero_run)


class Tagged(Accelerator[Inceptionn]):
    """Accelerator of inceptionn."""

    def encode(
        self, compressor: Inceptionn, x: Array, residual: Array | None, ctx: Context
    ) -> tuple[Payload, Array] | None:
        kernel = kernels(ctx).quantisers.tagged_encode
        if not kernel:
            return None
        return at_once_encoded(compressor, lambda v: kernel(v, *compressor.powers), x, residual, ctx)

    def mean(
        self, compressor: Inceptionn, payloads: Sequence[Payload], out: Array | None, ctx: Context
    ) -> Array | None:
        if not kernels(ctx).quantisers.tagged_encode:
            return None
        return kernels(ctx).quantisers.tagged_mean(payloads, out, ctx.size, *compressor.powers)


class Quantiles(Accelerator[Sketch]):
    """Accelerator of sketch."""

    def encode(
        self, compressor: Sketch, x: Array, residual: Array | None, ctx: Context
    ) -> tuple[Payload, Array] | None:
        kernel = kernels(ctx).quantisers.quantiles_encode
        if not kernel or ctx.size >= 2**31:
            return None
        return at_once_encoded(compressor, lambda v: kernel(v, *compressor.sizes(ctx)), x, residual, ctx)

    def mean(self, compressor: Sketch, payloads: Sequence[Payload], out: Array | None, ctx: Context) -> Array | None:
        if not kernels(ctx).quantisers.quantiles_encode:
            return None
        return kernels(ctx).quantisers.quantiles_mean(payloads, out, ctx.size, *compressor.sizes(ctx))


ACCELERATORS: dict[type, Accelerator[Any]] = {
    EFSignSGD: ScaledSigns(),
    OneBit: Halves(),
    BlockInt: Integers(),
    QSGD: Levels(),
    TernGrad: RandomTernary(),
    SignSGD: Votes(),
    Signum: Votes(),
    ThreeLC: ThreeValues(),
    Inceptionn: Tagged(),
    Sketch: Quantiles(),
}
