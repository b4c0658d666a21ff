"""Samples of tensors and records of gradients, by which a `Watch` sees steps, written weights, removed gradients."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from grace.core import Transport

T = TypeVar("T")
ELEMENTS, TENSORS = 8192, 32
"""Size of an optimizer's sample: elements, and tensors that they are taken from."""
SMALLEST = 8
"""Number of elements sampled around a tensor's smallest magnitude, which a small step changes first."""
AIMS, CHUNK = 4, 65536
"""Number of parameters sampled at their largest gradients, and number of gradient elements searched at once."""
STATES = 4
"""Number of parameters whose state in the optimizer is sampled."""


class _Copies(NamedTuple):
    """Two copies of parts of tensors, of one dtype and device: from when they were taken, and from the last look."""

    parts: list[torch.Tensor]
    before: torch.Tensor
    before_parts: list[torch.Tensor]
    after: torch.Tensor
    after_parts: list[torch.Tensor]

    def look(self) -> None:
        torch._foreach_copy_(self.after_parts, self.parts)


class Sample:
    """Copies of parts of tensors, to detect a later write, even one that bypasses autograd.

    ``elements``: how many to copy, of all tensors together. ``smallest``: whether to copy those around a tensor's
    smallest magnitude, too, which takes a pass over it.
    """

    def __init__(self, elements: int, smallest: bool = True):
        self.elements, self._smallest = elements, smallest
        self.share = 0
        """Largest number of elements of a tensor that is copied whole."""
        self._addresses: list[int] = []
        self._groups: list[_Copies] = []
        self._tensors: list[torch.Tensor] = []

    @torch.no_grad()
    def take(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy parts of plain, dense tensors. Views of the parts are reused while the addresses stay the same."""
        addresses = [each.data_ptr() for each in tensors]
        if addresses != self._addresses:
            self._build(tensors)
            self._addresses = addresses
        self._tensors = list(tensors)
        for group in self._groups:
            torch._foreach_copy_(group.before_parts, group.parts)

    def _build(self, tensors: Sequence[torch.Tensor]) -> None:
        self.share = max(64, self.elements // max(1, len(tensors)))
        kinds: dict[Any, list[torch.Tensor]] = {}
        for each in tensors:
            kinds.setdefault((each.dtype, each.device), []).extend(_parts(each, self.share, self._smallest))
        self._groups = []
        for (dtype, device), views in kinds.items():
            if not views:  # empty tensors
                continue
            sizes = [view.numel() for view in views]
            before = torch.empty(sum(sizes), dtype=dtype, device=device)
            after = torch.empty_like(before)
            self._groups.append(_Copies(views, before, list(before.split(sizes)), after, list(after.split(sizes))))

    @torch.no_grad()
    def changed(self) -> Any:
        """Whether an element has other bits now: a bool, or a flag bool[] if a device holds the tensors."""
        if any(each.data_ptr() != address for each, address in zip(self._tensors, self._addresses, strict=True)):
            return True
        found: Any = False
        for group in self._groups:
            group.look()
            before, after = _bits(group.before), _bits(group.after)
            if not waits(group.before.device):
                found = (before != after).any() | found
            elif not torch.equal(before, after):
                return True
        return found

    @torch.no_grad()
    def signs_changed(self) -> bool:
        """Whether an element has another sign now; False on a device, where reading would wait."""
        for group in self._groups:
            before, after = group.before, group.after
            if waits(before.device):
                group.look()
                if (before * after < 0).any() or ((before == 0) & (after != 0)).any():
                    return True
        return False

    def clear(self) -> None:
        """Forget the tensors."""
        self._addresses, self._groups, self._tensors = [], [], []


def _parts(x: torch.Tensor, count: int, smallest: bool) -> list[torch.Tensor]:
    # Views of about ``count`` elements of a tensor, and of those around its smallest magnitude other than 0.
    n = x.numel()
    if not n:
        return []
    flat = x.detach()
    if not flat.is_contiguous():
        if n == flat.untyped_storage().nbytes() // flat.element_size():  # dense in another order
            flat = flat.as_strided((n,), (1,), 0)
        else:  # a view with gaps: its first row
            while flat.dim() > 1:
                flat = flat[0]
            n = flat.numel()
    flat = flat.reshape(-1)
    if n <= count:
        return [flat]
    if waits(flat.device):
        part = flat[:: -(-n // count)]
    else:
        part = flat[n // 3 : n // 3 + count]  # a strided view would leave the fast path of _foreach_copy_
    if not smallest or not flat.is_floating_point():
        return [part]
    size = flat.abs()
    start = min(int(torch.where(size > 0, size, torch.inf).argmin()), n - SMALLEST)
    return [part, flat[start : start + SMALLEST]]


def waits(device: torch.device) -> bool:
    """Whether to read values at once: True on the CPU; another device would have to finish its work first."""
    return device.type == "cpu"


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(x.element_size(), torch.int64))


def local(x: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this worker holds, without a tensor subclass around it."""
    return x.to_local() if hasattr(x, "to_local") else x


def plain(x: Any) -> bool:
    """Whether a tensor is a dense array of values, of which a `Sample` can copy parts."""
    return type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout == torch.strided and not x.is_meta


def zero(gradients: Sequence[torch.Tensor]) -> list[bool]:
    """For each gradient, whether all its elements are 0; waits for a device."""
    return [not each.numel() or not bool(each.count_nonzero()) for each in map(_values, gradients)]


class Gradients:
    """A record of gradients, to detect whether they were removed, replaced or written to."""

    def __init__(self) -> None:
        self._parameters: list[torch.Tensor] = []
        self._of: dict[int, tuple[Any, int]] = {}  # by the parameter's ID: its gradient, and the gradient's version
        self._sample = Sample(1024, smallest=False)

    def record(
        self, parameters: Iterable[torch.Tensor], sampled: bool = True, besides: Sequence[torch.Tensor] = ()
    ) -> None:
        """Record the current gradients of some parameters, and forget all others except those of ``besides``.

        ``sampled``: whether to copy a sample of their content.
        """
        present = [p for p in parameters if p.grad is not None]
        gradients = [p.grad for p in present]
        kept = {id(p): self._of[id(p)] for p in besides if id(p) in self._of}
        self._parameters = [*present, *besides]
        self._of = {id(p): (weakref.ref(x), x._version) for p, x in zip(present, gradients, strict=True)} | kept
        if sampled:
            values = [value for x in _spread(gradients, 8) if plain(value := local(x))]
            self._sample.take(values)

    def refresh(self, sampled: bool = True) -> None:
        """Record those gradients again that are still the recorded tensors."""
        self.record([p for p in self._parameters if self.kept(p)], sampled)

    def clear(self) -> None:
        """Forget all gradients."""
        self._parameters = []
        self._of.clear()
        self._sample.clear()

    def __contains__(self, p: torch.Tensor) -> bool:
        return id(p) in self._of

    def kept(self, p: torch.Tensor) -> bool:
        """Whether a gradient is still the recorded tensor, even if it was written to."""
        gradient, put = p.grad, self._of.get(id(p))
        return gradient is not None and put is not None and put[0]() is gradient

    def untouched(self, p: torch.Tensor) -> bool:
        """Whether a gradient is still the recorded tensor, and its version says that it was not written to."""
        gradient, put = p.grad, self._of.get(id(p))
        return gradient is not None and put is not None and put[0]() is gradient and put[1] == gradient._version

    def unchanged(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether all gradients of some parameters are the recorded ones, with the same content by a sample."""
        present = [p for p in parameters if p.grad is not None]
        return bool(self._of) and all(map(self.untouched, present)) and not bool(self._sample.changed())

    def written(self) -> bool:
        """Whether a recorded gradient that is still there was written to, as by clipping."""
        kept = [p for p in self._parameters if self.kept(p)]
        # GradScaler changes gradients without raising their version: compare the sample too.
        return not all(map(self.untouched, kept)) or (len(kept) == len(self._of) and bool(self._sample.changed()))

    def mixed(self) -> bool:
        """Whether a write changed the sign of a sampled element: more than clipping, unscaling or another scaling."""
        return self._sample.signs_changed()

    def removed(self) -> bool:
        """Whether all recorded gradients were removed, replaced or zeroed."""
        kept = [p.grad for p in self._parameters if self.kept(p) and p.grad is not None]
        return all(zero(kept))


def nonzero(gradients: Sequence[torch.Tensor]) -> Any:
    """Whether any gradient has a nonzero element: a bool, or a flag bool[] if a device holds the gradients."""
    if not gradients or waits(gradients[0].device):
        return any(bool(_values(each).count_nonzero()) for each in gradients)
    values = [each for each in map(_values, gradients) if each.numel()]
    return (torch.stack(torch._foreach_norm(values, torch.inf)) != 0).any()


def alike(gradients: Sequence[torch.Tensor], transport: Transport) -> bool:
    """Whether gradients have equal sums and norms on all workers, up to rounding, as if computed from means."""
    if transport.size == 1:
        return True
    mine = [(float(x.sum(dtype=torch.float64)), float(x.double().norm())) for x in map(_values, gradients)]
    first, *others = (json.loads(text) for text in transport.exchange(json.dumps(mine)))
    return all(len(each) == len(first) and all(map(_close, each, first)) for each in others)


def _close(one: tuple[float, float], other: tuple[float, float]) -> bool:
    # Whether the sums and norms of two gradients are equal but for rounding, which is relative to the norm.
    pairs = zip(one, other, strict=True)
    return all(repr(a) == repr(b) or abs(a - b) <= 1e-4 * max(one[1], other[1]) for a, b in pairs)


def _values(x: torch.Tensor) -> torch.Tensor:
    return x.detach().coalesce().values() if x.is_sparse else local(x.detach())


class Tracks:
    """Samples of one optimizer's weights and state."""

    def __init__(self) -> None:
        self.weights = Sample(ELEMENTS)
        self._states = Sample(64 * 4 * STATES)
        self._numbers: list[Any] = []
        # for each parameter: its tensor, the positions of its largest gradients, and the weights there
        self._aimed: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._chosen: list[torch.Tensor] = []
        self._known: set[int] = set()
        self._parameters: list[torch.Tensor] = []
        self._versions = 0
        self._whole: list[torch.Tensor] | None = None
        self._wholly = False  # whether to compare all weights at the next step

    def take(self, optimizer: Any, parameters: list[torch.Tensor]) -> None:
        """Sample the weights that have gradients, and their state."""
        self._parameters = [p for p in parameters if p.grad is not None]
        self._versions = sum([p._version for p in self._parameters])
        sampled = _spread(self._parameters, TENSORS)
        self.weights.take([value for p in sampled if plain(value := local(p))])
        self._aim(set(map(id, sampled)))
        self._whole = [value.detach().clone() for value in self._values()] if self._wholly else None
        self._chosen = _spread(self._parameters, STATES)
        tensors, self._numbers = self._state(optimizer)
        self._known = set(map(id, tensors))
        self._states.take([local(each) for each in tensors])

    @torch.no_grad()
    def _aim(self, sampled: set[int]) -> None:
        # Sample weights where gradients are largest: other samples might miss the nonzero elements of a sparse mean.
        # ``sampled``: IDs of parameters in the other sample, which already has all elements of the small ones.
        self._aimed = []
        seen = 0
        for p in sorted(self._parameters, key=torch.Tensor.numel):
            value, gradient = local(p), local(p.grad)
            if seen + len(self._aimed) == AIMS:
                return
            if not plain(value) or not plain(gradient):
                continue
            n = gradient.numel()
            if n <= self.weights.share and id(p) in sampled and value.is_contiguous():
                seen += n > 0 and (not waits(gradient.device) or bool(gradient.any()))
                continue
            flat = gradient.reshape(-1)
            for start in range(0, n, CHUNK):
                sizes, at = flat[start : start + CHUNK].abs().topk(min(SMALLEST, n - start))
                if not waits(flat.device) or bool(sizes[0] > 0):
                    self._aimed.append((value, at + start, value.reshape(-1)[at + start]))
                    break

    def _hit(self) -> Any:
        # Whether a weight of `_aim` has other bits now: a bool, or a flag on a device.
        found: Any = False
        for value, at, before in self._aimed:
            now = value.detach().reshape(-1)[at]
            if waits(now.device):
                if not torch.equal(_bits(now), _bits(before)):
                    return True
            else:
                found = (_bits(now) != _bits(before)).any() | found
        return found

    def _state(self, optimizer: Any) -> tuple[list[torch.Tensor], list[Any]]:
        # The tensors and the numbers in the state of some parameters.
        entries = [value for p in self._chosen for value in (optimizer.state.get(p) or {}).values()]
        return [each for each in entries if isinstance(each, torch.Tensor) and plain(local(each))], [
            each for each in entries if isinstance(each, int | float)
        ]

    def moved(self) -> Any:
        """Whether a sampled weight changed: a bool, or a flag on a device."""
        found = self._hit()
        return True if found is True else found | self.weights.changed()

    def changed(self, optimizer: Any) -> Any:
        """Whether weights or state changed: a bool, or a flag on a device."""
        found = self.moved()
        if found is True:
            self._wholly, self._whole = False, None
            return True
        tensors, numbers = self._state(optimizer)
        fresh = [each for each in tensors if id(each) not in self._known]
        for more in (numbers != self._numbers, self._states.changed(), nonzero(fresh)):
            if more is True:
                return True
            found = found | more
        if not isinstance(found, bool):
            return found
        whole, self._whole = self._whole, None
        if whole is not None and not all(map(torch.equal, whole, self._values())):
            self.weights.elements *= 4
            self.weights.clear()
            return True
        # Weights were written, but the sample did not change: the changes may be too small or too few, so compare all.
        self._wholly = whole is None and sum([p._version for p in self._parameters]) != self._versions
        return False

    def _values(self) -> list[torch.Tensor]:
        return [value for p in self._parameters if plain(value := local(p))]


class Unowned:
    """Samples of the weights of tensors that no optimizer has stepped yet."""

    def __init__(self) -> None:
        self._samples: dict[str, Sample] = {}

    def take(self, members: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Sample the weights of these tensors."""
        kept = {name: self._samples.get(name) or Sample(1024) for name in members}
        for name, each in members.items():
            kept[name].take([value for p in each if plain(value := local(p))])
        self._samples = kept

    def written(self, names: Iterable[str]) -> set[str]:
        """The ``names`` of sampled tensors whose weights changed; waits for a device."""
        return {name for name in names if name in self._samples and bool(self._samples[name].changed())}


def _spread(tensors: list[T], count: int) -> list[T]:
    # Returns at most ``count`` of the tensors, evenly spread.
    n = len(tensors)
    return tensors if n <= count else [tensors[i * (n - 1) // (count - 1)] for i in range(count)]
