"""Many cases of one law inside one test: all are tried, and those that fail are named."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from itertools import combinations, product
from typing import Any

import pytest

ONLY: list[str] = []
"""What a case's name must contain to be run: `pytest --case TEXT`, once or several times."""
SHOWN = 20


class Looped:
    """The cases of one test: their names, and the values of each dimension."""

    def __init__(self, function: Callable[..., None]):
        self.function, self.names, self.dimensions = function, [], []  # type: ignore[var-annotated]

    def cases(self, few: bool) -> Iterable[dict[str, Any]]:
        """Each case: every combination, or each pair of values at least once."""
        for chosen in pairs(self.dimensions) if few else product(*self.dimensions):
            case: dict[str, Any] = {}
            for names, value in zip(self.names, chosen, strict=True):
                case.update(zip(names, value if len(names) > 1 else (value,), strict=True))
            yield case

    def run(self, few: bool, fixtures: dict[str, Any]) -> None:
        """Try each case."""
        hold((named(case), partial(self.function, **fixtures, **case)) for case in self.cases(few))


def named(case: dict[str, Any]) -> str:
    """What a case is called."""
    return ", ".join(f"{key}={value}" for key, value in case.items())


def hold(cases: Iterable[tuple[str, Callable[[], None]]]) -> None:
    """Try each case, a name and what to call; raises the first failure, below a list of all of them."""
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
    """The first line of what an error says."""
    return next((line for line in str(error).splitlines() if line.strip()), "")[:200]


def pairs(dimensions: Sequence[Sequence[Any]]) -> Iterable[tuple[Any, ...]]:
    """Few combinations, with each pair of values of any two dimensions in at least one of them."""
    if len(dimensions) < 3:
        yield from product(*dimensions)
        return
    sizes = [range(len(values)) for values in dimensions]
    left = dict.fromkeys(
        (i, a, j, b) for i, j in combinations(range(len(sizes)), 2) for a, b in product(sizes[i], sizes[j])
    )
    while left:
        i, a, j, b = next(iter(left))
        chosen = {i: a, j: b}
        for k in range(len(sizes)):
            if k not in chosen:
                chosen[k] = max(sizes[k], key=lambda c: sum(key in left for key in keys_of({**chosen, k: c}, k)))
        for key in [key for k in chosen for key in keys_of(chosen, k)]:
            left.pop(key, None)
        yield tuple(dimensions[k][chosen[k]] for k in range(len(sizes)))


def keys_of(chosen: dict[int, int], k: int) -> list[tuple[int, int, int, int]]:
    """The pairs of values that dimension ``k`` is in."""
    return [(*min((i, a), (k, chosen[k])), *max((i, a), (k, chosen[k]))) for i, a in chosen.items() if i != k]


def looped(function: Any) -> Looped:
    """A test's cases; those of a test that has none yet."""
    return getattr(function, "looped", None) or Looped(function)


def loop(names: str, values: Iterable[Any]) -> Callable[[Any], Any]:
    """Decorator: run a test for each value, as `pytest.mark.parametrize` does, but all inside one test.

    Several make every combination, unless `pairwise` stands above them.
    """

    def decorate(function: Any) -> Any:
        all_of = looped(function)
        all_of.names.insert(0, [name.strip() for name in names.split(",")])
        all_of.dimensions.insert(0, list(values))
        return wrapped(function, all_of, False)

    return decorate


def pairwise(function: Any) -> Any:
    """Decorator above several `loop`: each pair of values; all combinations under the marker `exhaustive`."""
    modes = [False, pytest.param(True, marks=pytest.mark.exhaustive)]
    mark = pytest.mark.parametrize("exhaustive", modes, ids=["pairs", "all"])
    return mark(wrapped(function, looped(function), True))


def wrapped(function: Any, all_of: Looped, few: bool) -> Any:
    """The test that pytest sees: it asks for the fixtures alone."""

    @wraps(function)
    def test(**fixtures: Any) -> None:
        all_of.run(few and not fixtures.pop("exhaustive"), fixtures)

    signature = inspect.signature(all_of.function)
    own = {name for names in all_of.names for name in names}
    given = [parameter for name, parameter in signature.parameters.items() if name not in own]
    if few:
        given.append(inspect.Parameter("exhaustive", inspect.Parameter.POSITIONAL_OR_KEYWORD))
    test.__signature__ = signature.replace(parameters=given)  # type: ignore[attr-defined]
    test.looped = all_of  # type: ignore[attr-defined]
    return test
