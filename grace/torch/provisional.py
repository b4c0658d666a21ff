"""Detects whether an exchange's means were applied, from changes of gradients and parameters since the exchange."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from weakref import ref

import torch

from grace.core import Transport

SAMPLED = 4
"""Number of tensors that a `Sample` copies."""


class Put(NamedTuple):
    """The record of a gradient, to find out later whether ``p.grad`` is still the same tensor."""

    gradient: ref[torch.Tensor]
    version: int
    address: int

    @classmethod
    def of(cls, gradient: torch.Tensor) -> Put:
        """Record a gradient."""
        return cls(ref(gradient), gradient._version, _address(gradient))

    def holds(self, gradient: torch.Tensor | None) -> bool:
        """Whether a gradient is the recorded tensor, even if it was changed in place, as by clipping."""
        return gradient is not None and self.gradient() is gradient and self.address == _address(gradient)

    def unchanged(self, gradient: torch.Tensor | None) -> bool:
        """Whether a gradient is the recorded tensor and was not written to."""
        return self.holds(gradient) and gradient is not None and gradient._version == self.version

    def thrown_away(self, gradient: torch.Tensor | None) -> bool:
        """Whether the recorded gradient was removed, replaced or zeroed; False for an unchanged zero gradient."""
        if gradient is None or not self.holds(gradient):
            return True
        return not self.unchanged(gradient) and not nonzero(gradient)


class Sample:
    """Copies of the smallest of some tensors, to detect any write to these, even one that bypasses autograd."""

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._read: Callable[[torch.Tensor], Any] = lambda p: p

    def take(self, parameters: Iterable[torch.Tensor], read: Callable[[torch.Tensor], Any]) -> None:
        """Copy ``read(p)``, such as a gradient, of the smallest parameters."""
        self._read = read
        dense = [p for p in parameters if read(p) is not None and not read(p).is_sparse]
        self._copies = [(p, read(p).detach().clone()) for p in sorted(dense, key=torch.Tensor.numel)[:SAMPLED]]

    @property
    def changed(self) -> bool:
        """Whether any copied tensor has different bits now; gradients removed since are ignored."""
        pairs = [(self._read(p), copy) for p, copy in self._copies]
        return any(now is not None and not torch.equal(_bits(now), _bits(copy)) for now, copy in pairs)


class Accumulation:
    """Gradients, accumulated over one or more passes, that wait for their exchange."""

    def __init__(self) -> None:
        self.passes = 0
        """Number of backward passes since the last exchange."""
        self._gradients: dict[torch.Tensor, Put] = {}
        self._sample = Sample()

    def record(self, parameters: Iterable[torch.Tensor]) -> None:
        """Record the gradients at the end of a pass."""
        self._gradients = {p: Put.of(p.grad) for p in parameters if p.grad is not None}
        self._sample.take(self._gradients, lambda p: p.grad)

    @property
    def thrown_away(self) -> bool:
        """Whether all gradients were removed or zeroed."""
        return bool(self.passes) and all(put.thrown_away(p.grad) for p, put in self._gradients.items())

    @property
    def changed(self) -> bool:
        """Whether a recorded gradient was written to, as by clipping."""
        present = [(p, put) for p, put in self._gradients.items() if put.holds(p.grad)] if self.passes else []
        # GradScaler changes gradients without raising their version: compare the sample too.
        return any(not put.unchanged(p.grad) for p, put in present) or bool(present and self._sample.changed)

    def clear(self) -> None:
        """Forget all gradients."""
        self.passes = 0
        self._gradients.clear()


class Means:
    """The means of the last exchange that were put into ``p.grad`` and not dropped since.

    ``parameters``: all parameters by name.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]):
        self._parameters = parameters
        self._put: dict[str, Put] = {}
        self._before = Sample()

    def __iter__(self) -> Iterator[str]:
        return iter(self._put)

    def put(self, means: Mapping[str, torch.Tensor | None], owned: Collection[torch.Tensor]) -> None:
        """Put means into ``p.grad``. ``owned``: parameters whose gradients may be overwritten; others get new ones."""
        for name, mean in means.items():
            p = self._parameters[name]
            if mean is None:
                continue
            if p.grad is None or p.grad.is_sparse or p not in owned:
                p.grad = mean.clone()  # a copy, as the mean is a view that would keep a whole message in memory
            elif mean.data_ptr() != p.grad.data_ptr():
                with torch.no_grad():
                    p.grad.copy_(mean)
            self._put[name] = Put.of(p.grad)
        self._before.take((self._parameters[name] for name in self._put), lambda p: p)

    @property
    def stepped(self) -> bool:
        """Whether the parameters were written to since `put`, by an optimizer or by hand."""
        return self._before.changed

    def holds(self, name: str) -> bool:
        """Whether the gradient of a parameter is still its mean, even if it was changed in place."""
        return name in self._put and self._put[name].holds(self._parameters[name].grad)

    def unchanged(self, name: str) -> bool:
        """Whether the gradient of a parameter is still its mean and was not written to."""
        return name in self._put and self._put[name].unchanged(self._parameters[name].grad)

    def intact(self) -> set[str]:
        """Names of the means that were neither removed, replaced nor zeroed."""
        return {name for name in self._put if self.holds(name) and nonzero(self._parameters[name].grad)}

    @property
    def finite(self) -> bool:
        """Whether the current gradients of these parameters are finite; absent ones count as finite."""
        gradients = (self._parameters[name].grad for name in self._put)
        return all(bool(torch.isfinite(_values(each)).all()) for each in gradients if each is not None)

    def written(self) -> None:
        """Record the gradients again after the optimizer's step: whatever it wrote to them counts as the means."""
        for name, put in self._put.items():
            gradient = self._parameters[name].grad
            if gradient is not None and put.holds(gradient):
                self._put[name] = Put.of(gradient)

    def drop(self, names: Iterable[str]) -> None:
        """Forget the means of the named parameters."""
        for name in names:
            self._put.pop(name, None)

    def clear(self) -> None:
        """Forget all means."""
        self._put.clear()


def nonzero(gradient: torch.Tensor | None) -> bool:
    """Whether a gradient has a non-zero element."""
    return gradient is not None and bool(_values(gradient).count_nonzero())


def alike(gradients: Iterable[torch.Tensor], transport: Transport) -> bool:
    """Whether gradients that were set by hand are equal on all workers; False for a single worker.

    Equal gradients were computed from the means, as by ``p.grad = p.grad / 2``; others from each worker's own batch.
    """
    if transport.size == 1:
        return False
    sums = [int(_bits(gradient).to(torch.int64).sum()) for gradient in gradients]
    return len(set(transport.exchange(repr(sums)))) == 1


def _bits(x: torch.Tensor) -> torch.Tensor:
    data = _values(x).contiguous().reshape(-1)
    return data.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(data.element_size(), torch.int64))


def _values(x: torch.Tensor) -> torch.Tensor:
    return x.detach().coalesce().values() if x.is_sparse else x.detach()


def _address(x: torch.Tensor) -> int:
    return x.data_ptr() if x.layout == torch.strided else 0
