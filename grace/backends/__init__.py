"""Array functions for methods, one file per toolkit; `base` defines them.

A package adds a toolkit by one entry point of the group "grace.backends", whose value is a `Toolkit`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from pkgutil import resolve_name
from typing import Any, NamedTuple

from grace.backends.base import Backend
from grace.core.registry import offered

__all__ = ["Backend", "Toolkit", "backend_of", "get_backend", "toolkits"]


class Toolkit(NamedTuple):
    """How to find the backends of a toolkit. The toolkit is not imported before ``build`` is called."""

    name: str
    build: Callable[[str], Backend]
    """The backend of a device, by the device's name."""
    modules: tuple[str, ...]
    """The top-level modules that define the types of its arrays."""
    device: Callable[[Any], str] = lambda array: "cpu"
    """The name of an array's device."""


def _class(path: str) -> Any:
    return resolve_name(f"grace.backends.{path}")


BUILT_IN = (
    Toolkit("numpy", lambda device: _class("numpy:NumpyBackend")(), ("numpy",)),
    Toolkit("torch", lambda device: _class("torch:TorchBackend")(device), ("torch",), lambda array: str(array.device)),
    Toolkit("tensorflow", lambda device: _class("tensorflow:TensorflowBackend")(), ("tensorflow", "keras")),
    Toolkit(
        "jax",
        lambda device: _class("jax:JaxBackend")(device),
        ("jax", "jaxlib"),
        lambda array: _class("jax:device_name")(array),
    ),
)
_LOCK = threading.RLock()


@cache
def toolkits() -> tuple[Toolkit, ...]:
    """GRACE's own toolkits, then those of other packages. Warns of packages that fail."""
    return (*BUILT_IN, *offered("grace.backends", "backend", Toolkit))


def get_backend(name: str, device: str = "cpu") -> Backend:
    """A toolkit's backend by name: "numpy", "torch", "tensorflow", "jax", or another package's.

    Imports only that toolkit. ValueError for an unknown name.
    """
    with _LOCK:  # thread-safe: one object for each name and device
        return _backend(name, device)


@cache
def _backend(name: str, device: str) -> Backend:
    toolkit = _find(lambda each: each.name == name)
    if toolkit is None:
        raise ValueError(f"unknown backend {name!r}; choose one of {_known()}")
    return toolkit.build(device)


def backend_of(array: Any) -> Backend:
    """The backend of an array. TypeError for other objects."""
    module = type(array).__module__.partition(".")[0]
    toolkit = _find(lambda each: module in each.modules)
    if toolkit is None:
        raise TypeError(
            f"{type(array).__module__}.{type(array).__name__} is not an array of {_known()}; "
            "pass tensors of one of these toolkits"
        )
    return get_backend(toolkit.name, toolkit.device(array))


def _find(fits: Callable[[Toolkit], bool]) -> Toolkit | None:
    # Load other packages' toolkits only if none of GRACE's own fits.
    return next(filter(fits, BUILT_IN), None) or next(filter(fits, toolkits()), None)


def _known() -> str:
    return ", ".join(toolkit.name for toolkit in toolkits())
