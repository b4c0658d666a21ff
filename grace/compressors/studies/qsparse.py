"""Top-k elements, stochastically rounded and scaled down."""

from __future__ import annotations

from dataclasses import dataclass, field

from grace.compressors.measured.qsgd import QSGD
from grace.compressors.studies.chain import Chain
from grace.core import Compressor, name_of
from grace.core.registry import register


@register("qsparse")
@dataclass(frozen=True)
class Qsparse(Chain):
    """Send the elements of largest magnitude, rounded stochastically to a few levels and scaled by 1 / (1 + w).

    Payload: as ``chain``: codes and norm of the k values, positions int32[k]. w is the quantiser's variance, which for
    k values in one bucket is min(k / s², sqrt(k) / s). The factor makes the method a contraction for any number of
    levels.
    ``compress_ratio``: the share of elements to send, in (0, 1]. ``quantum_num``: levels s, 1 .. 127.
    ``bucket_size``: sent elements that share a norm; 0: all of them, as in the paper.
    The paper's local steps are left to the training loop, which can accumulate gradients and exchange them every few
    steps.
    Basu, Data, Karakus and Diggavi, "Qsparse-local-SGD", NeurIPS 2019, arXiv:1906.02367, section 2 and algorithm 1.
    """

    quantizer: Compressor = field(default=QSGD(quantum_num=15, bucket_size=0))

    def __post_init__(self) -> None:
        if not self.quantizer.traits.unbiased or self.sparsifier.traits.unbiased:
            raise ValueError(
                f"'qsparse' scales an unbiased quantizer down after a sparsifier that is not scaled up; with "
                f"sparsifier={name_of(self.sparsifier)!r} and quantizer={name_of(self.quantizer)!r} use "
                "compressor 'chain'"
            )
        super().__post_init__()

    def scale(self, k: int) -> float:
        return 1 / (1 + (self.quantizer.variance(k) or 0.0))

    def _share(self, k: int) -> float | None:
        return self.scale(k)
