"""Profiles of Keras models: the backward pass measured as a whole, and apportioned by FLOPs.

TensorFlow does not reveal when a single gradient is ready inside a graph.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import tensorflow as tf

from grace.planner.profile import Profile, apportioned


def profile(model: Any, loss: Callable[[], Any], steps: int = 20, warmup: int = 3) -> Profile:
    """Measure a Keras model's backward pass, in a graph; medians over ``steps``.

    ``model``: built. ``loss``: a function that runs a forward pass on a typical batch and returns the loss. A tensor's
    share is its number of elements times the positions (pixels, tokens) of its layer's output.
    """
    if not model.trainable_variables:
        raise ValueError("the model has no trainable variables: call it once, so that they are made")

    @tf.function(autograph=False)
    def forward() -> Any:
        return loss()

    @tf.function(autograph=False)
    def whole() -> Any:
        with tf.GradientTape() as tape:
            value = loss()
        # Return a scalar per gradient, so that the graph prunes no gradient and copies none.
        return [tf.reduce_max(gradient) for gradient in tape.gradient(value, model.trainable_variables)]

    one, both = (_median(call, steps, warmup) for call in (forward, whole))
    positions = _positions(model)
    work = [
        (each.path, tuple(each.shape) or (1,), float(math.prod(each.shape)) * positions.get(each.path, 1))
        for each in model.trainable_variables[::-1]
    ]
    made = apportioned(work, max(both - one, 0.0), "measured as a whole, apportioned by FLOPs")
    return replace(made, forward=one)


def _median(call: Callable[[], Any], steps: int, warmup: int) -> float:
    found = []
    for step in range(warmup + steps):
        began = time.perf_counter()
        for value in tf.nest.flatten(call()):
            value.numpy()  # wait for the result
        if step >= warmup:
            found.append(time.perf_counter() - began)
    return sorted(found)[len(found) // 2]


def _positions(model: Any) -> dict[str, int]:
    # Returns, by variable, the number of positions in its layer's output (without batch and channels), which is how
    # often the weights are used.
    found: dict[str, int] = {}
    for layer in model._flatten_layers(include_self=False, recursive=True):
        try:
            shape = layer.output.shape
        except (AttributeError, ValueError):  # outside a graph of layers: its weights count once
            continue
        for variable in layer.trainable_variables:
            found[variable.path] = math.prod(length or 1 for length in shape[1:-1])
    return found
