"""Gradient averaging in custom training loops of Keras models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from grace.engine.session import Grace
from grace.keras.checks import check_grace
from grace.keras.layout import described
from grace.keras.toolkits import toolkit, unconverted

DRIVEN: WeakKeyDictionary[Grace, str] = WeakKeyDictionary()
"""For each Grace, a description of the optimizer that it drives, until `release`."""


@unconverted
def build(grace: Grace, variables: Iterable[Any]) -> None:
    """Create the state of these variables now instead of with their first gradients. Call it eagerly.

    Variables with non-float dtypes are skipped. Raises as `Grace.build` does.
    """
    check_grace(grace, "build")
    variables = list(variables)
    kit = toolkit("grace.keras.build", variables)
    grace.build(described(kit, grace, [variable for variable in variables if kit.is_float(variable)]))


@unconverted
def average_gradients(grace: Grace, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Average gradients over all workers, eagerly or while a graph is traced. Returns means in the same order.

    Eagerly, a None gradient counts as zero if another worker has one, and stays None otherwise. Inside a graph it
    stays None: all workers trace the same program, so they lack the same gradients. Sparse gradients of embeddings
    (IndexedSlices) become dense. On PyTorch, gradients are tensors, such as ``v.value.grad``, and stay unchanged.

    Raises ValueError if the Grace drives an optimizer, which would average again; RuntimeError inside a tf.distribute
    strategy with several replicas, and on PyTorch if a keras.distribution is set.
    """
    check_grace(grace, "average_gradients")
    if grace in DRIVEN:
        raise ValueError(
            f"this Grace drives an optimizer ({DRIVEN[grace]}), which averages what it applies: take the gradients of "
            "a plain tf.GradientTape or backward(), or release the optimizer (grace.keras.release), or use a second "
            "Grace"
        )
    kit = toolkit("grace.keras.average_gradients", variables)
    means = kit.exchange(grace, gradients, variables)
    kit.tune(grace)
    return means
