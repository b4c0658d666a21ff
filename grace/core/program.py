"""Programs: generators that yield collectives and are resumed with the results."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar, Union

from grace.core.collectives import Collective
from grace.core.state import name_of

T = TypeVar("T")
Program = Generator[Collective | tuple[Collective, ...], Any, T]
"""A generator that yields collectives and is resumed with their results."""
MaybeProgram = Union[T, Program[T]]  # noqa: UP007 - a TypeVar alone has no | at run time in 3.10
"""A value, or a program that returns one."""


def as_program(value: MaybeProgram[T]) -> Program[T]:
    """Convert a value, or a program, to a program: ``result = yield from as_program(value)``."""
    if isinstance(value, Generator):
        return (yield from value)
    return value


def run_local(value: MaybeProgram[T], whose: Any) -> T:
    """Run a program that requests no collective, and return its result.

    ValueError, naming the method ``whose``, if it requests one.
    """
    program = as_program(value)
    try:
        next(program)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise ValueError(f"{name_of(whose)!r} asks for collectives inside compress, so its payload cannot be cut")


# Former names.
Steps = MaybeProgram[T]
run, at_once = as_program, run_local
