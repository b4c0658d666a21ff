"""Many cases of one law inside one test: all run, and failures are named."""

import inspect
from collections.abc import Callable, Iterable
from functools import partial, wraps
from itertools import product
from typing import Any

import pytest

ONLY: list[str] = []
"""What a case's name must contain to be run: `pytest --case TEXT`, once or several times."""
SHOWN = 20


class Looped:
    """The cases of one test: their names, and the values of each dimension."""

    def __init__(self, function: Callable[..., None]):
        self.function, self.names, self.dimensions = function, [], []  # type: ignore[var-annotated]

    def cases(self) -> Iterable[dict[str, Any]]:
        """Every combination of values."""
        for chosen in product(*self.dimensions):
            case: dict[str, Any] = {}
            for names, value in zip(self.names, chosen, strict=True):
                case.update(zip(names, value if len(names) > 1 else (value,), strict=True))
            yield case

    def run(self, fixtures: dict[str, Any]) -> None:
        """Try each case."""
        hold((named(case), partial(self.function, **fixtures, **case)) for case in self.cases())


def named(case: dict[str, Any]) -> str:
    """The name of a case."""
    return ", ".join(f"{key}={value}" for key, value in case.items())


def hold(cases: Iterable[tuple[str, Callable[[], None]]]) -> None:
    """Run each case, a name and a function; raises the first failure, with a list of all failures above it."""
    failed: list[tuple[str, BaseException]] = []
    count, skipped = 0, []
    for name, call in cases:
        if all(text in name for text in ONLY):
            count += 1
            try:
                call()
            except pytest.skip.Exception as reason:
                skipped.append(reason)
            except (Exception, pytest.fail.Exception) as error:
                failed.append((name, error))
    if not count:
        pytest.skip(f"no case is called {' and '.join(ONLY)}" if ONLY else "there are no cases")
    if len(skipped) == count:
        raise skipped[0]
    if failed:
        lines = [f"  {name}: {type(error).__name__}: {first(error)}" for name, error in failed[:SHOWN]]
        rest = [f"  and {len(failed) - SHOWN} more"] if len(failed) > SHOWN else []
        message = "\n".join([f"{len(failed)} of {count} cases failed:", *lines, *rest])
        raise AssertionError(message) from failed[0][1]


def first(error: BaseException) -> str:
    """The first line of an error's message."""
    return next((line for line in str(error).splitlines() if line.strip()), "")[:200]


def looped(function: Any) -> Looped:
    """The cases of a test; new ones if it has none yet."""
    return getattr(function, "looped", None) or Looped(function)


def in_turn(names: str, cases: Iterable[tuple[Any, ...]], *axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize by cases and settings, which combine the axes: each case takes one setting, the next one in turn.

    The other combinations are marked exhaustive.
    """
    cases, settings = list(cases), list(product(*axes))
    assert len(cases) >= len(settings), "a setting would have no turn"
    values = []
    for number, case in enumerate(cases):
        for turn, setting in enumerate(settings):
            marks = [pytest.mark.exhaustive] * (number % len(settings) != turn)
            values.append(pytest.param(*case, *setting, marks=marks, id="-".join(map(str, (*case, *setting)))))
    return pytest.mark.parametrize(names, values)


def loop(names: str, values: Iterable[Any]) -> Callable[[Any], Any]:
    """Decorator: run a test for each value, as `pytest.mark.parametrize` does, but all inside one test.

    Several make every combination.
    """

    def decorate(function: Any) -> Any:
        all_of = looped(function)
        all_of.names.insert(0, [name.strip() for name in names.split(",")])
        all_of.dimensions.insert(0, list(values))
        return wrapped(function, all_of)

    return decorate


def wrapped(function: Any, all_of: Looped) -> Any:
    """The test that pytest collects: it requests only the fixtures."""

    @wraps(function)
    def test(**fixtures: Any) -> None:
        all_of.run(fixtures)

    signature = inspect.signature(all_of.function)
    own = {name for names in all_of.names for name in names}
    given = [parameter for name, parameter in signature.parameters.items() if name not in own]
    test.__signature__ = signature.replace(parameters=given)  # type: ignore[attr-defined]
    test.looped = all_of  # type: ignore[attr-defined]
    return test
