"""Kernels for device tensors: Triton's, if GRACE_KERNELS=triton asks for them."""

from __future__ import annotations

import os
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grace.kernels.triton import TritonKernels


def asked() -> bool:
    """Whether the environment asks for Triton's kernels."""
    return os.environ.get("GRACE_KERNELS", "").lower() == "triton"


def runs_on(xp: Any) -> bool:
    """Whether Triton can reach a backend's tensors: on CUDA, and on hosts in its interpreter (TRITON_INTERPRET=1)."""
    return xp.device.type == "cuda" or (xp.on_host and os.environ.get("TRITON_INTERPRET") == "1")


def device_kernels(xp: Any) -> TritonKernels | None:
    """Triton's kernels for a supported backend; None if not asked for, or after a failure."""
    if not asked():
        return None
    if "_device_kernels" not in xp.__dict__:
        try:
            from grace.kernels.triton import TritonKernels
        except Exception as error:  # importing Triton may fail in any way
            give_up(xp, error)
        else:
            xp.__dict__["_device_kernels"] = TritonKernels(xp, partial(give_up, xp))
    found: TritonKernels | None = xp.__dict__["_device_kernels"]
    return found


def give_up(xp: Any, error: Exception) -> None:
    """Disable these kernels for the backend, with one warning."""
    xp.__dict__["_device_kernels"] = None
    said = (str(error).strip() or type(error).__name__).splitlines()[-1]
    warnings.warn(
        f"GRACE_KERNELS=triton: Triton's kernels cannot be used, and methods run without them: {said}", stacklevel=2
    )
