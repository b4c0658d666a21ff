"""Sparse ternary compression."""

from __future__ import annotations

from dataclasses import dataclass, field

from grace.compressors.measured.efsignsgd import EFSignSGD
from grace.compressors.measured.topk import TopK
from grace.compressors.studies.chain import Chain
from grace.core import Compressor
from grace.core.registry import register


@register("stc")
@dataclass(frozen=True)
class STC(Chain):
    """Send the positions of the elements of largest magnitude, their signs, and their mean magnitude.

    Payload: as ``chain``: bits uint8[ceil(k/8)], 1 where x >= 0; scale float32[1]; positions in about 2 + log2(n / k)
    bits each. The paper encodes positions with a Golomb code of variable length; the Elias-Fano code is about as short
    and has a fixed length.
    ``compress_ratio``: the share of elements to send, in (0, 1]. ``block_size``: sent elements that share a magnitude;
    0: all of them, as in the paper.
    Sattler, Wiedemann, Müller and Samek, "Robust and Communication-Efficient Federated Learning from Non-IID Data",
    IEEE TNNLS 2020, arXiv:1903.02891, algorithm 1.
    """

    sparsifier: Compressor = field(default=TopK(index_coding="elias_fano"))
    quantizer: Compressor = field(default=EFSignSGD())
