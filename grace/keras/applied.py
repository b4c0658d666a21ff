"""Tells whether a Keras optimizer has applied means.

`Optimizer.apply` advances ``_iterations`` in each step, even in one that only accumulates means. If a loss scaler
skips a step, ``_iterations`` stays. A user's own ``apply`` may step without counting, so its variables are compared
instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from grace.core import Array
from grace.core.dtypes import ITEMSIZE
from grace.engine.session import Grace
from grace.keras.toolkits import Toolkit

WORDS = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}
"""By the size of an element in bytes, the integer of that size."""


def innermost(optimizer: Any) -> Any:
    """The optimizer inside loss scalers."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


@contextmanager
def deciding(kit: Toolkit, optimizer: Any, grace: Grace, variables: Sequence[Any] | None) -> Iterator[None]:
    """Decide the exchanges of this block: applied if the optimizer stepped in it; discarded if not, or after an error.

    ``variables``: those that the optimizer may change; None: those that it was built with. Works in graphs, too.
    """
    step = _Step(kit, innermost(optimizer), variables)
    grace.defer_commit = True
    try:
        yield
    except BaseException:
        grace.discard()
        raise
    finally:
        grace.defer_commit = False
    if not grace.provisional:  # nothing was exchanged
        return
    stepped = step.made()
    if not isinstance(stepped, bool):
        grace.decide(grace.undecided, when=stepped)
    elif stepped:
        grace.commit()
    else:
        grace.discard()


class _Step:
    # Compares an optimizer before and after a step, by integers: the number of its steps and, where Keras does not
    # count them, the sum of the bits of each variable with dimensions (counters have none).
    def __init__(self, kit: Toolkit, optimizer: Any, variables: Sequence[Any] | None):
        self._kit, self._optimizer = kit, optimizer
        self._counted = type(optimizer).apply.__module__.startswith("keras.")
        self._variables = list(optimizer._trainable_variables if variables is None else variables)
        self._before = self._marks()

    def made(self) -> Any:
        """Whether the optimizer has stepped: a bool, or bool[] in a graph."""
        xp, before, after = self._kit.backend(), self._before, self._marks()
        before = [*before, *[0] * (len(after) - len(before))]  # an optimizer built in this step began with zeros
        same = [one == two for one, two in zip(before, after, strict=True)]
        if not xp.tracing:
            return not all(map(bool, same))
        return xp.invert(xp.all(xp.concat([xp.reshape(each, (1,)) for each in same])))

    def _marks(self) -> list[Any]:
        with self._kit.inside():
            marks = [self._kit.count(keras.ops.convert_to_tensor(self._optimizer._iterations))]
            if not self._counted:
                known = [*self._variables, *self._optimizer.variables]
                marks += [self._bits(variable) for variable in known if len(variable.shape)]
            return marks

    def _bits(self, variable: Any) -> Array:
        xp = self._kit.backend()
        x = self._kit.tensor(keras.ops.convert_to_tensor(variable))  # also within Keras's StatelessScope
        words = xp.bitcast(xp.reshape(x, (-1,)), WORDS[ITEMSIZE[xp.dtype(x)]])
        return xp.cast(xp.sum(words if xp.dtype(words) in ("int32", "int64") else xp.cast(words, "int32")), "int64")
