"""Kernels for device tensors: Triton's, on CUDA devices, unless GRACE_KERNELS=off."""

from __future__ import annotations

import os
import sys
import warnings
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grace.kernels.triton import TritonKernels


def runs_on(xp: Any) -> bool:
    """Whether Triton can reach a backend's tensors: on CUDA, and on hosts in its interpreter (TRITON_INTERPRET=1)."""
    return xp.device.type == "cuda" or (xp.on_host and os.environ.get("TRITON_INTERPRET") == "1")


def device_kernels(xp: Any) -> TritonKernels | None:
    """Triton's kernels for a backend that `runs_on` accepts; None if they are off, not installed, or have failed.

    On a host only GRACE_KERNELS=triton selects them.
    """
    setting = os.environ.get("GRACE_KERNELS", "").lower()
    if setting in ("off", "0") or (xp.on_host and setting != "triton"):
        return None
    if "_device_kernels" not in xp.__dict__:
        xp.__dict__["_device_kernels"] = None
        _load(xp, setting == "triton")
    found: TritonKernels | None = xp.__dict__["_device_kernels"]
    return found


def _load(xp: Any, named: bool) -> None:
    # ``named``: whether GRACE_KERNELS names Triton, so that its absence needs a warning.
    if sys.modules.get("triton") is None:
        if "tensorflow" in sys.modules:  # both contain LLVM, and loading a second copy crashes the process
            give_up(xp, "TensorFlow is loaded: use a process without it")
            return
        if not named and find_spec("triton") is None:
            return
    try:
        from grace.kernels.triton import TritonKernels
    except Exception as error:  # importing Triton may fail in any way
        give_up(xp, error)
    else:
        xp.__dict__["_device_kernels"] = TritonKernels(xp, partial(give_up, xp))


def give_up(xp: Any, reason: Exception | str) -> None:
    """Disable these kernels for the backend, with one warning."""
    xp.__dict__["_device_kernels"] = None
    said = (str(reason).strip() or type(reason).__name__).splitlines()[-1]
    warnings.warn(
        f"Triton's kernels cannot be used, and methods run without them, slower: {said} (GRACE_KERNELS=off turns them "
        "off, and this warning)",
        stacklevel=2,
    )
