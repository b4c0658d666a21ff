"""Comparisons of PyTorch's CUDA tensors where they are, by Triton."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import Any

from grace.patch.delta import Delta


def reaches(tensor: Any) -> bool:
    """Whether Triton's kernel can compare a tensor: on CUDA, contiguous, not a DTensor, of elements up to 8 bytes."""
    return (
        bool(getattr(tensor, "is_cuda", False))
        and not hasattr(tensor, "to_local")
        and tensor.is_contiguous()
        and tensor.element_size() <= 8
        and find_spec("triton") is not None
        and "tensorflow" not in sys.modules  # both contain LLVM, and loading a second copy crashes the process
        and os.environ.get("GRACE_KERNELS", "").lower() not in ("off", "0")
    )


def compare(new: Any, base: Any) -> Delta:
    """As `grace.patch.delta.compare`, of device tensors; only the changes come to the host."""
    from grace.kernels.triton.patches import changes

    counts, places, steps, fresh = (each.cpu().numpy() for each in changes(new.detach(), base.detach()))
    word = f"u{steps.itemsize}"
    size = new.numel() * new.element_size() // steps.itemsize
    return Delta(size, counts, places.view("u2"), steps.view(word), fresh.view(word))
