"""The differences between the toolkits that Keras runs on: variables, devices and graphs."""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import keras

from grace.backends import Backend
from grace.core import Array
from grace.engine.session import Grace

F = TypeVar("F", bound=Callable[..., Any])

MODULES = {"tensorflow": "grace.tensorflow.variables", "torch": "grace.keras.on_torch"}
"""By Keras backend, the module that defines its TOOLKIT."""


class Toolkit(ABC):
    """Variables and gradients of one toolkit. Variables are Keras's, or TensorFlow's own."""

    breaks_graphs = False
    """Whether a compiled training step leaves its graph for an exchange."""

    @abstractmethod
    def backend(self) -> Backend:
        """The `Backend` of messages that contain variables."""

    @abstractmethod
    def path_of(self, variable: Any) -> str:
        """The path or name of a variable; empty for other objects."""

    @abstractmethod
    def identity(self, variable: Any) -> Any:
        """An ID of a variable, never reused in this process; None for other objects."""

    @abstractmethod
    def dtype_of(self, variable: Any) -> str:
        """The name of a variable's dtype."""

    @abstractmethod
    def is_float(self, variable: Any) -> bool:
        """Whether gradients exist for the variable's dtype."""

    @abstractmethod
    def can_broadcast(self, dtype: str) -> bool:
        """Whether values of this dtype are plain bytes."""

    @abstractmethod
    def tensor(self, variable: Any) -> Array:
        """A variable's value; may share its memory."""

    @abstractmethod
    def like(self, variable: Any, transposed: bool) -> Array:
        """An array or spec of a variable's dtype and shape. ``transposed``: whether to reverse the shape."""

    @abstractmethod
    def pack(self, variables: Sequence[Any]) -> Array:
        """The values of variables as one tensor of bytes."""

    @abstractmethod
    def unpack(self, variables: Sequence[Any], data: Array) -> None:
        """Assign values that `pack` returned."""

    @abstractmethod
    def exchange(self, grace: Grace, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Average gradients over all workers. Returns means in the order of ``gradients``."""

    def count(self, counter: Array) -> Any:
        """A counter's value; or anything else that changes with it, if reading a device would wait."""
        return self.tensor(counter)

    def tune(self, grace: Grace) -> None:
        """Count an exchange that was applied or discarded, except in a graph; see `Grace.tune`."""
        if not self.inside_graph():
            grace.tune()

    @abstractmethod
    def check_alone(self, optimizer: Any = None) -> None:
        """Raise RuntimeError if the toolkit or Keras exchanges gradients itself."""

    def inside_graph(self) -> bool:
        """Whether a graph is being traced."""
        return False

    def outside_graphs(self) -> AbstractContextManager[Any]:
        """Return a context manager that leaves a graph which is being traced."""
        return nullcontext()

    def opaque(self, function: F) -> F:
        """Wrap a function so that the toolkit's compiler leaves it as it is."""
        return function

    def inside(self) -> AbstractContextManager[Any]:
        """Return a context manager in which to compute with variables."""
        return nullcontext()


def unconverted(function: F) -> F:
    """Keep TensorFlow's AutoGraph, if it is loaded, from rewriting a function that a tf.function calls."""
    tensorflow = sys.modules.get("tensorflow")
    return function if tensorflow is None else tensorflow.autograph.experimental.do_not_convert(function)


def toolkit(what: str, variables: Sequence[Any] = ()) -> Toolkit:
    """The toolkit of Keras's backend; TensorFlow's if ``variables`` has TensorFlow's own, which work with any backend.

    Raises RuntimeError if GRACE does not support the backend; ``what``: the caller, for the message.
    """
    own = any(type(variable).__module__.startswith("tensorflow.") for variable in variables)
    backend = "tensorflow" if own else keras.backend.backend()
    if backend not in MODULES:
        why = ". Keras compiles a step in which JAX has summed the gradients already; grace.jax is for loops with optax"
        raise RuntimeError(
            f"{what} is for Keras on TensorFlow or PyTorch, but Keras runs on {backend}: set "
            f"KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch before keras is imported{why * (backend == 'jax')}"
        )
    found: Toolkit = importlib.import_module(MODULES[backend]).TOOLKIT
    return found
