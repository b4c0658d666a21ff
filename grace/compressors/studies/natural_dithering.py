"""Natural dithering: powers of two, or of another base, below a norm."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from grace.compressors.blockwise import Blockwise
from grace.core import Array, Context, MaybeProgram, Payload, State, Traits
from grace.core.registry import register
from grace.ops import blocks
from grace.ops.packing import pack, unpack


def _bits(s: int) -> int:
    return 1 + s.bit_length()


def _levels(s: int, base: float) -> list[float]:
    return [0.0, *(base ** (level - s) for level in range(1, s + 1))]


def _values(s: int, base: float = 2.0) -> list[float]:
    # The value of each code, for s levels, with the sign in the top bit of the code.
    levels = _levels(s, base)
    levels += [float("nan")] * ((1 << (_bits(s) - 1)) - len(levels))  # unused codes
    return [*levels, *(-level for level in levels)]


@register("natural_dithering")
@dataclass(frozen=True)
class NaturalDithering(Blockwise):
    """Round magnitudes, relative to the block's norm, stochastically to 0, base**(1-s), ..., 1/base or 1; unbiased.

    Payload: codes uint8[ceil(b * n / 8)], each the number of a level, with the sign in the top bit; b = 1 + bits of s;
    scales float32[m].
    ``s``: number of nonzero levels, 1 .. 127; 1, 3, 7 and so on leave no code unused.
    ``base``: 1.1 .. 16; base**(s-1) must not exceed 2**126. Only base 2 has native kernels.
    ``norm``: the scale: "max", the largest magnitude, or "l2", the Euclidean norm. With "l2" and base 2 this is NUQSGD,
    which counts one level less as its s; the bound of the variance is higher than with "max", and no kernel encodes.
    ``block_size``: elements that share a scale, a multiple of 8; 0: the whole tensor.
    Horvath et al., "Natural Compression for Distributed Deep Learning", 2019, arXiv:1905.10988, on natural dithering,
    where the norm may be chosen. For other bases than 2, exponential dithering: Beznosikov, Horvath, Richtarik and
    Safaryan, "On Biased Compression for Distributed Learning", 2020, arXiv:2002.12410. With the Euclidean norm:
    Ramezani-Kebrya et al., "NUQSGD: Provably Communication-efficient Data-parallel SGD via Nonuniform Quantization",
    JMLR 22(114), 2021, arXiv:1908.06077, section 3.
    """

    s: int = 7
    block_size: int = 512
    base: float = 2.0
    norm: str = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.s <= 127:
            raise ValueError(f"s={self.s!r} must lie in 1 .. 127 (codes of at most 8 bits)")
        if not 1.1 <= self.base <= 16 or self.base ** (self.s - 1) > 2.0**126:
            raise ValueError(
                f"base={self.base!r} must lie in 1.1 .. 16, and base ** (s - 1) up to 2 ** 126: use a smaller base or "
                f"fewer levels than s={self.s!r}"
            )
        if self.norm not in ("max", "l2"):
            raise ValueError(f"norm={self.norm!r}: choose 'max' or 'l2'")

    @cached_property
    def traits(self) -> Traits:
        return Traits(family="quantisation", block_size=self.block_size or None, unbiased=True, memory="none")

    @property
    def bits(self) -> int:
        """Bits of one code, its sign included."""
        return _bits(self.s)

    def variance(self, n: int) -> float | None:
        # Between two powers of b an element has a variance of at most (b - 1)² / (4 b) x². Below the lowest power the
        # variance is that of equal steps (as in `blockint`, if its largest element is exact). In the worst case all
        # elements are of one of these two kinds.
        n, b = max(1, min(n, self.traits.block_size or n)), self.base
        if self.norm == "l2":
            # Relative to |x|, elements r below the lowest power l have the variance r (l - r). They sum to at most
            # l sqrt(n) t - t² if t² is the sum of their squares; the others add (b - 1)² / (4 b) (1 - t²).
            between, below = (b - 1) ** 2 / (4 * b), b ** (1 - self.s) * n**0.5
            t = min(1.0, below / (2 * (1 + between)))
            return between + below * t - (1 + between) * t**2
        return max((b - 1) ** 2 / (4 * b), ((1 + (n - 1) * b ** (2 * (1 - self.s))) ** 0.5 - 1) / 2)

    def compress(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        xp, n = ctx.xp, ctx.size
        rows = xp.abs(blocks.rows(xp, x, self.traits.block_size))
        scale = xp.max(rows, 1) if self.norm == "max" else blocks.norms(xp, rows)
        share = blocks.flat(xp, rows / blocks.divisor(xp, scale), n)
        # The level below (at most the second highest), and its distance to the next level; exact for powers of two.
        levels = _levels(self.s, self.base)
        level = xp.minimum(xp.searchsorted(xp.asarray(levels[1:], "float32"), share), self.s - 1)
        table = xp.asarray(levels, "float32")
        lower, upper = xp.take(table, level), xp.take(table, level + 1)
        level = level + xp.cast(ctx.rng("round").uniform(n) < (share - lower) / (upper - lower), "int32")
        codes = level + xp.cast(x < 0, "int32") * (1 << (self.bits - 1))
        return (pack(xp, self.bits, codes), scale), state

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        xp, n = ctx.xp, ctx.size
        table = xp.asarray(_values(self.s, self.base), "float32")
        codes = xp.cast(unpack(xp, self.bits, payload[0], n), "int32")
        return blocks.scaled(xp, xp.take(table, codes), payload[1], self.traits.block_size)
