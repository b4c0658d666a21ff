"""Which kernels carry out the tensors of a device: Triton's, where GRACE_KERNELS=triton asks for them."""

from __future__ import annotations

import os
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grace.kernels.triton import TritonKernels


def asked() -> bool:
    """The environment asks for Triton's kernels."""
    return os.environ.get("GRACE_KERNELS", "").lower() == "triton"


def runs_on(xp: Any) -> bool:
    """Triton can reach a backend's tensors: on CUDA devices, and in its interpreter (TRITON_INTERPRET=1) on hosts."""
    return xp.device.type == "cuda" or (xp.on_host and os.environ.get("TRITON_INTERPRET") == "1")


def device_kernels(xp: Any) -> TritonKernels | None:
    """Triton's kernels for a backend that they run on; None where they are not asked for, or have failed."""
    if not asked():
        return None
    if "_device_kernels" not in xp.__dict__:
        try:
            from grace.kernels.triton import TritonKernels
        except Exception as error:  # it may be broken in any way
            give_up(xp, error)
        else:
            xp.__dict__["_device_kernels"] = TritonKernels(xp, partial(give_up, xp))
    found: TritonKernels | None = xp.__dict__["_device_kernels"]
    return found


def give_up(xp: Any, error: Exception) -> None:
    """From now on the backend has no kernels of this kind; says so once."""
    xp.__dict__["_device_kernels"] = None
    said = (str(error).strip() or type(error).__name__).splitlines()[-1]
    warnings.warn(
        f"GRACE_KERNELS=triton: Triton's kernels cannot be used, and methods run without them: {said}", stacklevel=2
    )
