"""Agreement among workers: their settings and tensors at the start, and the step of each exchange."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from grace.core import Transport
from grace.engine.buckets import Tensor
from grace.transports.launched import JOINED


def agree(transport: Transport, settings: Mapping[str, Any], tensors: Iterable[Tensor], number: int = 0) -> int:
    """Compare settings and tensors with those of the other workers; return the largest ``number`` of all.

    If settings or tensors differ, all workers raise a ValueError that names the difference.
    """
    if transport.size == 1:
        return number
    mine = json.dumps([settings, [asdict(tensor) for tensor in tensors], number])
    answers = [json.loads(text) for text in transport.exchange(mine)]
    # Every worker compares the same answers with worker 0's, so all of them raise together.
    for rank, (*answer, _) in enumerate(answers):
        if answer != answers[0][:-1]:
            raise ValueError(f"worker 0 and worker {rank} differ: {_difference(answers[0][:-1], answer)}")
    return max(each for *_, each in answers)


def _difference(first: Any, other: Any) -> str:
    (settings, tensors), (other_settings, other_tensors) = first, other
    for key, value in settings.items():
        if other_settings[key] != value:
            return (
                f"{key} is {value} on the one and {other_settings[key]} on the other. Use the same settings everywhere"
            )
    names, other_names = [t["name"] for t in tensors], [t["name"] for t in other_tensors]
    if only := [name for name in names if name not in other_names]:
        return f"only worker 0 has {only[:3]}. Make the same model on every worker"
    if only := [name for name in other_names if name not in names]:
        return f"worker 0 lacks {only[:3]}. Make the same model on every worker"
    for one, two in zip(tensors, other_tensors, strict=True):
        if one != two:
            return (
                f"{one['name']!r} is {one['dtype']}{one['shape']} on the one where the other has {two['name']!r}, "
                f"{two['dtype']}{two['shape']}. Make the same model, in the same order, on every worker"
            )
    return "their settings"


class Place(NamedTuple):
    """A worker's position in the sequence of exchanges, to compare with the other workers'."""

    step: int
    attempt: int
    """Number of exchanges since the last step."""
    exchange: int
    """Number of exchanges since the workers agreed on their tensors."""
    by_hand: bool
    """Whether the gradients were set by hand."""
    digest: int
    """`Windows.digest`."""
    decided: dict[str, str]
    """The decisions since the last exchange, by tensor."""


HEADER = 5
"""Length of an exchange's float32 header, which is summed over the workers."""


def header(place: Place, failed: bool, workers: int) -> list[float]:
    """Return a tag of the exchange and its square, the same of the decisions, and whether the worker gave up.

    The sums over the workers show exactly whether all tags are equal (`in_step`), since float32 is exact below 2^24.
    Tags are never 0, because Horovod sends zeros for a worker that has called hvd.join().
    """
    limit = min(2039, math.isqrt(2**24 // workers)) - 1
    exchange = 1 + (2 * place.exchange + place.by_hand) % limit
    decisions = 1 + place.digest % limit
    return [float(each) for each in (exchange, exchange**2, decisions, decisions**2, failed)]


def in_step(sums: Sequence[float], workers: int) -> bool:
    """Return whether all workers are at one exchange and decided alike, and none gave up, by their headers' sums."""
    exchange, squares, decisions, more_squares, failed = (round(each) for each in sums)
    return failed == 0 and workers * squares == exchange**2 and workers * more_squares == decisions**2


def joined(sums: Sequence[float], own: Sequence[float], workers: int) -> bool:
    """Return whether some workers called hvd.join() and the others are at this worker's step, by the headers' sums."""
    there = round(sums[0] / own[0])
    return there < workers and [round(each) for each in sums] == [there * round(each) for each in own]


class OutOfStep(RuntimeError):
    """Workers are at different steps, or some gave up the step; raised on all of them."""

    everyone = False
    """Whether all workers gave up the step: then only this exchange is lost."""


def out_of_step(transport: Transport, place: Place, failure: str, sums: Sequence[float]) -> OutOfStep:
    """Ask all workers for their step; returns the error that each of them raises."""
    if joined(sums, header(place, bool(failure), transport.size), transport.size):
        return OutOfStep(JOINED)  # workers that called hvd.join() do not answer
    found = [json.loads(text) for text in transport.exchange(json.dumps([place._asdict(), failure]))]
    places = [Place(**each) for each, _ in found]
    if failures := [f"worker {n} gave up step {places[n].step}: {why}" for n, (_, why) in enumerate(found) if why]:
        error = OutOfStep("; ".join(failures) + ". No worker kept anything of this exchange")
        error.everyone = len(failures) == len(found)
        return error
    kinds = ("", " of gradients set by hand")
    shown = [f"worker {n}: step {at.step}, exchange {at.attempt}{kinds[at.by_hand]}" for n, at in enumerate(places)]
    return OutOfStep(
        f"the workers are out of step ({'; '.join(shown)}), so that this exchange would average gradients of different "
        f"batches. {_decided(places)}One of them made a backward pass that the others did not make, or skipped "
        "one: keep such passes inside `with optimizer.no_sync()`, and step on all workers or on none"
    )


def _decided(places: Sequence[Place]) -> str:
    # Returns a sentence on the first tensor whose last exchange the workers decided differently; empty without one.
    for name in sorted({name for place in places for name in place.decided}):
        found = [place.decided.get(name, "undecided") for place in places]
        if len(set(found)) > 1:
            return f"The means of {name!r} were {', '.join(f'{how} on worker {n}' for n, how in enumerate(found))}. "
    return ""
