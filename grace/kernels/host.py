"""Kernels on host arrays: NumPy's, and PyTorch's on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from grace.backends.deferred import DeferredKernels
from grace.kernels import Library, library
from grace.kernels.arrays import Arrays
from grace.kernels.calls import Family, Log
from grace.kernels.memories import Memories
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


FAMILIES = {
    "quantisers": Quantisers,
    "sparsifiers": Sparsifiers,
    "transforms": Transforms,
    "memories": Memories,
    "arrays": Arrays,
}


class HostKernels:
    """A `Library` for a backend's arrays, in families of kernels."""

    quantisers: Quantisers
    sparsifiers: Sparsifiers
    transforms: Transforms
    memories: Memories
    arrays: Arrays

    def __init__(
        self,
        xp: Any,
        library: Library,
        tables: dict[Any, Array] | None = None,
        log: Log | None = None,
        deferred: DeferredKernels | None = None,
    ):
        self.library, self.isa = library, library.isa
        self._bound = xp, library, {} if tables is None else tables, log, deferred

    def within(self, log: Log | None, deferred: DeferredKernels | None) -> HostKernels:
        """These kernels, bound to a step's rollback log and deferred kernels: see `Family`."""
        xp, library, tables, *_ = self._bound
        return HostKernels(xp, library, tables, log, deferred)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Made on first use, and without the lock of a cached_property: `within` is called for each tensor.
            if name not in FAMILIES:
                raise AttributeError(f"host kernels have no {name!r}")
            found = self.__dict__[name] = FAMILIES[name](*self._bound)
            return found


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
