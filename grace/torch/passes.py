"""The current backward pass, as autograd's hooks see it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

NONE = -1


def running() -> int:
    """The ID of autograd's running graph task; -1 outside of a backward pass."""
    return torch._C._current_graph_task_id()


class BackwardPass:
    """A backward pass, and the inner pass that a reentrant checkpoint runs inside it.

    After the end of the inner pass, the outer one continues, perhaps without another parameter gradient whose hook
    would show this.
    """

    def __init__(self) -> None:
        self._task = self._inner = NONE
        self.began = 0.0
        """Time of `time.perf_counter` at which the pass began."""

    def has(self, task: int) -> bool:
        """Whether a graph task is part of the pass."""
        return task in (self._task, self._inner)

    @property
    def begun(self) -> bool:
        """Whether the pass began, and has not ended."""
        return self._task != NONE

    @property
    def reentrant(self) -> bool:
        """Whether an inner pass has begun."""
        return self._inner != NONE

    @property
    def failed(self) -> bool:
        """Whether the pass was aborted: it began, but autograd no longer runs it."""
        return self._task not in (NONE, running()) and self._inner == NONE

    def begin(self, task: int, on_end: Callable[[], None]) -> None:
        """Begin a pass at its first gradient; autograd calls ``on_end`` after the last one."""
        self._task = task
        self.began = time.perf_counter()
        torch.autograd.Variable._execution_engine.queue_callback(on_end)

    def begin_inner(self, task: int) -> None:
        """Begin an inner pass at its first gradient."""
        self._inner = task

    def end(self) -> None:
        """End or abandon the pass."""
        self._task = self._inner = NONE


def is_reentrant() -> bool:
    """Whether an autograd.Function started the running pass inside another one, as reentrant checkpoints do."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is _FUNCTION_BACKWARD:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


_FUNCTION_BACKWARD = torch.autograd.function.BackwardCFunction.apply.__code__
