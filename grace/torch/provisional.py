"""Detects whether an exchange's means were applied: changes of gradients and parameters since the exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from weakref import ref

import torch

SAMPLED = 4
"""Number of tensors that a `Sample` copies."""


class Put(NamedTuple):
    """A recorded gradient, to tell whether ``p.grad`` still is this tensor."""

    gradient: ref[torch.Tensor]
    version: int
    address: int

    @classmethod
    def of(cls, gradient: torch.Tensor) -> Put:
        """Record a gradient."""
        return cls(ref(gradient), gradient._version, _address(gradient))

    def holds(self, gradient: torch.Tensor | None) -> bool:
        """Whether it is this tensor, even if changed in place, as clipping does."""
        return gradient is not None and self.gradient() is gradient and self.address == _address(gradient)

    def unchanged(self, gradient: torch.Tensor | None) -> bool:
        """Whether it is this tensor, and unwritten."""
        return self.holds(gradient) and gradient is not None and gradient._version == self.version

    def thrown_away(self, gradient: torch.Tensor | None) -> bool:
        """Whether it was removed or zeroed. An unchanged gradient, even a zero one, was not."""
        if gradient is None or not self.holds(gradient):
            return True
        return not self.unchanged(gradient) and not nonzero(gradient)


class Sample:
    """Copies of the smallest of some tensors, to detect writes, even those that bypass autograd."""

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._read: Callable[[torch.Tensor], Any] = lambda p: p

    def take(self, parameters: Iterable[torch.Tensor], read: Callable[[torch.Tensor], Any]) -> None:
        """Copy ``read(p)`` for the smallest of these."""
        self._read = read
        dense = [p for p in parameters if read(p) is not None and not read(p).is_sparse]
        self._copies = [(p, read(p).detach().clone()) for p in sorted(dense, key=torch.Tensor.numel)[:SAMPLED]]

    @property
    def changed(self) -> bool:
        """Whether any of them has different bits now; a removed one does not count."""
        pairs = [(self._read(p), copy) for p, copy in self._copies]
        return any(now is not None and not torch.equal(_bits(now), _bits(copy)) for now, copy in pairs)


def nonzero(gradient: torch.Tensor | None) -> bool:
    """Whether a gradient has a non-zero element."""
    return gradient is not None and bool(_values(gradient).count_nonzero())


def checksum(gradient: torch.Tensor) -> int:
    """The sum of a gradient's bits, as integers."""
    return int(_bits(gradient).to(torch.int64).sum())


def _bits(x: torch.Tensor) -> torch.Tensor:
    data = _values(x).contiguous().reshape(-1)
    return data.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(data.element_size(), torch.int64))


def _values(x: torch.Tensor) -> torch.Tensor:
    return x.detach().coalesce().values() if x.is_sparse else x.detach()


def _address(x: torch.Tensor) -> int:
    return x.data_ptr() if x.layout == torch.strided else 0
