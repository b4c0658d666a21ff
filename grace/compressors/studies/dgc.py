"""Deep gradient compression: top-k by a sampled threshold."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from grace.compressors.selectors import SelectingSparsifier
from grace.core import Traits
from grace.core.registry import register


@register("dgc")
@dataclass(frozen=True)
class DGC(SelectingSparsifier):
    """Send approximately the largest elements: those above a threshold estimated from a sample.

    Payload: values float32[K], positions int32[K], ascending; K is near k = floor(compress_ratio * n) and at most
    1.3 k. Zeros are not sent. Tensors no larger than the sample send their k largest elements.
    ``compress_ratio``: the share of elements to send, in (0, 1]. The paper decreases it to 0.001 over four epochs.
    ``selector``: "sampled", or any other selector of `topk`.
    ``index_coding``: the coding of the positions, "int32" or "bitmap" (n bits).
    The sample is 1% of the elements, at least 100 and at least 32 / compress_ratio, drawn at random. The paper then
    corrects its threshold in a loop; here one pass counts the elements above each of 65 thresholds, and the
    threshold whose count is nearest to k is used. The paper's momentum correction, masking and clipping belong to the
    memory, not to the compressor.
    Lin, Han, Mao, Wang and Dally, "Deep Gradient Compression", ICLR 2018, arXiv:1712.01887, sections 3 and 5.
    """

    compress_ratio: float = 0.001
    selector: str = "sampled"

    @cached_property
    def traits(self) -> Traits:
        return replace(super().traits, memory="dgc")
