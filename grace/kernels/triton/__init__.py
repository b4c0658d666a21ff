"""Triton's kernels for PyTorch's CUDA tensors: signs, integers, the top-k selection, and rotations with few bits.

`groups` has those for all tensors of a bucket at once. Each gives the same bits as the plain function on a host:
divisions are rounded to nearest, there is no fused multiply-add, and workers are added in order. No call waits for the
device. If TRITON_INTERPRET=1 is set on import, Triton's interpreter runs them on the host, element by element in NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grace.kernels.arrays import Arrays
from grace.kernels.host import absent
from grace.kernels.triton.quantisers import TritonQuantisers
from grace.kernels.triton.sparsifiers import TritonSparsifiers
from grace.kernels.triton.tables import TritonGroups
from grace.kernels.triton.transforms import TritonTransforms


class TritonKernels:
    """The counterpart of `grace.kernels.host.HostKernels` for device tensors."""

    isa = "triton"
    arrays = absent(Arrays)

    def __init__(self, xp: Any, give_up: Callable[[Exception], None]):
        self.quantisers, self.sparsifiers = TritonQuantisers(xp, give_up), TritonSparsifiers(xp, give_up)
        self.transforms, self.groups = TritonTransforms(xp, give_up), TritonGroups(xp, give_up)
