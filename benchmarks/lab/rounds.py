"""Times trainings in alternating steps, so that other load on the machine affects all equally."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Mapping

from grace.core import Transport

LEAST = 3  # fewest rounds


def medians(
    carrier: Transport,
    trainings: Mapping[str, Callable[[], float]],
    seconds: float,
    beside: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Measure the median step time of each training, in seconds on the slowest worker.

    A training is a function that runs a step and returns its seconds. Each round calls all of them twice, in a new
    random order; the first call only warms the caches and does not count. ``seconds``: after this time no round starts.
    ``beside``: called in every round. All workers must call this together.
    """
    found: dict[str, list[float]] = {label: [] for label in trainings}
    draw, began, rounds = random.Random(0), time.perf_counter(), 0
    while rounds < LEAST or carrier.exchange(str(time.perf_counter() - began < seconds))[0] == "True":
        beside()
        for label in draw.sample([*trainings], len(trainings)):
            trainings[label]()
            found[label].append(trainings[label]())
        rounds += 1
    everybody = [json.loads(text) for text in carrier.exchange(json.dumps(found))]
    return {
        label: statistics.median(map(max, zip(*(worker[label] for worker in everybody), strict=True)))
        for label in trainings
    }
