"""Compares the workers' starting points before the first exchange and in `fit`: after a restart they must be equal."""

from __future__ import annotations

import json
import warnings
from typing import Any
from weakref import WeakSet

from grace.core import Transport
from grace.engine.session import Grace
from grace.keras.applied import innermost
from grace.keras.toolkits import Toolkit

_BEGUN: WeakSet[Grace] = WeakSet()
# Graces whose optimizers were compared.


def iterations_of(kit: Toolkit, optimizer: Any) -> int:
    """The number of steps that an optimizer has applied."""
    return int(kit.tensor(innermost(optimizer)._iterations))


def compare_starts(transport: Transport, start: str, remedy: str) -> None:
    """Raise ValueError on all workers unless their descriptions ``start`` are equal. Every worker must call this."""
    if transport.size == 1 or transport.lockstep:
        return
    first, *others = map(json.loads, transport.exchange(json.dumps(start)))
    for rank, other in enumerate(others, 1):
        if other != first:
            raise ValueError(f"worker 0 starts {first}, and worker {rank} {other}: {remedy}")


def begin(kit: Toolkit, optimizer: Any, grace: Grace, transport: Transport) -> None:
    """Before a Grace's first exchange: compare the optimizers' steps, and warn if residuals were lost in a restart."""
    if grace in _BEGUN:
        return
    _BEGUN.add(grace)
    with kit.outside_graphs():
        done, steps = iterations_of(kit, optimizer), grace.steps
        if not transport.elastic:  # in elastic training, other workers may have begun earlier
            compare_starts(
                transport,
                f"at step {done} of its optimizer",
                "load the same model on every worker, or broadcast worker 0's first, as broadcast_variables("
                "[*model.variables, *optimizer.variables])",
            )
    if done and not steps and grace.method.feeds_back and transport.rank == 0:
        warnings.warn(
            f"the optimizer continues from step {done}, but its Grace starts anew, without residuals. After a restart, "
            "load its state before the first step: grace.checkpoint.load, or grace.keras.BackupAndRestore in fit",
            stacklevel=5,
        )
