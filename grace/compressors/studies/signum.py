"""Signs of the momentum."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from grace.compressors.measured.signsgd import SignSGD
from grace.core import Traits
from grace.core.registry import register


@register("signum")
@dataclass(frozen=True)
class Signum(SignSGD):
    """Apply signsgd to each worker's momentum: signsgd with the memory "momentum".

    Payload: as signsgd's.
    Bernstein et al., ICML 2018, arXiv:1802.04434, algorithm 2.
    """

    @cached_property
    def traits(self) -> Traits:
        return replace(super().traits, memory="momentum")
