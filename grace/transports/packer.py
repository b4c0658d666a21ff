"""Packs the arrays of many tensors into one byte buffer, and unpacks them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from grace.core import Array
from grace.core.gathered import Layout, nbytes, offsets


class Packer(NamedTuple):
    """Packs this worker's arrays, and unpacks other workers'. ValueError, naming the sender, for a wrong buffer."""

    xp: Any
    """The backend."""
    rank: int
    size: int

    # -- sizes that all workers know --------------------------------------------------------------------------------
    def pack(self, arrays: Iterable[Array]) -> tuple[Array, Layout]:
        """The bytes of arrays, uint8[n], and the arrays' dtypes and shapes."""
        arrays = list(arrays)
        return self.joined(arrays), self.layout(arrays)

    def joined(self, arrays: list[Array]) -> Array:
        """The bytes of arrays, uint8[n]."""
        return self.xp.buffers.concat_bytes(arrays) if arrays else self.xp.zeros((0,), "uint8")

    def layout(self, arrays: list[Array]) -> Layout:
        """Dtypes and shapes of arrays."""
        xp = self.xp
        return tuple([(xp.dtype(array), xp.shape(array)) for array in arrays])

    def unpack(self, buffer: Array, layout: Layout, sender: int) -> tuple[Array, ...]:
        """The arrays in a buffer of worker ``sender``."""
        self.check_size(buffer, layout, sender)
        return self.cut(buffer, layout)

    def check_size(self, buffer: Array, layout: Layout, sender: int) -> None:
        """Raise ValueError unless a buffer of worker ``sender`` has the size of the layout's arrays."""
        needed, (size,) = offsets(layout)[-1], self.xp.shape(buffer)
        if size is not None and size != needed:
            raise self._misfit(sender, f"has {size} bytes, and not {needed} as this worker's")

    def cut(self, buffer: Array, layout: Layout) -> tuple[Array, ...]:
        """The arrays in a buffer, whose size is not checked."""
        parts = self.xp.split(buffer, [nbytes(dtype, shape) for dtype, shape in layout])
        return tuple(self.xp.buffers.from_bytes(part, *form) for part, form in zip(parts, layout, strict=True))

    # -- lengths that only their sender knows -----------------------------------------------------------------------
    def pack_ragged(self, arrays: Iterable[Array]) -> tuple[Array, Layout]:
        """As `pack`, with the lengths of the arrays before their bytes; receivers know the rest of the layout."""
        arrays = list(arrays)
        body, layout = self.pack(arrays)
        return self.xp.concat([self.xp.buffers.to_bytes(self.xp.lengths(arrays)), body]), layout

    def unpack_ragged(self, buffer: Array, layout: Layout, sender: int) -> tuple[Array, ...]:
        """The arrays in a buffer that `pack_ragged` made. ``layout``: that of this worker's own arrays."""
        xp, head = self.xp, 8 * len(layout)
        (size,) = xp.shape(buffer)
        if size is not None and size < head:
            raise self._misfit(sender, f"has {size} bytes, which are too few")
        heads = xp.buffers.from_bytes(buffer[:head], "int64", (len(layout),))
        widths = [nbytes(dtype, shape[1:]) for dtype, shape in layout]
        why = "has other lengths than it says"
        if xp.tracing:
            buffer = xp.sound(buffer, lambda: self._adds_up(buffer, heads, widths), str(self._misfit(sender, why)))
        lengths = xp.integers(heads)
        if not xp.tracing:
            lengths = [int(length) for length in lengths]
            total = sum(length * width for length, width in zip(lengths, widths, strict=True))
            if min(lengths, default=0) < 0 or head + total != size:
                raise self._misfit(sender, why)
        sizes = [(dtype, (length, *shape[1:])) for (dtype, shape), length in zip(layout, lengths, strict=True)]
        return self.cut(buffer[head:], tuple(sizes))

    def _adds_up(self, buffer: Array, heads: Array, widths: list[int]) -> Array:
        # Returns a bool scalar: whether arrays of these lengths (``heads``) fill the rest of the buffer. Each length is
        # also checked by itself, because the product of a huge length could wrap around.
        xp = self.xp
        (room,) = xp.integers(xp.lengths([buffer]) - 8 * len(widths))
        sound = xp.all((heads >= 0) & (heads <= room))
        return sound & xp.all(xp.sum(heads * xp.asarray(widths, "int64")) == room)

    def _misfit(self, sender: int, why: str) -> ValueError:
        return ValueError(
            f"worker {self.rank} of {self.size} cannot unpack the message of worker {sender}, which {why}. All workers "
            "must run the same version of GRACE with the same settings; if they do, the network or that machine's "
            "memory has failed: start again from the last checkpoint"
        )
