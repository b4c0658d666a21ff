"""Triton's kernels for PyTorch's CUDA tensors, for all tensors of a bucket at once: `tables.TritonGroups`.

Quantisers in blocks and rotations are in `groups`, selections in `selections`. Each kernel gives the same bits as the
plain function on a host: divisions are rounded to nearest, nothing uses fused multiply-add, and workers are added in
order. No call waits for the device. If TRITON_INTERPRET=1 is set on import, Triton's interpreter runs them on the host,
element by element in NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grace.kernels.arrays import Arrays
from grace.kernels.host import absent
from grace.kernels.triton.singles import TritonQuantisers, TritonSparsifiers, TritonTransforms
from grace.kernels.triton.tables import TritonGroups


class TritonKernels:
    """The counterpart of `grace.kernels.host.HostKernels` for device tensors."""

    isa = "triton"
    arrays = absent(Arrays)

    def __init__(self, xp: Any, give_up: Callable[[Exception], None]):
        alone = TritonGroups(xp, give_up)
        self.quantisers, self.transforms = TritonQuantisers(alone), TritonTransforms(alone)
        self.sparsifiers, self.groups = TritonSparsifiers(alone), TritonGroups(xp, give_up)
