"""What all methods share that keep statistics of blocks."""

from __future__ import annotations

from dataclasses import dataclass

from grace.core import Compressor
from grace.ops.blocks import check_block


@dataclass(frozen=True)
class Blockwise(Compressor):
    """Has statistics per block of ``block_size`` elements, a multiple of 8; 0: of the whole tensor."""

    block_size: int = 0
    family = "quantisation"

    def __post_init__(self) -> None:
        check_block("block_size", self.block_size)

    @property
    def block(self) -> int | None:
        return self.block_size or None


@dataclass(frozen=True)
class Rounded(Blockwise):
    """Rounds to the "nearest" of its values, with a residual, or at random ("stochastic"), without bias."""

    rounding: str = "nearest"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"rounding={self.rounding!r}: choose 'nearest' or 'stochastic'")

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        return self.rounding == "stochastic"

    @property
    def memory(self) -> str:  # type: ignore[override]
        return "none" if self.unbiased else "residual"
