"""Kernels of sparsifiers, on host arrays."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64
from typing import Any

from grace.core.rng import Rng
from grace.kernels.calls import Family, Pairs, encoder, fitted
from grace.kernels.schema import CODECS
from grace.ops.packing import packed_size

Array = Any


class Sparsifiers(Family):
    """Selections, index codings and sparse sums."""

    def topk_encode(self, x: Array, residual: Array | None, k: int) -> tuple[tuple[Array, Array], Array]:
        """float32[n] -> values float32[k] and positions int32[k] of the largest magnitudes; and the new residual."""
        xp, at = self._xp, self._at
        values, positions = xp.buffers.empty(k), xp.buffers.empty(k, "int32")
        where = *self._source(x, residual), at(values), at(positions)
        self.library.topk_encode(*where, xp.shape(x)[0], k, xp.threads)
        return (values, positions), x

    def threshold_encode(self, x: Array, residual: Array | None, bound: float) -> tuple[tuple[Array, Array], Array]:
        """float32[n] -> values and positions of magnitudes that reach the bound or are not finite; the new residual."""
        xp, at = self._xp, self._at
        (n,), (source, last, out) = xp.shape(x), self._source(x, residual)
        room = min(n, max(1024, n // 16))
        while True:
            values, positions = xp.buffers.empty(room), xp.buffers.empty(room, "int32")
            found = at(values), at(positions), room
            count = self.library.threshold_encode(source, last, out, bound, *found, n, xp.threads)
            if count <= room:
                return (values[:count], positions[:count]), x
            last, room = None, count  # x now holds x + residual

    def sampled(
        self, x: Array, rng: Rng, sample: int, rank: int, factors: Array, miss: Array, first: int, k: int, most: int
    ) -> Array:
        """float32[n] -> int32[K]: `grace.compressors.selectors.Sampled.select`."""
        xp, at, (x,) = self._xp, self._at, self._ready(x)
        (n,), (many,) = xp.shape(x), xp.shape(factors)
        room = min(n, max(1024, n // 16))
        while True:
            values, positions = xp.buffers.empty(room), xp.buffers.empty(room, "int32")
            count = self.library.sampled(
                at(x), n, *rng.keys, rng.offset, sample, rank, at(factors), at(miss), many, first, k, most, at(values),
                at(positions), room, xp.threads,
            )  # fmt: skip
            if count >= 0:
                return positions[:count]
            room = -3 - count

    def sparse_mean(self, payloads: Pairs, out: Array | None, n: int, k: int | None = None) -> Array:
        """Each worker's values and ascending positions -> float32[n]; ValueError, naming the worker, if invalid.

        ``k``: required number of elements; None: as many values as positions.
        """
        if k is None:
            sizes = [self._xp.shape(positions)[0] for _, positions in payloads]
            kept, columns = self._ragged(payloads, [(("float32", size), ("int32", size)) for size in sizes])
        else:
            kept, columns = self._received(payloads, (("float32", k), ("int32", k)))
            sizes = [k] * len(kept)
        xp, out = self._xp, self._out(out, n)
        self.library.sparse_mean(*columns, sizes, len(kept), self._at(out), n, xp.threads)
        return out

    def adaq_mean(self, payloads: Pairs, out: Array | None, n: int) -> Array:
        """Each worker's two means and signed positions -> float32[n], in ``out`` if given.

        ValueError names the worker of an invalid payload.
        """
        sizes = [self._xp.shape(positions)[0] for _, positions in payloads]
        kept, columns = self._ragged(payloads, [(("float32", 2), ("int32", size)) for size in sizes])
        xp, out = self._xp, self._out(out, n)
        self.library.adaq_mean(*columns, sizes, len(kept), self._at(out), n, xp.threads)
        return out

    def positions_write(self, positions: Array, widths: Sequence[int], marks: int) -> tuple[Array, ...]:
        """int32[k] -> planes of lower bits, and the upper bits' code: "elias_fano" in `grace.ops.index_coding`."""
        xp, at, (positions,) = self._xp, self._at, self._ready(positions)
        (k,) = xp.shape(positions)
        planes = [xp.buffers.empty(packed_size(bits, k), "uint8") for bits in widths]
        upper = xp.buffers.empty(packed_size(1, marks), "uint8")
        where = list(map(at, planes)), at(upper), marks
        if self.library.positions_write(at(positions), k, sum(widths), *where) != k:
            raise ValueError("positions do not ascend, each once, below the number of elements")
        return (*planes, upper)

    def positions_read(self, sent: Sequence[Array], widths: Sequence[int], marks: int, k: int) -> Array | None:
        """The inverse of `positions_write`: int32[k]; None if the number of positions is different."""
        sizes = [("uint8", packed_size(bits, k)) for bits in widths]
        (arrays,), xp = fitted(self._xp, [tuple(sent)], *sizes, ("uint8", packed_size(1, marks))), self._xp
        positions, (*planes, upper) = xp.buffers.empty(k, "int32"), map(self._at, arrays)
        found = self.library.positions_read(planes, upper, marks, k, sum(widths), self._at(positions))
        return positions if found == k else None

    chunktopk_encode = encoder("chunktopk")

    def chunktopk_values(self, payload: Sequence[Array], n: int, chunk: int, k: int) -> tuple[Array, Array] | None:
        """Decode a payload: return values float32[K] and positions int32[K]; None if a place lies outside its chunk."""
        sizes, xp = CODECS["chunktopk"].sizes(n, chunk, k), self._xp
        _kept, columns = self._received([tuple(payload)], sizes)
        values, positions = xp.buffers.empty(sizes[0][1]), xp.buffers.empty(sizes[0][1], "int32")
        where = [column and column[0] for column in columns]
        wrong = self.library.chunktopk_values(*where, n, chunk, k, self._at(values), self._at(positions))
        return None if wrong else (values, positions)

    def adaq_encode(self, x: Array, residual: Array | None, ratio: float) -> tuple[tuple[Array, Array], Array]:
        """float32[n] -> the payload of `grace.compressors.adaq`, and the new residual."""
        xp, at = self._xp, self._at
        (n,) = xp.shape(x)
        (source, last, out), signs = self._source(x, residual), (c_int64 * 3)()
        self.library.adaq_count(source, last, out, signs, n, xp.threads)
        means, room = xp.buffers.empty(2), min(n, int(ratio * n) + 2)
        while True:
            sent = xp.buffers.empty(room, "int32")
            count = self.library.adaq_encode(source, signs, ratio, at(means), at(sent), out, room, n)
            if count <= room:
                return (means, sent[:count]), x
            room = count
