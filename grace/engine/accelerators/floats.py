"""Kernels for low-bit floats and codebooks, which a `Codes` describes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cache
from typing import Any

from grace.compressors.bf16 import BF16
from grace.compressors.dettmers8 import Dettmers8, code_bits, code_values, middles
from grace.compressors.fp8 import FORMATS, FP8
from grace.compressors.natural import GRACE_TOP, Natural
from grace.compressors.natural_dithering import NaturalDithering
from grace.core import Array, Context, Payload
from grace.core.rng import Rng
from grace.engine.accelerators.base import Accelerator, C
from grace.engine.workspace import kernels
from grace.kernels import Codes

_BFLOAT16 = Codes("bfloat16", 16)
_FP8 = {name: Codes("fp8", 8, *layout, factor=1.0 / layout.largest) for name, layout in FORMATS.items()}
_NATURAL = {"auto": Codes("natural", 8), "grace": Codes("natural", 8, second=GRACE_TOP)}


@cache
def _codebook(name: str) -> Codes:
    return Codes("nearest", code_bits(name), table=code_values(name), middles=middles(name))


@cache
def _dithered(s: int, bits: int) -> Codes:
    return Codes("dithered", bits, first=s)


class Coded(Accelerator[C]):
    """Accelerator base of compressors that send low-bit codes with a scale for each block."""

    @abstractmethod
    def codes(self, compressor: C) -> Codes:
        """The description of the codes for the kernels."""

    @abstractmethod
    def rng(self, compressor: C, ctx: Context) -> Rng | None:
        """The random stream for stochastic rounding; None: round to nearest."""

    def block_size(self, compressor: C) -> int:
        """Number of elements that share a scale; 0: all of them."""
        size: int = compressor.block_size  # type: ignore[attr-defined]
        return size

    def encode(self, compressor: C, x: Array, residual: Array | None, ctx: Context) -> tuple[Payload, Array] | None:
        kernel, how = kernels(ctx).quantisers.codes_encode, (self.block_size(compressor), self.codes(compressor))
        return kernel(x, residual, *how, self.rng(compressor, ctx)) if kernel else None

    def mean(self, compressor: C, payloads: Sequence[Payload], out: Array | None, ctx: Context) -> Array | None:
        kernel, how = kernels(ctx).quantisers.codes_mean, (self.block_size(compressor), self.codes(compressor))
        return kernel(payloads, out, ctx.size, *how) if kernel else None


class UpperHalves(Coded[BF16]):
    """Accelerator of bf16."""

    def codes(self, compressor: BF16) -> Codes:
        return _BFLOAT16

    def rng(self, compressor: BF16, ctx: Context) -> Rng | None:
        return ctx.rng("round") if compressor.traits.unbiased else None

    def block_size(self, compressor: BF16) -> int:
        return 0


class Float8(Coded[FP8]):
    """Accelerator of fp8."""

    def codes(self, compressor: FP8) -> Codes:
        return _FP8[compressor.format]

    def rng(self, compressor: FP8, ctx: Context) -> Rng | None:
        return ctx.rng("round") if compressor.traits.unbiased else None


class PowersOfTwo(Coded[Natural]):
    """Accelerator of natural."""

    def codes(self, compressor: Natural) -> Codes:
        return _NATURAL[compressor.window]

    def rng(self, compressor: Natural, ctx: Context) -> Rng | None:
        return ctx.rng("round") if compressor.stochastic else None


class DitheredPowers(Coded[NaturalDithering]):
    """Accelerator of natural_dithering with base=2."""

    def encode(
        self, compressor: NaturalDithering, x: Array, residual: Array | None, ctx: Context
    ) -> tuple[Payload, Array] | None:
        return super().encode(compressor, x, residual, ctx) if compressor.base == 2 else None

    def mean(
        self, compressor: NaturalDithering, payloads: Sequence[Payload], out: Array | None, ctx: Context
    ) -> Array | None:
        return super().mean(compressor, payloads, out, ctx) if compressor.base == 2 else None

    def codes(self, compressor: NaturalDithering) -> Codes:
        return _dithered(compressor.s, compressor.bits)

    def rng(self, compressor: NaturalDithering, ctx: Context) -> Rng | None:
        return ctx.rng("round")


class Codebooks(Coded[Dettmers8]):
    """Accelerator of dettmers8."""

    def codes(self, compressor: Dettmers8) -> Codes:
        return _codebook(compressor.table)

    def rng(self, compressor: Dettmers8, ctx: Context) -> Rng | None:
        return None


ACCELERATORS: dict[type, Accelerator[Any]] = {
    BF16: UpperHalves(),
    FP8: Float8(),
    Natural: PowersOfTwo(),
    NaturalDithering: DitheredPowers(),
    Dettmers8: Codebooks(),
}
