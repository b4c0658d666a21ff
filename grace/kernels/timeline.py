"""The planner's timelines in C++, with the same results as `grace.planner.timeline`."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any
from weakref import finalize

from grace.kernels import load

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


def native_player(backward: Sequence[float], servers: int, deferred: bool, stride: int) -> NativePlayer | None:
    """Return a timeline player, or None if it is not built or GRACE_KERNELS=off."""
    if os.environ.get("GRACE_KERNELS", "").lower() in ("off", "0"):
        return None
    library = _library()
    return library and NativePlayer(library, backward, servers, deferred, stride)


@cache
def _library() -> Any:
    shared = load("timeline")
    if shared is None:
        return None
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "new": (_P, [_P, _I, _I, _I, _I]),
        "free": (None, [_P]),
        "chain": (_I, [_P, _P, _P, _I]),
        "set": (_F, [_P, _P, _P, _I]),
        "tried": (_F, [_P, _P, _P, _I, _F]),
        "hide": (None, [_P, _P]),
    }
    for name, (result, types) in signatures.items():
        function = shared[f"grace_timeline_{name}"]
        function.restype, function.argtypes = result, types
        setattr(shared, name, function)
    return shared


class NativePlayer:
    """Simulates timelines; same interface as the Python player."""

    def __init__(self, library: Any, backward: Sequence[float], servers: int, deferred: bool, stride: int):
        self.deferred, self.pool = deferred, (0.0,) * servers
        self._library, self._count = library, len(backward)
        self._handle = library.new((_F * len(backward))(*backward), len(backward), servers, deferred, stride)
        self._numbers: dict[Any, int] = {}
        self._arguments = (_I * len(backward))(), (_I * len(backward))()
        finalize(self, library.free, self._handle)

    def _number(self, chain: Any) -> int:
        found = self._numbers.get(chain)
        if found is None:
            resources = (ctypes.c_int32 * len(chain))(*(resource for resource, _ in chain))
            seconds = (_F * len(chain))(*(seconds for _, seconds in chain))
            found = self._numbers[chain] = self._library.chain(self._handle, resources, seconds, len(chain))
        return found

    def _listed(self, changes: Mapping[int, Any]) -> tuple[Any, Any, int]:
        tensors, chains = self._arguments
        for place, (tensor, chain) in enumerate(changes.items()):
            tensors[place], chains[place] = tensor, self._number(chain)
        return tensors, chains, len(changes)

    def set(self, changes: Mapping[int, Any]) -> float:
        """Change some tensors' chains; returns the total time."""
        return float(self._library.set(self._handle, *self._listed(changes)))

    def tried(self, changes: Mapping[int, Any], best: float) -> float:
        """The total time with these chains instead; infinity once it is certain to reach ``best``."""
        return float(self._library.tried(self._handle, *self._listed(changes), best))

    def hide(self, hidden: bytearray) -> None:
        """Set each tensor's byte to 1 if an idle gap follows its messages on every link that it uses."""
        self._library.hide(self._handle, (ctypes.c_uint8 * self._count).from_buffer(hidden))
