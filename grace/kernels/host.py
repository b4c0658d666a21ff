"""Kernels on host arrays: NumPy's, and PyTorch's on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from grace.kernels import Library, library
from grace.kernels.arrays import Arrays
from grace.kernels.calls import Family
from grace.kernels.quantisers import Quantisers
from grace.kernels.sparsifiers import Sparsifiers
from grace.kernels.transforms import Transforms

T = TypeVar("T")
Array = Any


class _Settled(threading.local):
    library: Library | None = None
    known = False


_settled = _Settled()


@contextmanager
def settled() -> Iterator[None]:
    """A context manager inside which the library is looked up once, not for each tensor."""
    before = _settled.library, _settled.known
    _settled.library, _settled.known = library(), True
    try:
        yield
    finally:
        _settled.library, _settled.known = before


def host_kernels(xp: Any) -> HostKernels | None:
    """The kernels of a host backend; None if they are not built, or off."""
    found = _settled.library if _settled.known else library()
    if found is None:
        return None
    kernels: HostKernels | None = xp.__dict__.get("_kernels")
    if kernels is None or kernels.library is not found:
        kernels = xp.__dict__["_kernels"] = HostKernels(xp, found)
    return kernels


class HostKernels:
    """A `Library` for a backend's arrays, in families of kernels."""

    def __init__(self, xp: Any, library: Library):
        self.library, self.isa = library, library.isa
        tables: dict[Any, Array] = {}
        self.quantisers, self.sparsifiers = Quantisers(xp, library, tables), Sparsifiers(xp, library, tables)
        self.transforms, self.arrays = Transforms(xp, library, tables), Arrays(xp, library, tables)


def partly(family: type[Family]) -> Callable[[type[T]], type[T]]:
    """Class decorator for partial replacements of a family: missing kernels become None."""

    def completed(kernels: type[T]) -> type[T]:
        for name in vars(family).keys() - vars(kernels).keys():
            if not name.startswith("_"):
                setattr(kernels, name, None)
        return kernels

    return completed


def absent(family: type[Family]) -> Any:
    """A family without kernels: all its attributes are None."""
    return partly(family)(type("Absent", (), {}))
