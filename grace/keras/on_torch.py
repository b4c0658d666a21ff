"""Keras on PyTorch: variables are parameters, and gradients are exchanged after ``loss.backward()``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import count
from typing import Any

import keras
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from grace.backends import Backend, get_backend
from grace.core import Array
from grace.engine.session import SPARSE, Grace
from grace.keras.layout import transposed
from grace.keras.names import EXCHANGED, names_for
from grace.keras.toolkits import Toolkit
from grace.torch.checks import ordinary

_IDS: Any = WeakTensorKeyDictionary()
_NUMBERS = count(1)


class TorchToolkit(Toolkit):
    """Keras's variables on PyTorch."""

    breaks_graphs = True

    def backend(self) -> Backend:
        return get_backend("torch", str(keras.ops.convert_to_tensor(0).device))

    def path_of(self, variable: Any) -> str:
        return str(variable.path) if isinstance(variable, keras.Variable) else ""

    def identity(self, variable: Any) -> Any:
        if not isinstance(variable, keras.Variable):
            return None
        if (value := variable._value) not in _IDS:
            _IDS[value] = next(_NUMBERS)
        return _IDS[value]

    def dtype_of(self, variable: Any) -> str:
        return str(keras.backend.standardize_dtype(variable.dtype))

    def is_float(self, variable: Any) -> bool:
        return bool(self.tensor(variable).is_floating_point())

    def can_broadcast(self, dtype: str) -> bool:
        return dtype != "string"

    def tensor(self, variable: Any) -> Array:
        return (variable._value if isinstance(variable, keras.Variable) else variable).detach()

    def count(self, counter: Array) -> Any:
        return int(counter) if counter.device.type == "cpu" else (counter.data_ptr(), counter._version)

    def like(self, variable: Any, transposed: bool) -> Array:
        return self.tensor(variable).t() if transposed else self.tensor(variable)

    def pack(self, variables: Sequence[Any]) -> Array:
        device = keras.ops.convert_to_tensor(0).device
        return torch.cat([self.tensor(v).contiguous().reshape(-1).view(torch.uint8).to(device) for v in variables])

    def unpack(self, variables: Sequence[Any], data: Array) -> None:
        start = 0
        with ordinary():
            for variable in variables:
                value = self.tensor(variable)
                # A clone is aligned for any dtype.
                part = data[start : start + value.nbytes].clone().view(value.dtype)
                value.copy_(part.view(value.shape))
                start += value.nbytes

    def exchange(self, grace: Grace, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        self.check_alone()
        names = names_for(self, grace, variables)
        EXCHANGED.update(map(self.identity, variables))
        turned = dict(zip(names, transposed(self, grace, variables), strict=True))
        grace.track_missing = True
        handed: dict[str, Any] = {}
        built: dict[str, Array] = {}
        for name, variable, gradient in zip(names, variables, gradients, strict=True):
            if gradient is not None:
                if gradient.is_sparse:
                    grace.note(name, SPARSE)
                    gradient = gradient.to_dense()
                handed[name] = gradient.detach().t() if turned[name] else gradient.detach()
            elif self.is_float(variable):
                handed[name] = None
            if name in handed:
                built[name] = self.like(variable, turned[name])
        with ordinary():
            grace.build(built)
            means = grace.step(handed)
            found = [(means.get(name), turned[name]) for name in names]
            # Optimizers are slow with gradients that are not contiguous.
            return [mean.t().contiguous() if back and mean is not None else mean for mean, back in found]

    def check_alone(self, optimizer: Any = None) -> None:
        if (distribution := keras.distribution.distribution()) is not None:
            raise RuntimeError(
                f"keras.distribution.{type(distribution).__name__} is set, which would average gradients beside "
                "GRACE's exchange: keras.distribution.set_distribution(None), and start one process for each device, "
                "as with torchrun"
            )

    def opaque(self, function: Callable[..., Any]) -> Any:
        return torch.compiler.disable(function)

    def inside(self) -> AbstractContextManager[Any]:
        return ordinary()


TOOLKIT = TorchToolkit()
