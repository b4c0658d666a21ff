"""Three levels, five in a byte, and runs of zeros: 3LC."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from grace.compressors.blockwise import Blockwise
from grace.core import Array, Context, MaybeProgram, Payload, State, Traits
from grace.core.registry import register
from grace.ops import blocks
from grace.ops.packing import pack_trits, packed_trits, unpack_trits
from grace.ops.validate import fitting

ZEROS = 121  # the byte that encodes five zeros
FIRST = 243  # bytes from here on encode runs of 2 .. 14 such bytes
LONGEST = 14


@register("3lc")
@dataclass(frozen=True)
class ThreeLC(Blockwise):
    """Round to -s, 0 or s, with s the largest magnitude times ``sparsity``, and run-length encode zeros.

    Payload: bytes uint8[K], each for five elements or for a run of up to 70 zeros; scales float32[m].
    ``sparsity``: 1 or more, below 2. Elements below half of s become zero: a larger s sends fewer bytes.
    ``zero_run``: True encodes a run of zeros as one byte, so that K depends on the values, with one scale for the
    tensor; with False K = ceil(n / 5), and blocks may have their own scales.
    ``block_size``: without runs, elements that share a scale, a multiple of 40; 0: the whole tensor.
    Lim, Andersen and Kaminsky, "3LC", MLSys 2019, arXiv:1802.07389, section 3. There the first of five elements is the
    highest digit of a byte; here it is the lowest.
    """

    sparsity: float = 1.0
    zero_run: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.sparsity < 2:
            raise ValueError(f"sparsity={self.sparsity!r} must be 1 or more and below 2 (where all becomes zero)")
        if not 0 <= self.block_size <= blocks.LARGEST or self.block_size % 40:
            raise ValueError(
                f"block_size={self.block_size!r} must be a multiple of 40 (whole bytes of 5 elements) up to "
                f"{blocks.LARGEST}, or 0 for the whole tensor"
            )
        if self.block_size and self.zero_run:
            raise ValueError("block_size needs zero_run=False: runs of zeros do not end where blocks do")

    @cached_property
    def traits(self) -> Traits:
        return Traits(
            family="hybrid",
            block_size=self.block_size or None,
            variable_length=self.zero_run,
            nonfinite_in_payload=True,
        )

    def contraction(self, n: int) -> float | None:
        # No element's error exceeds the element, and the largest element's error is sparsity - 1 times the element.
        return self.sparsity * (2 - self.sparsity) / max(1, min(n, self.traits.block_size or n))

    def compress(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        xp, n = ctx.xp, ctx.size
        rows = blocks.rows(xp, x, self.traits.block_size)
        scale = xp.max(xp.abs(rows), 1) * float(self.sparsity)
        share = blocks.flat(xp, rows / blocks.divisor(xp, scale), n)
        # A share of exactly ±0.5 becomes zero. Comparisons give -1, 0 or 1 even for NaN, whose cast is undefined.
        sent = pack_trits(xp, xp.cast(share > 0.5, "int32") - xp.cast(share < -0.5, "int32"))
        return (_shorten(xp, sent) if self.zero_run and n else sent, scale), state

    def decompress(self, payload: Payload, ctx: Context) -> Array:
        xp, n = ctx.xp, ctx.size
        sent, size = payload[0], packed_trits(n)
        sent = _lengthen(xp, sent, size) if self.zero_run and n else fitting(xp, sent, "uint8", size, "bytes")
        sent = xp.cast(sent, "uint8")
        trits = xp.bits.map_bytes(lambda part, m: xp.cast(unpack_trits(xp, part, 5 * m), "float32"), sent, size)
        return blocks.scaled(xp, trits[:n], payload[1], self.traits.block_size)


def _shorten(xp: Any, sent: Array) -> Array:
    # uint8[k] -> uint8[K]: encode runs of ZEROS as one byte.
    size = xp.shape(sent)[0]
    other = sent != ZEROS
    # Each byte's index in its run: its distance to the last byte other than ZEROS (position -1 if there is none).
    borders = xp.concat([xp.full(1, -1, "int32"), xp.nonzero(other)])
    into = xp.arange(size) - xp.take(borders, xp.cumsum(xp.cast(other, "int32"))) - 1
    # Runs are cut after LONGEST bytes. Each run extends to the start of the next.
    starts = xp.nonzero(xp.where(other, True, into % LONGEST == 0))
    lengths = xp.concat([starts[1:], xp.full(1, size, "int32")]) - starts
    codes = xp.where(lengths > 1, lengths + (FIRST - 2), xp.cast(xp.take(sent, starts), "int32"))
    return xp.cast(codes, "uint8")


def _lengthen(xp: Any, sent: Array, size: int) -> Array:
    # The inverse of _shorten.
    codes = xp.cast(sent, "int32")
    lengths = xp.where(codes >= FIRST, codes - (FIRST - 2), 1)
    lengths = xp.sound(lengths, lambda: xp.sum(lengths) == size, f"its runs do not make {size} bytes")
    starts = xp.cumsum(lengths) - lengths
    # The buffer is filled with ZEROS, so a run needs no further writes.
    return xp.scatter(xp.full(size, ZEROS, "int32"), starts, xp.where(codes >= FIRST, ZEROS, codes))
