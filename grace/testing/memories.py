"""Laws for memories. Each takes the memory, a compressor that it accepts, and a backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from grace.core import Compressor, Memory
from grace.core.registry import communicators, usual_communicator
from grace.testing import exchanges
from grace.testing.cases import Laws, fully, lockstep, shape_of, spread, workers

LAWS = Laws()


@LAWS.add
def declarations_make_sense(memory: Memory, compressor: Compressor, xp: Any) -> None:
    """The memory is a frozen dataclass with a docstring."""
    assert dataclasses.is_dataclass(memory), "put @dataclass(frozen=True) above the class"
    assert dataclasses.replace(memory) == memory, "it must be made of its fields alone"
    assert hash(memory) == hash(dataclasses.replace(memory)), "@dataclass needs frozen=True"
    assert (type(memory).__doc__ or "").strip(), "a docstring must say what it keeps"


@LAWS.add
def steady_gradients_come_through(memory: Memory, compressor: Compressor, xp: Any) -> None:
    """Error feedback: a constant gradient is eventually applied in full, in the right proportions."""
    if not memory.feedback or memory.second_stage is not None:
        return
    shape = shape_of(compressor, 300)
    graces, fixed = workers(compressor, memory, size=2), [spread(*shape, seed=rank) for rank in range(2)]
    for grace in graces:
        grace.build({"w": xp.zeros(shape)})
    total = np.zeros(shape)
    for _ in range(200 if fully(xp) else 60):
        mean = lockstep(graces, [{"w": xp.asarray(g, "float32")} for g in fixed])[0]["w"]
        total += xp.to_numpy(mean)
    target = np.mean(fixed, 0)
    cosine = (total * target).sum() / np.linalg.norm(total) / np.linalg.norm(target)
    assert cosine > 0.9, f"what was applied points elsewhere: its cosine with the gradient is {cosine:.3f}"


def _over_the_usual_communicator(check: Callable[..., None]) -> None:
    def over(memory: Memory, compressor: Compressor, xp: Any) -> None:
        check(communicators[usual_communicator(compressor)](), compressor, xp, memory)

    over.__name__, over.__doc__ = check.__name__, check.__doc__
    over.graphs = getattr(check, "graphs", False)  # type: ignore[attr-defined]
    LAWS.add(over)


for _check in exchanges.LAWS.values():
    _over_the_usual_communicator(_check)
