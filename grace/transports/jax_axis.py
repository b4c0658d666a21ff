"""Collectives over named axes of a JAX mesh, for programs that run while JAX traces a function inside shard_map.

All devices run one traced program, so all parts of an exchange have the same shape on all of them. Only all_gather,
all_to_all and psum (or its min and max) are used: psum_scatter gives wrong sums over gloo (jax issue 40830).
"""

from __future__ import annotations

import math
from typing import Any

from jax import lax

from grace.core import Array
from grace.transports.messages import MessageTransport, Wait

REDUCE = {"sum": lax.psum, "min": lax.pmin, "max": lax.pmax}
Axes = tuple[str, ...]


class JaxAxisTransport(MessageTransport):
    """The devices along ``axes`` of the mesh. Of two axes, the first counts machines ("cross"), the second "node".

    ``rank`` is 0 in this object, because it is not known while a program is traced; `index` is the symbolic one.
    """

    lockstep = True

    def __init__(self, xp: Any, axes: Axes):
        self.xp, self.axes = xp, axes
        self.size = math.prod(map(lax.axis_size, axes))
        if len(axes) == 2:
            cross, node = ((axis,) for axis in axes)
            self._groups = {"cross": JaxAxisTransport(xp, cross), "node": JaxAxisTransport(xp, node)}

    @property
    def index(self) -> Array:
        """This device's rank, int32[]."""
        return lax.axis_index(self.axes)

    def among(self, ranks: list[int]) -> MessageTransport:
        raise NotImplementedError("the groups of a mesh are its axes")

    def reduce(self, buffer: Array, op: str, name: str) -> Wait:
        found = REDUCE[op](buffer, self.axes)
        return lambda: found

    def gather(self, buffer: Array, name: str) -> Wait:
        # "invarying": the result is equal on all devices, which `check_vma` of shard_map then knows.
        found = lax.all_gather(buffer, self.axes, to="invarying")
        return lambda: list(found)

    def gather_sized(self, buffer: Array, sizes: list[int], name: str) -> Wait:
        self._same(sizes)
        return self.gather(buffer, name)

    def broadcast(self, buffer: Array, root: int, name: str) -> Wait:
        # A sum of bytes that are 0 on all devices but one.
        found = lax.psum(self.xp.where(self.index == root, buffer, self.xp.zeros(buffer.shape, "uint8")), self.axes)
        return lambda: found

    def all_to_all(self, buffers: list[Array], sizes: list[int], name: str) -> Wait:
        self._same([buffer.shape[0] for buffer in buffers] + sizes)
        found = lax.all_to_all(self.xp.concat(buffers), self.axes, 0, 0, tiled=True)
        return lambda: self.xp.split(found, sizes)

    def gather_ragged(self, buffer: Array, name: str) -> Wait:
        raise TypeError("payloads of different lengths cannot be exchanged by a program that JAX traces")

    def _same(self, sizes: list[int]) -> None:
        if len(set(sizes)) > 1:
            raise TypeError(f"messages of {sorted(set(sizes))} bytes in one exchange: JAX needs equal ones")
