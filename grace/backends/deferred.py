"""Deferred kernel calls, which run back to back for many tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class DeferredKernels:
    """A queue of kernel calls, to run them without Python code in between.

    Such code would run several times slower than usual, since kernels fill the caches with gradients.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[[], None], tuple[Any, ...]]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, call: Callable[[], None], *used: Any) -> None:
        """Defer a call. ``used``: arrays to keep alive until then, since a kernel only holds addresses."""
        self._waiting.append((call, used))

    def run(self) -> None:
        """Run all calls."""
        waiting, self._waiting = self._waiting, []
        for call, _ in waiting:
            call()
