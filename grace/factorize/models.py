"""The toolkit of a model."""

from __future__ import annotations

import importlib
from typing import Any


def toolkit_of(model: Any) -> Any:
    """`grace.factorize.torch` or `grace.factorize.keras`, by the classes that a model inherits from.

    Raises TypeError for other objects, RuntimeError for a Keras model on another backend than TensorFlow, whose layers
    cannot change in place.
    """
    roots = {cls.__module__.partition(".")[0] for cls in type(model).__mro__}
    for name in ("keras", "torch"):  # Keras first: on its PyTorch backend its layers are modules too
        if name in roots:
            if name == "keras" and (backend := importlib.import_module("keras").backend.backend()) != "tensorflow":
                raise RuntimeError(
                    f"Keras runs on {backend}, where layers cannot change in place: set KERAS_BACKEND=tensorflow, or "
                    "factorise a torch.nn.Module"
                )
            return importlib.import_module(f"grace.factorize.{name}")
    raise TypeError(f"{type(model).__name__} is neither a torch.nn.Module nor a Keras 3 layer")
