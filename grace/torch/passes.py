"""The current backward pass, as autograd's hooks see it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

NONE = -1


def running() -> int:
    """The number of autograd's running graph task; -1 outside of `backward`."""
    return torch._C._current_graph_task_id()


class BackwardPass:
    """A backward pass, and the one that a reentrant checkpoint runs inside it.

    The end of the inner pass is not the end of the whole one, which may have no gradient of its own to hook.
    """

    def __init__(self) -> None:
        self._task = self._inner = NONE
        self.began = 0.0
        """The clock when the pass began."""

    def has(self, task: int) -> bool:
        """Whether a graph task is part of the pass."""
        return task in (self._task, self._inner)

    @property
    def begun(self) -> bool:
        """Whether the pass began, and has not ended."""
        return self._task != NONE

    @property
    def reentrant(self) -> bool:
        """Whether an inner pass was seen."""
        return self._inner != NONE

    @property
    def failed(self) -> bool:
        """Whether the pass began and will not end: autograd no longer runs it."""
        return self._task not in (NONE, running()) and self._inner == NONE

    def begin(self, task: int, on_end: Callable[[], None]) -> None:
        """The first gradient of a pass has arrived; ``on_end`` is called when autograd has computed the last one."""
        self._task = task
        self.began = time.perf_counter()
        torch.autograd.Variable._execution_engine.queue_callback(on_end)

    def begin_inner(self, task: int) -> None:
        """The first gradient of an inner pass has arrived."""
        self._inner = task

    def end(self) -> None:
        """The pass has ended, or is given up."""
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
