"""Programs: generators that yield collectives and are resumed with the results."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar, Union

from grace.core.collectives import Collective
from grace.core.state import name_of


class Calls:
    """Kernels' work that is put off, so that of many tensors it is done in one go, in the order in which it was added.

    Python that runs between two kernels finds the caches full of gradients, and takes several times as long.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[[], None], tuple[Any, ...]]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, call: Callable[[], None], *used: Any) -> None:
        """Have a call made later. What is ``used`` there stays until then: a kernel knows no more than addresses."""
        self._waiting.append((call, used))

    def make(self) -> None:
        """Make all calls that wait."""
        waiting, self._waiting = self._waiting, []
        for call, _ in waiting:
            call()


T = TypeVar("T")
Program = Generator[Collective | tuple[Collective, ...] | Calls, Any, T]
"""A computation that yields collectives and is resumed with their results; or `Calls`, once these have been made."""
Steps = Union[T, Program[T]]  # noqa: UP007 - a TypeVar alone has no | at run time in 3.10
"""A value, or a program that returns one."""


def run(steps: Steps[T]) -> Program[T]:
    """Use a value and a program alike: ``result = yield from run(steps)``."""
    if isinstance(steps, Generator):
        return (yield from steps)
    return steps


def at_once(steps: Steps[T], whose: Any) -> T:
    """What steps come to that ask for no collective. ValueError if they do, naming the method."""
    program = run(steps)
    try:
        next(program)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise ValueError(f"{name_of(whose)!r} asks for collectives inside compress, so its payload cannot be cut")
