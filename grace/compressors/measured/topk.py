"""Top-k sparsification."""

from __future__ import annotations

from dataclasses import dataclass

from grace.compressors.selectors import SelectingSparsifier
from grace.core.registry import register


@register("topk")
@dataclass(frozen=True)
class TopK(SelectingSparsifier):
    """Send the elements of largest magnitude.

    Payload: values float32[k], positions int32[k], ascending; k = floor(compress_ratio * n), at least 1.
    ``compress_ratio``: the share of elements to send, in (0, 1].
    ``selector``: "exact", or an approximate one: "chunk" (exact in chunks, also k elements), or "sampled",
    "sidco", "gaussian", "bisect" or "trim" (a threshold; the number of elements varies).
    ``index_coding``: the coding of the positions: "int32", "bitmap" (n bits), "elias_fano" (about 2 + log2(n / k) bits
    each; needs a fixed number of elements), or "auto" for the smallest.
    State: of selector "sidco", as in compressor `sidco`; else none.
    Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017, arXiv:1704.05021; Stich,
    Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018, arXiv:1809.07599, section 2.
    """

    compress_ratio: float = 0.01
