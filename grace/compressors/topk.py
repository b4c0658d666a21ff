"""Top-k sparsification."""

from __future__ import annotations

from dataclasses import dataclass

from grace.compressors.sparse import CodedSparsifier, check_ratio, kept
from grace.core import Array, Context, Payload
from grace.registry import register


@register("topk")
@dataclass(frozen=True)
class TopK(CodedSparsifier):
    """Send the elements of largest magnitude.

    Payload: values float32[k], positions int32[k], ascending; k = floor(compress_ratio * n), at least 1.
    ``compress_ratio``: the share of elements to send, in (0, 1].
    ``index_coding``: of the positions; "int32", "bitmap" (n bits), "elias_fano" (about 2 + log2(n / k) bits each), or
    "auto" for the smallest.
    Aji and Heafield, EMNLP 2017, arXiv:1704.05021; Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory",
    NeurIPS 2018, arXiv:1809.07599, section 2.
    """

    compress_ratio: float = 0.01

    def __post_init__(self) -> None:
        check_ratio(self.compress_ratio)
        super().__post_init__()

    def count(self, n: int) -> int | None:
        return kept(self.compress_ratio, n)

    def contraction(self, n: int) -> float | None:
        return kept(self.compress_ratio, n) / n if n else 1.0

    def select(self, x: Array, ctx: Context) -> Array:
        return ctx.xp.topk_abs(x, kept(self.compress_ratio, ctx.size))

    def fused(self, x: Array, residual: Array | None, ctx: Context) -> tuple[Payload, Array] | None:
        values, positions, left = ctx.xp.kernels.topk_encode(x, residual, kept(self.compress_ratio, ctx.size))
        return (values, *self.write(positions, ctx)), left
