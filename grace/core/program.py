"""Programs: generators that yield collectives and are resumed with the results."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar, Union

from grace.core.collectives import Collective
from grace.core.state import name_of


class Calls:
    """Deferred kernels: those of many tensors run one after the other, in the order in which they were added.

    Python between two kernels finds the caches full of gradients, and takes several times as long.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[[], None], tuple[Any, ...]]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, call: Callable[[], None], *used: Any) -> None:
        """Defer a call. ``used``: arrays to keep alive until then, since a kernel holds addresses only."""
        self._waiting.append((call, used))

    def make(self) -> None:
        """Run all deferred kernels."""
        waiting, self._waiting = self._waiting, []
        for call, _ in waiting:
            call()


T = TypeVar("T")
Program = Generator[Collective | tuple[Collective, ...] | Calls, Any, T]
"""A generator that yields collectives and is resumed with their results; it may yield `Calls` to have them run."""
Steps = Union[T, Program[T]]  # noqa: UP007 - a TypeVar alone has no | at run time in 3.10
"""A value, or a program that returns one."""


def run(steps: Steps[T]) -> Program[T]:
    """A value as a program: ``result = yield from run(steps)``."""
    if isinstance(steps, Generator):
        return (yield from steps)
    return steps


def at_once(steps: Steps[T], whose: Any) -> T:
    """The result of a program that requests no collective; else ValueError, naming the method."""
    program = run(steps)
    try:
        next(program)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise ValueError(f"{name_of(whose)!r} asks for collectives inside compress, so its payload cannot be cut")
