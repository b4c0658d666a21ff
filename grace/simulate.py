"""Several workers in one process, to try and compare methods without a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grace.backends import Backend, backend_of, get_backend
from grace.engine.report import Report
from grace.engine.scheduler import RoundScheduler
from grace.engine.session import Grace
from grace.factory import grace_from_params
from grace.transports.local import LocalTransport, World

Gradients = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Simulation:
    """The result of `simulate`."""

    means: list[dict[str, Any]]
    """The last step's means by name, as NumPy arrays, for each worker."""
    history: list[list[dict[str, Any]]]
    """The ``means`` of each step."""
    report: Report
    """Worker 0's report."""
    state: list[dict[str, Any]]
    """Each worker's `Grace.state_dict`."""


def simulate(
    params: Mapping[str, Any],
    gradients: Gradients | Sequence[Gradients],
    backend: str = "numpy",
    steps: int | None = None,
    steps_per_epoch: int = 0,
) -> Simulation:
    """Exchange gradients between workers in this process, with the code that real workers run.

    ``params``: as for `grace.grace_from_params`. ``gradients``: one dictionary {name: array} per worker, or a list of
    such lists, one per step. ``backend``: "numpy", "torch", "tensorflow" or "jax". ``steps``: number of exchanges;
    default: one, or one per element of the list of steps (which is repeated if ``steps`` is larger).
    ``steps_per_epoch``: steps after which a policy decides; 0: never.

    An absent gradient is None, or missing from its worker's dictionary.
    """
    first = _first(gradients)
    sequence: list[Any] = [gradients] if isinstance(first, Mapping) else list(gradients)
    sequence = [[{n: g for n, g in worker.items() if g is not None} for worker in workers] for workers in sequence]
    graces, xp = workers(params, len(sequence[0])), get_backend(backend)
    example = {name: _convert(xp, g) for workers in sequence for worker in workers for name, g in worker.items()}
    for grace in graces:
        grace.build(example)
        grace.track_missing = any(len(worker) < len(example) for workers in sequence for worker in workers)
    history = []
    for number in range(len(sequence) if steps is None else steps):
        now = sequence[number % len(sequence)]
        given = [{name: _convert(xp, own[name]) if name in own else None for name in example} for own in now]
        history.append([{name: _host(xp, mean) for name, mean in means.items()} for means in step(graces, given)])
        if steps_per_epoch and (number + 1) % steps_per_epoch == 0:
            end_epoch(graces)
    return Simulation(history[-1], history, graces[0].report(), [grace.state_dict() for grace in graces])


def workers(params: Mapping[str, Any], size: int) -> list[Grace]:
    """Make the Graces of ``size`` workers in this process, for `step`. ``params``: as for `grace_from_params`."""
    world = World(size)
    return [grace_from_params(params, LocalTransport(world, rank)) for rank in range(size)]


def step(graces: Sequence[Grace], gradients: Gradients) -> list[dict[str, Any]]:
    """Run one exchange of workers in this process; returns each worker's means by name.

    ``graces``: from `workers`. ``gradients``: one dictionary {name: array} per worker, with the same names, and None
    for a gradient that a worker lacks. The first step builds the tensors.
    """
    for grace, own in zip(graces, gradients, strict=True):
        if not grace.names:
            grace.build({name: array for name, array in own.items() if array is not None})
        grace.launch(own)
    # Advance all workers round by round, as their messages would arrive.
    while [grace for grace in graces if not grace.advance()]:
        pass
    for grace in graces:
        grace.land()
    _settle([grace.tuning() for grace in graces])
    return [{name: grace.mean(name) for name in own} for grace, own in zip(graces, gradients, strict=True)]


def _first(gradients: Any) -> Any:
    # The first element: one worker's gradients, or the list of all workers' gradients in the first step.
    first = gradients[0] if isinstance(gradients, Sequence) and len(gradients) else None
    each = first[0] if isinstance(first, Sequence) and len(first) else first
    if not isinstance(each, Mapping):
        raise TypeError(
            "gradients is a list with a dictionary for each worker, as [{'w': array}, {'w': array}], or a list over "
            f"steps of such lists, not {type(gradients).__name__} of {type(each).__name__}"
        )
    return first


def end_epoch(graces: Sequence[Grace], lr: float | None = None, next_lr: float | None = None) -> None:
    """`Grace.end_epoch` for all workers of a world in this process."""
    _settle([grace.ending(lr, next_lr) for grace in graces])


def _settle(flights: Sequence[RoundScheduler | None]) -> None:
    while [flight for flight in flights if flight is not None and not flight.advance()]:
        pass


def _convert(xp: Backend, array: Any) -> Any:
    # Convert to an array of the backend, with the same dtype.
    try:
        own = backend_of(array)
    except TypeError:
        return xp.asarray(array, "float32")
    return array if own is xp else xp.asarray(own.to_numpy(array), own.dtype(array))


def _host(xp: Backend, array: Any) -> Any:
    return None if array is None else xp.to_numpy(array).copy()
