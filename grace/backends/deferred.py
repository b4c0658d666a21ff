"""Kernels that are called later, those of many tensors one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class DeferredKernels:
    """Calls of kernels, in the order in which they were added.

    Python between two kernels finds the caches full of gradients, and takes several times as long.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[[], None], tuple[Any, ...]]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, call: Callable[[], None], *used: Any) -> None:
        """Defer a call. ``used``: arrays to keep alive until then, since a kernel holds addresses only."""
        self._waiting.append((call, used))

    def run(self) -> None:
        """Make all calls."""
        waiting, self._waiting = self._waiting, []
        for call, _ in waiting:
            call()
