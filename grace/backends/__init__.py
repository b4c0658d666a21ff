"""Array functions for methods, one file per toolkit; `base` defines them."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

from grace.backends.base import Backend

__all__ = ["Backend", "backend_of", "get_backend"]

NAMES = ("numpy", "torch", "tensorflow")
_LOCK = threading.RLock()


def get_backend(name: str, device: str = "cpu") -> Backend:
    """A backend by name: "numpy", "torch" or "tensorflow". Imports only that toolkit."""
    with _LOCK:  # one object each, however the device is given, and in whatever thread
        return _backend(name, device)


@cache
def _backend(name: str, device: str) -> Backend:
    if name == "numpy":
        from grace.backends.numpy import NumpyBackend

        return NumpyBackend()
    if name == "torch":
        from grace.backends.torch import TorchBackend

        return TorchBackend(device)
    if name == "tensorflow":
        from grace.backends.tensorflow import TensorflowBackend

        return TensorflowBackend()
    raise ValueError(f"unknown backend {name!r}; choose one of {', '.join(NAMES)}")


def backend_of(array: Any) -> Backend:
    """The backend of an array."""
    module = type(array).__module__.split(".")[0]
    if module == "torch":
        return get_backend("torch", str(array.device))
    if module in ("tensorflow", "keras"):
        return get_backend("tensorflow")
    if module == "numpy":
        return get_backend("numpy")
    raise TypeError(
        f"{type(array).__module__}.{type(array).__name__} is not an array of {', '.join(NAMES)}; "
        "pass tensors of one of these toolkits"
    )
