"""The toolkit of a model."""

from __future__ import annotations

import importlib
from typing import Any


def toolkit_of(model: Any) -> Any:
    """`grace.factorize.torch` or `grace.factorize.keras`, by the classes that a model inherits from."""
    roots = {cls.__module__.partition(".")[0] for cls in type(model).__mro__}
    for name in ("keras", "torch"):  # Keras first: on its PyTorch backend its layers are modules too
        if name in roots:
            return importlib.import_module(f"grace.factorize.{name}")
    raise TypeError(f"{type(model).__name__} is neither a torch.nn.Module nor a Keras 3 layer")
