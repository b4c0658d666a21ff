"""Tensors, the units that a method compresses, and the buckets of units that are sent together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from grace.core import Context
from grace.core.dtypes import ITEMSIZE

FIRST_BUCKET_MB = 1.0  # small, so that the first message leaves early in the backward pass

CHANGED = "If the model has changed, call grc.rebuild(model.named_parameters()), or make a new Grace"
"""The advice in error messages about tensors whose shapes differ from those given to `build`."""


@dataclass(frozen=True)
class Tensor:
    """The name, shape and dtype of a gradient."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @cached_property
    def size(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        return self.size * ITEMSIZE[self.dtype]


@dataclass(frozen=True, eq=False)  # hash by identity: a step hashes a unit a thousand times
class Unit:
    """A vector that a method compresses as one tensor: one gradient, or several concatenated ones."""

    name: str
    tensors: tuple[Tensor, ...]
    dense: str = ""
    """Why the unit is sent uncompressed; empty if it is compressed."""
    lossless: bool = False
    """Whether the method sends gradients uncompressed and has no state for them."""

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return self.tensors[0].shape if len(self.tensors) == 1 else (sum(tensor.size for tensor in self.tensors),)

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @cached_property
    def dtype(self) -> str:
        """The dtype of the computation: float64 only for a float64 gradient that is sent uncompressed."""
        return "float64" if (self.dense or self.lossless) and self.tensors[0].dtype == "float64" else "float32"

    @cached_property
    def wire(self) -> str:
        """The dtype of lossless payloads: the gradients' common dtype if it has less than 4 bytes, else `dtype`."""
        (dtype, *others) = {tensor.dtype for tensor in self.tensors}
        return dtype if not others and ITEMSIZE[dtype] < 4 else self.dtype

    @cached_property
    def narrow(self) -> bool:
        """Whether the means are returned in float16, whose largest value is 65504."""
        return all(tensor.dtype == "float16" for tensor in self.tensors)


@dataclass(frozen=True)
class Bucket:
    """Units whose collectives are sent as one message per round."""

    name: str
    units: tuple[Unit, ...]

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for unit in self.units for tensor in unit.tensors]

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of its tensors."""
        return frozenset(tensor.name for tensor in self.tensors)


def layout(
    tensors: Iterable[Tensor],
    method: str,
    refusal: Callable[[Context], str],
    options: Any,
    xp: Any,
    first: int = 0,
    lossless: Callable[[str], bool] = lambda name: False,
) -> list[Bucket]:
    """Buckets of the tensors in reverse order, roughly the order in which a backward pass produces them.

    ``method``: the name of the method, for error messages. ``refusal``: a function that returns why the method does not
    compress a tensor, or an empty string if it does. ``options``: `grace.engine.options.Options`. ``first``: the number
    of the first bucket. ``lossless``: whether the method sends a tensor uncompressed, by the tensor's name; such
    tensors are fused only if their dtypes agree.
    """
    buckets: list[Bucket] = []
    bucket_mb = math.inf if options.fuse == "model" else options.bucket_mb
    for group in grouped(list(tensors)[::-1], bucket_mb, options.min_numel):
        reasons = {tensor.name: _dense(tensor, refusal, options, xp) for tensor in group}
        units = [Unit(tensor.name, (tensor,), reasons[tensor.name], lossless(tensor.name)) for tensor in group]
        fused = [tensor for tensor in group if not reasons[tensor.name]]
        if options.fuse != "tensor" and fused:
            kinds = dict.fromkeys(tensor.dtype if lossless(tensor.name) else "" for tensor in fused)
            parts = [tuple(tensor for tensor in fused if not kind or tensor.dtype == kind) for kind in kinds]
            wholes = [Unit(f"{part[0].name}..{part[-1].name}", part, "", lossless(part[0].name)) for part in parts]
            if any(refusal(Context(xp, whole.name, whole.shape)) for whole in wholes):
                raise ValueError(
                    f"fuse={options.fuse!r} gives the method one flat vector, but {method!r} needs "
                    "the shape of each tensor: use fuse='tensor'"
                )
            units = [*wholes, *(unit for unit in units if unit.dense)]
        buckets.append(Bucket(f"bucket{first + len(buckets)}", tuple(units)))
    return buckets


def grouped(tensors: Iterable[Any], bucket_mb: float, min_numel: int) -> list[list[Any]]:
    """Group tensors (any objects with ``size`` and ``nbytes``), in the order of their gradients, into buckets.

    A bucket is closed once it has reached its size. Only the last bucket may be smaller, because each bucket costs a
    message. The size of the first bucket is at most 1 MiB, so that it is sent early. Tensors of fewer than
    ``min_numel`` elements are sent uncompressed, all of them in the last bucket. ``bucket_mb``: the size of a bucket
    in MiB; infinity for a single bucket.
    """
    groups: list[list[Any]] = []
    small: list[Any] = []
    room = 0.0
    for tensor in tensors:
        if tensor.size < min_numel:
            small.append(tensor)
            continue
        if room <= 0:
            room = 2**20 * (min(FIRST_BUCKET_MB, bucket_mb) if not groups and math.isfinite(bucket_mb) else bucket_mb)
            groups.append([])
        groups[-1].append(tensor)
        room -= tensor.nbytes
    if small:
        groups = groups or [[]]
        groups[-1] += small
    return groups


def _dense(tensor: Tensor, refusal: Callable[[Context], str], options: Any, xp: Any) -> str:
    if tensor.size == 0:
        return "empty"
    if tensor.size < options.min_numel:
        return f"fewer than min_numel={options.min_numel} elements"
    alone = Context(xp, tensor.name, tensor.shape if options.fuse == "tensor" else (tensor.size,))
    return refusal(alone) if options.fuse == "tensor" else ""
