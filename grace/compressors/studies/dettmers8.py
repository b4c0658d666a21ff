"""Codebooks: each element becomes the nearest value of a fixed table."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from grace.compressors.blockwise import Blockwise
from grace.core import Array, Context, MaybeProgram, Payload, State, Traits
from grace.core.registry import register
from grace.ops import blocks
from grace.ops.packing import pack, unpack


def _both_signs(magnitudes: list[float], *others: float) -> tuple[float, ...]:
    return tuple(sorted([*magnitudes, *(-value for value in magnitudes), *others]))


TABLES = {
    # Seven decades, each with twice as many values as the one below it.
    "dynamic8": _both_signs(
        [10.0**-i * (0.1 + 0.9 * (j + 0.5) / 2 ** (6 - i)) for i in range(7) for j in range(2 ** (6 - i))], 0.0, 1.0
    ),
    "linear8": _both_signs([j / 127 for j in range(1, 128)], 0.0),
    # Quantiles of a normal distribution, and 4-bit floats with two bits of exponent.
    "nf4": (
        *(-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0),
        *(0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0),
    ),
    "fp4": _both_signs([0.5 / 6, 1 / 6, 1.5 / 6, 2 / 6, 3 / 6, 4 / 6, 1.0], 0.0),
}


def code_bits(table: str) -> int:
    """Bits of one code."""
    return 8 if table.endswith("8") else 4


def code_values(table: str) -> list[float]:
    """The value of each code; NaN for unused codes."""
    return [*TABLES[table], *[float("nan")] * ((1 << code_bits(table)) - len(TABLES[table]))]


def middles(table: str) -> list[float]:
    """Boundaries between neighbouring entries of a table: their midpoints."""
    return [(a + b) / 2 for a, b in pairwise(TABLES[table])]


@register("dettmers8", "u8bit")
@dataclass(frozen=True)
class Dettmers8(Blockwise):
    """Replace each element, relative to the largest magnitude of its block, by the nearest entry of a table.

    Payload: codes uint8[ceil(b * n / 8)], b = 8 or 4; scales float32[m].
    ``table``: with 8 bits "dynamic8" (dense near zero) or "linear8", with 4 bits "nf4" or "fp4". All include 0.
    ``block_size``: elements that share a scale, a multiple of 8; 0: the whole tensor.
    Dettmers, "8-bit approximations for parallelism in deep learning", ICLR 2016, arXiv:1511.04561, section 2; for NF4
    Dettmers et al., "QLoRA", NeurIPS 2023, arXiv:2305.14314, section 3.
    """

    table: str = "dynamic8"
    block_size: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.table not in TABLES:
            raise ValueError(f"table={self.table!r}: choose one of {', '.join(map(repr, TABLES))}")

    @cached_property
    def traits(self) -> Traits:
        return Traits(family="quantisation", block_size=self.block_size or None, nonfinite_in_payload=True)

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return code_bits(self.table)

    def contraction(self, n: int) -> float | None:
        # No element's error exceeds the element, and the error of the largest, which is 1 or -1 relative to the scale,
        # is at most its distance to the end of the table.
        worst = 1 - min(abs(TABLES[self.table][0]), TABLES[self.table][-1])
        return (1 - worst**2) / max(1, min(n, self.traits.block_size or n))

    def compress(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        xp, n = ctx.xp, ctx.size
        rows = blocks.rows(xp, x, self.traits.block_size)
        scale = xp.max(xp.abs(rows), 1)
        bounds = xp.asarray(middles(self.table), "float32")
        codes = xp.searchsorted(bounds, blocks.flat(xp, rows / blocks.divisor(xp, scale), n))
        return (pack(xp, self.bits, codes), scale), state

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        xp, n = ctx.xp, ctx.size
        codes = xp.cast(unpack(xp, self.bits, payload[0], n), "int32")
        values = xp.take(xp.asarray(code_values(self.table), "float32"), codes)
        return blocks.scaled(xp, values, payload[1], self.traits.block_size)
