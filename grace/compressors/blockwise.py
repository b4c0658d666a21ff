"""Base classes of methods with statistics per block."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from grace.core import Compressor, Traits
from grace.ops.blocks import check_block


@dataclass(frozen=True)
class Blockwise(Compressor):
    """Computes statistics per block of ``block_size`` elements, a multiple of 8; 0: over the whole tensor."""

    block_size: int = 0

    def __post_init__(self) -> None:
        check_block("block_size", self.block_size)

    @cached_property
    def traits(self) -> Traits:
        return Traits(family="quantisation", block_size=self.block_size or None)


@dataclass(frozen=True)
class Rounded(Blockwise):
    """Rounds to the "nearest" value, by default with a residual, or by "stochastic" rounding, which is unbiased."""

    rounding: str = "nearest"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"rounding={self.rounding!r}: choose 'nearest' or 'stochastic'")

    @cached_property
    def traits(self) -> Traits:
        unbiased = self.rounding == "stochastic"
        return replace(super().traits, unbiased=unbiased, memory="none" if unbiased else "residual")
