"""Kernels of sparsifiers, on host arrays."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64
from functools import partial
from typing import Any

from grace.core.rng import Rng
from grace.kernels.calls import Family, Pairs, encoder, fitted
from grace.kernels.schema import CODECS, blocks
from grace.ops.packing import packed_size

Array = Any


class Sparsifiers(Family):
    """Selections, index codings, sparse sums and sketches."""

    def topk_encode(self, x: Array, residual: Array | None, k: int) -> tuple[tuple[Array, Array], Array]:
        """float32[n] -> values float32[k] and positions int32[k] of the largest magnitudes; and the new residual."""
        xp, at = self._xp, self._at
        values, positions = xp.buffers.empty_payload(k), xp.buffers.empty_payload(k, "int32")
        left, swap = (x, False) if self._log is None or residual is None else (residual, True)
        where = at(x), at(residual), at(left), at(values), at(positions)
        encode = partial(self.library.topk_encode, *where, self._xp.shape(x)[0], k, xp.threads, swap)
        self._do(encode, (x, residual), values, positions)
        return (values, positions), left

    def threshold_encode(self, x: Array, residual: Array | None, bound: float) -> tuple[tuple[Array, Array], Array]:
        """float32[n] -> values and positions of magnitudes that reach the bound or are not finite; the new residual."""
        xp, at = self._xp, self._at
        (n,) = xp.shape(x)
        room = min(n, max(1024, n // 16))
        while True:
            values, positions = xp.buffers.empty(room), xp.buffers.empty(room, "int32")
            count = self.library.threshold_encode(
                at(x), at(residual), at(x), bound, at(values), at(positions), room, n, xp.threads
            )
            if count <= room:
                return (values[:count], positions[:count]), x
            residual, room = None, count  # x now holds the sum

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
        """Each worker's values and ascending positions -> float32[n]; ValueError names an invalid payload's worker.

        ``k``: required number of elements; None: as many values as positions.
        """
        if k is None:
            return self.sparse_sums(payloads, out, n, (False,))
        kept, columns = self._received(payloads, (("float32", k), ("int32", k)))
        xp, out = self._xp, self._out(out, n)
        self.library.sparse_mean(*columns, [k] * len(kept), len(kept), self._at(out), n, xp.threads)
        return out

    def sparse_sums(self, payloads: Pairs, out: Array | None, n: int, pairs: Sequence[bool]) -> Array:
        """`sparse_mean` of workers that send several vectors each, which add up: one for each entry of ``pairs``.

        ``payloads``: the vectors, worker by worker. If its entry is true, a vector has two values in all, and signed
        positions: negative ones select the second value.
        """
        kinds = list(pairs) * (len(payloads) // len(pairs))
        sizes = [self._xp.shape(positions)[0] for _, positions in payloads]
        kept = self._ragged(
            payloads,
            [(("float32", 2 if pair else size), ("int32", size)) for pair, size in zip(kinds, sizes, strict=True)],
        )
        xp, out, marks = self._xp, self._out(out, n), bytes(kinds) if any(kinds) else None
        where = *self._columns(kept), sizes, marks, len(kept), len(pairs), self._at(out)
        self.library.sparse_means(*where, n, xp.threads)
        return out

    def positions_write(self, positions: Array, widths: Sequence[int], marks: int) -> tuple[Array, ...]:
        """int32[k] -> planes of lower bits, and the upper bits' code: "elias_fano" in `grace.ops.index_coding`."""
        xp, at, (positions,) = self._xp, self._at, self._ready(positions)
        (k,) = xp.shape(positions)
        planes = [xp.buffers.empty_payload(packed_size(bits, k), "uint8") for bits in widths]
        upper = xp.buffers.empty_payload(packed_size(1, marks), "uint8")
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

    chunks_encode = encoder("chunks")

    def chunks_values(self, payload: Sequence[Array], n: int, chunk: int, k: int) -> tuple[Array, Array] | None:
        """Decode: float32[K], and positions int32[K]. None: some places are outside their chunks."""
        sizes, xp = CODECS["chunks"].sizes(n, chunk, k), self._xp
        _kept, columns = self._received([tuple(payload)], sizes)
        values, positions = xp.buffers.empty(sizes[0][1]), xp.buffers.empty(sizes[0][1], "int32")
        where = [column and column[0] for column in columns]
        wrong = self.library.chunks_values(*where, n, chunk, k, self._at(values), self._at(positions))
        return None if wrong else (values, positions)

    def largest_of_signs(self, x: Array, residual: Array | None, ratio: float) -> tuple[tuple[Array, Array], Array]:
        """float32[n] -> the payload of `grace.compressors.adaq`, and the new residual."""
        xp, at = self._xp, self._at
        (n,) = xp.shape(x)
        left, out, swap = self._left(x, residual)
        signs = (c_int64 * 3)()
        self.library.signs_count(at(x), at(residual), out, signs, n, xp.threads, swap)
        self._note(x, residual)
        means, room = xp.buffers.empty(2), min(n, int(ratio * n) + 2)
        while True:
            sent = xp.buffers.empty(room, "int32")
            count = self.library.largest_of_signs(at(left), signs, ratio, at(means), at(sent), out, room, n)
            if count <= room:
                return (means, sent[:count]), left
            room = count

    def bins_encode(self, x: Array, residual: Array, size: int) -> tuple[tuple[Array, Array, Array], Array]:
        """Counts uint8[m], places uint8[K], scale float32[1]; and the new residual: `grace.compressors.adacomp`."""
        xp, at, (x, residual) = self._xp, self._at, self._ready(x, residual)
        (n,) = xp.shape(x)
        counts, places, scale = (
            xp.buffers.empty(blocks(n, size), "uint8"),
            xp.buffers.empty(n, "uint8"),
            xp.buffers.empty(1),
        )
        left, payload = xp.buffers.empty(n), (at(counts), at(places), at(scale))
        sent = self.library.bins_encode(at(x), at(residual), at(left), *payload, n, size, xp.threads)
        return (counts, places[:sent], scale), left

    def bins_mean(self, payloads: Pairs, out: Array | None, n: int, size: int) -> Array:
        """Each worker's counts, places and scale -> float32[n], in ``out`` if given; ValueError for invalid ones."""
        xp = self._xp
        sizes = [xp.shape(places)[0] for _, places, _ in payloads]
        kept = self._ragged(
            payloads, [(("uint8", blocks(n, size)), ("uint8", count), ("float32", 1)) for count in sizes]
        )
        out = self._out(out, n)
        self.library.bins_mean(*self._columns(kept), sizes, len(kept), self._at(out), n, size, xp.threads)
        return out

    def chances_encode(self, x: Array, ratio: float, iterations: int, rng: Rng) -> tuple[Array, ...]:
        """float32[n] -> the payload of `grace.compressors.wangni`."""
        xp, at, (x,) = self._xp, self._at, self._ready(x)
        (n,), magnitude = xp.shape(x), xp.buffers.empty(1)
        room = min(n, int(1.25 * ratio * n) + 64)
        while True:
            arrays = xp.buffers.empty(room, "int32"), xp.buffers.empty(room), xp.buffers.empty(room, "int32"), magnitude
            where, sent = (*rng.keys, rng.offset, *map(at, arrays), room), (c_int64 * 2)()
            self.library.chances_encode(at(x), ratio * n, iterations, *where, sent, n, xp.threads)
            certain, drawn = sent
            if max(certain, drawn) <= room:
                return arrays[0][:certain], arrays[1][:certain], arrays[2][:drawn], magnitude
            room = max(certain, drawn)

    def count_sketch(self, x: Array, words: Array, group: int, width: int) -> Array:
        """float32[n] -> float32[rows * width]: `grace.compressors.sketch_sgd.SketchSGD.sketch`.

        ``words``: the random words of all rows.
        """
        xp, at, (x, words) = self._xp, self._at, self._ready(x, words)
        (n,) = xp.shape(x)
        rows = xp.shape(words)[0] // (group + -(-n // group))
        table = xp.buffers.empty(rows * width)
        self.library.count_sketch(at(x), at(words), at(table), n, rows, group, width, xp.threads)
        return table

    def count_sketch_estimate(self, table: Array, words: Array, n: int, group: int, width: int) -> Array:
        """float32[rows * width] -> float32[n]: `grace.compressors.sketch_sgd.SketchSGD.estimate`."""
        xp, at, (table, words) = self._xp, self._at, self._ready(table, words)
        out, rows = xp.buffers.empty(n), xp.shape(table)[0] // width
        self.library.count_sketch_estimate(at(table), at(words), at(out), n, rows, group, width, xp.threads)
        return out

    def signed_sums(self, x: Array, words: Array, size: int) -> Array:
        """float32[n], int32[many * size] -> float32[ceil(n / size), many]: `grace.compressors.arctopk`."""
        xp, at, (x, words) = self._xp, self._at, self._ready(x, words)
        (n,), many = xp.shape(x), xp.shape(words)[0] // size
        rows = blocks(n, size)
        sums = xp.buffers.empty(rows * many)
        self.library.signed_sums(at(x), at(words), at(sums), n, size, many, xp.threads)
        return xp.reshape(sums, (rows, many))

    def largest_sums(self, payloads: Pairs, n: int, k: int) -> tuple[Array, Array]:
        """Each worker's k values and ascending positions -> those of the k largest sums over the workers."""
        xp, (kept, columns) = self._xp, self._received(payloads, (("float32", k), ("int32", k)))
        sums, places = xp.buffers.empty(k), xp.buffers.empty(k, "int32")
        self.library.largest_sums(*columns, len(kept), k, self._at(sums), self._at(places), n, k)
        return sums, places
