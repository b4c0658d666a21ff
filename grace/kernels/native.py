"""The loaded kernel library: Python's side of the C interface."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from grace.kernels.schema import KERNELS, Kernel

_P, _I, _F, _D = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_double


def _sequence(element: Any) -> Any:
    """Return an argument type that is an array in C, and a sequence or None in Python."""

    class Sequenced:
        @staticmethod
        def from_param(values: Sequence[Any] | None) -> Any:
            return None if values is None else (element * len(values))(*values)

    return Sequenced


ADDRESSES = _sequence(_P)
TYPES: dict[str, Any] = {"int64_t": _I, "float": _F, "double": _D, "void": None}
TYPES |= {"const float[]": _sequence(_F), "const int64_t[]": _sequence(_I)}


def _type(c: str) -> Any:
    return TYPES[c] if c in TYPES else ADDRESSES if c.endswith("[]") else _P


class Library:
    """The kernels of one instruction set: a method for each row of `grace.kernels.schema`, with its arguments.

    Kernels take raw addresses as integers, with None or 0 for absent arrays. They check only payloads: arrays must be
    contiguous, of the given dtypes and sizes, and must not change during the call. They raise ValueError, naming the
    worker, for an invalid payload, and MemoryError if memory runs out. The GIL is released during the call.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, shared: Any, handle: int):
        self.handle, self.path = handle, str(shared._name)
        shared.grace_name.restype, shared.grace_name.argtypes = ctypes.c_char_p, [_P]
        self.isa: str = shared.grace_name(handle).decode()
        self.functions = {kernel.name: partial(_bound(shared, kernel), handle) for kernel in KERNELS.values()}


def _bound(shared: Any, kernel: Kernel) -> Any:
    function = shared[f"grace_{kernel.name}"]  # a separate object for each Library
    function.restype, function.argtypes = _type(kernel.result), [_P, *(_type(each.type) for each in kernel.arguments)]
    if kernel.memory or kernel.refusal:
        function.errcheck = partial(_checked, kernel)
    return function


def _checked(kernel: Kernel, result: int, function: Any, arguments: tuple[Any, ...]) -> int:
    if result == -2 and kernel.memory:
        raise MemoryError(f"no memory for {kernel.name}")
    if kernel.refusal and result >= 0:
        names = (each.name for each in kernel.arguments)
        raise ValueError(kernel.refusal(result, **dict(zip(names, arguments[1:], strict=True))))
    return result


def _method(kernel: Kernel) -> Any:
    name, count, values = kernel.name, len(kernel.arguments), tuple(each.value for each in kernel.arguments)
    required = sum(each.default is None for each in kernel.arguments)

    def method(self: Library, *arguments: Any, **named: Any) -> Any:
        if len(arguments) < count:
            plain = not named and len(arguments) >= required
            arguments = arguments + values[len(arguments) :] if plain else kernel.completed(arguments, named)
        return self.functions[name](*arguments)

    return method


def _flattening(kernel: Kernel) -> Any:
    # A payload, and the sizes of a matrix, may be passed as one sequence.
    method = _method(kernel)

    def flat(self: Library, *arguments: Any, **named: Any) -> Any:
        given = (each if isinstance(each, (list, tuple)) else (each,) for each in arguments)
        return method(self, *chain.from_iterable(given), **named)

    return flat


for _kernel in KERNELS.values():
    _wrapped = _flattening if _kernel.name in ("demo_encode", "demo_left") else _method
    setattr(Library, _kernel.name, _wrapped(_kernel))
